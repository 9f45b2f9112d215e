"""The zygotes of single ranks, as the zygote that has forked them sees them (see `preload.py`)."""

import contextlib
import json
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .preload import Importer, Journal

MAX_PACKET_BYTES = 1 << 17

_BUSY_S = 9.0
_LOOK_S = 0.5
_QUIET_LOOKS = 60
_ANY = "any"

Request = Mapping[str, Any]


class RankZygote:
    """The zygote's side of a rank zygote that it has forked.

    Args:
        pid: Its process.
        control: Reaches it.

    Attributes:
        ordered: What it was told to import, as lines of a journal.
        busy: It is importing.
        patience_s: How long a worker that is to be forked may wait for that.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self.ordered: list[str] = []
        self.busy = False
        self.patience_s = _BUSY_S
        self._reads: dict[str, str | None] = {}

    def order(self, lines: list[str]) -> None:
        """Let it import what `lines`, which begin with those that were ordered before, say besides."""
        more = lines[len(self.ordered) :]
        self.ordered = lines
        self.busy = True
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"preload": more}).encode())

    def fork(self, request: Request, descriptors: Sequence[int]) -> bool:
        """Hand the request for a worker on, with its descriptors; return False if nobody is there to take it."""
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], list(descriptors))
        except OSError:
            return False
        return True

    def answer(self) -> tuple[list[str], str] | None:
        """Take what it says next; return what it must do without, and why, None when it has imported everything.

        Raises:
            OSError: It is gone.
        """
        packet = self.control.recv(MAX_PACKET_BYTES)
        if not packet:
            raise ConnectionResetError("the rank zygote is gone")
        said = json.loads(packet)
        self.busy = False
        self._reads = said["reads"]
        return None if said["refused"] is None else ([said["refused"][0]], said["refused"][1])

    def modules(self) -> list[str]:
        """Return what it was ordered to import."""
        return [line.removeprefix("import ") for line in self.ordered if line.startswith("import ")]

    def fits(self, env: Mapping[str, str]) -> bool:
        """Tell whether its imports read of `env` what they would read in a worker that starts now."""
        return all(env.get(name) == value for name, value in self._reads.items())

    def close(self) -> None:
        """End it; its workers go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.control.close()


