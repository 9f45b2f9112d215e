"""When this host's replicas may leave: in the idle spans of the training network (Gemini, Section 6.5).

Trainers say when their network is idle in an iteration and when each iteration begins; both clocks are CLOCK_MONOTONIC.
What may leave now is decided by `SendSchedule`, for this host and for a trainer that sends its captures itself.

Nothing waits for ever: the last span of a checkpoint's last iteration has no end, an iteration that does not come opens
the gate after a while, and after a failure (`release`) everything may leave. Restores and repairs are never paced.
"""

import asyncio
import contextlib
import fcntl
import logging
import math
import socket
import statistics
import struct
import sys
import termios
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from resilient_run.ckpt.format.idle import IdleProfile, common
from resilient_run.ckpt.format.schedule import (
    PACED,
    SHORTEST_STARTUP_S,
    STALL,
    STALL_S,
    LinkMeter,
    Schedule,
    SendSchedule,
    Window,
    plan,
)

from ..base.policy import ReplicationPolicy
from .download import RANGE_BYTES

log = logging.getLogger(__name__)

_ITERATIONS: Final = 32
_SMOOTHING: Final = 0.3
_QUEUE_BYTES: Final = struct.Struct("i")
_TCP_INFO_BYTES: Final = 192
_UNSENT_BYTES: Final = 128 << 10
_MIN_RTT: Final = slice(148, 152)


@dataclass(kw_only=True, slots=True, eq=False)
class _PacedRank:
    topology: int
    profile: IdleProfile | None
    step: int = -1
    started_s: float = 0.0
    quiet_s: float = 0.0
    checkpoint_bytes: int = 0
    copies: int = 0
    ready_s: float = 0.0
    bytes_per_s: float = 0.0


