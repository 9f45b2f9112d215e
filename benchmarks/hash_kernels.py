"""Zen's hierarchical hash as kernels for a CPU and for CUDA, to be timed beside the partition that Zen uses."""

from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from resilient_run.comm.ops.compaction import mark, marked
from resilient_run.comm.ops.kernels import CudaKernel, cpu_kernel, host
from resilient_run.comm.ops.op import Op
from resilient_run.comm.ops.spread import Spread, murmur_cpu, murmur_cuda, owner_cuda
from resilient_run.comm.zen.hash import Hashed, HashMemory, check_memory, checked, hierarchical_hash, seeds_of
from resilient_run.comm.zen.histogram import Parts


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
    """Do what `hierarchical_hash` does, compiled for one thread."""
    elements = checked(dense, indices, spread)
    while True:
        slots = np.zeros(check_memory(spread, memory), np.int32)
        spilled = np.zeros(spread.parts, np.int64)
        seeds = np.array(seeds_of(spread, memory), np.int64)
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
    elements = checked(dense, indices, spread)
    indices = indices.contiguous()
    seeds = torch.tensor(seeds_of(spread, memory), device=indices.device)
    while True:
        slots = torch.zeros(check_memory(spread, memory), dtype=torch.int32, device=indices.device)
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


def _unchanged(
    dense: Tensor, indices: Tensor, spread: Spread, memory: HashMemory
) -> tuple[Tensor, Tensor, Spread, HashMemory]:
    return dense, indices, spread, memory  # each checks them itself


hash_op = Op(name="hierarchical_hash", check=_unchanged, reference=hierarchical_hash, cpu=hash_cpu, cuda=_hash_cuda)
