"""When the training network is idle in an iteration, from the collectives that were seen (Gemini, Section 6.5.4)."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

WARM_UP: Final = 2
"""First iterations that are not looked at: frameworks allocate, connect and lay out buckets in them."""

MAX_SPANS: Final = 4096
_SHORTEST_SPAN_S: Final = 0.0005
_ALIKE: Final = 0.5
_STEADY: Final = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A time in which the training network is idle.

    Attributes:
        start_s: Seconds from the start of the iteration to its begin.
        length_s: How long it lasts.
    """

    start_s: float
    length_s: float

    @property
    def end_s(self) -> float:
        """Seconds from the start of the iteration to its end."""
        return self.start_s + self.length_s


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleProfile:
    """A typical iteration, from the end of one `Checkpointer.step()` to the begin of the next.

    Attributes:
        iteration_s: Its length.
        spans: When the network is idle in it, in order, none overlapping another.
        collectives: How many communication operations it has.
    """

    iteration_s: float
    spans: tuple[Span, ...]
    collectives: int

    @property
    def idle_s(self) -> float:
        """Seconds of an iteration in which the network is idle."""
        return sum(span.length_s for span in self.spans)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return what `to_message` made."""
        numbers = message["spans"]
        return cls(
            iteration_s=message["iteration_s"],
            collectives=message["collectives"],
            spans=tuple(
                Span(start_s=start_s, length_s=length_s)
                for start_s, length_s in zip(numbers[::2], numbers[1::2], strict=True)
            ),
        )

    def to_message(self) -> dict[str, Any]:
        """Return the profile for the wire; `spans` has start and length of each in turn."""
        return {
            "iteration_s": self.iteration_s,
            "collectives": self.collectives,
            "spans": [number for span in self.spans for number in (span.start_s, span.length_s)],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One iteration as it was seen.

    Attributes:
        length_s: From the end of one `Checkpointer.step()` to the begin of the next.
        busy: Begin and end of each communication operation, in seconds from the iteration's start, by begin.
    """

    length_s: float
    busy: tuple[tuple[float, float], ...]


def typical(iterations: Sequence[Iteration]) -> tuple[IdleProfile | None, str]:
    """Return the typical iteration, None when there is none, and the reason.

    The first `WARM_UP` iterations are left out, and those with another number of operations than most have. Of the
    others the k-th operations are taken together: their median begin and their median end are when the network is busy.
    """
    seen = iterations[WARM_UP:]
    if not seen:
        return None, f"only {len(iterations)} iterations were seen, more than {WARM_UP} are needed"
    count, alike = Counter(len(iteration.busy) for iteration in seen).most_common(1)[0]
    if alike < _ALIKE * len(seen):
        return None, f"iterations differ: at most {alike} of {len(seen)} have the same number of collectives, {count}"
    usual = [iteration for iteration in seen if len(iteration.busy) == count]
    length_s = statistics.median(iteration.length_s for iteration in usual)
    deviation = statistics.median(abs(iteration.length_s - length_s) for iteration in usual)
    if deviation > _STEADY * length_s:
        return None, f"iterations take {length_s:.3f} s, but half of them deviate by more than {deviation:.3f} s"
    busy = [
        (
            statistics.median(iteration.busy[index][0] for iteration in usual),
            statistics.median(iteration.busy[index][1] for iteration in usual),
        )
        for index in range(count)
    ]
    profile = IdleProfile(iteration_s=length_s, spans=_gaps(busy, length_s), collectives=count)
    return profile, (
        f"{alike} of {len(seen)} iterations have {count} collectives and take {length_s:.3f} s; "
        f"the network is idle for {profile.idle_s:.3f} s of it, in {len(profile.spans)} spans"
    )


def common(profiles: Sequence[IdleProfile]) -> IdleProfile:
    """Return when the network of a host is idle for every one of its ranks; at least one profile is given."""
    length_s = statistics.median(profile.iteration_s for profile in profiles)
    busy = [gap for profile in profiles for gap in _busy(profile)]
    return IdleProfile(
        iteration_s=length_s,
        spans=_gaps(busy, length_s),
        collectives=max(profile.collectives for profile in profiles),
    )


def _busy(profile: IdleProfile) -> list[tuple[float, float]]:
    edges = [0.0, *(edge for span in profile.spans for edge in (span.start_s, span.end_s)), profile.iteration_s]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]


def _gaps(busy: Sequence[tuple[float, float]], length_s: float) -> tuple[Span, ...]:
    """Return the idle spans between busy times, the shortest ones left out where there are too many."""
    spans: list[Span] = []
    idle_from_s = 0.0
    for begin_s, end_s in [*sorted(busy), (length_s, length_s)]:
        begin_s = min(begin_s, length_s)
        if begin_s - idle_from_s >= _SHORTEST_SPAN_S:
            spans.append(Span(start_s=idle_from_s, length_s=begin_s - idle_from_s))
        idle_from_s = max(idle_from_s, end_s)
    longest = sorted(spans, key=lambda span: span.length_s, reverse=True)[:MAX_SPANS]
    return tuple(sorted(longest, key=lambda span: span.start_s))