class Pacer:
    """The gate through which the captures of a job's ranks leave this host, one chunk after the other.

    Args:
        policy: The job's configuration of replication.
        changed: Called when `every` is another.
        clock: The monotonic clock.

    Attributes:
        reason: Why one checkpoint of so many steps is sent, and whether anything waits.
    """

    def __init__(
        self, policy: ReplicationPolicy, *, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason = "the network is not profiled yet" if policy.scheme in PACED else f"scheme {policy.scheme}"
        self._policy = policy
        self._told = changed
        self._clock = clock
        self._profiles: dict[tuple[int, int], IdleProfile] = {}
        self._ranks: dict[int, _PacedRank] = {}
        self._plan: Schedule | None = None
        self._profile: IdleProfile | None = None
        self._sending = SendSchedule(
            scheme=policy.scheme,
            variance=policy.variance,
            buffer_bytes=min(policy.chunk_bytes, RANGE_BYTES),
            link=LinkMeter(policy.bandwidth_mbit_s * 1e6 / 8),
        )
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._streams: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._iterations: deque[float] = deque(maxlen=_ITERATIONS)
        self._used_s = self._last_used_s = 0.0

    @property
    def every(self) -> int:
        """Of how many steps one checkpoint can be sent by this host."""
        return self._sending.every

    @property
    def is_on(self) -> bool:
        """Tell whether the job's configuration asks for pacing by daemons."""
        return self._policy.transport == "daemon" and self._policy.scheme in PACED

    @property
    def iteration_s(self) -> float | None:
        """The time of a training step in this generation, the median of the last ones; None while it is not known."""
        return statistics.median(self._iterations) if self._iterations else None

    @property
    def patience_s(self) -> float:
        """How long a receiver may have to wait for a range."""
        if self._profile is None or self._plan is None or not self._plan.paced:
            return max((rank.quiet_s for rank in self._ranks.values()), default=0.0)
        return self.every * (STALL * self._profile.iteration_s + STALL_S)

    # What trainers say.

    def attach(self, rank: int, topology: int) -> IdleProfile | None:
        """Begin with a trainer, and return the typical iteration that one of this rank and topology has found."""
        profile = self._profiles.get((rank, topology))
        self._ranks[rank] = _PacedRank(topology=topology, profile=profile)
        self._update()
        return profile

    def detach(self, rank: int) -> None:
        """End with a trainer; what it left may leave at once."""
        self._ranks.pop(rank, None)
        self._update()

    def profiled(self, rank: int, profile: IdleProfile) -> None:
        """Record when the network of an attached trainer is idle."""
        known = self._ranks.get(rank)
        if known is None:
            return
        known.profile = self._profiles[rank, known.topology] = profile
        self._update()

    def iteration(self, rank: int, step: int, started_s: float, quiet_s: float = 0.0) -> None:
        """Record that the iteration after `step` steps began at `started_s`; no replica may leave for `quiet_s`."""
        known = self._ranks.get(rank)
        if known is None:
            return
        if known.step >= 0 and step == known.step + 1:
            self._iterations.append(started_s - known.started_s)
        if step > max(other.step for other in self._ranks.values()):
            self._used_s, self._last_used_s = 0.0, self._used_s
        known.step, known.started_s, known.quiet_s = step, started_s, quiet_s
        self._update()

    def captured(self, rank: int, step: int, *, checkpoint_bytes: int, copies: int) -> None:
        """Record that a capture of `step` is there to be sent, and plan anew with what is known by now."""
        known = self._ranks.get(rank)
        if known is None:
            return
        known.checkpoint_bytes, known.copies = checkpoint_bytes, copies
        if known.step == step:
            ready_s = self._clock() - known.started_s
            known.ready_s += (_SMOOTHING if known.ready_s else 1.0) * (ready_s - known.ready_s)
        self._replan()
        self._update()

    def measured(self, rank: int, bytes_per_s: float) -> None:
        """Record what an attached trainer that sends by itself measures of the link, beside others of this host."""
        known = self._ranks.get(rank)
        if known is not None and self._policy.transport == "trainer":
            known.bytes_per_s = bytes_per_s
            self._sending.link = LinkMeter(
                self._policy.bandwidth_mbit_s * 1e6 / 8 or sum(other.bytes_per_s for other in self._ranks.values())
            )

    # What the job says.

    def release(self) -> None:
        """Let everything leave until the next generation: a failure was seen, or training is over."""
        self._sending.released = True
        self._update()

    def reset(self) -> None:
        """Begin a generation: its trainers are yet to come, and nobody waits for what its predecessor was sending."""
        self._sending.released = False
        self._ranks.clear()
        self._iterations.clear()
        self._turn = asyncio.Lock()
        self._streams = weakref.WeakSet()
        self._update()

    # What the peer server asks.

    async def send(
        self, step: int, size_bytes: int, sock: socket.socket, send: Callable[[int], Awaitable[None]]
    ) -> None:
        """Send `size_bytes` of the checkpoint of `step` through `sock`, in chunks, each as soon as it may leave.

        Args:
            step: Which checkpoint.
            size_bytes: How much of it.
            sock: The connection.
            send: Sends so many bytes more of it.
        """
        if sock not in self._streams:
            self._streams.add(sock)
            # What waits in the kernel cannot be held back any more when a collective begins.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        while size_bytes:
            async with self._turn:
                chunk_bytes, seen = await self._admit(step, size_bytes)
                began_s, queued_bytes = self._clock(), self._queued_bytes()
                await send(chunk_bytes)
                sent_bytes = chunk_bytes + queued_bytes - self._queued_bytes()
                if self._plan is None or seen.why.startswith("in span"):
                    self._sending.link.add(sent_bytes, self._clock() - began_s, _round_trip_s(sock))
                size_bytes -= chunk_bytes

    def describe(self) -> dict[str, Any]:
        """Return what `resilientctl status` shows."""
        cost, profile, made = self._sending.link.cost, self._profile, self._plan
        return {
            "scheme": self._policy.scheme,
            "transport": self._policy.transport,
            "every": self.every,
            "reason": self.reason,
            "bandwidth_mbit_s": None if cost is None else cost.bytes_per_s * 8 / 1e6,
            "startup_s": None if cost is None else cost.startup_s,
            "profiled_iteration_s": None if profile is None else profile.iteration_s,
            "iteration_s": self.iteration_s,
            "idle_s": None if profile is None else profile.idle_s,
            "planned_s": None if made is None else made.used_s / made.every,
            "used_s": self._last_used_s,
            "late_bytes": None if made is None else made.late_bytes,
        }

    async def _admit(self, step: int, wanted_bytes: int) -> tuple[int, Window]:
        """Wait until something may leave; return how much, and why."""
        while True:
            now_s, cost = self._clock(), self._sending.link.cost
            if cost is None:
                # The first bytes measure the link, also in an iteration that is profiled.
                size_bytes = min(self._sending.buffer_bytes, wanted_bytes)
                return size_bytes, Window(remaining_s=math.inf, wait_s=0.0, why="not measured")
            queued_s = self._queued_bytes() / cost.bytes_per_s
            size_bytes, seen = self._sending.chunk(step, wanted_bytes, now_s=now_s, queued_s=queued_s)
            if size_bytes:
                offset_s = now_s - self._sending.began_s
                log.debug("step %d: %d bytes leave at %.4f s, %s", step, size_bytes, offset_s, seen.why)
                self._used_s += cost.seconds(size_bytes)
                return size_bytes, seen
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seen.wait_s, SHORTEST_STARTUP_S)):
                    await changed.wait()

    def _replan(self) -> None:
        cost = self._sending.link.cost
        profiles = [rank.profile for rank in self._ranks.values() if rank.profile is not None]
        if cost is None or len(profiles) < len(self._ranks) or self._policy.scheme not in PACED:
            return
        self._profile = common(profiles)
        self._plan, reason = plan(
            self._profile,
            checkpoint_bytes=sum(rank.checkpoint_bytes for rank in self._ranks.values()),
            copies=max(rank.copies for rank in self._ranks.values()),
            buffer_bytes=cost.burst_bytes(self._sending.buffer_bytes, self._policy.scheme),
            cost=cost,
            variance=self._policy.variance,
            max_every=self._policy.max_every,
            ready_s=max(rank.ready_s for rank in self._ranks.values()),
        )
        if self._plan.every != self.every or self.reason == "the network is not profiled yet":
            log.info("replication: %s", reason)
        self.reason = reason
        if self._plan.every != self.every:
            self._sending.every = self._plan.every
            self._told()

    def _queued_bytes(self) -> int:
        """Return what was handed to the kernel and is not acknowledged yet."""
        return sum(_queued(stream) for stream in self._streams if stream.fileno() >= 0)

    def _update(self) -> None:
        """Tell the schedule what is known of all ranks by now, and wake what waits."""
        ranks, sending = self._ranks.values(), self._sending
        known = bool(ranks) and all(rank.profile is not None and rank.step >= 0 for rank in ranks)
        sending.profile = self._profile if known and self._plan is not None and self._plan.paced else None
        # An iteration of the host begins when the last of its ranks begins it.
        sending.step = max((rank.step for rank in ranks), default=-1)
        sending.began_s = max((rank.started_s for rank in ranks), default=0.0)
        sending.quiet_until_s = max((rank.started_s + rank.quiet_s for rank in ranks), default=0.0)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _queued(sock: socket.socket) -> int:
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, _QUEUE_BYTES.pack(0))
    return int(_QUEUE_BYTES.unpack(answer)[0])


def _round_trip_s(sock: socket.socket) -> float:
    """Return the shortest round trip that the kernel saw, 0 where it does not say (tcp_info, tcpi_min_rtt)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[_MIN_RTT], sys.byteorder) / 1e6
