"""Models, calls and schemes drawn from seeds: sums are DDP's, or nothing of them is lost, and no rank waits for ever.

To try a seed again: ``python tests/drawn_models.py RANKS SEED 1``.
"""

import time

import pytest
from drawn_models import run

pytestmark = pytest.mark.jobs

CASES = {2: 24, 3: 15, 4: 8, 5: 8}
"""Ranks → cases."""


@pytest.mark.parametrize("ranks", CASES)
def test_no_gradient_is_lost(ranks: int) -> None:
    check(ranks, 0, CASES[ranks])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", CASES)
def test_no_gradient_is_lost_in_cases_of_each_night(ranks: int) -> None:
    check(ranks, int(time.time()) // 86400 * 100_000, 25_000, seconds=900)


def check(ranks: int, first: int, count: int, **limit: float) -> None:
    seeds, wrong = run(ranks, first, count, **limit)
    assert seeds
    assert not wrong, "\n".join(wrong)
