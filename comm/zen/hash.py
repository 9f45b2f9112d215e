"""Zen's hierarchical hash: partition by parallel hashing, with serial memory for what collides (Algorithm 3.2).

Where the printed algorithm slips, this is what its text means: a slot holds index + 1, since 0 is an index; r1 and r2
are sizes per partition; of several that want a slot, the last one written has it; nothing is written behind a
partition's serial memory. The partition (`partition`) gives the same sets exactly and faster, and is what Zen uses
unless it is told to hash.
"""

import torch
from torch import Tensor

from ..ops.spread import Spread, murmur

ROUNDS = 3
"""k: how many slots an index tries."""


def hierarchical_hash(indices: Tensor, spread: Spread, slots: int) -> list[Tensor]:
    """Return for each part the indices that it owns, int32, ascending.

    Args:
        indices: int32, none twice.
        spread: h0, and the seed of h1 to hk.
        slots: r1, for parallel hashing in each part, at least 1; the paper's is 2|G|d/n. r2 is a tenth. Where that does
            not suffice, memory is doubled until nothing is left out.
    """
    while True:
        serial = max(1, slots // 10)
        memory, spilled = fill(indices, spread, slots=slots, serial=serial)
        if int(spilled.max()) <= serial:
            return [(part[part > 0] - 1).sort().values.int() for part in memory]
        slots *= 2


def fill(indices: Tensor, spread: Spread, *, slots: int, serial: int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Return the memory of each part, index + 1 in each slot that is taken, and how many of each found none free.

    Of these, serial memory has the first ones.
    """
    owners, wide, width = spread.owners(indices), indices.long(), slots + serial
    memory = torch.zeros(spread.parts * width, dtype=torch.int64, device=indices.device)
    left = torch.arange(indices.numel(), device=indices.device)
    for seed in seeds_of(spread, rounds):
        wanted = owners[left] * width + ((murmur(wide[left], seed) * slots) >> 32)
        free = memory[wanted] == 0
        # Of those that want the same free slot, any one gets it; what is written last decides.
        memory[wanted[free]] = wide[left[free]] + 1
        left = left[memory[wanted] != wide[left] + 1]
    left = left[owners[left].argsort(stable=True)]
    spilled = torch.bincount(owners[left], minlength=spread.parts)
    rank = torch.arange(left.numel(), device=left.device) - (spilled.cumsum(0) - spilled)[owners[left]]
    fits = rank < serial
    memory[(owners[left] * width + slots + rank)[fits]] = wide[left[fits]] + 1
    return memory.view(spread.parts, width), spilled


def seeds_of(spread: Spread, rounds: int = ROUNDS) -> list[int]:
    """Return the seeds of h1 to hk."""
    hashes: list[int] = murmur(torch.arange(1, rounds + 1), spread.seed).tolist()
    return hashes
