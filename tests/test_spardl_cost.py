"""The cost equations at points that can be checked by hand, and the teams that they recommend."""

import pytest

from resilient_run.comm.spardl.cost import Cost, choose_teams, spardl_cost


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


def test_the_network_decides_the_number_of_teams() -> None:
    latency = choose_teams(8, 1000, alpha_s=1e-3, beta_s=1e-12)
    assert (latency.teams, latency.gather, latency.cost.rounds) == (8, "recursive", 3)
    bandwidth = choose_teams(8, 100_000, alpha_s=1e-9, beta_s=1e-6)
    assert bandwidth.teams <= 2
    both = choose_teams(8, 10_000, alpha_s=1e-4, beta_s=8e-8)
    assert both.teams == 2, "the same words as one team, in fewer rounds"
    assert "2 of [1, 2, 4, 8] teams: 5 rounds and 35000 words" in both.reason
    assert choose_teams(9, 1000, alpha_s=1.0, beta_s=1e-9).gather == "bruck"
    assert choose_teams(1, 10, alpha_s=1.0, beta_s=1.0).teams == 1


def test_how_teams_gather_may_be_given() -> None:
    """R-SAG has no other numbers than powers of two; B-SAG has all, at its worst."""
    slow_messages = {"alpha_s": 1.0, "beta_s": 1e-9}
    assert (choose_teams(6, 600, **slow_messages).teams, choose_teams(6, 600, **slow_messages).gather) == (6, "bruck")
    recursive = choose_teams(6, 600, **slow_messages, gather="recursive")
    assert (recursive.teams, recursive.gather) == (2, "recursive")
    assert "2 of [1, 2] teams" in recursive.reason
    bruck = choose_teams(8, 600, **slow_messages, gather="bruck")
    assert (bruck.teams, bruck.gather) == (8, "bruck")
    assert bruck.cost == spardl_cost(8, 600, teams=8, gather="bruck")
