"""Which way a gradient takes, decided from the sparsity that was seen, with the bytes of the formats really sent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .formats import ALL, cheapest, payload_bytes

Route = Literal["dense", "parallel", "hierarchical"]

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
        route: The library's all-reduce; push to a server per part and pull; or recursive doubling.
        width: Elements per row.
        received_bytes: What each rank is expected to receive.
        reason: Why, in words.
    """

    route: Route
    width: int
    received_bytes: int
    reason: str


def decide(profile: Sequence[Rows], *, ranks: int, numel: int, item_bytes: int) -> ZenPlan:
    """Return the plan with the fewest bytes received per rank; equal on all ranks for equal profiles.

    All-reduce stays unless a tenth of its bytes is saved: it costs no computation.

    Args:
        profile: One entry for each width that is possible.
        ranks: n.
        numel: Elements of the gradient.
        item_bytes: Of one element.
    """
    dense_bytes = 2 * (ranks - 1) / ranks * numel * item_bytes
    found: list[tuple[float, Route, int]] = []
    for rows in profile:
        length, row_bytes = -(-numel // rows.width), rows.width * item_bytes
        found.append((_parallel_bytes(rows, ranks, length, row_bytes), "parallel", rows.width))
        if rows.sent:
            doubled = sum(_message_bytes(count, length, row_bytes) for count in rows.sent)
            # With n no power of two some ranks take part in the fold: what they receive before and after.
            if ranks & (ranks - 1):
                doubled += _message_bytes(rows.own, length, row_bytes) + _message_bytes(rows.summed, length, row_bytes)
            found.append((doubled, "hierarchical", rows.width))
    found.sort(key=lambda each: each[0])
    found.insert(0 if not found or found[0][0] > _WORTH * dense_bytes else len(found), (dense_bytes, "dense", 1))
    best, route, width = found[0]
    others = ", ".join(
        f"{next(size for size, name, _ in found if name == other) / 1e6:.3f} MB {other}"
        for other in dict.fromkeys(name for _, name, _ in found)
        if other != route
    )
    return ZenPlan(
        route=route,
        width=width,
        received_bytes=round(best),
        reason=f"{best / 1e6:.3f} MB per rank in rows of {width}" + (f", against {others}" if others else ""),
    )


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
