"""The recoveries of a run, as its launchers tell each other in etcd."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..base.goodput import PHASES, FailureCost, Ledger, Recovery

_KEPT: Final = 10_000
_SHOWN: Final = 32
_KINDS: Final = (
    "worker_exit", "host_lost", "hang", "unhealthy", "unhealthy_steps", "memory_lost", "corruption", "membership",
    "restart", "rollback",
)  # fmt: skip
"""As in docs/operations/monitoring.md: a counter that begins at 0 shows the first of a kind, too."""


class Recoveries:
    """What each generation cost that recovered a failure; each of its hosts tells when its own ranks are back."""

    def __init__(self) -> None:
        self._since_s = time.time()
        self._events: dict[int, dict[str, Recovery]] = {}

    def see(self, key: str, value: Mapping[str, Any]) -> None:
        """Take the event of a host.

        Raises:
            DaemonError: The value is none.
        """
        event = Recovery.parse(value, key)
        if event.generation in self._events or event.unix_s - event.total_s >= self._since_s:
            self._events.setdefault(event.generation, {})[event.host] = event
            while len(self._events) > _KEPT:
                del self._events[min(self._events)]

    def describe(self, step_s: float | None) -> dict[str, Any]:
        """Return the ledger since this daemon knows the run, with its newest failures only.

        Args:
            step_s: Seconds of one training step, None when nobody knows.
        """
        costs = [FailureCost.of(events.values()) for _, events in sorted(self._events.items())]
        # Of each phase the host that took longest: a host that tells later lets no sum fall.
        phases_s = {
            phase: sum(
                max(each.phases_s.get(phase, 0.0) for each in events.values()) for events in self._events.values()
            )
            for phase in PHASES
        }
        told = Ledger(failures=tuple(costs), step_s=step_s, period_s=time.time() - self._since_s).describe()
        kinds = {**dict.fromkeys(_KINDS, 0), **Counter(cost.kind for cost in costs)}
        return {**told, "failures": told["failures"][-_SHOWN:], "kinds": kinds, "phases_s": phases_s}
