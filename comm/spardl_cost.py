"""What sparse all-reduces cost, by the name that users import."""

from .baselines.cost import gtopk_cost, ok_topk_cost, topk_a_cost, topk_dsa_cost
from .spardl.cost import Cost, TeamChoice, choose_teams, log2_rounds, spardl_cost

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
