"""How likely memory survives when k hosts are lost at once (Gemini, Section 6.4): counted and bounded."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from math import comb, perm

from .placement import Placement


def survival(plan: Placement, failures: int) -> Fraction:
    """Return the probability that every checkpoint is left when `failures` hosts are lost, all sets equally likely.

    Exact for any N, m and k, by counting the losses that are harmless and not by trying each.

    Raises:
        ValueError: More hosts are lost than there are, or less than none.
    """
    hosts = _check(plan, failures)
    groups = sum(len(group) == plan.replicas for group in plan.groups)
    ring = hosts - groups * plan.replicas
    harmless = sum(
        _harmless_in_ring(ring, plan.replicas, lost) * _harmless_in_groups(groups, plan.replicas, failures - lost)
        for lost in range(min(ring, failures) + 1)
        if failures - lost <= groups * plan.replicas
    )
    return Fraction(harmless, comb(hosts, failures))


def union_bound(plan: Placement, failures: int) -> Fraction:
    """Return Corollary 6.1's lower bound of `survival`, for any placement: sets that lose two checkpoints count twice.

    It is exact while fewer than 2m hosts of a group placement are lost.

    Raises:
        ValueError: More hosts are lost than there are, or less than none.
    """
    hosts = _check(plan, failures)
    if failures < plan.replicas:
        return Fraction(1)
    fatal = len({frozenset(holders) for holders in plan.holders()})
    chance = Fraction(fatal * comb(hosts - plan.replicas, failures - plan.replicas), comb(hosts, failures))
    return max(Fraction(0), 1 - chance)


def fatal_domains(plan: Placement, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of the domains that take the last copy of a checkpoint with them when they are lost whole."""
    inside = ({labels[host] for host in holders} for holders in plan.holders())
    return tuple(sorted({label for domains in inside if len(domains) == 1 for label in domains}))


def domain_loss(plan: Placement, labels: Sequence[str], missing: int) -> float:
    """Return the chance that a random domain takes a last copy with it while `missing` random other hosts are lost.

    It is an upper bound: as in Corollary 6.1, a loss that takes two checkpoints counts twice. Give each host a label of
    its own for the loss of one host.
    """
    sizes = Counter(labels)
    chances: defaultdict[str, float] = defaultdict(float)
    for holders in {frozenset(holders) for holders in plan.holders()}:
        for label, inside in Counter(labels[host] for host in holders).items():
            outside, others = len(holders) - inside, len(labels) - sizes[label]
            chances[label] += perm(min(missing, others), outside) / perm(others, outside)
    return sum(min(1.0, chance) for chance in chances.values()) / len(sizes)


def _check(plan: Placement, failures: int) -> int:
    """Return the number of hosts."""
    hosts = sum(map(len, plan.groups))
    if not 0 <= failures <= hosts:
        raise ValueError(f"{failures} of {hosts} hosts cannot be lost: give a number from 0 to {hosts}")
    return hosts


def _harmless_in_groups(groups: int, replicas: int, lost: int) -> int:
    """Return how many sets of `lost` hosts take no group of `replicas` hosts whole, by inclusion and exclusion."""
    return sum(
        _sign(whole) * comb(groups, whole) * comb(replicas * (groups - whole), lost - replicas * whole)
        for whole in range(lost // replicas + 1)
    )


def _harmless_in_ring(size: int, replicas: int, lost: int) -> int:
    """Return how many sets of `lost` hosts of a ring have no `replicas` hosts in a row.

    The hosts left are borders of `size - lost` runs of lost hosts, each shorter than m. Such runs are counted by
    inclusion and exclusion for each host of the ring as the first border; each border is the first once.
    """
    borders = size - lost
    if not borders:
        return int(not size)
    runs = sum(
        _sign(i) * comb(borders, i) * comb(size - 1 - replicas * i, borders - 1)
        for i in range(min(borders, (size - 1) // replicas) + 1)
    )
    return size * runs // borders


def _sign(count: int) -> int:
    return -1 if count & 1 else 1