class Nursery:
    """The rank zygotes of a zygote, and the journals of the workers that they learn from.

    Args:
        modules: To import beforehand; None learns them from journals.
    """

    def __init__(self, modules: Sequence[str] | None) -> None:
        self._given = None if modules is None else [f"import {name}" for name in modules]
        self._zygotes: dict[str, RankZygote] = {}
        self._journals: dict[str, Journal] = {}
        # What is known by name may be imported before there are ranks, by a zygote for any.
        self._requests: dict[str, Request] = {_ANY: {"set": {}, "unset": []}} if modules else {}
        self._seen: dict[str, list[str]] = {}
        self._refused: dict[str, set[str]] = {}
        self._notes: list[str] = []
        self._looks = 0

    @classmethod
    def from_variable(cls, value: str | None) -> "Nursery":
        """Return the nursery that the value of `PRELOAD` asks for."""
        return cls(None if not value else [] if value == "none" else value.split(","))

    def begins(self, request: Request) -> Journal | None:
        """A worker is about to be forked from the zygote itself: return the journal that it is to keep."""
        rank = _rank(request)
        self._requests[rank] = request
        self._looks = 0
        if self._given is not None or rank in self._zygotes:
            return None
        self._seen.pop(rank, None)
        journal = self._journals.setdefault(rank, Journal())
        journal.clear()
        return journal

    def journal(self, rank: str) -> Journal | None:
        """Return the journal that workers of a rank zygote go on with."""
        return self._journals.get(rank)

    def pause_s(self) -> float | None:
        """Return how long to wait for requests before looking again, None for ever."""
        if self._given == [] or not self._requests or self._looks >= _QUIET_LOOKS:
            return None
        return _LOOK_S if self._given is None else 0.0

    def due(self) -> str | None:
        """Look at the journals; return the rank whose zygote is to be forked now, and order what others lack."""
        self._looks += 1
        for rank in sorted(self._requests):
            lines, zygote = self._lines(rank), self._zygotes.get(rank)
            settled = self._given is not None or lines == self._seen.get(rank)
            if not settled:
                self._seen[rank], self._looks = lines, 0
            elif zygote is None and any(_is_news(line) for line in lines):
                return rank
            elif zygote is not None and not zygote.busy and len(lines) > len(zygote.ordered):
                zygote.order(lines)
        return None

    def _lines(self, rank: str) -> list[str]:
        refused = self._refused.get(rank, set())
        if self._given is None:
            lines = self._journals[rank].lines() if rank in self._journals else []
        else:
            served = rank != _ANY and not self._refused.get(_ANY)
            lines = [] if served else self._given
        return [line for line in lines if not _within(line.removeprefix("import "), refused)]

    def importer(self, rank: str, refusal: Callable[[Iterable[str]], str | None]) -> Importer:
        """Return what imports in the zygote of `rank`; see `Importer`."""
        return Importer(refusal, knows_rank=rank != _ANY)

    def add(self, rank: str, pid: int, control: socket.socket) -> None:
        """Take care of a new rank zygote, and give it its first order."""
        self._zygotes[rank] = zygote = RankZygote(pid, control)
        self._looks = 0
        zygote.order(self._lines(rank))

    def request(self, rank: str) -> Request:
        """Return the newest request for a worker of `rank`."""
        return self._requests[rank]

    def controls(self) -> list[socket.socket]:
        """Return what becomes readable when a rank zygote says something."""
        return [zygote.control for zygote in self._zygotes.values()]

    def listen(self, readable: Sequence[object]) -> None:
        """Take what rank zygotes say; one that has met what must not be imported makes place for another."""
        for rank, zygote in list(self._zygotes.items()):
            if zygote.control not in readable:
                continue
            try:
                refused = zygote.answer()
            except OSError:
                # Nobody knows by which of them.
                refused = zygote.modules(), "the process that imported them ended"
            if refused is not None:
                self._do_without(rank, *refused)

    def _do_without(self, rank: str, modules: Sequence[str], reason: str) -> None:
        self._refused.setdefault(rank, set()).update(modules)
        self._notes.append(f"not imported beforehand: {', '.join(modules)}: {reason}")
        self._zygotes.pop(rank).close()
        self._looks = 0

    def zygote_for(self, request: Request, streams: Sequence[int]) -> RankZygote | None:
        """Return the rank zygote that a worker may be forked from; it is waited for if it is still importing."""
        env = {**os.environ, **request["set"]}
        for name in request["unset"]:
            env.pop(name, None)
        for rank in (_rank(request), _ANY):
            if (zygote := self._zygotes.get(rank)) is not None and zygote.busy:
                self.listen(select.select([zygote.control], [], [], zygote.patience_s)[0])
                zygote.patience_s = 0.0
                zygote = self._zygotes.get(rank)
            if zygote is None or zygote.busy or not _alike(streams):
                continue
            if zygote.fits(env):
                self._requests[_rank(request)] = request
                self._looks = 0
                return zygote
            # Its rank has changed.
            self._zygotes.pop(rank).close()
        return None

    def take_notes(self) -> list[str]:
        """Return what the log should say, once."""
        notes, self._notes = self._notes, []
        return notes

    def forget(self) -> None:
        """Let go, in a fork, of what is the zygote's own."""
        for zygote in self._zygotes.values():
            zygote.control.close()
        self._zygotes.clear()


def _is_news(line: str) -> bool:
    return line.startswith("import ") and line.removeprefix("import ") not in sys.modules


def _within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _rank(request: Request) -> str:
    return str(request["set"].get("LOCAL_RANK", ""))


def _alike(streams: Sequence[int]) -> bool:
    """Tell whether a worker's streams are what the zygote's are: packages look at them when they are imported."""
    return all(
        (stat.S_IFMT(os.fstat(stream).st_mode), os.isatty(stream))
        == (stat.S_IFMT(os.fstat(ours).st_mode), os.isatty(ours))
        for ours, stream in enumerate(streams)
    )
