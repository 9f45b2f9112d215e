"""Which checkpoint bytes travel in which idle span of the training network, and when (Gemini, Algorithm 6.2).

As printed the algorithm has four slips, which are put right here: what remains of a span shrinks by the time of the
chunk just placed, not by that of what is left to place; a size below one byte ends the span (else the loop does not
end); the startup time is paid once per chunk; and the bound of the counter would send m copies where m - 1 are meant.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .idle import IdleProfile, Span

PACED: Final = ("interleaved", "no-pipeline", "naive")
"""The schemes whose replicas travel in the idle spans alone."""

SHORTEST_ITERATION_S: Final = 0.1
"""In shorter iterations nothing is scheduled: a late checkpoint would cost more than the traffic does."""

_BURST_S: Final = 0.005
_SMALLEST_BURST_BYTES: Final = 64 << 10

SHORTEST_STARTUP_S: Final = 0.001
"""The least that a chunk is taken to cost, and the least wait between two looks at the clock."""

SAMPLE_BYTES: Final = 256 << 10
"""Fewer bytes say nothing about a link."""

_SAMPLES: Final = 32

STALL: Final = 1.5
STALL_S: Final = 0.5
"""An iteration that lasts so many times and seconds longer than a typical one has stalled: nothing is saved for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCost:
    """What it takes to send a chunk: f(s) = alpha + s / B.

    Attributes:
        startup_s: alpha, paid once per chunk.
        bytes_per_s: B.
    """

    startup_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        """Return f(size)."""
        return self.startup_s + size_bytes / self.bytes_per_s

    def burst_bytes(self, limit_bytes: int, scheme: str) -> int:
        """Return the largest chunk, up to `limit_bytes`: one that hardly holds up a collective which comes early.

        With the scheme "naive" a chunk may fill a span.
        """
        if scheme == "naive":
            return limit_bytes
        return min(limit_bytes, max(_SMALLEST_BURST_BYTES, math.floor(_BURST_S * self.bytes_per_s)))

    def chunk_bytes(self, remaining_s: float, *, buffer_bytes: int, remaining_bytes: int) -> int:
        """Return the size of the next chunk in a span that has `remaining_s` left, 0 when none fits in it."""
        if remaining_s < self.seconds(buffer_bytes):
            buffer_bytes = math.floor(max(0.0, (remaining_s - self.startup_s) * self.bytes_per_s))
        return min(buffer_bytes, remaining_bytes)


class LinkMeter:
    """What sending costs, from the sending itself.

    Args:
        bytes_per_s: The bandwidth where it is known, 0 to measure it.
    """

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._given_bytes_per_s = bytes_per_s
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._startups: deque[float] = deque(maxlen=_SAMPLES)
        self._size_bytes = 0
        self._seconds = 0.0

    @property
    def cost(self) -> TransferCost | None:
        """The median of what was seen, None while nothing was."""
        bytes_per_s = self._given_bytes_per_s or (statistics.median(self._rates) if self._rates else 0.0)
        if not bytes_per_s:
            return None
        startup_s = statistics.median(self._startups) if self._startups else 0.0
        return TransferCost(startup_s=max(startup_s, SHORTEST_STARTUP_S), bytes_per_s=bytes_per_s)

    def add(self, size_bytes: int, seconds: float, startup_s: float = 0.0) -> None:
        """Note that `size_bytes` arrived in `seconds`; too few of them say something only together."""
        self._size_bytes += size_bytes
        self._seconds += seconds
        if self._size_bytes >= SAMPLE_BYTES and self._seconds > 0:
            self._rates.append(self._size_bytes / self._seconds)
            self._startups.append(startup_s)
            self._size_bytes, self._seconds = 0, 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How the replicas of one checkpoint are sent.

    Attributes:
        every: A checkpoint is sent every so many iterations.
        paced: Whether anything is gained by waiting for the idle spans; if not, everything is sent at once.
        used_s: Seconds of idle network that the chunks take.
        late_bytes: What did not fit in the spans, and prolongs the last one.
    """

    every: int
    paced: bool
    used_s: float
    late_bytes: int


def fill(
    spans: Sequence[Span],
    *,
    checkpoint_bytes: int,
    copies: int,
    buffer_bytes: int,
    cost: TransferCost,
    variance: float,
) -> tuple[int, float]:
    """Return how many bytes of the checkpoints fit in `spans`, and the seconds that they take (Algorithm 6.2).

    The full chunks of one checkpoint in one span are counted at once, so this takes no longer for a larger checkpoint.

    Args:
        spans: The idle spans T, in order.
        checkpoint_bytes: Size C of one checkpoint.
        copies: Checkpoints to send, m - 1.
        buffer_bytes: The largest chunk, R / p.
        cost: The time f(s) of a chunk.
        variance: mu: the part of each span that is used, because spans vary.
    """
    placed_bytes, used_s = 0, 0.0
    full_s = cost.seconds(buffer_bytes)
    for span in spans:
        remaining_s = variance * span.length_s
        while placed_bytes < checkpoint_bytes * copies:
            left_bytes = checkpoint_bytes - placed_bytes % checkpoint_bytes
            count = max(1, min(left_bytes // buffer_bytes, math.floor(remaining_s / full_s)))
            size_bytes = cost.chunk_bytes(remaining_s, buffer_bytes=buffer_bytes, remaining_bytes=left_bytes)
            if not size_bytes:
                break
            placed_bytes += count * size_bytes
            used_s += count * cost.seconds(size_bytes)
            remaining_s -= count * cost.seconds(size_bytes)
    return placed_bytes, used_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What may leave now.

    Attributes:
        remaining_s: How long the network is ours yet, infinity for no limit, 0 for not now.
        wait_s: When to ask again where that is not enough.
        why: In words.
    """

    remaining_s: float
    wait_s: float
    why: str


