"""The alpha-beta cost of SparDL (equations 3, 5 and 7) and of what it is compared with (SparDL, Table 1)."""

from dataclasses import dataclass

from resilient_run.comm.spardl.teams import Gather


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


def topk_a_cost(ranks: int, kept: int) -> Cost:
    """All-gather of every rank's k elements."""
    words = 2 * kept * (ranks - 1)
    return Cost(rounds=log2_rounds(ranks), least_words=words, most_words=words)


def topk_dsa_cost(ranks: int, kept: int, numel: int) -> Cost:
    """Direct sends to the owner of each block, then an all-gather of sparse or dense sums.

    Rounds are those of `TopkDSA`: P - 1 sends, then Bruck's all-gather. The paper's table has P + 2·log P. `Traffic`
    counts the sends as one exchange, as they need not wait for each other.
    """
    share = (ranks - 1) / ranks
    return Cost(
        rounds=ranks - 1 + log2_rounds(ranks), least_words=4 * kept * share, most_words=(2 * kept + numel) * share
    )


def gtopk_cost(ranks: int, kept: int) -> Cost:
    """A reduction tree and a broadcast tree over a power of two of ranks."""
    words = 4 * kept * log2_rounds(ranks)
    return Cost(rounds=2 * log2_rounds(ranks), least_words=words, most_words=words)


def ok_topk_cost(ranks: int, kept: int) -> Cost:
    """A balanced split, then a balanced all-gather.

    Rounds are the paper's. `OkTopk` makes P - 1 sends (one exchange for `Traffic`) and gathers twice by Bruck; as many
    sends again where sums are uneven, and a third gather where it evaluates its threshold.
    """
    words = 2 * kept * (ranks - 1) / ranks
    return Cost(rounds=2 * (ranks + log2_rounds(ranks)), least_words=words, most_words=3 * words)
