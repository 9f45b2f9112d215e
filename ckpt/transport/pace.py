"""What the training thread does for the traffic of replicas: learn when the network is idle, say when iterations begin.

The daemon does the rest (`daemon/peers/pacing.py`). While the network is being profiled, a capture's replicas leave one
iteration later: so the iteration in between shows the training's traffic alone, as in Section 6.5.4 of Gemini, and
training waits for nothing. Iterations in which replicas of an earlier capture travel are not looked at.
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
from ..format.schedule import PACED, SHORTEST_ITERATION_S, STALL, STALL_S
from ..format.wire import Message
from ..link.link import Link
from .profile import Profiler

_BLOCKING_S: Final = 60.0
_log = logging.getLogger(__name__)


class TrainerPace:
    """The pace of one rank's checkpoints in one generation.

    Attributes:
        every: Of so many steps one is captured at most, because the network is not idle long enough for more.
        profile: The typical iteration, None while it is not known, and when there is none.
        quiet_s: For so long no replicas are to leave in the present iteration, because that is being profiled.
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
        self.profile: IdleProfile | None = None
        self.every = 1
        self._scheme: str = replication["scheme"]
        self._link = link
        self._capturer = capturer
        self._lock = threading.Lock()
        self._profiler: Profiler | None = None
        self._stuck_at: tuple[Pair | None] | None = None
        self.quiet_s: float | None = None
        self._began_s = time.monotonic()
        self._shortest_s = math.inf
        self._disturbed = False
        self.protection = ProtectionWatch(
            capturer, link, makes_captures=self.captures, every=lambda: self.every, loud=loud
        )
        self.on_attached(replication)
        if self.profile is None and replication["copies"] and self._scheme in PACED:
            self._profiler = Profiler(replication["profile_steps"])

    def on_attached(self, replication: Message) -> None:
        """Take what the daemon knows; tell one that has forgotten it when the network is idle."""
        self.on_message({"op": "pace", "every": replication["every"]})
        self.protection.attached()
        known = replication["idle"]
        with self._lock:
            if known is not None:
                self.profile = IdleProfile.from_message(known)
            elif self.profile is not None:
                self._link.notify("schedule", **self.profile.to_message())

    def on_message(self, message: Message) -> None:
        """Take a notification of the daemon."""
        if message.get("op") == "pace" and message["every"] != self.every:
            self.every = message["every"]
            _log.info("a checkpoint is made of every %d steps now", self.every)

    @property
    def captures(self) -> bool:
        """Whether captures are made at all; of which steps, the root says."""
        return self._scheme != "none"

    def enter(self) -> None:
        """Record that `step()` begins."""
        if self._profiler is None:
            return
        if self._profiler.has_begun:
            self._shortest_s = min(time.monotonic() - self._began_s, self._shortest_s)
        self._profiler.iteration_ends(counts=not self._disturbed)
        if self._profiler.done:
            with self._lock:
                self.profile = self._profiler.result
                if self.profile is not None:
                    self._link.notify("schedule", **self.profile.to_message())
            if self.profile is None:
                _log.warning("replicas are sent as soon as they are there: %s", self._profiler.reason)
            self._profiler = None

    def leave(self, step: int) -> None:
        """Record that `step()` ends; wait for the replicas first with the scheme `blocking`."""
        if self._scheme == "blocking":
            self._wait()
        self._began_s = time.monotonic()
        self.quiet_s = self._hush(step)
        self._link.notify("iteration", step=step, monotonic_s=self._began_s, quiet_s=self.quiet_s)
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

    def close(self) -> None:
        """Stop profiling, and say how long commits did not keep up."""
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
