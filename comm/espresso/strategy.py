"""What Espresso's planners search: which of its chains each tensor takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cupcake.front import pareto
from . import maxplus
from .maxplus import Array, Resource

Strategy = tuple[int, ...]
Indices = NDArray[np.intp]
Fronts = list[Indices]
KINDS = ("compress", "communicate", "decompress")
_TICKS_PER_S = 2.0**45


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostedStep:
    """A step of choices.

    Attributes:
        resource: What it occupies.
        seconds: How long for each kind.
        kind: For what, one of `KINDS`.
    """

    resource: Resource
    seconds: Array
    kind: str


Choice = tuple[CostedStep, ...]


class Problem:
    """Tensors in ready order, of a few kinds, and the choices of each kind.

    Seconds of steps are rounded to multiples of 2^-45, so that sums of them are exact and choices that take equally
    long are seen to.

    Args:
        backward_s: Backward computation of each tensor.
        kinds: The kind of each tensor; tensors of a kind (those of one size) have the same choices.
        choices: The steps of each choice. A strategy is the index of a choice for each tensor.
    """

    def __init__(
        self,
        *,
        backward_s: Sequence[float],
        kinds: Sequence[int],
        choices: Sequence[Choice],
    ) -> None:
        self.backward_s, self.kinds, self.choices = tuple(backward_s), tuple(kinds), tuple(choices)
        steps = {id(step): step for choice in self.choices for step in choice}
        places = {key: place for place, key in enumerate(steps)}
        lengths = np.array([len(choice) for choice in self.choices])
        # Chains end with steps of no resource and no time, as many as make them equally long (steps, choices).
        self._places = np.full((max(1, lengths.max()), len(self.choices)), len(steps))
        filled = np.arange(len(self._places)) < lengths[:, None]
        self._places.T[filled] = [places[id(step)] for choice in self.choices for step in choice]
        self._resources = np.array([*(maxplus.RESOURCES.index(step.resource) for step in steps.values()), -1], np.int8)
        kind_count = max((len(step.seconds) for step in steps.values()), default=1 + max(self.kinds, default=0))
        seconds = np.stack([*(step.seconds for step in steps.values()), np.zeros(kind_count)], axis=1)
        self._seconds = np.round(seconds * _TICKS_PER_S) / _TICKS_PER_S
        # Few of thousands of choices are of use: only their matrices are derived.
        self._derived = np.full(len(self.choices), -1)
        self._matrices = np.empty((kind_count, 0, maxplus.WIDTH, maxplus.WIDTH))
        self._ready = np.empty((kind_count, 0, maxplus.WIDTH))

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.kinds)

    def matrices(self, kinds: int | Sequence[int], choices: int | Indices) -> Array:
        """Return what choices do to the state (…, 6, 6)."""
        places = self._derive(choices)
        found: Array = self._matrices[kinds, places]
        return found

    def ready(self, kinds: int | Sequence[int], choices: int | Indices) -> Array:
        """Return when the first communication of choices is ready to run, given the state before (…, 6)."""
        places = self._derive(choices)
        found: Array = self._ready[kinds, places]
        return found

    def _derive(self, choices: int | Indices) -> Indices:
        """Return the places of choices among those whose matrices are derived."""
        if (self._derived[choices] < 0).any():
            missing = np.unique(choices)
            missing = missing[self._derived[missing] < 0]
            chains, taken = self._chains(missing), [seconds[self._places[:, missing]] for seconds in self._seconds]
            self._derived[missing] = np.arange(len(missing)) + self._matrices.shape[1]
            self._matrices = np.concatenate([self._matrices, [chains.matrices(each) for each in taken]], axis=1)
            self._ready = np.concatenate([self._ready, [chains.ready(each) for each in taken]], axis=1)
        found: Indices = self._derived[choices]
        return found

    def _chains(self, choices: Indices) -> maxplus.Chains:
        return maxplus.Chains(self._resources[self._places[:, choices]])

    def alone_s(self, choices: Indices) -> Array:
        """Return how long each choice takes for each kind when nothing else goes on (kinds, choices)."""
        return np.stack([seconds[self._places[:, choices]].sum(axis=0) for seconds in self._seconds])

    def fronts(self, choices: Iterable[int]) -> Fronts:
        """Return, for each kind, those of the choices that can be best whatever the other tensors take."""
        among = np.fromiter(choices, dtype=np.intp)
        chains, places = self._chains(among), self._places[:, among]
        found = [among[pareto(chains.entries(seconds[places]))] for seconds in self._seconds]
        self._derive(np.concatenate(found))
        return found

    def quickest(self, choices: Iterable[int]) -> Strategy:
        """Return the strategy that gives each tensor the choice that is quickest alone; of equal ones the first."""
        among = np.fromiter(choices, dtype=np.intp)
        best = among[self.alone_s(among).argmin(axis=1)]
        return tuple(int(best[kind]) for kind in self.kinds)

    def iteration_s(self, strategy: Strategy) -> float:
        """Return F(S) without the forward pass."""
        state = np.zeros(maxplus.WIDTH)
        for kind, backward_s, choice in zip(self.kinds, self.backward_s, strategy, strict=True):
            state = (maxplus.compute(state, backward_s) + self.matrices(kind, choice)).max(axis=1)
        return float(state.max())
