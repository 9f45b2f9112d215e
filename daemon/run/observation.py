"""Observations: what is wrong on a host now, in the words that etcd, the log and `resilientctl` share."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError

from ..base.fields import Fields, printable
from . import keys

KINDS = ("hang", "peer_unreachable", "memory", "disk", "tmpfs", "load", "gpu", "replication_slow", "corruption")
SEVERITIES = ("info", "warn", "fail")
"""From harmless to "the root must act"."""

MAX_OBSERVATIONS = 256
"""How many one host may report."""

_MAX_LETTERS = 1000
_MAX_NUMBER = 1e18


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
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

    kind: str
    severity: str
    rank: int | None = None
    generation: int | None = None
    step: int | None = None
    value: float
    limit: float
    message: str
    unix_s: float

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return the observation in one element of a `state/observations/<host>` value.

        Raises:
            DaemonError: It is none.
        """
        fields = Fields(value, "observation")
        kind, severity = fields.text("kind"), fields.text("severity")
        for name, given, known in (("kind", kind, KINDS), ("severity", severity, SEVERITIES)):
            if given not in known:
                raise DaemonError(f"observation: field '{name}' must be one of {', '.join(known)}, got {given[:80]!r}")
        return cls(
            kind=kind,
            severity=severity,
            rank=fields.optional_integer("rank"),
            generation=fields.optional_integer("generation"),
            step=fields.optional_integer("step"),
            value=fields.number("value", low=-_MAX_NUMBER, high=_MAX_NUMBER),
            limit=fields.number("limit", low=-_MAX_NUMBER, high=_MAX_NUMBER),
            message=fields.text("message"),
            unix_s=fields.number("unix_s", high=_MAX_NUMBER),
        )

    def to_value(self) -> dict[str, Any]:
        """Return what `parse` reads; a path in the message may hold what no text of ours may."""
        return {**asdict(self), "message": printable(self.message[:_MAX_LETTERS])}

    @property
    def identity(self) -> tuple[str, str, int | None, int | None]:
        """What has to change for this to count as news; the measured value alone does not."""
        return self.kind, self.severity, self.rank, self.generation


def parse_observations(value: Mapping[str, Any]) -> tuple[Observation, ...]:
    """Return what a host reports under `state/observations/<host>`.

    Raises:
        DaemonError: The value is not such a report.
    """
    found = Fields(value, keys.OBSERVATIONS).objects("observations")
    if len(found) > MAX_OBSERVATIONS:
        raise DaemonError(f"{keys.OBSERVATIONS}: {len(found)} observations, a host reports at most {MAX_OBSERVATIONS}")
    return tuple(Observation.parse(item) for item in found)


def report_observations(observations: Iterable[Observation]) -> dict[str, Any] | None:
    """Return the etcd value that `parse_observations` reads, the worst first; None when nothing is wrong."""
    worst = sorted(observations, key=lambda item: -SEVERITIES.index(item.severity))[:MAX_OBSERVATIONS]
    return {"observations": [item.to_value() for item in worst]} if worst else None
