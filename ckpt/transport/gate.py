"""The gate through which a trainer's captures leave it: in the idle spans of the training network (Algorithm 6.2).

The trainers' counterpart of the daemon's pacing. Chunks are cut one by one, from what is left of the present span by
the clock. Nothing waits for ever: see `schedule.window`.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from ..format.idle import IdleProfile
from ..format.schedule import PACED, SHORTEST_ITERATION_S, TransferCost, window
from ..format.wire import Message

_STARTUP_S: Final = 0.001
_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 256 << 10


class Known(Protocol):
    """What is known of the training, `pace.TrainerPace`."""

    @property
    def profile(self) -> IdleProfile | None:
        """A typical iteration, None while there is none."""

    @property
    def every(self) -> int:
        """How many iterations one checkpoint may take."""

    @property
    def quiet_s(self) -> float | None:
        """For how long nothing may leave in the present iteration."""


class Gate:
    """Lets chunks leave; any thread may ask.

    Args:
        replication: How replicas travel, from the answer to the attachment.
        known: What is known of the training.
        measured: Called with the bytes per second that sending was found to make.
        clock: The monotonic clock.
    """

    def __init__(
        self,
        replication: Message,
        known: Known,
        *,
        measured: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheme: str = replication["scheme"]
        self._paced = self._scheme in PACED
        self._variance = replication["variance"]
        self._buffer_bytes: int = replication["sub_buffer_bytes"]
        self._given_bytes_per_s = replication["bandwidth_mbit_s"] * 1e6 / 8
        self._known = known
        self._measured = measured
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._changed = threading.Condition()
        self._step = 0
        self._began_s = 0.0
        self._busy_until_s = self._quiet_until_s = 0.0
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Tell whether everything may leave at once: nothing is known yet, or nothing is gained by waiting."""
        return self._plan is None and self._quiet_until_s <= self._clock()

    def begins(self, step: int) -> None:
        """Record that the iteration after `step` steps begins now."""
        with self._changed:
            self._step, self._began_s = step, self._clock()
            self._quiet_until_s = self._began_s + (self._known.quiet_s or 0.0)
            self._changed.notify_all()

    def admit(self, step: int, remaining_bytes: int) -> int:
        """Wait until something of the capture of `step` may leave; return how much of the `remaining_bytes`."""
        with self._changed:
            while not self._closed and not self.is_open:
                size_bytes, wait_s = self._ask(step, remaining_bytes)
                if size_bytes:
                    return size_bytes
                self._changed.wait(max(wait_s, _STARTUP_S))
        return min(self._buffer_bytes, remaining_bytes)

    def sent(self, size_bytes: int, seconds: float) -> None:
        """Record that `size_bytes` left in `seconds` while everything might; too few of them tell nothing."""
        if self._paced and size_bytes >= _SAMPLE_BYTES and seconds > 0:
            with self._changed:
                self._rates.append(size_bytes / seconds)
            self._measured(statistics.median(self._rates))

    def close(self) -> None:
        """Let everything leave: the edges are about to be closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _plan(self) -> tuple[IdleProfile, TransferCost] | None:
        """The typical iteration and the cost of a chunk, None while everything may leave at once."""
        profile = self._known.profile
        bytes_per_s = self._given_bytes_per_s or (statistics.median(self._rates) if self._rates else 0.0)
        if not self._paced or not bytes_per_s or profile is None or profile.iteration_s < SHORTEST_ITERATION_S:
            return None
        return profile, TransferCost(startup_s=_STARTUP_S, bytes_per_s=bytes_per_s)

    def _ask(self, step: int, remaining_bytes: int) -> tuple[int, float]:
        """Return how much may leave now, and after how many seconds to ask again where that is nothing."""
        now_s, plan = self._clock(), self._plan
        if plan is None:
            return 0, self._quiet_until_s - now_s
        profile, cost = plan
        seen = window(
            profile,
            offset_s=now_s - self._began_s,
            iterations=self._step - step,
            every=self._known.every,
            variance=self._variance,
        )
        if math.isinf(seen.remaining_s):
            return min(self._buffer_bytes, remaining_bytes), 0.0
        # Gloo does not say when a chunk has left, so what is on its way is known by its cost.
        queued_s = max(0.0, self._busy_until_s - now_s)
        size_bytes = cost.chunk_bytes(
            seen.remaining_s - queued_s,
            buffer_bytes=cost.burst_bytes(self._buffer_bytes, self._scheme),
            remaining_bytes=remaining_bytes,
        )
        if size_bytes:
            self._busy_until_s = max(now_s, self._busy_until_s) + cost.seconds(size_bytes)
        return size_bytes, seen.wait_s
