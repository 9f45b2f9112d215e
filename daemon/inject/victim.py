"""The process that a fault targets, identified by pid and start time: a later process may have its pid."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import psutil

from resilient_run.ckpt.errors import DaemonError

from ..base.codec import UNIX_S, Record, limited


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim(Record):
    """One process.

    Attributes:
        pid: Its id.
        created_s: When it started, as psutil says it.
    """

    pid: int = limited(low=2, high=1 << 30)
    created_s: float = limited(high=UNIX_S)

    @classmethod
    def find(cls, pid: int) -> Self:
        """Return the process that has `pid` now.

        Raises:
            DaemonError: There is none.
        """
        try:
            return cls(pid=pid, created_s=psutil.Process(pid).create_time())
        except (psutil.Error, OverflowError) as error:
            raise DaemonError(f"there is no process {pid}") from error

    def signal(self, number: signal.Signals) -> bool:
        """Send the signal if the process still lives, and tell whether it was sent.

        Raises:
            PermissionError: It is somebody else's.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The descriptor holds on to whoever has the pid now; only then is it worth asking who that is.
            if psutil.Process(self.pid).create_time() != self.created_s:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        finally:
            os.close(descriptor)
        return True

    def descendants(self) -> list[psutil.Process]:
        """Return the processes below it, none when it is gone."""
        try:
            process = psutil.Process(self.pid)
            return process.children(recursive=True) if process.create_time() == self.created_s else []
        except psutil.NoSuchProcess:
            return []


def kill_all(processes: Sequence[Any], timeout_s: float) -> None:
    """SIGKILL psutil `processes` and wait until none of them runs, up to `timeout_s`."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=timeout_s)
