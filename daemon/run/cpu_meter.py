"""CPU time as a sign of life: how much of a CPU a trainer and its children, such as data loaders, take."""

import contextlib
from collections import deque
from typing import Final

import psutil

BUSY: Final = 0.1
"""CPUs that a process which works takes at least; threads that only look at a clock take less than a tenth of it."""


class CpuMeter:
    """The CPU time of one process tree, as it is heard from time to time."""

    def __init__(self) -> None:
        self._heard: deque[tuple[float, float]] = deque()

    def hear(self, now_s: float, cpu_s: float, window_s: float) -> None:
        """Note the CPU time so far at `now_s`; what is older than `window_s` counts no more."""
        self._heard.append((now_s, cpu_s))
        while len(self._heard) > 2 and self._heard[1][0] <= now_s - window_s:
            self._heard.popleft()

    def forget(self) -> None:
        """Begin anew."""
        self._heard.clear()

    @property
    def heard_s(self) -> float:
        """When it was heard last, minus infinity for never."""
        return self._heard[-1][0] if self._heard else float("-inf")

    @property
    def busy(self) -> bool:
        """Whether the processes took `BUSY` of a CPU since the oldest note."""
        if len(self._heard) < 2:
            return False
        (from_s, before_s), (to_s, after_s) = self._heard[0], self._heard[-1]
        return to_s > from_s and after_s - before_s >= BUSY * (to_s - from_s)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants, also of those that ended; 0 when there is none."""
    total_s = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
