"""What ranks have computed so far: noted at some steps by their hosts, compared by the root."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.fields import MAX_INTEGER
from .rounds import MAX_WORLD_SIZE

LEAST_STEPS = 4
"""So many steps are compared together at least: one alone may load data or be logged."""
_LEAST_S = 0.5
"""So long do they take at least; CPU time varies by a few percent in it."""
_MOST_STEPS = 1 << 12


class RankWork(NamedTuple):
    """What a rank had computed when it completed a step.

    Attributes:
        step: That step.
        worked_s: Seconds that its training thread has been on a CPU since it began.
        at_s: When that was, by the monotonic clock of its host.
        state_bytes: What it captures: ranks that do the same work have about as much.
    """

    step: int
    worked_s: float
    at_s: float
    state_bytes: int


def is_due(known: RankWork | None, step: int, now_s: float) -> bool:
    """Tell whether a rank's work is to be noted at `step`, after it was at `known`.

    All hosts count the same steps, and those of a longer distance are among those of a shorter one, so ranks of which
    one seems a little faster have many in common.
    """
    if known is None:
        return True
    distance, step_s = LEAST_STEPS, (now_s - known.at_s) / max(1, step - known.step)
    while distance * step_s < _LEAST_S and distance < _MOST_STEPS:
        distance *= 2
    return step // distance > known.step // distance


def read_work(rows: Any) -> Mapping[int, RankWork]:
    """Return rank → work from the rows of a report.

    Raises:
        TypeError: They are none.
        ValueError: They are none.
    """
    found = {}
    for rank, *numbers in rows:
        if not all(type(number) in (int, float) and 0 <= number <= MAX_INTEGER for number in (rank, *numbers)):
            raise ValueError(f"the work {str([rank, *numbers])[:80]}")
        step, worked_s, at_s, state_bytes = numbers
        found[int(rank)] = RankWork(int(step), worked_s, at_s, int(state_bytes))
    if len(found) > MAX_WORLD_SIZE:
        raise ValueError(f"the work of {len(found)} ranks")
    return found


def work_rows(work: Mapping[int, RankWork]) -> list[list[float]]:
    """Return the rows that `read_work` reads."""
    return [[rank, *point] for rank, point in work.items()]