@dataclass(kw_only=True, slots=True)
class SendSchedule:
    """When checkpoints may leave, and in which chunks: the same for a daemon with all its ranks and for one trainer.

    It reads no clock and does not wait: whoever sends does both, and says what has changed. Chunks are cut as in
    Algorithm 6.2, but one by one and from what is left of the present span by the clock, so that a late capture or a
    slow link moves the next chunk instead of upsetting a list of them.

    Attributes:
        scheme: How replicas travel, `replication.scheme`.
        variance: mu, the part of each span that is used.
        buffer_bytes: The largest chunk.
        link: What sending costs.
        profile: A typical iteration, None while there is none to wait in.
        every: How many iterations a checkpoint may take.
        step: How many steps were completed when the present iteration began.
        began_s: When that was, on the monotonic clock.
        quiet_until_s: Until then nothing leaves, because the network is being profiled.
        released: Whether everything may leave at once: a failure was seen, or training is over.
    """

    scheme: str
    variance: float
    buffer_bytes: int
    link: LinkMeter
    profile: IdleProfile | None = None
    every: int = 1
    step: int = 0
    began_s: float = 0.0
    quiet_until_s: float = 0.0
    released: bool = False

    @property
    def paced(self) -> IdleProfile | None:
        """The typical iteration whose spans are waited for, None where nothing is gained by that."""
        profile = self.profile
        if self.scheme not in PACED or profile is None or self.link.cost is None:
            return None
        return None if profile.iteration_s < SHORTEST_ITERATION_S else profile

    def chunk(self, step: int, wanted_bytes: int, *, now_s: float, queued_s: float) -> tuple[int, Window]:
        """Return how much of the checkpoint of `step` may leave at `now_s`, and the window in which it does.

        Args:
            step: Which checkpoint.
            wanted_bytes: What is left of it to send.
            now_s: The monotonic clock.
            queued_s: How long the link needs for what left already.
        """
        seen, cost = self.window(step, now_s), self.link.cost
        if cost is None or math.isinf(seen.remaining_s):
            return (min(self.buffer_bytes, wanted_bytes) if seen.remaining_s else 0), seen
        burst_bytes = cost.burst_bytes(self.buffer_bytes, self.scheme)
        remaining_s = seen.remaining_s - queued_s
        return cost.chunk_bytes(remaining_s, buffer_bytes=burst_bytes, remaining_bytes=wanted_bytes), seen

    def window(self, step: int, now_s: float) -> Window:
        """Return what the checkpoint of `step` may use of the network at `now_s`."""
        if self.released:
            return Window(remaining_s=math.inf, wait_s=0.0, why="released")
        if now_s < self.quiet_until_s:
            return Window(remaining_s=0.0, wait_s=self.quiet_until_s - now_s, why="the network is being profiled")
        profile = self.paced
        if profile is None:
            return Window(remaining_s=math.inf, wait_s=0.0, why="not paced")
        iterations, offset_s = self.step - step, now_s - self.began_s
        if iterations >= self.every:
            return Window(remaining_s=math.inf, wait_s=0.0, why="late: its iterations are over")
        stalled_s = STALL * profile.iteration_s + STALL_S
        if offset_s >= stalled_s:
            return Window(remaining_s=math.inf, wait_s=0.0, why="training stalls")
        last = iterations == self.every - 1
        for index, span in enumerate(profile.spans):
            # The middle of the span: the collective before it may end late as well as the next one may begin early.
            begin_s = span.start_s + (1 - self.variance) / 2 * span.length_s
            if offset_s < begin_s:
                return Window(remaining_s=0.0, wait_s=begin_s - offset_s, why=f"before span {index}")
            if last and index == len(profile.spans) - 1:
                return Window(remaining_s=math.inf, wait_s=0.0, why=f"in span {index}, the last")
            end_s = begin_s + self.variance * span.length_s
            if offset_s < end_s:
                return Window(remaining_s=end_s - offset_s, wait_s=end_s - offset_s, why=f"in span {index}")
        return Window(remaining_s=0.0, wait_s=stalled_s - offset_s, why="after the last span")


