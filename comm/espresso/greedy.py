"""Espresso's own algorithms: greedy compression on GPUs, then offloading to CPUs (thesis, Algorithms 4.1 and 4.2)."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from . import maxplus
from .strategy import Fronts, Problem, Strategy
from .sweep import Sweep

_MOST_COMBINATIONS = 4096
_ROUNDING = 1e-12


def greedy(problem: Problem, fronts: Fronts, start: Strategy, sizes: Sequence[float]) -> Strategy:
    """Return the strategy that Algorithm 4.1 finds.

    Tensors are looked at once, the largest first, and of one size those that become ready last first; each takes the
    option that makes the iteration shortest while the others keep theirs. Tensors communicated before a bubble keep
    what they have, since sending them faster only widens it.

    Args:
        problem: Tensors and choices.
        fronts: The choices to look at for each kind.
        start: The strategy without compression.
        sizes: Of the tensors, in any unit.
    """
    sweep = Sweep(problem, start)
    first = sweep.last_bubble()
    for index in sorted(range(len(problem)), key=lambda index: (-sizes[index], -index)):
        if index < first:
            continue
        front = fronts[problem.kinds[index]]
        times_s = sweep.times_s(index, front)
        least = int(times_s.argmin())
        if times_s[least] < sweep.makespan_s * (1 - _ROUNDING):
            sweep.take(index, int(front[least]))
            first = max(first, sweep.last_bubble())
    return sweep.strategy


def offload(problem: Problem, strategy: Strategy, on_cpu: Mapping[int, int]) -> Strategy:
    """Return the best strategy of those that Algorithm 4.2 looks at.

    Tensors of one size with one option form a group; of each group the tensors that become ready first move to the CPU,
    as many as is best, which all combinations over the groups tell. More than 4096 combinations are searched group by
    group until none gets better.

    Args:
        problem: Tensors and choices.
        strategy: Compresses on GPUs only.
        on_cpu: For each choice of the strategy the same one with CPUs; itself if it does not compress.
    """
    groups = _groups(problem, strategy, on_cpu)
    sizes = [len(group) for group in groups]
    if prod(size + 1 for size in sizes) <= _MOST_COMBINATIONS:
        return best_moved(problem, strategy, on_cpu, groups, product(*(range(size + 1) for size in sizes)))
    counts, best, best_s = [0] * len(groups), strategy, problem.iteration_s(strategy)
    improved = True
    while improved:
        improved = False
        for place, size in enumerate(sizes):
            tried = ((*counts[:place], count, *counts[place + 1 :]) for count in range(size + 1))
            found = best_moved(problem, strategy, on_cpu, groups, tried)
            if (found_s := problem.iteration_s(found)) < best_s * (1 - _ROUNDING):
                best, best_s, improved = found, found_s, True
                counts[place] = sum(best[index] != strategy[index] for index in groups[place])
    return best


def _groups(problem: Problem, strategy: Strategy, on_cpu: Mapping[int, int]) -> list[list[int]]:
    """Return the tensors of one kind and choice that CPUs can compress, in ready order."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, choice in enumerate(strategy):
        if on_cpu[choice] != choice:
            groups.setdefault((problem.kinds[index], choice), []).append(index)
    return list(groups.values())


def best_moved(
    problem: Problem,
    strategy: Strategy,
    on_cpu: Mapping[int, int],
    groups: list[list[int]],
    counts: Iterator[tuple[int, ...]],
) -> Strategy:
    """Return the best of the strategies that move so many tensors of each group to the CPU; the first of equal ones."""
    tried = np.array(list(counts), dtype=np.intp)
    limits = np.zeros((len(problem), len(tried)), dtype=np.intp)
    ranks = np.zeros(len(problem), dtype=np.intp)
    for place, group in enumerate(groups):
        limits[group] = tried[:, place]
        ranks[group] = np.arange(len(group))
    moved = ranks[:, None] < limits
    states = np.zeros((len(tried), maxplus.WIDTH))
    for index, (kind, choice) in enumerate(zip(problem.kinds, strategy, strict=True)):
        both = problem.matrices(kind, np.array([choice, on_cpu[choice]]))
        states = maxplus.compute(states, problem.backward_s[index])
        states = (states[:, None, :] + both[moved[index].astype(np.intp)]).max(axis=2)
    best = moved[:, states.max(axis=1).argmin()]
    return tuple(on_cpu[choice] if moves else choice for choice, moves in zip(strategy, best, strict=True))
