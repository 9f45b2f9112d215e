"""Hosts that a run avoids for a while, as the root says; launchers and the root read it."""

from dataclasses import dataclass

from ..base.codec import UNIX_S, Record, limited

_MAX_REASON_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine(Record):
    """A quarantined host is used only if the round would be too small without it.

    Attributes:
        since_unix_s: When it began; failures before it do not count towards another one.
        until_unix_s: When it ends; from then on the key means nothing.
        reason: What a person wants to know.
    """

    since_unix_s: float = limited(high=UNIX_S)
    until_unix_s: float = limited(high=UNIX_S)
    reason: str = limited(high=_MAX_REASON_BYTES)

    def left_s(self, now_unix_s: float) -> float:
        """Return the seconds until it ends, 0 when it has."""
        return max(0.0, self.until_unix_s - now_unix_s)

    def describe(self, now_unix_s: float) -> str:
        """Return what it means for its host, for a person."""
        return (
            f"is in quarantine for another {self.left_s(now_unix_s):.0f} s ({self.reason}): it takes part only if the "
            "run has too few hosts without it"
        )
