"""What the exact planner has to decide, and what bounds the rest of an iteration from a state of the queues on.

Most tensors are so small that one choice is best whatever the others take. A *leg* is a tensor with several choices;
what the tensors before it do is one matrix. Queues that no choice uses are left out of the states.
"""

from itertools import pairwise

import numpy as np

from . import maxplus
from .maxplus import Array
from .strategy import Fronts, Problem, Strategy

_GRID = np.linspace(0.0, 0.95, 20)
# Queues that tensors can be moved between.
_WEIGHED = (maxplus.BUSY, maxplus.CPU, maxplus.CPU_LATE)


class Legs:
    """The tensors with several choices.

    Attributes:
        queues: Those that some choice uses; the GPU's two come first.
        kinds: Of each leg.
        matrices: What the choices of each kind do (choices, queues, queues).
        before: What happens between a leg and the one before, backward computation of its tensor included, and after
            the last one (legs + 1, queues, queues).
    """

    def __init__(self, problem: Problem, fronts: Fronts) -> None:
        self._problem, self._fronts = problem, fronts
        self.queues = _used(problem, fronts)
        outs, ins = np.ix_(self.queues, self.queues)
        self.matrices = [problem.matrices(kind, front)[:, outs, ins] for kind, front in enumerate(fronts)]
        self._tensors = [index for index, kind in enumerate(problem.kinds) if len(fronts[kind]) > 1]
        self.kinds = [problem.kinds[index] for index in self._tensors]
        ends = pairwise([-1, *self._tensors, len(problem)])
        self.before = np.stack([self._between(start + 1, stop) for start, stop in ends])

    def strategy(self, choices: list[int]) -> Strategy:
        """Return the strategy in which each leg takes this one of its choices."""
        taken = [int(self._fronts[kind][0]) for kind in self._problem.kinds]
        for index, kind, choice in zip(self._tensors, self.kinds, choices, strict=True):
            taken[index] = int(self._fronts[kind][choice])
        return tuple(taken)

    def _between(self, start: int, stop: int) -> Array:
        made = np.where(np.eye(len(self.queues), dtype=bool), 0.0, maxplus.NEVER)
        for index in range(start, min(stop + 1, len(self._problem))):
            made[maxplus.COMPUTING] += self._problem.backward_s[index]
            if index < stop:
                (only,) = self.matrices[self._problem.kinds[index]]
                made = (only[:, :, None] + made).max(axis=1)
        return made


def _used(problem: Problem, fronts: Fronts) -> list[int]:
    identity = np.where(np.eye(maxplus.WIDTH, dtype=bool), 0.0, maxplus.NEVER)
    used = np.zeros(maxplus.WIDTH, dtype=bool)
    used[maxplus.COMPUTING] = True
    for kind, front in enumerate(fronts):
        differs = (problem.matrices(kind, front) != identity).any(axis=0)
        used |= differs.any(axis=1)
    return [int(queue) for queue in np.flatnonzero(used)]


class Slack:
    """By how much a queue may be free earlier than another one, after each leg, without making any iteration shorter.

    If x is slack[q, p] for the queues q and p, then no future is shorter because q was free before x after p. So states
    that differ in such times only are the same.
    """

    def __init__(self, legs: Legs) -> None:
        slack = _before(np.zeros((len(legs.queues),) * 2), legs.before[-1][None])
        self._after = [slack]
        for kind, before in zip(reversed(legs.kinds), legs.before[-2::-1], strict=True):
            slack = _before(_before(slack, legs.matrices[kind]), before[None])
            self._after.append(slack)
        self._after.reverse()

    def settle(self, leg: int, states: Array) -> Array:
        """Return the largest states that are the same as these after a leg."""
        return maxplus.apply(states, self._after[leg + 1][None])[:, 0]


def _before(slack: Array, matrices: Array) -> Array:
    """Return the slack before a choice of these matrices."""
    reached = maxplus.compose(slack, matrices)
    earlier: Array = (reached[:, :, None, :] - matrices[:, :, :, None]).min(axis=(0, 1))
    np.fill_diagonal(earlier, 0.0)
    return earlier


class Future:
    """How long the iteration takes at least from a state on, for several weightings of the queues' own work."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._works = [place for place, queue in enumerate(legs.queues) if queue in _WEIGHED]
        self._weights = self._weigh()
        self._after = self._bounds(self._weights)
        self.bound_s = float(self._after[0].max())

    def after(self, leg: int, states: Array) -> Array:
        """Return a lower bound of the time of iterations that leave a leg behind in these states."""
        rest, after = 1 - self._weights.sum(axis=1), self._after[leg + 1]
        longest = rest * states[:, :1] + after[:, 0]
        for queue in range(1, states.shape[1]):
            np.maximum(longest, rest * states[:, queue, None] + after[:, queue], out=longest)
        bounds: Array = (longest + states[:, self._works] @ self._weights.T).max(axis=1)
        return bounds

    def _weigh(self) -> Array:
        """Return weightings that bound well: none, and those on the way to the best one, queue by queue."""
        best = np.zeros(len(self._works))
        chosen = [best]
        for work in (*range(len(self._works)), *(range(len(self._works)) if len(self._works) > 1 else ())):
            tried = (1 - _GRID[:, None]) * best + _GRID[:, None] * np.eye(len(self._works))[work]
            bounds = self._bounds(tried)[0].max(axis=1)
            best = tried[bounds.argmax()]
            chosen.append(best)
        return np.unique(chosen, axis=0)

    def _bounds(self, weights: Array) -> list[Array]:
        """Return, for before all legs and after each of them, (weightings, queues)."""
        least = {kind: self._weighted(weights, self._legs.matrices[kind]).min(axis=0) for kind in set(self._legs.kinds)}
        before = self._weighted(weights, self._legs.before)
        bound = before[-1].max(axis=1)
        found = [bound]
        for kind, earlier in zip(reversed(self._legs.kinds), before[-2::-1], strict=True):
            bound = (bound[:, :, None] + least[kind]).max(axis=1)
            bound = (bound[:, :, None] + earlier).max(axis=1)
            found.append(bound)
        return found[::-1]

    def _weighted(self, weights: Array, matrices: Array) -> Array:
        """Return what matrices add to bounds (matrices, weightings, queues, queues)."""
        rest = 1 - weights.sum(axis=1)
        own = np.diagonal(matrices, axis1=1, axis2=2)[:, self._works]
        weighted: Array = rest[:, None, None] * matrices[:, None] + (own @ weights.T)[:, :, None, None]
        return weighted
