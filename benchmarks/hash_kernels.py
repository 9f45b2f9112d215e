"""Zen's hierarchical hash as kernels for a CPU and for CUDA, to be timed beside the partition that Zen uses."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from resilient_run.comm.ops.compaction import mark, marked
from resilient_run.comm.ops.kernels import CudaKernel, check_list, check_range, cpu_kernel, flat, host
from resilient_run.comm.ops.op import Op
from resilient_run.comm.ops.spread import Spread, murmur_cpu, murmur_cuda, owner_cuda
from resilient_run.comm.zen.hash import ROUNDS, fill, seeds_of
from resilient_run.comm.zen.histogram import Parts


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
    rounds: int = ROUNDS

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


def _hash_torch(dense: Tensor, indices: Tensor, spread: Spread, memory: HashMemory) -> Hashed:
    """Return the elements at the indices by the part that owns them, as Zen finds them."""
    while True:
        slots, spilled = fill(indices, spread, slots=memory.slots, serial=memory.serial, rounds=memory.rounds)
        if int(spilled.max()) <= memory.serial:
            break
        memory = memory.doubled()
    filled = slots.nonzero()
    found = slots[filled[:, 0], filled[:, 1]] - 1
    counts: list[int] = torch.bincount(filled[:, 0], minlength=spread.parts).tolist()
    return Hashed(Parts(spread.positions(found), dense.reshape(-1)[found], counts), int(spilled.sum()), memory)


@cpu_kernel
def _fill(
    indices: NDArray[np.int32],
    parts: int,
    seed: int,
    seeds: NDArray[np.int64],
    first: int,
    serial: int,
    slots: NDArray[np.int32],
    spilled: NDArray[np.int64],
) -> None:
    for i in range(indices.size):
        index = indices[i]
        stripe = index // parts
        part = index - stripe * parts + ((murmur_cpu(stripe, seed) * parts) >> 32)
        if part >= parts:
            part -= parts
        base = part * (first + serial)
        placed = False
        for j in range(seeds.size):
            slot = base + ((murmur_cpu(index, seeds[j]) * first) >> 32)
            if slots[slot] == 0:
                slots[slot] = index + 1
                placed = True
                break
        if not placed:
            rank = spilled[part]
            spilled[part] = rank + 1
            if rank < serial:
                slots[base + first + rank] = index + 1


@cpu_kernel
def _extract(slots: NDArray[np.int32], width: int, indices: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
    place = 0
    for part in range(counts.size):
        before = place
        for slot in range(part * width, (part + 1) * width):
            indices[place] = slots[slot] - 1
            place += slots[slot] != 0
        counts[part] = place - before


def hash_cpu(dense: Tensor, indices: Tensor, spread: Spread, memory: HashMemory) -> Hashed:
    """Do the same, compiled for one thread."""
    elements = flat("hierarchical_hash", dense)
    while True:
        slots = np.zeros(spread.parts * (memory.slots + memory.serial), np.int32)
        spilled = np.zeros(spread.parts, np.int64)
        seeds = np.array(seeds_of(spread, memory.rounds), np.int64)
        sizes = (spread.parts, spread.seed, seeds, memory.slots, memory.serial)
        _fill(host(indices), *sizes, slots, spilled)
        if spilled.max() <= memory.serial:
            break
        memory = memory.doubled()
    found = torch.empty(indices.numel() + 1, dtype=torch.int32)
    counts = np.zeros(spread.parts, np.int64)
    _extract(slots, memory.slots + memory.serial, host(found), counts)
    found = found[:-1]
    return Hashed(Parts(spread.positions(found), elements[found], counts.tolist()), int(spilled.sum()), memory)


@CudaKernel
def _fill_kernel(
    indices: Any,
    parts: int,
    seed: int,
    seeds: Any,
    first: int,
    serial: int,
    slots: Any,
    spilled: Any,
) -> None:
    i = cuda.grid(1)
    if i >= indices.size:
        return
    index = indices[i]
    part = owner_cuda(index, parts, seed)
    base = part * (first + serial)
    for j in range(seeds.size):
        slot = base + ((murmur_cuda(index, seeds[j]) * first) >> 32)
        if cuda.atomic.cas(slots, slot, 0, index + 1) == 0:
            return
    rank = cuda.atomic.add(spilled, part, 1)
    if rank < serial:
        slots[base + first + rank] = index + 1


def _hash_cuda(dense: Tensor, indices: Tensor, spread: Spread, memory: HashMemory) -> Hashed:
    elements, indices = flat("hierarchical_hash", dense), indices.contiguous()
    seeds = torch.tensor(seeds_of(spread, memory.rounds), device=indices.device)
    while True:
        size = spread.parts * (memory.slots + memory.serial)
        slots = torch.zeros(size, dtype=torch.int32, device=indices.device)
        spilled = torch.zeros(spread.parts, dtype=torch.int32, device=indices.device)
        sizes = (spread.parts, spread.seed, seeds, memory.slots, memory.serial)
        _fill_kernel.launch(indices.numel(), indices, *sizes, slots, spilled)
        if int(spilled.max()) <= memory.serial:
            break
        memory = memory.doubled()
    filled = marked(mark(slots))
    found = slots.index_select(0, filled) - 1
    counts: list[int] = torch.bincount(filled // (memory.slots + memory.serial), minlength=spread.parts).tolist()
    return Hashed(Parts(spread.positions(found), elements.index_select(0, found), counts), int(spilled.sum()), memory)


def _check(
    dense: Tensor, indices: Tensor, spread: Spread, memory: HashMemory
) -> tuple[Tensor, Tensor, Spread, HashMemory]:
    """Return what the implementations take."""
    check_list("hierarchical_hash", indices)
    check_range("hierarchical_hash", indices, spread.numel)
    return dense, indices, spread, memory


hash_op = Op(name="hierarchical_hash", check=_check, reference=_hash_torch, cpu=hash_cpu, cuda=_hash_cuda)
