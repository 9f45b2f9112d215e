"""Observations: what is wrong on a host now, in the words that etcd, the log and `resilientctl` share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.codec import Record, limited, parse_all
from ..base.fields import printable

KINDS = (
    "hang",
    "peer_unreachable",
    "memory",
    "disk",
    "tmpfs",
    "load",
    "gpu",
    "replication_slow",
    "corruption",
    "straggler",
)
SEVERITIES = ("info", "warn", "fail")
"""From harmless to "the root must act"."""

MAX_OBSERVATIONS = 256
"""How many one host may report."""

_MAX_LETTERS = 1000
_MAX_NUMBER = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation(Record):
    """One thing that is wrong.

    Attributes:
        kind: One of `KINDS`.
        severity: One of `SEVERITIES`.
        rank: The rank that it is about, None when no single one is.
        generation: The generation that it is about, None when it outlasts generations.
        step: Where training stood still, if long work might explain it; None when it cannot, or nothing stood still.
        value: What was measured, in the unit that the message names.
        limit: What it should have kept to.
        message: The sentence that a person wants.
        unix_s: Since when it is so.
    """

    kind: str = limited(choices=KINDS)
    severity: str = limited(choices=SEVERITIES)
    rank: int | None = None
    generation: int | None = None
    step: int | None = None
    value: float = limited(low=-_MAX_NUMBER, high=_MAX_NUMBER)
    limit: float = limited(low=-_MAX_NUMBER, high=_MAX_NUMBER)
    message: str = limited(write=lambda message: printable(message[:_MAX_LETTERS]))
    unix_s: float = limited(high=_MAX_NUMBER)

    @property
    def identity(self) -> tuple[str, str, int | None, int | None]:
        """What has to change for this to count as news; the measured value alone does not."""
        return self.kind, self.severity, self.rank, self.generation


def parse_observations(value: Mapping[str, Any]) -> tuple[Observation, ...]:
    """Return what a host reports under `state/observations/<host>`.

    Raises:
        DaemonError: The value is not such a report.
    """
    return parse_all(Observation, value, "observations", most=MAX_OBSERVATIONS)


def report_observations(observations: Iterable[Observation]) -> dict[str, Any] | None:
    """Return the etcd value that `parse_observations` reads, the worst first; None when nothing is wrong."""
    worst = sorted(observations, key=lambda item: -SEVERITIES.index(item.severity))[:MAX_OBSERVATIONS]
    return {"observations": [item.to_value() for item in worst]} if worst else None
