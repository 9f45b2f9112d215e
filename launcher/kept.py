"""Which workers of a broken generation keep their process: those that come out of `loop` in time."""

import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from .workers.line import INSIDE, OUT, READY, Line
from .workers.warm import WorkerStarter

_OWN_ERROR_S = 1.0
_PEERS_ERROR_S = 0.3
_LOOK_S = 0.02


class KeptWorkers:
    """The workers of this host that are in a `loop`, as the agent sees them.

    Args:
        starter: Starts workers, and has the lines to them.
        limit_s: How long they may take to come out, or to end after SIGTERM.
    """

    def __init__(self, starter: WorkerStarter, *, limit_s: int) -> None:
        self._starter = starter
        self._limit_s = limit_s
        self._keeps = False
        self._ends_until_s = 0.0  # that one which has an error of its own

    @contextmanager
    def while_closing(self, *, keep: bool) -> Iterator[None]:
        """Let `close` leave those alone, while the block runs, that come out in time, if `keep`."""
        self._keeps = keep
        try:
            yield
        finally:
            self._keeps = False

    def descriptors(self) -> list[int]:
        """Return what becomes readable when one of them says something."""
        self._listen()
        return [line.end.fileno() for line in self._starter.lines.values()]

    def answer(self) -> Line | None:
        """Let one fail whose function raised while nothing else did, in a generation that is not broken.

        Return one whose error may have come from another worker, of which nobody has told. While one here ends with an
        error of its own, the others' are likely to come from that, and are not told of.
        """
        self._listen()
        now_s = time.monotonic()
        out = [line for line in self._starter.lines.values() if line.state == OUT]
        own = [line for line in out if not line.peers]
        for line in own:
            if now_s - line.out_s > _OWN_ERROR_S:
                self._ends_until_s = now_s + self._limit_s
                self.fail(line)
        if own or now_s < self._ends_until_s:
            return None
        return next((line for line in out if now_s - line.out_s > _PEERS_ERROR_S), None)

    def fail(self, line: Line) -> None:
        """Let a worker whose function raised end with its error."""
        line.state = ""
        line.tell({"raise": True})

    def close(
        self,
        context: Any,
        close: Any,
        groups: set[int],
        death_sig: signal.Signals | None = None,
        timeout: int | None = None,
    ) -> None:
        """Close a process context as torch does, with our grace where torch does not ask for another.

        What failed workers left in their process groups ends too, once for each of `groups`: torch does that only where
        the worker still runs. A DataLoader's worker that had hardly begun when its trainer was killed takes whoever
        adopts it for its trainer, and waits for ever.
        """
        grace_s = self._limit_s if timeout is None else timeout
        self._ends_until_s = 0.0
        if not isinstance(context, SubprocessContext):
            close(death_sig, grace_s)
            return
        handlers = context.subprocess_handlers
        # First: as long as their copies of its sockets are open, nobody who waits for the failed worker comes out.
        _end_groups(handlers, groups)
        if self._keeps:
            self._gather(context)
        else:
            self._starter.ready.clear()
        kept = {line.process.pid for line in self._starter.ready.values()}
        context.subprocess_handlers = {rank: each for rank, each in handlers.items() if each.proc.pid not in kept}
        try:
            close(death_sig, grace_s)
        finally:
            context.subprocess_handlers = handlers
        _end_groups(handlers, groups)

    def end(self) -> None:
        """End those that were to be kept: nothing would bring their state back to what a new process has."""
        for line in self._starter.ready.values():
            with suppress(ProcessLookupError):
                os.killpg(line.process.pid, signal.SIGKILL)
            line.process.wait()
        self._starter.ready.clear()

    def _gather(self, context: SubprocessContext) -> None:
        """Tell the workers of `context` that the generation is broken, and wait for those that are in a loop."""
        self._listen()
        by_rank = {
            rank: self._starter.lines[handler.proc.pid]
            for rank, handler in context.subprocess_handlers.items()
            if handler.proc.pid in self._starter.lines
        }
        coming = {
            rank: line for rank, line in by_rank.items() if line.state in {INSIDE, OUT} and line.tell({"stop": True})
        }
        deadline = time.monotonic() + self._limit_s
        while coming and time.monotonic() < deadline:
            select.select([line.end for line in coming.values()], [], [], _LOOK_S)
            self._listen()
            coming = {rank: line for rank, line in coming.items() if self._is_coming(line)}
        self._starter.ready |= {rank: line for rank, line in by_rank.items() if line.state == READY}

    def _is_coming(self, line: Line) -> bool:
        return line.state in {INSIDE, OUT} and line.process.pid in self._starter.lines

    def _listen(self) -> None:
        """Take what workers have said; forget those that have ended."""
        for pid, line in list(self._starter.lines.items()):
            if not line.listen() or line.process.poll() is not None:
                line.state = ""
                line.end.close()
                del self._starter.lines[pid]


def _end_groups(handlers: Mapping[int, SubprocessHandler], groups: set[int]) -> None:
    """End what failed workers left in their process groups; `groups` has those that it has not ended before."""
    for handler in handlers.values():
        if handler.proc.poll() and handler.proc.pid in groups:
            groups.remove(handler.proc.pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(handler.proc.pid, signal.SIGKILL)
