"""What the training thread does for the traffic of replicas: learn when the network is idle, say when iterations begin.

The daemon does the rest (`daemon/peers/pacing.py`). While the network is being profiled each step waits until its
replicas have arrived, for at most as long as an iteration takes: so what is seen is the training's traffic alone, as in
Section 6.5.4 of Gemini, and yet no step goes without a checkpoint. The scheme `blocking` waits so in every step.
"""

import logging
import threading
import time
from typing import Final

from ..capture.capture import Capturer
from ..capture.protection import ProtectionWatch
from ..capture.slots import Pair
from ..format.idle import IdleProfile
from ..format.wire import Message
from ..link.link import Link
from .profile import Profiler

_BLOCKING_S: Final = 60.0
_PROFILING_S: Final = 1.0
_log = logging.getLogger(__name__)


class TrainerPace:
    """The pace of one rank's checkpoints in one generation.

    Attributes:
        every: Of so many steps one is captured at most, because the network is not idle long enough for more.
        profile: The typical iteration, None while it is not known, and when there is none.
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
        self._began_s = time.monotonic()
        self._length_s = 0.0
        self.protection = ProtectionWatch(
            capturer, link, makes_captures=self.captures, every=lambda: self.every, loud=loud
        )
        self.on_attached(replication)
        if self.profile is None and replication["copies"] and self._scheme in ("interleaved", "no-pipeline"):
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
        """Say that `step()` begins."""
        self._length_s = time.monotonic() - self._began_s
        if self._profiler is None:
            return
        self._profiler.iteration_ends()
        if self._profiler.done:
            with self._lock:
                self.profile = self._profiler.result
                if self.profile is not None:
                    self._link.notify("schedule", **self.profile.to_message())
            if self.profile is None:
                _log.warning("replicas are sent as soon as they are there: %s", self._profiler.reason)
            self._profiler = None

    def leave(self, step: int) -> None:
        """Say that `step()` ends; wait for the replicas first where that is to be."""
        if self._scheme == "blocking":
            self._wait(_BLOCKING_S)
        elif self._profiler is not None:
            self._wait(max(_PROFILING_S, self._length_s))
        self._began_s = time.monotonic()
        self._link.notify("iteration", step=step, monotonic_s=self._began_s)
        if self._profiler is not None:
            self._profiler.iteration_begins()

    def close(self) -> None:
        """Stop profiling, and say how long commits did not keep up."""
        if self._profiler is not None:
            self._profiler.close()
        self.protection.close()

    def _wait(self, timeout_s: float) -> None:
        """Wait for the commit, but only while commits are made at all: training outlives the daemon, peers and etcd."""
        if self._stuck_at == (self._capturer.watermark,):
            return
        started_s = time.monotonic()
        self._stuck_at = None if self._capturer.wait_decided(timeout_s) else (self._capturer.watermark,)
        self._capturer.stats.waited_s += time.monotonic() - started_s
