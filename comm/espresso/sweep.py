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
        self._strategy = np.array(strategy, dtype=np.intp)
        self._maps = problem.matrices(problem.kinds, self._strategy)
        self._maps[:, :, maxplus.COMPUTING] += np.array(problem.backward_s)[:, None, None]
        self._states = np.zeros((len(problem) + 1, maxplus.WIDTH))
        self._rest = np.zeros((len(problem) + 1, maxplus.WIDTH))
        self._states_to, self._rest_from = 0, len(problem)

    @property
    def strategy(self) -> Strategy:
        """The strategy as it is now."""
        return tuple(map(int, self._strategy))

    @property
    def makespan_s(self) -> float:
        """Its time without the forward pass."""
        return float(self._state(len(self._problem)).max())

    def times_s(self, index: int, choices: Indices) -> Array:
        """Return the time without the forward pass if a tensor took each of these choices."""
        matrices = self._problem.matrices(self._problem.kinds[index], choices)
        state = maxplus.compute(self._state(index), self._problem.backward_s[index])
        times: Array = ((state + matrices).max(axis=2) + self._rest_of(index + 1)).max(axis=1)
        return times

    def take(self, index: int, choice: int) -> None:
        """Change the choice of one tensor."""
        self._strategy[index] = choice
        self._maps[index] = self._problem.matrices(self._problem.kinds[index], choice)
        self._maps[index][:, maxplus.COMPUTING] += self._problem.backward_s[index]
        self._states_to = min(self._states_to, index)
        self._rest_from = max(self._rest_from, index + 1)

    def last_bubble(self) -> int:
        """Return the last tensor that the links wait for; 0 if they wait for none but the first."""
        self._state(len(self._problem))
        ready = self._problem.ready(self._problem.kinds, self._strategy)
        before = maxplus.compute(self._states[:-1], np.array(self._problem.backward_s)[:, None])
        idle = before[:, maxplus.LINK]
        waits = np.flatnonzero(idle < (before + ready).max(axis=1))
        return int(waits[-1]) if len(waits) else 0

    def improve(self, fronts: Fronts) -> bool:
        """Give each tensor in turn the choice that is best while the others keep theirs; return whether any changed."""
        changed = False
        best_s = self.makespan_s
        for index, kind in enumerate(self._problem.kinds):
            front = fronts[kind]
            if len(front) == 1 and front[0] == self._strategy[index]:
                continue
            times_s = self.times_s(index, front)
            least = int(times_s.argmin())
            if times_s[least] < best_s * (1 - _ROUNDING):
                self.take(index, int(front[least]))
                best_s, changed = float(times_s[least]), True
        return changed

    def _state(self, index: int) -> Array:
        """Return the state before a tensor, once those since the last change are known."""
        added = np.empty((maxplus.WIDTH, maxplus.WIDTH))
        for known in range(self._states_to, index):
            np.add(self._maps[known], self._states[known], out=added)
            np.maximum.reduce(added, axis=1, out=self._states[known + 1])
        self._states_to = max(self._states_to, index)
        state: Array = self._states[index]
        return state

    def _rest_of(self, index: int) -> Array:
        """Return how long the iteration takes from each queue on before a tensor, once that is known behind it."""
        added = np.empty((maxplus.WIDTH, maxplus.WIDTH))
        for known in range(self._rest_from, index, -1):
            np.add(self._maps[known - 1], self._rest[known][:, None], out=added)
            np.maximum.reduce(added, axis=0, out=self._rest[known - 1])
        self._rest_from = min(self._rest_from, index)
        rest: Array = self._rest[index]
        return rest


def improve(problem: Problem, fronts: Fronts, strategy: Strategy) -> Strategy:
    """Return a strategy that is no worse, and better if changing single tensors makes it so."""
    sweep = Sweep(problem, strategy)
    for _ in range(_SWEEPS):
        if not sweep.improve(fronts):
            break
    return sweep.strategy
