"""Which part (server) owns each index of a tensor: equal shares for any pattern of non-zeros, without tables.

This is h0 of Zen's hierarchical hash and the index sets I_i of its hash bitmap (thesis sections 3.3.3 and 3.3.4).
Units (elements, or chunks of them) are taken in stripes of as many consecutive units as there are parts. Each part gets
one unit of each stripe: the stripe, rotated by a hash of its number. So

- each pattern of non-zeros is spread at least as evenly as by a universal hash function: a part's load is a sum over
  stripes, independent of each other, and units of one stripe never meet;
- dense regions are spread exactly;
- an index is computed from part and position, and back, so the sets need no memory, and order is kept within parts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .kernels import MAX_NUMEL, check_numel, cpu_kernel, cuda_function

_MASK = 0xFFFFFFFF


def _murmur(number: Any, seed: int) -> int:
    """Return MurmurHash3 (x86, 32 bits) of the four bytes of `number`; Python integers outside of kernels."""
    h = (int(number) * 0xCC9E2D51) & _MASK
    h = ((h << 15) | (h >> 17)) & _MASK
    h = int(seed) ^ ((h * 0x1B873593) & _MASK)
    h = ((h << 13) | (h >> 19)) & _MASK
    h = ((h * 5 + 0xE6546B64) & _MASK) ^ 4
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


murmur_cpu = cpu_kernel(_murmur)
murmur_cuda = cuda_function(_murmur)


def murmur(numbers: Tensor, seed: int) -> Tensor:
    """Return MurmurHash3 of the four bytes of each number in [0, 2^32), as int64 in [0, 2^32)."""
    h = (numbers.long() * 0xCC9E2D51) & _MASK
    h = ((h << 15) | (h >> 17)) & _MASK
    h = ((h * 0x1B873593) & _MASK) ^ seed
    h = ((h << 13) | (h >> 19)) & _MASK
    h = ((h * 5 + 0xE6546B64) & _MASK) ^ 4
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


@cpu_kernel
def count_owners(
    indices: NDArray[np.int32], parts: int, seed: int, chunk: int, owners: NDArray[np.int32], counts: NDArray[np.int64]
) -> None:
    """Write the part of each index to `owners` and add how many each part has to `counts`."""
    # Division in float64 is exact for 31 bits, as the half keeps quotients off whole numbers; unlike that of integers
    # it is done for several at once. Counting is not, so it has a loop of its own.
    per_chunk, per_part = 1.0 / chunk, 1.0 / parts
    for i in range(indices.size):
        unit = np.int64(indices[i]) if chunk == 1 else np.int64((indices[i] + 0.5) * per_chunk)
        stripe = np.int64((unit + 0.5) * per_part)
        owner = unit - stripe * parts + ((murmur_cpu(stripe, seed) * parts) >> 32)
        owners[i] = owner - (parts if owner >= parts else 0)
    for i in range(owners.size):
        counts[owners[i]] += 1


@cpu_kernel
def write_indices(
    positions: NDArray[np.int32], part: int, parts: int, seed: int, chunk: int, indices: NDArray[np.int32]
) -> None:
    """Write the index at each position of `part` to `indices`, which may be `positions`."""
    per_chunk = 1.0 / chunk
    for i in range(positions.size):
        stripe = np.int64(positions[i]) if chunk == 1 else np.int64((positions[i] + 0.5) * per_chunk)
        turn = part - ((murmur_cpu(stripe, seed) * parts) >> 32)
        turn += parts if turn < 0 else 0
        indices[i] = (stripe * parts + turn) * chunk + (positions[i] - stripe * chunk)


@cpu_kernel
def write_samples(seed: int, numel: int, samples: NDArray[np.int32]) -> None:
    """Write pseudo-random numbers in [0, numel) to `samples`; some may be equal."""
    for i in range(samples.size):
        samples[i] = (murmur_cpu(i, seed) * numel) >> 32


@cuda_function
def owner_cuda(index: Any, parts: int, seed: int, chunk: int) -> Any:
    """Return the part that owns `index`."""
    # Division of 32 bits is several times faster than of 64.
    unit = np.uint32(index) // np.uint32(chunk)
    stripe = np.int64(unit // np.uint32(parts))
    owner = np.int64(unit) - stripe * parts + ((murmur_cuda(stripe, seed) * parts) >> 32)
    return owner - parts if owner >= parts else owner


@cuda_function
def index_cuda(position: Any, part: int, parts: int, seed: int, chunk: int) -> Any:
    """Return the index at `position` of `part`."""
    stripe = np.int64(np.uint32(position) // np.uint32(chunk))
    turn = part - ((murmur_cuda(stripe, seed) * parts) >> 32)
    if turn < 0:
        turn += parts
    return (stripe * parts + turn) * chunk + (np.int64(position) - stripe * chunk)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How the elements of a tensor are shared among parts; the same on all ranks.

    Attributes:
        numel: Elements of the tensor.
        parts: Number of parts (servers).
        seed: In [0, 2^32): which of the functions.
        chunk: Consecutive elements that stay together: 1, or a multiple of a row for embeddings.
    """

    numel: int
    parts: int
    seed: int = 0
    chunk: int = 1

    def __post_init__(self) -> None:
        check_numel("spread", self.numel)
        for name, value, low, high in (
            ("parts", self.parts, 1, MAX_NUMEL),
            ("seed", self.seed, 0, _MASK),
            ("chunk", self.chunk, 1, MAX_NUMEL),
        ):
            if not low <= value <= high:
                raise OpError(f"spread: {name} is {value}; give one between {low} and {high}")

    def size(self, part: int) -> int:
        """Return how many elements `part` owns."""
        units = -(-self.numel // self.chunk)
        stripes, rest = divmod(units, self.parts)
        missing = units * self.chunk - self.numel
        turn = (part - self._rotation(stripes)) % self.parts
        if rest == 0:
            # The last unit, which may be short, is the last of the last whole stripe.
            last = (part - self._rotation(stripes - 1)) % self.parts == self.parts - 1 if stripes else False
            return stripes * self.chunk - (missing if last else 0)
        return (stripes + (turn < rest)) * self.chunk - (missing if turn == rest - 1 else 0)

    def owners(self, indices: Tensor) -> Tensor:
        """Return the part of each index, int64: the specification of the kernels."""
        stripes = (indices.long() // self.chunk) // self.parts
        turns = (indices.long() // self.chunk) % self.parts
        return (turns + self._rotations(stripes)) % self.parts

    def positions(self, indices: Tensor) -> Tensor:
        """Return where each index stands among those of its part, int32; ascending with the index."""
        wide = indices.long()
        return (wide // (self.chunk * self.parts) * self.chunk + wide % self.chunk).int()

    def indices(self, positions: Tensor, part: int) -> Tensor:
        """Return the int32 indices at `positions` of `part`: the inverse of `owners` and `positions`."""
        stripes, offsets = positions.long() // self.chunk, positions.long() % self.chunk
        units = stripes * self.parts + (part - self._rotations(stripes)) % self.parts
        return (units * self.chunk + offsets).int()

    def check_part(self, part: int) -> None:
        """Raise OpError unless there is such a part."""
        if not 0 <= part < self.parts:
            raise OpError(f"part {part} is none of the {self.parts} parts; number them from 0")

    def _rotation(self, stripe: int) -> int:
        return (_murmur(stripe, self.seed) * self.parts) >> 32

    def _rotations(self, stripes: Tensor) -> Tensor:
        return (murmur(stripes, self.seed) * self.parts) >> 32
