"""Zen's hierarchical hash: partition by parallel hashing, with serial memory for what collides (Algorithm 3.2).

Where the printed algorithm slips, this is what its text means: a slot holds index + 1, since 0 is an index; r1 and r2
are sizes per partition; of several that want a slot, the last one written has it; nothing is written behind a
partition's serial memory. The partition (`partition`) gives the same sets exactly and faster, and is what Zen uses
unless it is told to hash.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..errors import OpError
from ..ops.kernels import MAX_NUMEL, check_list, check_range, flat
from ..ops.spread import Spread, murmur
from .histogram import Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class HashMemory:
    """Sizes of a hierarchical hash, in indices per partition.

    Attributes:
        slots: r1, for parallel hashing.
        serial: r2, for indices that found no free slot.
        rounds: k, how many slots an index tries.
    """

    slots: int
    serial: int
    rounds: int = 3

    def __post_init__(self) -> None:
        if min(self.slots, self.serial, self.rounds) < 1:
            raise OpError(f"hash memory is {self.slots} + {self.serial} with {self.rounds} rounds; each is at least 1")

    @classmethod
    def of(cls, spread: Spread, density: float) -> Self:
        """Return the paper's sizes for gradients of `density`: r1 = 2|G|d/n, r2 = r1/10."""
        slots = max(1, ceil(2 * spread.numel * density / spread.parts))
        return cls(slots=slots, serial=max(1, slots // 10))

    def doubled(self) -> Self:
        """Return twice as much memory."""
        return replace(self, slots=2 * self.slots, serial=2 * self.serial)


class Hashed(NamedTuple):
    """What a hierarchical hash found.

    Attributes:
        parts: The entries of each partition, in any order.
        spilled: Indices in serial memory.
        memory: What sufficed: `memory` of the call, or, where that overflowed, doubled until nothing was left out.
    """

    parts: Parts
    spilled: int
    memory: HashMemory


def hierarchical_hash(dense: Tensor, indices: Tensor, spread: Spread, memory: HashMemory) -> Hashed:
    """Return the elements of `dense` at `indices` by the part that owns them, found by hashing.

    Each part has the same set of entries as with `partition`; their order, and how many spilled, are of no meaning.

    Args:
        dense: G, of any shape.
        indices: I, into the row-major order of `dense`, int32, none twice.
        spread: h0, and the seed of h1 to hk.
        memory: To begin with.

    Raises:
        OpError: An index does not fit, or memory for all indices would have more than 2^31-1 slots.
    """
    elements = checked(dense, indices, spread)
    owners = spread.owners(indices)
    while True:
        slots, spilled, overflowed = _fill_reference(indices.long(), owners, spread, memory)
        if not overflowed:
            break
        memory = memory.doubled()
    filled = slots.nonzero()
    found = slots[filled[:, 0], filled[:, 1]] - 1
    counts: list[int] = torch.bincount(filled[:, 0], minlength=spread.parts).tolist()
    return Hashed(Parts(spread.positions(found), elements[found], counts), spilled, memory)


def checked(dense: Tensor, indices: Tensor, spread: Spread) -> Tensor:
    """Return the elements of `dense`, of which these are indices.

    Raises:
        OpError: They are not.
    """
    elements = flat("hierarchical_hash", dense)
    check_list("hierarchical_hash", indices)
    if elements.numel() != spread.numel:
        raise OpError(f"hierarchical_hash: {elements.numel()} elements, but the spread is of {spread.numel}; make one")
    check_range("hierarchical_hash", indices, spread.numel)
    return elements


def check_memory(spread: Spread, memory: HashMemory) -> int:
    """Return how many slots the memory has.

    Raises:
        OpError: More than int32 numbers.
    """
    slots = spread.parts * (memory.slots + memory.serial)
    if slots > MAX_NUMEL:
        raise OpError(f"hierarchical_hash: {slots} slots are more than {MAX_NUMEL}; use `partition`, which needs none")
    return slots


def seeds_of(spread: Spread, memory: HashMemory) -> list[int]:
    """Return the seeds of h1 to hk."""
    hashes: list[int] = murmur(torch.arange(1, memory.rounds + 1), spread.seed).tolist()
    return hashes


def _fill_reference(indices: Tensor, owners: Tensor, spread: Spread, memory: HashMemory) -> tuple[Tensor, int, int]:
    check_memory(spread, memory)
    width = memory.slots + memory.serial
    slots = torch.zeros(spread.parts * width, dtype=torch.int64, device=indices.device)
    left = torch.arange(indices.numel(), device=indices.device)
    for seed in seeds_of(spread, memory):
        wanted = owners[left] * width + ((murmur(indices[left], seed) * memory.slots) >> 32)
        free = slots[wanted] == 0
        # Of those that want the same free slot, any one gets it; what is written last decides.
        slots[wanted[free]] = indices[left[free]] + 1
        left = left[slots[wanted] != indices[left] + 1]
    spilling = owners[left].argsort(stable=True)
    left = left[spilling]
    counts = torch.bincount(owners[left], minlength=spread.parts)
    rank = torch.arange(left.numel(), device=left.device) - (counts.cumsum(0) - counts)[owners[left]]
    fits = rank < memory.serial
    slots[(owners[left] * width + memory.slots + rank)[fits]] = indices[left[fits]] + 1
    return slots.view(spread.parts, width), left.numel(), int((~fits).sum())
