"""The alpha-beta cost of the sparse all-reduces that SparDL is compared with (SparDL, Table 1)."""

from resilient_run.comm.spardl.cost import Cost, log2_rounds


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
