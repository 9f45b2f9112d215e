"""The alpha-beta cost of SparDL (Table 1, equations 3, 5 and 7), and the number of teams that it says is best."""

from dataclasses import dataclass

from .teams import Gather, default_gather


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the rank that receives most has to wait for.

    Attributes:
        rounds: Messages that follow each other; each takes alpha.
        least_words: Values and indices received, of 4 bytes each, when the ranks' elements overlap best.
        most_words: The same when they overlap worst.
    """

    rounds: int
    least_words: float
    most_words: float

    def most_s(self, *, alpha_s: float, beta_s: float) -> float:
        """Return alpha·rounds + beta·words at worst: `alpha_s` for a message, `beta_s` for a word."""
        return self.rounds * alpha_s + self.most_words * beta_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamChoice:
    """How to run SparDL, and why."""

    teams: int
    gather: Gather
    cost: Cost
    reason: str


def log2_rounds(count: int) -> int:
    """Return ⌈log2 count⌉."""
    return (count - 1).bit_length()


def spardl_cost(ranks: int, kept: int, *, teams: int = 1, gather: Gather = "recursive") -> Cost:
    """SparDL with d teams: equations (3), (5) and (7).

    The lower bound of equation (7) omits the reduce-scatter; this one has it: 2·k·(P + P·d - 2·d)/(P·d).
    """
    rounds = 2 * log2_rounds(ranks // teams) + log2_rounds(teams)
    scatter = 2 * kept * (ranks - teams) / ranks
    if gather == "recursive":
        words = 2 * scatter + 2 * kept * teams / ranks * log2_rounds(teams)
        return Cost(rounds=rounds, least_words=words, most_words=words)
    between = 2 * kept * (teams - 1) / ranks
    return Cost(
        rounds=rounds,
        least_words=scatter + between + scatter / teams,
        most_words=scatter + teams * between + scatter,
    )


def choose_teams(ranks: int, kept: int, *, alpha_s: float, beta_s: float, gather: Gather | None = None) -> TeamChoice:
    """Return the teams whose cost at worst is least, and why; of equal ones the fewest.

    Args:
        ranks: P, one or more.
        kept: k of the gradient.
        alpha_s: Latency of one message, seconds.
        beta_s: Time of one word of 4 bytes on a link, seconds.
        gather: How teams agree, "recursive" only for powers of two of teams; None for `default_gather` of each number.
    """
    costs: dict[tuple[int, Gather], Cost] = {}
    for teams in range(1, ranks + 1):
        if ranks % teams == 0 and (gather != "recursive" or default_gather(teams) == "recursive"):
            how = gather or default_gather(teams)
            costs[teams, how] = spardl_cost(ranks, kept, teams=teams, gather=how)
    seconds = {key: cost.most_s(alpha_s=alpha_s, beta_s=beta_s) for key, cost in costs.items()}
    best = min(seconds, key=lambda key: (seconds[key], key[0]))
    one = min(costs, key=lambda key: key[0])
    cost, single = costs[best], costs[one]
    reason = (
        f"{best[0]} of {sorted(teams for teams, _ in costs)} teams: {cost.rounds} rounds and {cost.most_words:.0f} "
        f"words in {seconds[best]:.3g} s; one team: {single.rounds} and {single.most_words:.0f} in {seconds[one]:.3g} s"
    )
    return TeamChoice(teams=best[0], gather=best[1], cost=cost, reason=reason)
