"""Replication between trainers: each capture travels to the trainers that receive it for their hosts, behind training.

The second transport (Gemini, Section 6.5); the first one is the daemons' own. Every edge has a thread at each end. What
goes wrong on an edge ends that edge only, and the daemons move what it does not.
"""

import base64
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from ..capture.slots import MappedSlot
from ..errors import CheckpointError, SlotError
from ..format.pair import Pair
from ..format.slot import HEADER_BYTES, SlotHeader, parse_header
from ..format.wire import Message
from ..link.env import TrainerEnv
from ..link.link import Link
from .edge import Edge, EdgeConfig, Reply
from .pace import TrainerPace

_ALLOCATE_S: Final = 60.0
_ANNOUNCE_AGAIN_S: Final = 0.5
_FREE_S: Final = 1.0
_PAUSE_S: Final = 0.005
_JOIN_S: Final = 5.0
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class ExchangeStats:
    """What this trainer moved for replication; all zero when daemons move replicas.

    Attributes:
        sent: Captures that were sent, counted once for each receiver.
        sent_bytes: Their bytes.
        send_s: Seconds that sending took, waits for idle spans included.
        received: Replicas that were received for the daemon of this host.
        received_bytes: Their bytes.
        receive_s: Seconds that receiving took.
    """

    sent: int = 0
    sent_bytes: int = 0
    send_s: float = 0.0
    received: int = 0
    received_bytes: int = 0
    receive_s: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class _End:
    """This trainer's end of one edge.

    Attributes:
        owner: Rank whose captures travel over it.
        receiver: Rank that receives them.
        edge: The edge while it is open.
        capture: Path and version of the newest capture that waits to be sent, at the owner's end.
        mapped: Slots by path, mapped for this edge alone: the capturer may unmap its own at any time.
    """

    owner: int
    receiver: int
    edge: Edge | None = None
    capture: tuple[str, Pair] | None = None
    mapped: dict[str, MappedSlot] = field(default_factory=dict)


