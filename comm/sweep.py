"""What changing one tensor's choice does to the iteration time, for all its choices at once."""

import numpy as np

from . import maxplus
from .maxplus import Array
from .strategy import Fronts, Indices, Problem, Strategy

_ROUNDING = 1e-12
_SWEEPS = 4


class Sweep:
    """A strategy with the state of the queues before each tensor, and how long the rest takes from each queue on.

    Args:
        problem: Tensors and choices.
        strategy: Where to begin.
    """

    def __init__(self, problem: Problem, strategy: Strategy) -> None:
        self._problem = problem
        self._strategy = list(strategy)
        self._states = np.zeros((len(problem) + 1, maxplus.WIDTH))
        self._rest = np.zeros((len(problem) + 1, maxplus.WIDTH))
        for index in range(len(problem)):
            self._forward(index)
        self._back(len(problem) - 1)

    @property
    def strategy(self) -> Strategy:
        """The strategy as it is now."""
        return tuple(self._strategy)

    @property
    def makespan_s(self) -> float:
        """Its time without the forward pass."""
        return float(self._states[-1].max())

    def times_s(self, index: int, choices: Indices) -> Array:
        """Return the time without the forward pass if a tensor took each of these choices."""
        matrices = self._problem.matrices[self._problem.kinds[index]][choices]
        after = (self._computed(index) + matrices).max(axis=2)
        times: Array = (after + self._rest[index + 1]).max(axis=1)
        return times

    def take(self, index: int, choice: int) -> None:
        """Change the choice of one tensor."""
        self._strategy[index] = choice
        for later in range(index, len(self._problem)):
            self._forward(later)
        self._back(index)

    def last_bubble(self) -> int:
        """Return the last tensor that the links wait for; 0 if they wait for none but the first."""
        ready = self._problem.ready[self._problem.kinds, self._strategy]
        backward = np.array(self._problem.backward_s)
        before = self._states[:-1].copy()
        before[:, [maxplus.GPU, maxplus.BUSY]] += backward[:, None]
        idle = before[:, [maxplus.INTRA, maxplus.INTER]].max(axis=1)
        waits = np.flatnonzero(idle < (before + ready).max(axis=1))
        return int(waits[-1]) if len(waits) else 0

    def improve(self, fronts: Fronts) -> bool:
        """Give each tensor in turn the choice that is best while the others keep theirs; return whether any changed."""
        changed = False
        best_s = self.makespan_s
        for index, kind in enumerate(self._problem.kinds):
            times_s = self.times_s(index, fronts[kind])
            least = int(times_s.argmin())
            if times_s[least] < best_s * (1 - _ROUNDING):
                self._strategy[index], best_s, changed = int(fronts[kind][least]), float(times_s[least]), True
            self._forward(index)
        if changed:
            self._back(len(self._problem) - 1)
        return changed

    def _computed(self, index: int) -> Array:
        return maxplus.compute(self._states[index], self._problem.backward_s[index])

    def _matrix(self, index: int) -> Array:
        chosen: Array = self._problem.matrices[self._problem.kinds[index], self._strategy[index]]
        return chosen

    def _forward(self, index: int) -> None:
        self._states[index + 1] = (self._computed(index) + self._matrix(index)).max(axis=1)

    def _back(self, start: int) -> None:
        for index in range(start, -1, -1):
            self._rest[index] = (self._rest[index + 1][:, None] + self._matrix(index)).max(axis=0)
            self._rest[index, [maxplus.GPU, maxplus.BUSY]] += self._problem.backward_s[index]


def improve(problem: Problem, fronts: Fronts, strategy: Strategy) -> Strategy:
    """Return a strategy that is no worse, and better if changing single tensors makes it so."""
    sweep = Sweep(problem, strategy)
    for _ in range(_SWEEPS):
        if not sweep.improve(fronts):
            break
    return sweep.strategy
