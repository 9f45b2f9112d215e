"""From measures to observations: two thresholds each, and no flapping at them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..run.observation import Observation

_SLACK = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One measured value and the thresholds from which on it is wrong.

    Attributes:
        name: What it is about, unique on the host.
        kind: Kind of the observation that it may become.
        value: What was measured.
        warn: Threshold of a warning, 0 for none.
        fail: Threshold of a failure, 0 for none.
        rank: The rank that it is about, None for the host.
        generation: The generation that it is about, None when it outlasts generations.
        low_is_bad: It is wrong below the thresholds (a rest), not from them on (a load).
        message: The sentence about the value; the threshold is added to it.
    """

    name: str
    kind: str
    value: float
    warn: float = 0.0
    fail: float = 0.0
    rank: int | None = None
    generation: int | None = None
    low_is_bad: bool = False
    message: str

    def exceeds(self, threshold: float, *, before: bool) -> bool:
        """Tell whether the value is wrong; after it was so `before` it must be a tenth better than `threshold`."""
        if not threshold:
            return False
        slack = _SLACK * threshold if before else 0.0
        return self.value < threshold + slack if self.low_is_bad else self.value >= threshold - slack


class Judge:
    """Says which measures are wrong, and since when.

    Args:
        wall: Unix seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._before: dict[str, Observation] = {}

    def judge(self, measures: Iterable[Measure]) -> dict[str, Observation]:
        """Return by name what is wrong among `measures`, which are all that there is to judge now."""
        seen = {measure.name: self._observe(measure) for measure in measures}
        self._before = {name: found for name, found in seen.items() if found is not None}
        return self._before

    def _observe(self, measure: Measure) -> Observation | None:
        before = self._before.get(measure.name)
        severity_before = None if before is None else before.severity
        if measure.exceeds(measure.fail, before=severity_before == "fail"):
            severity, limit = "fail", measure.fail
        elif measure.exceeds(measure.warn, before=severity_before is not None):
            severity, limit = "warn", measure.warn
        else:
            return None
        return Observation(
            kind=measure.kind,
            severity=severity,
            rank=measure.rank,
            generation=measure.generation,
            value=round(measure.value, 3),
            limit=limit,
            message=f"{measure.message} (the limit is {limit:g})",
            unix_s=before.unix_s if before is not None and severity_before == severity else self._wall(),
        )
