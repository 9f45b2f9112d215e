"""The recoveries of a run, as its launchers tell each other in etcd."""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from ..base.goodput import PHASES, FailureCost, Ledger, Recovery

_SHOWN: Final = 32
"""So many of the newest failures are known host by host; what came before is only added up."""

_KINDS: Final = (
    "worker_exit", "host_lost", "hang", "unhealthy", "unhealthy_steps", "memory_lost", "corruption", "membership",
    "restart", "rollback",
)  # fmt: skip
"""As in docs/operations/monitoring.md: a counter that begins at 0 shows the first of a kind, too."""


class Recoveries:
    """What each generation cost that recovered a failure; each of its hosts tells when its own ranks are back."""

    def __init__(self) -> None:
        self._since_s = self._unknown_s = time.time()
        self._events: dict[int, dict[str, Recovery]] = {}
        self._older: FailureCost | None = None
        self._kinds = Counter[str]()
        self._phases_s = dict.fromkeys(PHASES, 0.0)

    def see(self, key: str, value: Mapping[str, Any]) -> None:
        """Take the event of a host.

        Raises:
            DaemonError: The value is none.
        """
        event = Recovery.parse(value, key)
        # By time, not by generation: another life of the run counts from 1 again.
        if event.generation in self._events or event.unix_s - event.total_s >= self._unknown_s:
            self._events.setdefault(event.generation, {})[event.host] = event
            if len(self._events) > _SHOWN:
                self._add_up(self._events.pop(next(iter(self._events))).values())

    def describe(self, step_s: float | None) -> dict[str, Any]:
        """Return the ledger since this daemon knows the run, with its newest failures only.

        Args:
            step_s: Seconds of one training step, None when nobody knows.
        """
        older = () if self._older is None else (self._older,)
        costs = [FailureCost.of(events.values()) for _, events in sorted(self._events.items())]
        phases_s = dict(self._phases_s)
        for events in self._events.values():
            _add_phases(phases_s, events.values())
        told = Ledger(failures=(*older, *costs), step_s=step_s, period_s=time.time() - self._since_s).describe()
        kinds = {**dict.fromkeys(_KINDS, 0), **(self._kinds + Counter(cost.kind for cost in costs))}
        newest = {"failures": told["failures"][len(older) :], "count": sum(kinds.values())}
        return {**told, **newest, "kinds": kinds, "phases_s": phases_s}

    def _add_up(self, events: Collection[Recovery]) -> None:
        """Let the sums have a failure; a host that tells of it only now is too late."""
        cost, older = FailureCost.of(events), self._older
        self._unknown_s = max(self._unknown_s, min(event.unix_s for event in events))
        self._kinds[cost.kind] += 1
        _add_phases(self._phases_s, events)
        if older is not None:
            steps_lost = (older.steps_lost or 0) + (cost.steps_lost or 0)
            cost = replace(cost, down_s=older.down_s + cost.down_s, steps_lost=steps_lost)
        self._older = cost


def _add_phases(sums_s: dict[str, float], events: Collection[Recovery]) -> None:
    """Add, of each phase, the host that took longest: a host that tells later lets no sum fall."""
    for phase in PHASES:
        sums_s[phase] += max(each.phases_s.get(phase, 0.0) for each in events)
