"""Which part (server) owns each index of a tensor: equal shares for any pattern of non-zeros, without tables.

This is h0 of Zen's hierarchical hash and the index sets I_i of its hash bitmap (thesis sections 3.3.3 and 3.3.4).
Elements are taken in stripes of as many consecutive ones as there are parts. Each part gets one element of each stripe:
the stripe, rotated by a hash of its number. So

- each pattern of non-zeros is spread at least as evenly as by a universal hash function: a part's load is a sum over
  stripes, independent of each other, and elements of one stripe never meet;
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
    indices: NDArray[np.int32],
    parts: int,
    seed: int,
    owners: NDArray[np.int32],
    stripes: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Write part and stripe of each index, which is where it stands in the part, and add up what each part has."""
    # Division in float64 is exact for 31 bits, as the half keeps quotients off whole numbers; unlike that of integers
    # it is done for several at once. Counting is not, so it has a loop of its own.
    per_part = 1.0 / parts
    for i in range(indices.size):
        index = np.int64(indices[i])
        stripe = np.int64((index + 0.5) * per_part)
        owner = index - stripe * parts + ((murmur_cpu(stripe, seed) * parts) >> 32)
        owners[i] = owner - (parts if owner >= parts else 0)
        stripes[i] = stripe
    for i in range(owners.size):
        counts[owners[i]] += 1


@cpu_kernel
def write_indices(positions: NDArray[np.int32], part: int, parts: int, seed: int, indices: NDArray[np.int32]) -> None:
    """Write the index at each position of `part` to `indices`, which may be `positions`."""
    for i in range(positions.size):
        stripe = np.int64(positions[i])
        turn = part - ((murmur_cpu(stripe, seed) * parts) >> 32)
        turn += parts if turn < 0 else 0
        indices[i] = stripe * parts + turn


@cuda_function
def owner_cuda(index: Any, parts: int, seed: int) -> Any:
    """Return the part that owns `index`."""
    # Division of 32 bits is several times faster than of 64.
    stripe = np.int64(np.uint32(index) // np.uint32(parts))
    owner = np.int64(index) - stripe * parts + ((murmur_cuda(stripe, seed) * parts) >> 32)
    return owner - parts if owner >= parts else owner


@cuda_function
def index_cuda(position: Any, part: int, parts: int, seed: int) -> Any:
    """Return the index at `position` of `part`."""
    stripe = np.int64(position)
    turn = part - ((murmur_cuda(stripe, seed) * parts) >> 32)
    if turn < 0:
        turn += parts
    return stripe * parts + turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How the elements of a tensor are shared among parts; the same on all ranks.

    Attributes:
        numel: Elements of the tensor.
        parts: Number of parts (servers).
        seed: In [0, 2^32): which of the functions.
    """

    numel: int
    parts: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_numel("spread", self.numel)
        for name, value, low, high in (("parts", self.parts, 1, MAX_NUMEL), ("seed", self.seed, 0, _MASK)):
            if not low <= value <= high:
                raise OpError(f"spread: {name} is {value}; give one between {low} and {high}")

    def size(self, part: int) -> int:
        """Return how many elements `part` owns."""
        stripes, rest = divmod(self.numel, self.parts)
        return stripes + ((part - self._rotation(stripes)) % self.parts < rest)

    def owners(self, indices: Tensor) -> Tensor:
        """Return the part of each index, int64: the specification of the kernels."""
        wide = indices.long()
        return (wide % self.parts + self._rotations(wide // self.parts)) % self.parts

    def positions(self, indices: Tensor) -> Tensor:
        """Return where each index stands among those of its part, int32; ascending with the index."""
        return (indices.long() // self.parts).int()

    def indices(self, positions: Tensor, part: int) -> Tensor:
        """Return the int32 indices at `positions` of `part`: the inverse of `owners` and `positions`."""
        stripes = positions.long()
        return (stripes * self.parts + (part - self._rotations(stripes)) % self.parts).int()

    def _rotation(self, stripe: int) -> int:
        return (_murmur(stripe, self.seed) * self.parts) >> 32

    def _rotations(self, stripes: Tensor) -> Tensor:
        return (murmur(stripes, self.seed) * self.parts) >> 32