class Exchange:
    """The edges of one trainer in one generation.

    Attributes:
        stats: What was moved; written by the edges' threads, read by anybody.
    """

    def __init__(self, env: TrainerEnv, link: Link, *, routes: Message, config: EdgeConfig, pace: TrainerPace) -> None:
        """Prepare; `start` begins.

        Args:
            env: Whose edges.
            link: To the daemon.
            routes: From the answer to the attachment: ranks to send to and to receive from.
            config: How captures travel.
            pace: Says when; close it first.
        """
        self.stats = ExchangeStats()
        self._env = env
        self._link = link
        self._config = config
        self._pace = pace
        self._changed = threading.Condition()
        self._closing = False
        self._outlets = [_End(owner=env.rank, receiver=other) for other in routes["send_to"]]
        self._inlets = [_End(owner=other, receiver=env.rank) for other in routes["receive_from"]]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to connect, to send and to receive, in one thread for each edge."""
        for ends, use in ((self._outlets, self._send), (self._inlets, self._receive)):
            for end in ends:
                name = f"resilient-edge-{end.owner}-{end.receiver}"
                thread = threading.Thread(target=self._run, args=(end, use), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def offer(self, path: str, version: Pair) -> None:
        """Send the complete capture in the slot at `path`; one that still waits is given up for it."""
        with self._changed:
            for end in self._outlets:
                end.capture = (path, version)
            self._changed.notify_all()

    def attached(self) -> None:
        """Report to the daemon, which may be a new one, to which trainers there are connections."""
        self._link.notify("connected", ranks=[end.receiver for end in self._outlets if end.edge is not None])

    def close(self) -> None:
        """Break every edge and end the threads; a capture under way is left to the daemons."""
        with self._changed:
            self._closing = True
            edges = [end.edge for end in (*self._outlets, *self._inlets) if end.edge is not None]
            self._changed.notify_all()
        for edge in edges:
            edge.close()
        if edges:
            for thread in self._threads:
                # One that still waits for a trainer which never comes ends with the process.
                thread.join(_JOIN_S)

    def _run(self, end: _End, use: Callable[[_End, Edge], None]) -> None:
        try:
            edge = Edge.open(self._env, owner=end.owner, receiver=end.receiver, config=self._config)
            try:
                with self._changed:
                    if self._closing:
                        return
                    end.edge = edge
                self.attached()
                use(end, edge)
            finally:
                end.edge = None
                edge.close()
                self._unmap(end)
                self.attached()
        except (RuntimeError, CheckpointError, OSError) as error:
            if not self._closing:
                _log.info("captures of rank %d go to rank %d by its daemon: %s", end.owner, end.receiver, error)

    def _send(self, end: _End, edge: Edge) -> None:
        while (capture := self._next(end)) is not None:
            path, version = capture
            try:
                mapped, whole = self._map(end, path, on_device=edge.on_device)
                page = bytes(whole[:HEADER_BYTES].numpy())
                header = parse_header(page, mapped.slot.capacity_bytes)
            except (OSError, SlotError) as error:
                _log.debug("the capture of step %d is gone: %s", version[1], error)
                continue
            if header.pair != version:
                continue
            answer = edge.announce(page)
            if answer is Reply.LATER:
                self._repeat(end, capture)
            elif answer is Reply.SEND:
                self._count(sent=1, sent_bytes=header.used_bytes, send_s=self._move(edge, header, whole))

    def _move(self, edge: Edge, header: SlotHeader, whole: torch.Tensor) -> float:
        """Send the capture that was announced, and return the seconds that it took."""
        data = whole[HEADER_BYTES : header.used_bytes]
        at_once, started_s = self._pace.is_open, time.monotonic()
        edge.carrier.send(data, partial(self._pace.admit, header.step))
        seconds = time.monotonic() - started_s
        if at_once and self._pace.is_open:
            # The other edges have as much of the link at the same time.
            self._pace.sent(len(self._outlets) * len(data), seconds)
        return seconds

    def _receive(self, end: _End, edge: Edge) -> None:
        while True:
            page = edge.next_page()
            path, answer = self._allocate(page)
            if path is None:
                edge.answer(answer)
                continue
            try:
                mapped, whole = self._map(end, path, on_device=edge.on_device)
                header = parse_header(page, mapped.slot.capacity_bytes)
                started_s = time.monotonic()
                edge.answer(Reply.SEND)
                edge.carrier.receive(whole[HEADER_BYTES : header.used_bytes])
            except (RuntimeError, CheckpointError, OSError):
                self._link.notify("dropped", path=path)
                raise
            self._link.notify("received", path=path)
            self._count(received=1, received_bytes=header.used_bytes, receive_s=time.monotonic() - started_s)

    def _next(self, end: _End) -> tuple[str, Pair] | None:
        """Return the next capture to send, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or end.capture is not None)
            capture, end.capture = end.capture, None
            return None if self._closing else capture

    def _repeat(self, end: _End, capture: tuple[str, Pair]) -> None:
        """Send `capture` again after a while, unless there is a newer one by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or end.capture is not None, _ANNOUNCE_AGAIN_S)
            end.capture = end.capture or capture

    def _allocate(self, page: bytes) -> tuple[str | None, Reply]:
        """Return the path of a slot for the capture that `page` announces, or how to answer without one."""
        deadline, pause_s = time.monotonic() + _FREE_S, _PAUSE_S
        header = base64.b64encode(page).decode()
        while True:
            try:
                answer = self._link.request("allocate_replica", within_s=_ALLOCATE_S, header=header)
            except CheckpointError as error:
                _log.warning("an announced replica is refused: %s", error)
                return None, Reply.NEVER
            if answer["path"] is not None or answer["held"]:
                return answer["path"], Reply.NEVER
            # The owner may know of a commit that frees a slot some moments before the daemon here.
            if time.monotonic() > deadline or self._closing:
                return None, Reply.LATER
            time.sleep(pause_s)
            pause_s *= 2

    def _map(self, end: _End, path: str, *, on_device: bool) -> tuple[MappedSlot, torch.Tensor]:
        """Return the slot at `path`, page-locked if a GPU copies it, and all its bytes as uint8."""
        mapped = end.mapped.get(path)
        if mapped is None or not mapped.is_file(path):
            if mapped is not None:
                del end.mapped[path]
                mapped.close()
            mapped = end.mapped[path] = MappedSlot(path, self._env, pin=on_device)
        return mapped, torch.frombuffer(mapped.slot.buffer, dtype=torch.uint8)

    def _unmap(self, end: _End) -> None:
        while end.mapped:
            with contextlib.suppress(OSError):
                end.mapped.popitem()[1].close()

    def _count(self, **amounts: float) -> None:
        with self._changed:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)
