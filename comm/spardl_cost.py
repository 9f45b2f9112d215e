"""What SparDL costs, by the name that users import."""

from .spardl.cost import Cost, TeamChoice, choose_teams, log2_rounds, spardl_cost

__all__ = ["Cost", "TeamChoice", "choose_teams", "log2_rounds", "spardl_cost"]