def plan(
    profile: IdleProfile,
    *,
    checkpoint_bytes: int,
    copies: int,
    buffer_bytes: int,
    cost: TransferCost,
    variance: float,
    max_every: int,
    ready_s: float = 0.0,
) -> tuple[Schedule, str]:
    """Decide how often a checkpoint is sent and whether in the idle spans, and say why.

    A checkpoint is sent in every iteration if its replicas fit in the idle spans of one; else over as many iterations
    as they need, but at most `max_every`; what does not fit even there is sent in the last span and prolongs it.

    Args:
        profile: A typical iteration.
        checkpoint_bytes: Size of one checkpoint.
        copies: Checkpoints to send, m - 1.
        buffer_bytes: The largest chunk.
        cost: The time of a chunk.
        variance: mu, the part of each span that is used.
        max_every: How many iterations one checkpoint may take.
        ready_s: When in its first iteration the checkpoint is there to be sent.
    """
    total_bytes = checkpoint_bytes * copies
    short = profile.iteration_s < SHORTEST_ITERATION_S
    if short or not total_bytes:
        why = f"iterations of {profile.iteration_s:.3f} s are short" if short else "there is no peer to send to"
        return Schedule(every=1, paced=False, used_s=0.0, late_bytes=0), f"sent at once: {why}"
    every, placed_bytes, used_s = 1, 0, 0.0
    for every in range(1, max_every + 1):
        placed_bytes, used_s = fill(
            unrolled(profile, every, ready_s),
            checkpoint_bytes=checkpoint_bytes,
            copies=copies,
            buffer_bytes=buffer_bytes,
            cost=cost,
            variance=variance,
        )
        if placed_bytes == total_bytes:
            break
    made = Schedule(every=every, paced=True, used_s=used_s, late_bytes=total_bytes - placed_bytes)
    return made, _reason(made, profile, total_bytes, cost)


def _reason(made: Schedule, profile: IdleProfile, total_bytes: int, cost: TransferCost) -> str:
    idle = (
        f"{total_bytes} bytes at {cost.bytes_per_s / 1e6:.1f} MB/s; the network is idle for "
        f"{profile.idle_s:.3f} of {profile.iteration_s:.3f} s"
    )
    if made.late_bytes:
        return f"{idle}: too little even for {made.every} iterations, {made.late_bytes} bytes go into the last span"
    if made.every > 1:
        return f"{idle}: one checkpoint takes {made.every} iterations, so one of {made.every} steps is captured"
    return f"{idle}, and {made.used_s:.3f} s of it are used"


def unrolled(profile: IdleProfile, every: int, ready_s: float) -> list[Span]:
    """Return the idle spans of `every` iterations in a row, as offsets from the start of the first, after `ready_s`."""
    spans = []
    for iteration in range(every):
        for span in profile.spans:
            start_s = iteration * profile.iteration_s + span.start_s
            lost_s = min(max(0.0, ready_s - start_s), span.length_s)
            spans.append(Span(start_s=start_s + lost_s, length_s=span.length_s - lost_s))
    return spans
