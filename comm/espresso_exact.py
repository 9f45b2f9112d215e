"""The exact planner: a search over prefixes of tensors that keeps what can still be best.

A prefix of tensors with chosen options leaves the queues in some state. A state that is nowhere smaller than another
can be dropped (`maxplus`), and so can one from which the iteration cannot become faster than the best strategy known.
The lower bound for that weighs the time for which the GPU is busy against every other way through the timeline: a
convex combination of two times is no more than the larger one, and its least value over all strategies falls apart
into one independent choice for each tensor. That knows what compression costs as well as what it saves.

The search first keeps few states, the most promising ones, which finds a good strategy soon, and then more, until
nothing had to be dropped without proof. On models of hundreds of tensors it stops when it has proven to be close
enough.
"""

from dataclasses import dataclass

import numpy as np

from . import maxplus
from .maxplus import Array
from .strategy import Fronts, Problem, Strategy
from .sweep import improve

CLOSE_ENOUGH = 0.005
_FIRST_WIDTH = 8
_WIDENING = 4
_CHEAP = 50_000
_MOST = 100_000
_ROUNDING = 1e-12
_GRID = np.linspace(0.0, 0.95, 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the search found.

    Attributes:
        strategy: The best strategy.
        makespan_s: Its time without the forward pass.
        bound_s: No strategy takes less; equal to `makespan_s` if that is proven to be the optimum.
    """

    strategy: Strategy
    makespan_s: float
    bound_s: float


def search(problem: Problem, fronts: Fronts, incumbent: Strategy) -> Found:
    """Return the best strategy of the choices in `fronts`.

    It is the optimum if that can be proven by looking at 50 000 states, which it can for a dozen tensors with a dozen
    choices; or else it is within 0.5 % of it, if that can be proven by looking at some 100 000 states.

    Args:
        problem: Tensors and choices.
        fronts: The choices of each kind.
        incumbent: A strategy to begin with; the result is no worse.
    """
    return _Search(problem, fronts).run(incumbent)


class _Search:
    """The passes over all tensors; queues that no choice uses are left out of the states."""

    def __init__(self, problem: Problem, fronts: Fronts) -> None:
        self._problem, self._fronts = problem, fronts
        self._queues = _used(problem, fronts)
        take = np.ix_(self._queues, self._queues)
        self._matrices = [problem.matrices[kind][front][(slice(None), *take)] for kind, front in enumerate(fronts)]
        self._future = _Future(problem, self._matrices, self._queues)

    def run(self, incumbent: Strategy) -> Found:
        best = improve(self._problem, self._fronts, incumbent)
        best_s, bound_s, width = self._problem.iteration_s(best), self._future.bound_s, _FIRST_WIDTH
        for_each_state = sum(len(self._fronts[kind]) for kind in self._problem.kinds)
        while bound_s < best_s * (1 - _ROUNDING):
            states = for_each_state * width
            close = best_s <= bound_s * (1 + CLOSE_ENOUGH)
            if states > _CHEAP and (close or (states > _MOST and width > _FIRST_WIDTH)):
                return Found(strategy=best, makespan_s=best_s, bound_s=bound_s)
            found, dropped_s = self._pass(width, best_s)
            if found is not None:
                found = improve(self._problem, self._fronts, found)
                if (found_s := self._problem.iteration_s(found)) < best_s:
                    best, best_s = found, found_s
            bound_s = max(bound_s, min(dropped_s, best_s))
            width *= _WIDENING
        return Found(strategy=best, makespan_s=best_s, bound_s=best_s)

    def _pass(self, width: int, limit_s: float) -> tuple[Strategy | None, float]:
        """Return a strategy that takes less than `limit_s`, if one was kept, and the least bound of the others."""
        problem, states, trail = self._problem, np.zeros((1, len(self._queues))), []
        dropped_s = np.inf
        for index, (kind, backward_s) in enumerate(zip(problem.kinds, problem.backward_s, strict=True)):
            matrices = self._matrices[kind]
            after = maxplus.apply(maxplus.compute(states, backward_s), matrices).reshape(-1, len(self._queues))
            at_least_s = self._future.after(index, after)
            kept = np.flatnonzero(at_least_s < limit_s * (1 - _ROUNDING))
            kept = kept[np.argsort(at_least_s[kept], kind="stable")]
            if len(kept) > 4 * width:
                dropped_s = min(dropped_s, float(at_least_s[kept[4 * width]]))
                kept = kept[: 4 * width]
            kept = kept[maxplus.pareto(after[kept])]
            if len(kept) > width:
                dropped_s = min(dropped_s, float(at_least_s[kept[width]]))
                kept = kept[:width]
            if not len(kept):
                return None, dropped_s
            trail.append(np.stack([kept // len(matrices), kept % len(matrices)]))
            states = after[kept]
        state, strategy = int(states.max(axis=1).argmin()), []
        for kind, (parents, choices) in zip(reversed(problem.kinds), reversed(trail), strict=True):
            strategy.append(int(self._fronts[kind][choices[state]]))
            state = int(parents[state])
        return tuple(reversed(strategy)), dropped_s


class _Future:
    """How long the iteration takes at least from a state on, for several weightings of the queues' own work."""

    def __init__(self, problem: Problem, matrices: list[Array], queues: list[int]) -> None:
        self._problem, self._matrices = problem, matrices
        self._works = [place for place, queue in enumerate(queues) if _weighed(queue, problem.overlap)]
        self._own = [np.diagonal(of_kind, axis1=1, axis2=2)[:, self._works] for of_kind in matrices]
        self._weights = self._weigh()
        self._after = self._bounds(self._weights)
        self.bound_s = float(self._after[0].max())

    def after(self, index: int, states: Array) -> Array:
        """Return a lower bound of the time of iterations that leave the tensor `index` behind in these states."""
        rest = (1 - self._weights.sum(axis=1))[:, None] * states[:, None, :] + self._after[index + 1]
        bounds: Array = (rest.max(axis=2) + states[:, self._works] @ self._weights.T).max(axis=1)
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
        """Return, for before each tensor and the end, (weightings, queues)."""
        rest = 1 - weights.sum(axis=1)
        least = [
            (rest[:, None, None, None] * matrices + (weights @ own.T)[:, :, None, None]).min(axis=1)
            for matrices, own in zip(self._matrices, self._own, strict=True)
        ]
        # The first of the weighed queues is the GPU with all its work, which the backward pass belongs to.
        shift = np.zeros((len(weights), self._matrices[0].shape[1]))
        shift += weights[:, :1]
        shift[:, [maxplus.GPU, maxplus.BUSY]] += rest[:, None]
        bound = np.zeros_like(shift)
        found = [bound]
        for kind, backward_s in zip(reversed(self._problem.kinds), reversed(self._problem.backward_s), strict=True):
            bound = (bound[:, :, None] + least[kind]).max(axis=1) + backward_s * shift
            found.append(bound)
        return found[::-1]


def _weighed(queue: int, overlap: bool) -> bool:
    """Return whether to weigh a queue: those that tensors can be moved between."""
    return queue in (maxplus.BUSY, maxplus.CPU, maxplus.CPU_LATE) or (
        overlap and queue in (maxplus.INTRA, maxplus.INTER)
    )


def _used(problem: Problem, fronts: Fronts) -> list[int]:
    """Return the queues that some choice uses; the GPU's two always are."""
    identity = np.where(np.eye(maxplus.WIDTH, dtype=bool), 0.0, maxplus.NEVER)
    used = np.zeros(maxplus.WIDTH, dtype=bool)
    used[[maxplus.GPU, maxplus.BUSY]] = True
    for kind, front in enumerate(fronts):
        differs = (problem.matrices[kind][front] != identity).any(axis=0)
        used |= differs.any(axis=1)
    return [int(queue) for queue in np.flatnonzero(used)]
