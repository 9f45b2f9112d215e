"""Zen's choice is by the bytes of the formats that are sent."""

import pytest

from resilient_run.comm.zen.formats import ALL, Format, cheapest, payload_bytes
from resilient_run.comm.zen.plan import Rows, decide, imbalance

NUMEL = 1_000_000


def uniform(density: float, *, ranks: int, width: int = 1) -> Rows:
    """Return what is counted when every rank's places are drawn anew."""
    length = NUMEL // width

    def count(parts: int) -> int:
        return round(length * (1 - (1 - density) ** parts))

    rounds = range(ranks.bit_length() - 1)
    return Rows(width=width, own=count(1), sent=tuple(count(1 << index) for index in rounds), summed=count(ranks))


def test_the_bitmap_counts() -> None:
    """By the thesis' equations (1) and (2), without the bitmap, recursive doubling would be taken here."""
    plan = decide([uniform(0.02, ranks=8)], ranks=8, numel=NUMEL, item_bytes=4)
    assert (plan.route, plan.width) == ("parallel", 1)
    assert plan.received_bytes == pytest.approx(0.193 * 4 * NUMEL, rel=0.03)
    assert "hierarchical" in plan.reason
    assert "dense" in plan.reason


@pytest.mark.parametrize(
    ("density", "format"),
    [(0.03, Format.COO), (0.033, Format.BITMAP), (0.95, Format.BITMAP), (0.967, Format.BITMAP), (0.97, Format.DENSE)],
)
def test_the_smallest_format_by_density(density: float, format: Format) -> None:
    """Figure 3.17 of the thesis: the bitmap still saves bytes at 95 %, COO none from 50 % on."""
    count = round(density * NUMEL)
    assert cheapest(ALL, count=count, length=NUMEL, row_bytes=4) is format
    coo = payload_bytes(Format.COO, count=count, length=NUMEL, row_bytes=4)
    assert (coo < 4 * NUMEL) == (density < 0.5)


def test_without_overlap_partners_swap() -> None:
    apart = Rows(width=1, own=1000, sent=(1000, 2000), summed=4000)
    assert decide([apart], ranks=4, numel=NUMEL, item_bytes=4).route == "hierarchical"
    same = Rows(width=1, own=1000, sent=(1000, 1000), summed=1000)
    assert decide([same], ranks=4, numel=NUMEL, item_bytes=4).route == "parallel"


def test_all_gather_is_taken_where_it_is_cheaper() -> None:
    """With three ranks whose gradients do not overlap, since one of them would take part in the fold only."""
    apart = Rows(width=1, own=1000, sent=(2000,), summed=3000)
    plan = decide([apart], ranks=3, numel=NUMEL, item_bytes=4)
    assert (plan.route, plan.received_bytes) == ("gather", 2 * 8 * 1000)
    assert plan.reason.startswith("0.016 MB per rank in rows of 1, against ")


def test_what_is_nearly_dense_is_all_reduced() -> None:
    full = Rows(width=1, own=NUMEL, sent=(), summed=NUMEL)
    assert decide([full], ranks=4, numel=NUMEL, item_bytes=4).route == "dense"
    most = Rows(width=1, own=900_000, sent=(), summed=950_000)
    assert decide([most], ranks=4, numel=NUMEL, item_bytes=4).route == "dense", "a twentieth is not worth it"


def test_rows_are_taken_where_rows_are_zero_and_there_are_enough() -> None:
    elements, rows = uniform(0.02, ranks=16), uniform(0.02, ranks=16, width=16)
    assert decide([elements, rows], ranks=16, numel=NUMEL, item_bytes=4).width == 16
    # About the same non-zeros, but in 12 great rows: one server would get several of them.
    few = Rows(width=2000, own=12, sent=(), summed=110)
    assert decide([elements, few], ranks=16, numel=NUMEL, item_bytes=4).width == 1


def test_imbalance_falls_with_rows_and_is_that_of_the_papers_table() -> None:
    assert imbalance(0, 8) == imbalance(100, 1) == 1.0
    assert imbalance(2172, 8) == pytest.approx(1.13, abs=0.02)
    assert imbalance(2172, 128) == pytest.approx(1.89, abs=0.2)
