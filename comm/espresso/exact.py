"""The exact planner: a search over prefixes of tensors that keeps what can still be best.

A prefix of tensors with chosen options leaves the queues in some state. A state that is nowhere smaller than another
can be dropped (`maxplus`), and so can one from which the iteration cannot become faster than the best strategy known.
States are compared after each queue has been moved to the latest time that makes no difference any more: a link that
is free before the next tensor can be ready is as good as one that is free just then.
The lower bound for that weighs the time for which the GPU is busy against every other way through the timeline: a
convex combination of two times is no more than the larger one, and its least value over all strategies falls apart
into one independent choice for each tensor. That knows what compression costs as well as what it saves.

The search first keeps few states, the most promising ones, which finds a good strategy soon, and then more, until
nothing had to be dropped without proof. On models of hundreds of tensors it stops when it has proven to be close
enough.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..cupcake.front import pareto
from . import maxplus
from .legs import Future, Legs, Slack
from .strategy import Fronts, Problem, Strategy
from .sweep import improve

CLOSE_ENOUGH = 0.005
_FIRST_WIDTH = 8
_WIDENING = 4
_CHEAP = 50_000
_MOST = 100_000
_ROUNDING = 1e-12


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


def search(problem: Problem, fronts: Fronts, incumbents: Iterable[Strategy]) -> Found:
    """Return the best strategy of the choices in `fronts`.

    It is the optimum if that can be proven by looking at 50 000 states, which it can for a dozen tensors with a dozen
    choices; or else it is within 0.5 % of it, if that can be proven by looking at some 100 000 states.

    Args:
        problem: Tensors and choices.
        fronts: The choices of each kind.
        incumbents: Strategies to begin with; the result is no worse than any.
    """
    return _LegSearch(problem, fronts).run(incumbents)


class _LegSearch:
    """The passes over all legs."""

    def __init__(self, problem: Problem, fronts: Fronts) -> None:
        self._problem, self._fronts = problem, fronts
        self._legs = Legs(problem, fronts)
        self._future, self._slack = Future(self._legs), Slack(self._legs)

    def run(self, incumbents: Iterable[Strategy]) -> Found:
        improved = (improve(self._problem, self._fronts, incumbent) for incumbent in dict.fromkeys(incumbents))
        best = min(improved, key=self._problem.iteration_s)
        best_s, bound_s, width = self._problem.iteration_s(best), self._future.bound_s, _FIRST_WIDTH
        for_each_state = sum(len(self._legs.matrices[kind]) for kind in self._legs.kinds)
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
        legs, trail, dropped_s = self._legs, [], np.inf
        states = np.zeros((1, len(legs.queues)))
        for leg, kind in enumerate(legs.kinds):
            matrices = legs.matrices[kind]
            ready = maxplus.apply(states, legs.before[leg][None])[:, 0]
            after = maxplus.apply(ready, matrices).reshape(-1, len(legs.queues))
            at_least_s = self._future.after(leg, after)
            kept = np.flatnonzero(at_least_s < limit_s * (1 - _ROUNDING))
            kept = kept[np.argsort(at_least_s[kept], kind="stable")]
            if len(kept) > 4 * width:
                dropped_s = min(dropped_s, float(at_least_s[kept[4 * width]]))
                kept = kept[: 4 * width]
            if not len(kept):
                return None, dropped_s
            settled = self._slack.settle(leg, after[kept])
            front = pareto(settled)
            if len(front) > width:
                dropped_s = min(dropped_s, float(at_least_s[kept[front[width]]]))
                front = front[:width]
            kept, states = kept[front], settled[front]
            trail.append(np.stack([kept // len(matrices), kept % len(matrices)]))
        state = int(maxplus.apply(states, legs.before[-1][None]).max(axis=(1, 2)).argmin())
        choices = []
        for parents, chosen in reversed(trail):
            choices.append(int(chosen[state]))
            state = int(parents[state])
        return legs.strategy(choices[::-1]), dropped_s
