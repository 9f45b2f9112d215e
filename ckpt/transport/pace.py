"""What a trainer does for the traffic of replicas: learn when the network is idle, say when iterations begin.

If trainers carry replicas, their edges ask here when chunks may leave; else daemons do the rest
(`daemon/peers/pacing.py`). Both decide by `SendSchedule`.

While the network is being profiled, a capture's replicas leave one iteration later: so the iteration in between shows
the training's traffic alone, as in Section 6.5.4 of Gemini, and training waits for nothing. Iterations in which
replicas of an earlier capture travel are not looked at.
"""

import logging
import math
import threading
import time
from typing import Final

from ..capture.capture import Capturer
from ..capture.protection import ProtectionWatch
from ..format.idle import IdleProfile
from ..format.pair import Pair
from ..format.schedule import (
    PACED,
    SAMPLE_BYTES,
    SHORTEST_ITERATION_S,
    SHORTEST_STARTUP_S,
    STALL,
    STALL_S,
    LinkMeter,
    SendSchedule,
)
from ..format.wire import Message
from ..link.link import Link
from .profile import Profiler

_BLOCKING_S: Final = 60.0
_log = logging.getLogger(__name__)


class TrainerPace:
    """The pace of one rank's checkpoints in one generation; the threads of edges call `admit` and `sent`.

    Attributes:
        protection: Whether commits keep up.
    """

    def __init__(self, replication: Message, link: Link, capturer: Capturer, *, loud: bool) -> None:
        """Begin.

        Args:
            replication: What the daemon answered to the attachment.
            link: To the daemon.
            capturer: Makes the captures.
            loud: Whether this rank tells when commits do not keep up.
        """
        self._sending = SendSchedule(
            scheme=replication["scheme"],
            variance=replication["variance"],
            buffer_bytes=replication["sub_buffer_bytes"],
            link=LinkMeter(replication["bandwidth_mbit_s"] * 1e6 / 8),
        )
        self._link = link
        self._capturer = capturer
        self._changed = threading.Condition()
        self._profiler: Profiler | None = None
        self._stuck_at: tuple[Pair | None] | None = None
        self._busy_until_s = 0.0
        self._shortest_s = math.inf
        self._disturbed = False
        self.protection = ProtectionWatch(
            capturer, link, makes_captures=self.captures, every=lambda: self.every, loud=loud
        )
        self.on_attached(replication)
        if self._sending.profile is None and replication["copies"] and self._sending.scheme in PACED:
            self._profiler = Profiler(replication["profile_steps"])

    def on_attached(self, replication: Message) -> None:
        """Take what the daemon knows; tell one that has forgotten it when the network is idle."""
        self.on_message({"op": "pace", "every": replication["every"]})
        self.protection.attached()
        known = replication["idle"]
        with self._changed:
            if known is not None:
                self._sending.profile = IdleProfile.from_message(known)
            elif self._sending.profile is not None:
                self._link.notify("schedule", **self._sending.profile.to_message())

    def on_message(self, message: Message) -> None:
        """Take a notification of the daemon."""
        if message.get("op") == "pace" and message["every"] != self.every:
            self._sending.every = message["every"]
            _log.info("a checkpoint is made of every %d steps now", self.every)

    @property
    def every(self) -> int:
        """Of so many steps one is captured at most, because the network is not idle long enough for more."""
        return self._sending.every

    @property
    def captures(self) -> bool:
        """Whether captures are made at all; of which steps, the root says."""
        return self._sending.scheme != "none"

    def enter(self) -> None:
        """Record that `step()` begins."""
        if self._profiler is None:
            return
        if self._profiler.has_begun:
            self._shortest_s = min(time.monotonic() - self._sending.began_s, self._shortest_s)
        self._profiler.iteration_ends(counts=not self._disturbed)
        if self._profiler.done:
            with self._changed:
                profile = self._sending.profile = self._profiler.result
                if profile is not None:
                    self._link.notify("schedule", **profile.to_message())
            if profile is None:
                _log.warning("replicas are sent as soon as they are there: %s", self._profiler.reason)
            self._profiler = None

    def leave(self, step: int) -> None:
        """Record that `step()` ends; wait for the replicas first with the scheme `blocking`."""
        if self._sending.scheme == "blocking":
            self._wait()
        quiet_s = self._hush(step)
        with self._changed:
            began_s = time.monotonic()
            self._sending.step, self._sending.began_s = step, began_s
            self._sending.quiet_until_s = began_s + (quiet_s or 0.0)
            self._changed.notify_all()
        self._link.notify("iteration", step=step, monotonic_s=began_s, quiet_s=quiet_s)
        if self._profiler is not None:
            self._profiler.iteration_begins()

    def _hush(self, step: int) -> float | None:
        """Decide whether the iteration after `step` can be profiled, and for how long no replicas may leave for it."""
        self._disturbed = False
        # Where iterations are this short, replicas are not going to be paced at all.
        if self._profiler is None or not self._profiler.needs_quiet or self._shortest_s < SHORTEST_ITERATION_S:
            return None
        self._disturbed = self._capturer.uncommitted not in (None, step)
        # The shortest one: a script that waits for its commits shall not make the next wait longer.
        return None if self._disturbed else STALL * self._shortest_s + STALL_S

    @property
    def is_open(self) -> bool:
        """Tell whether everything may leave at once: nothing is known yet, or nothing is gained by waiting."""
        with self._changed:
            return self._sending.paced is None and self._sending.quiet_until_s <= time.monotonic()

    def admit(self, step: int, remaining_bytes: int) -> int:
        """Wait until something of the capture of `step` may leave; return how much of the `remaining_bytes`."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                # Gloo does not say when a chunk has left, so what is on its way is known by its cost.
                queued_s = max(0.0, self._busy_until_s - now_s)
                size_bytes, seen = self._sending.chunk(step, remaining_bytes, now_s=now_s, queued_s=queued_s)
                if size_bytes:
                    cost = self._sending.link.cost
                    if cost is not None and math.isfinite(seen.remaining_s):
                        self._busy_until_s = now_s + queued_s + cost.seconds(size_bytes)
                    return size_bytes
                self._changed.wait(max(seen.wait_s, SHORTEST_STARTUP_S))

    def sent(self, size_bytes: int, seconds: float) -> None:
        """Record that `size_bytes` left in `seconds` while everything might."""
        if self._sending.scheme in PACED and size_bytes >= SAMPLE_BYTES:
            with self._changed:
                self._sending.link.add(size_bytes, seconds)
                cost = self._sending.link.cost
            if cost is not None:
                self._link.notify("link", bytes_per_s=cost.bytes_per_s)

    def close(self) -> None:
        """Stop profiling, let everything leave, and say how long commits did not keep up."""
        with self._changed:
            self._sending.released = True
            self._changed.notify_all()
        if self._profiler is not None:
            self._profiler.close()
        self.protection.close()

    def _wait(self) -> None:
        """Wait for the commit, but only while commits are made at all: training outlives the daemon, peers and etcd."""
        if self._stuck_at == (self._capturer.watermark,):
            return
        started_s = time.monotonic()
        self._stuck_at = None if self._capturer.wait_decided(_BLOCKING_S) else (self._capturer.watermark,)
        self._capturer.stats.waited_s += time.monotonic() - started_s
