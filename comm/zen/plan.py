"""Which way a gradient takes, decided from the sparsity that was seen, with the bytes of the formats really sent."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

from .formats import ALL, cheapest, payload_bytes

Route = Literal["dense", "parallel", "hierarchical", "gather"]

_WORTH = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """How many rows of one width were not zero, of the rank that had most.

    Attributes:
        width: Elements per row.
        own: In a rank's own gradient.
        sent: In what was sent in each round of recursive doubling; empty when that was not tried.
        summed: In the sum.
    """

    width: int
    own: int
    sent: tuple[int, ...]
    summed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ZenPlan:
    """How a gradient is summed from now on.

    Attributes:
        route: The library's all-reduce; push to a server per part and pull; recursive doubling; or all-gather.
        width: Elements per row.
        received_bytes: What each rank is expected to receive.
        reason: Why, in words.
    """

    route: Route
    width: int
    received_bytes: int
    reason: str


class _Candidate(NamedTuple):
    """One way to sum, and what each rank receives."""

    received_bytes: float
    route: Route
    width: int


def decide(profile: Sequence[Rows], *, ranks: int, numel: int, item_bytes: int) -> ZenPlan:
    """Return the plan with the fewest bytes received per rank; equal on all ranks for equal profiles.

    All-reduce stays unless a tenth of its bytes is saved: it costs no computation.

    Args:
        profile: One entry for each width that is possible.
        ranks: n.
        numel: Elements of the gradient.
        item_bytes: Of one element.
    """
    dense = _Candidate(2 * (ranks - 1) / ranks * numel * item_bytes, "dense", 1)
    sparse = [
        each for rows in profile for each in _candidates(rows, ranks, -(-numel // rows.width), rows.width * item_bytes)
    ]
    sparse.sort(key=itemgetter(0))
    best = sparse[0] if sparse and sparse[0].received_bytes < _WORTH * dense.received_bytes else dense
    others: dict[Route, _Candidate] = {}
    for other in (*sparse, dense):
        if other.route != best.route:
            others.setdefault(other.route, other)
    against = ", ".join(f"{each.received_bytes / 1e6:.3f} MB {route}" for route, each in others.items())
    reason = f"{best.received_bytes / 1e6:.3f} MB per rank in rows of {best.width}"
    return ZenPlan(
        route=best.route,
        width=best.width,
        received_bytes=round(best.received_bytes),
        reason=reason + (f", against {against}" if against else ""),
    )


def _candidates(rows: Rows, ranks: int, length: int, row_bytes: int) -> Iterator[_Candidate]:
    """Yield the ways to sum `length` rows that are not all-reduce."""
    own_bytes = _message_bytes(rows.own, length, row_bytes)
    yield _Candidate(_parallel_bytes(rows, ranks, length, row_bytes), "parallel", rows.width)
    if rows.sent:
        doubled = sum(_message_bytes(count, length, row_bytes) for count in rows.sent)
        # With n no power of two some ranks take part in the fold: what they receive before and after.
        if ranks & (ranks - 1):
            doubled += own_bytes + _message_bytes(rows.summed, length, row_bytes)
        yield _Candidate(doubled, "hierarchical", rows.width)
    yield _Candidate((ranks - 1) * own_bytes, "gather", rows.width)


def imbalance(rows: float, parts: int) -> float:
    """Return about how much more than the mean the fullest of `parts` gets when `rows` are spread by a hash.

    It is the bound of Theorem 3.2 of the thesis with the constant of a Poisson load.
    """
    return 1 + math.sqrt(2 * parts * math.log(parts) / rows) if rows and parts > 1 else 1.0


def _parallel_bytes(rows: Rows, ranks: int, length: int, row_bytes: int) -> float:
    share = -(-length // ranks)
    pushed, pulled = (
        (ranks - 1) * _message_bytes(min(share, count / ranks), share, row_bytes) * _excess(count, length, ranks)
        for count in (rows.own, rows.summed)
    )
    return pushed + pulled


def _excess(count: int, length: int, parts: int) -> float:
    # Where everything is present there is nothing to balance.
    return 1 + (imbalance(count, parts) - 1) * (1 - count / length) if count else 1.0


def _message_bytes(count: float, length: int, row_bytes: int) -> float:
    whole = math.ceil(count)
    form = cheapest(ALL, count=whole, length=length, row_bytes=row_bytes)
    return payload_bytes(form, count=whole, length=length, row_bytes=row_bytes) if whole else 0
