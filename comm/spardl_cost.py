"""What sparse all-reduces cost, by the name that users import."""

from .baselines.spardl_cost import (
    Cost,
    TeamChoice,
    choose_teams,
    gtopk_cost,
    log2_rounds,
    ok_topk_cost,
    spardl_cost,
    topk_a_cost,
    topk_dsa_cost,
)

__all__ = [
    "Cost",
    "TeamChoice",
    "choose_teams",
    "gtopk_cost",
    "log2_rounds",
    "ok_topk_cost",
    "spardl_cost",
    "topk_a_cost",
    "topk_dsa_cost",
]
