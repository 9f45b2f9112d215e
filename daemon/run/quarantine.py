"""Hosts that a run avoids for a while, as the root says; launchers and the root read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ..base.fields import Fields
from . import keys

_MAX_REASON_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """A host is only used where a round could not reach its minimum size without it.

    Attributes:
        since_unix_s: When it began; failures before it do not count towards another one.
        until_unix_s: When it ends; from then on the key means nothing.
        reason: What a person wants to know.
    """

    since_unix_s: float
    until_unix_s: float
    reason: str

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return the quarantine in an etcd value.

        Raises:
            DaemonError: The value is not one.
        """
        fields = Fields(value, keys.QUARANTINES)
        return cls(
            since_unix_s=fields.number("since_unix_s", high=1e12),
            until_unix_s=fields.number("until_unix_s", high=1e12),
            reason=fields.text("reason", max_bytes=_MAX_REASON_BYTES),
        )

    def to_value(self) -> dict[str, Any]:
        """Return what `parse` reads."""
        return asdict(self)

    def left_s(self, now_unix_s: float) -> float:
        """Return the seconds until it ends, 0 when it has."""
        return max(0.0, self.until_unix_s - now_unix_s)

    def describe(self, now_unix_s: float) -> str:
        """Return what it means for its host, for a person."""
        return (
            f"is in quarantine for another {self.left_s(now_unix_s):.0f} s ({self.reason}): it takes part only if the "
            "run has too few hosts without it"
        )
