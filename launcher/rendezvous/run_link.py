"""The synchronous end of a `Membership`: views of the run, waiting for changes, requests that outlast outages."""

import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from resilient_run.daemon.etcd.client import EtcdConfig, EtcdError, EtcdUnavailable
from resilient_run.daemon.run.rounds import Member

from .loop import LoopThread
from .membership import Membership
from .patience import Impatience
from .rounds import View

log = logging.getLogger(__name__)

T = TypeVar("T")
_LEAVE_S = 5.0
_RETRY_S = 0.5


class RunLink:
    """Connects a launcher to a run; `membership`'s coroutines go through `request` or `report`.

    Raises:
        EtcdError: etcd cannot be reached or refuses.
    """

    def __init__(self, config: EtcdConfig, *, run_id: str, member: Member) -> None:
        self._version = 0
        self._changed = threading.Condition()
        self.changed_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pid = os.getpid()
        self.left = False
        """Whether `leave` was called; nothing can be requested or reported any more."""
        self._loop = LoopThread("etcd-rendezvous")
        try:
            self.membership = self._loop.run(
                Membership.open(config, run_id=run_id, member=member, on_change=self._on_change)
            )
        except BaseException:
            self._loop.stop()
            os.close(self.changed_fd)
            raise

    def look(self) -> tuple[View, int]:
        """Return the newest state of the run, and a number for `wait`."""
        with self._changed:
            return self.membership.view, self._version

    def wait(self, version: int, timeout_s: float) -> None:
        """Return once there is news since the `look` that gave `version`, or after `timeout_s`.

        Raises:
            EtcdError: Another thread has called `leave`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.left or self._version != version, max(0.0, timeout_s))
        if self.left:
            raise EtcdError("this launcher has left the run")

    def clear_changed(self) -> None:
        """Make `changed_fd` unreadable until the next change."""
        try:
            os.eventfd_read(self.changed_fd)
        except BlockingIOError:
            return

    def request(self, make: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
        """Return what the coroutine of `make` returns; made again while etcd is away, until `deadline` (monotonic).

        Raises:
            EtcdError: etcd was away for too long, or refuses.
        """
        impatience = Impatience()
        while True:
            try:
                return self._loop.run(make())
            except EtcdUnavailable as error:
                left_s = deadline - time.monotonic()
                if left_s < _RETRY_S:
                    raise
                impatience.tell("%s; going on for %.0f s", error, left_s)
                time.sleep(_RETRY_S)

    def report(self, report: Coroutine[Any, Any, None], patience_s: float) -> None:
        """Run a coroutine that goes on by itself, and wait for it only a little."""
        try:
            self._loop.run(report, patience_s)
        except (EtcdError, TimeoutError) as error:
            log.warning("cannot report to etcd yet: %s", str(error) or f"no answer in {patience_s:g} s")

    def leave(self) -> bool:
        """Give up the membership, disconnect, and tell whether etcd knows; only the first call does something."""
        # A forked child has this object, but neither its thread nor the right to speak for the launcher.
        if self.left or os.getpid() != self._pid:
            return True
        with self._changed:
            self.left = True
            self._changed.notify_all()
        try:
            self._loop.run(self.membership.leave(), _LEAVE_S)
            return True
        except (EtcdError, TimeoutError) as error:
            log.warning("left the run without telling etcd: %s", str(error) or f"no answer in {_LEAVE_S:g} s")
            return False
        finally:
            self._loop.stop()
            os.close(self.changed_fd)

    def _on_change(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        os.eventfd_write(self.changed_fd, 1)
