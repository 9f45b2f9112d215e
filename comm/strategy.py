"""What Espresso's planners search: which of its chains each tensor takes."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from . import maxplus
from .maxplus import Array
from .timeline import Chain, Job, Resource, Timeline, Work, derive

Strategy = tuple[int, ...]
Indices = NDArray[np.intp]
Fronts = list[Indices]
Choice = tuple[tuple[Resource, ...], Array, tuple[str, ...]]


class Problem:
    """Tensors in ready order, of a few kinds, and the choices of each kind.

    Args:
        names: Of the tensors.
        backward_s: Backward computation of each tensor.
        kinds: The kind of each tensor; tensors of a kind (those of one size) have the same choices.
        choices: What each choice occupies, how long for each kind (steps, kinds), and what its steps are called. A
            strategy is the index of a choice for each tensor.
        overlap: The links have a queue each.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        backward_s: Sequence[float],
        kinds: Sequence[int],
        choices: Sequence[Choice],
        overlap: bool = False,
    ) -> None:
        self.names, self.backward_s, self.kinds = tuple(names), tuple(backward_s), tuple(kinds)
        self.choices, self.overlap = tuple(choices), overlap
        self.matrices, self.ready = self._derive()

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)

    def _derive(self) -> tuple[Array, Array]:
        """Return what each choice does to the state of each kind, at once for choices that the same queues serve."""
        alike: dict[tuple[int, ...], list[tuple[list[int], Array]]] = {}
        for chain, indices in self._by_chain().items():
            served = maxplus.queues(chain, overlap=self.overlap)
            # Steps in a row on one queue are one step.
            starts = [place for place, queue in enumerate(served) if place == 0 or queue != served[place - 1]]
            taken = np.stack([self.choices[index][1] for index in indices], axis=1)
            merged = np.add.reduceat(taken, starts) if starts else taken
            alike.setdefault(tuple(served[place] for place in starts), []).append((indices, merged))
        kind_count = self.choices[0][1].shape[1]
        matrices = np.empty((kind_count, len(self.choices), maxplus.WIDTH, maxplus.WIDTH))
        ready = np.empty((kind_count, len(self.choices), maxplus.WIDTH))
        for served, parts in alike.items():
            indices = [index for some, _ in parts for index in some]
            seconds = np.concatenate([merged for _, merged in parts], axis=1)
            made = maxplus.operators(served, seconds.reshape(len(served), len(indices) * kind_count))
            for target, found in ((matrices, made.matrices), (ready, made.ready)):
                target[:, indices] = found.reshape(len(indices), kind_count, *found.shape[1:]).swapaxes(0, 1)
        return matrices, ready

    def _by_chain(self) -> dict[tuple[Resource, ...], list[int]]:
        alike: dict[tuple[Resource, ...], list[int]] = {}
        for index, (chain, _, _) in enumerate(self.choices):
            alike.setdefault(chain, []).append(index)
        return alike

    @cached_property
    def alone_s(self) -> Array:
        """How long each choice takes for each kind when nothing else goes on (kinds, choices)."""
        return np.stack([taken.sum(axis=0) for _, taken, _ in self.choices], axis=1)

    def fronts(self, choices: Iterable[int]) -> Fronts:
        """Return, for each kind, those of the choices that can be best whatever the other tensors take."""
        among = np.fromiter(choices, dtype=np.intp)
        flat = self.matrices[:, among].reshape(len(self.matrices), len(among), -1)
        return [among[maxplus.pareto(matrices)] for matrices in flat]

    def quickest(self, choices: Iterable[int]) -> Strategy:
        """Return the strategy that gives each tensor the choice that is quickest alone; of equal ones the first."""
        among = np.fromiter(choices, dtype=np.intp)
        best = among[self.alone_s[:, among].argmin(axis=1)]
        return tuple(int(best[kind]) for kind in self.kinds)

    def iteration_s(self, strategy: Strategy) -> float:
        """Return F(S) without the forward pass."""
        state = np.zeros(maxplus.WIDTH)
        for kind, backward_s, choice in zip(self.kinds, self.backward_s, strategy, strict=True):
            state = (maxplus.compute(state, backward_s) + self.matrices[kind, choice]).max(axis=1)
        return float(state.max())

    def timeline(self, strategy: Strategy, *, forward_s: float = 0.0) -> Timeline:
        """Return the timeline of a strategy."""
        return derive(self.jobs(strategy), forward_s=forward_s, overlap=self.overlap)

    def jobs(self, strategy: Strategy) -> tuple[Job, ...]:
        """Return the tensors with the chains that a strategy gives them."""
        return tuple(
            Job(name=name, backward_s=backward_s, chain=self.chain(kind, choice))
            for name, backward_s, kind, choice in zip(self.names, self.backward_s, self.kinds, strategy, strict=True)
        )

    def chain(self, kind: int, choice: int) -> Chain:
        """Return the steps of a choice for a kind."""
        resources, taken, labels = self.choices[choice]
        return tuple(
            Work(resource=resource, seconds=float(seconds[kind]), label=label)
            for resource, seconds, label in zip(resources, taken, labels, strict=True)
        )
