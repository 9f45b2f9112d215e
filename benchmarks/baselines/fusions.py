"""The fusion strategies that Cupcake is compared with (Section 5.4): none, a threshold, buckets, equal parts."""

from collections.abc import Iterable

from resilient_run.comm.cupcake.fusion import FusionProblem, Strategy, bucketed, groups_of

BUCKETS_BYTES = tuple(mib << 20 for mib in (2, 4, 8, 16, 32, 64))
EVEN_GROUPS = range(2, 33)


def one_group(problem: FusionProblem, *, compressed: bool = True) -> Strategy:
    """Return the strategy that fuses everything."""
    return groups_of((len(problem),), compressed=compressed)


def layer_wise(problem: FusionProblem, *, compressed: bool = True) -> Strategy:
    """Return the strategy that fuses nothing, as GRACE does."""
    return groups_of(range(1, len(problem) + 1), compressed=compressed)


def hipress(problem: FusionProblem) -> Strategy:
    """Return the strategy that fuses nothing and compresses each tensor for which that takes less time by itself.

    HiPress' threshold on the size: with affine costs these are the tensors above it.

    Raises:
        FileError: Nobody knows what communication without compression costs.
    """
    return tuple(
        min((group._replace(compressed=False), group), key=lambda g: sum(problem.costs_s(g)))
        for group in layer_wise(problem)
    )


def evenly_split(problem: FusionProblem, groups: int, *, compressed: bool = True) -> Strategy:
    """Return about `groups` groups with the same number of tensors."""
    count = len(problem)
    ends = sorted({max(1, round(count * (group + 1) / groups)) for group in range(groups)})
    return groups_of(ends, compressed=compressed)


def best_of(problem: FusionProblem, strategies: Iterable[Strategy]) -> Strategy:
    """Return the strategy with the least iteration time."""
    return min(strategies, key=problem.finish_s)


def best_bucketed(problem: FusionProblem, *, compressed: bool = True) -> Strategy:
    """Return the best of the bucket sizes 2 … 64 MiB."""
    return best_of(problem, (bucketed(problem.size_bytes, size, compressed=compressed) for size in BUCKETS_BYTES))


def best_evenly_split(problem: FusionProblem, *, compressed: bool = True) -> Strategy:
    """Return the best of 2 … 32 equal parts."""
    return best_of(problem, (evenly_split(problem, groups, compressed=compressed) for groups in EVEN_GROUPS))
