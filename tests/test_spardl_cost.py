"""The cost equations of SparDL at points that can be checked by hand."""

import pytest
from baselines.cost import Cost, spardl_cost


@pytest.mark.parametrize(
    ("ranks", "teams", "rounds", "words"),
    [(1, 1, 0, 0), (6, 1, 6, 2000), (6, 2, 5, 2000), (8, 2, 5, 2100), (8, 4, 4, 2400), (8, 8, 3, 3600)],
)
def test_recursive_gather(ranks: int, teams: int, rounds: int, words: float) -> None:
    kept = 600
    expected = Cost(rounds=rounds, least_words=words, most_words=words)
    assert spardl_cost(ranks, kept, teams=teams) == expected


def test_bruck_gather_has_the_reduce_scatter_in_its_lower_bound_too() -> None:
    cost = spardl_cost(6, 600, teams=3, gather="bruck")
    assert cost == Cost(rounds=4, least_words=1200 * (6 + 18 - 6) / 18, most_words=1200 * (9 + 12 - 9) / 6)
