"""All metrics of one gradient over its ranks, and what they mean for the schemes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from .. import sparsity
from ..zen.partition import Balanced
from ..zen.plan import Rows, ZenPlan, decide
from ..zen.sparse import row_width

_ROWS = (16, 64, 256)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientStats:
    """What `resilient-comm stats` tells of one gradient.

    Attributes:
        elements: Of the whole gradient.
        ranks: How many gave theirs.
        servers: Parts for skew and imbalance.
        density: Mean over ranks.
        row_density: Of rows of the first dimension; the same for vectors.
        overlap: Mean overlap ratio of neighbouring ranks; 1 for a single one.
        densification: γⁿ.
        skewness: Mean over ranks, over `servers` parts.
        push_imbalance: Of Zen; of sparse parameter servers it is `skewness`.
        pull_imbalance: Of Zen.
        dense_bytes: What a rank receives in an all-reduce (fp32).
        plan: What Zen would do.
    """

    elements: int
    ranks: int
    servers: int
    density: float
    row_density: float
    overlap: float
    densification: float
    skewness: float
    push_imbalance: float
    pull_imbalance: float
    dense_bytes: float
    plan: ZenPlan


def gradient_stats(gradients: Sequence[Tensor], *, servers: int | None = None) -> GradientStats:
    """Return the metrics of one step of a gradient, given for each rank.

    Args:
        gradients: At least one, all of one shape.
        servers: Parts for skew and imbalance; by default as many as ranks, but at least 2.
    """
    ranks, first = len(gradients), gradients[0]
    parts = max(2, ranks) if servers is None else servers
    elements = first.numel()
    index_sets = [sparsity.nonzero(gradient) for gradient in gradients]
    cut = Balanced(length=elements, servers=parts)
    together = sparsity.densities(gradients)
    pairs = [sparsity.overlap_ratio(one, other) for one, other in pairwise(gradients)]
    density = sum(indices.numel() for indices in index_sets) / max(1, ranks * elements)
    skew = sum(sparsity.skewness(gradient, parts) for gradient in gradients) / ranks
    per_row = elements // first.shape[0] if first.dim() > 1 and first.shape[0] else 1
    return GradientStats(
        elements=elements,
        ranks=ranks,
        servers=parts,
        density=density,
        row_density=sum(sparsity.densities([gradient], per_row)[0] for gradient in gradients) / ranks,
        overlap=sum(pairs) / len(pairs) if pairs else 1.0,
        densification=together[-1] / density if density else 1.0,
        skewness=skew,
        push_imbalance=sparsity.push_imbalance(index_sets, parts, cut.servers_of),
        pull_imbalance=sparsity.pull_imbalance(index_sets, parts, cut.servers_of),
        dense_bytes=2 * (ranks - 1) / ranks * 4.0 * elements,
        plan=decide(_profile(gradients), ranks=ranks, numel=elements, item_bytes=4),
    )


def _profile(gradients: Sequence[Tensor]) -> list[Rows]:
    """Return what Zen would count; recursive doubling as the first ranks see it."""
    numel, rounds = gradients[0].numel(), len(gradients).bit_length() - 1
    found = []
    for width in sorted({1, *(row_width(gradients[0].shape, rows) for rows in _ROWS)}):
        length = numel // width
        counts = [round(share * length) for share in sparsity.densities(gradients, width)]
        own = max(sparsity.nonzero(gradient, width).numel() for gradient in gradients)
        sent = tuple(counts[(1 << index) - 1] for index in range(rounds))
        found.append(Rows(width=width, own=own, sent=sent, summed=counts[-1]))
    return found
