"""Stable compaction: which elements reach a magnitude, with their indices, ascending."""

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .kernels import CudaKernel, bits, check_numbers, cpu_kernel, host, host_bits, magnitude_mask
from .op import Finding, Reading

BYTES_PER_THREAD = 8
"""Of a bitmap, where a kernel counts what is set before each thread's own bits."""
_BLOCK = 64
_FEW = 2
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
"""A power of two times this number has another six bits in front for each of them."""
_PLACES = np.argsort([((1 << place) * int(_DE_BRUIJN) % 2**64) >> 58 for place in range(_BLOCK)])
"""Those six bits → which power."""


@cpu_kernel
def _count_reaching(bits: NDArray[Any], threshold: int) -> int:
    mask = np.iinfo(bits.dtype).max
    count = 0
    for i in range(bits.size):
        count += (bits[i] & mask) >= threshold
    return count


@cpu_kernel
def _write_reaching(bits: NDArray[Any], threshold: int, indices: NDArray[np.int32], values: NDArray[Any]) -> None:
    # Every element is written and the place advances behind some of them: nothing for the processor to guess. Outputs
    # are one longer than the count.
    mask = np.iinfo(bits.dtype).max
    place = 0
    for i in range(bits.size):
        indices[place] = i
        values[place] = bits[i]
        place += (bits[i] & mask) >= threshold


@cpu_kernel
def _write_few_reaching(bits: NDArray[Any], threshold: int, indices: NDArray[np.int32], values: NDArray[Any]) -> int:
    """Write what reaches `threshold`, and return how many do; -1 if they are more than the outputs less a block."""
    # A bit for each element of a block, which the compiler makes for several at once. The first two of a block are
    # written whether they are there or not: as they are rarely more, the processor guesses right. How many they are is
    # counted from the word, so that the next block does not wait for them.
    mask = np.iinfo(bits.dtype).max
    least = bits.dtype.type(threshold)
    one = np.uint64(1)
    last = indices.size - _BLOCK
    place = 0
    whole = bits.size // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        if place > last:
            return -1
        word = np.uint64(0)
        for i in range(_BLOCK):
            word |= np.uint64((bits[start + i] & mask) >= least) << np.uint64(i)
        pairs = word - ((word >> one) & np.uint64(0x5555555555555555))
        fours = (pairs & np.uint64(0x3333333333333333)) + ((pairs >> np.uint64(2)) & np.uint64(0x3333333333333333))
        eights = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        count = int((eights * np.uint64(0x0101010101010101)) >> np.uint64(56))
        for offset in range(2):
            lowest = word & (~word + one)
            at = start + _PLACES[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            indices[place + offset] = at
            values[place + offset] = bits[at]
            word ^= lowest
        offset = 2
        while word != 0:
            lowest = word & (~word + one)
            at = start + _PLACES[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            indices[place + offset] = at
            values[place + offset] = bits[at]
            word ^= lowest
            offset += 1
        place += count
    if place > last:
        return -1
    for i in range(whole, bits.size):
        indices[place] = i
        values[place] = bits[i]
        place += (bits[i] & mask) >= least
    return place if place <= last else -1


def count_reaching(elements: Tensor, threshold: int) -> int:
    """Return how many elements of a CPU tensor have bits of a magnitude of `threshold` or more."""
    return int(_count_reaching(host_bits(elements), threshold))


def reaching(elements: Tensor, threshold: int, most: int) -> tuple[Tensor, Tensor] | None:
    """Return indices and values of those elements of a CPU tensor; None if they are more than `most`."""
    few = most * _FEW < elements.numel()
    count = most if few else count_reaching(elements, threshold)
    if count > most:
        return None
    indices = torch.empty(count + _BLOCK, dtype=torch.int32)
    values = torch.empty(count + _BLOCK, dtype=elements.dtype)
    outputs = host(indices), host_bits(values)
    if few:
        count = _write_few_reaching(host_bits(elements), threshold, *outputs)
    else:
        _write_reaching(host_bits(elements), threshold, *outputs)
    return None if count < 0 else (indices[:count], values[:count])


@CudaKernel
def _mark(bits: Any, mask: int, bitmap: Any) -> None:
    byte = cuda.grid(1)
    if byte < bitmap.size:
        word = 0
        for i in range(min(8, bits.size - byte * 8)):
            if bits[byte * 8 + i] & mask:
                word |= 1 << i
        bitmap[byte] = word


@CudaKernel
def _count(bitmap: Any, counts: Any) -> None:
    thread = cuda.grid(1)
    if thread < counts.size:
        count = 0
        for byte in range(thread * BYTES_PER_THREAD, min((thread + 1) * BYTES_PER_THREAD, bitmap.size)):
            count += cuda.popc(bitmap[byte])
        counts[thread] = count


@CudaKernel
def _write(bitmap: Any, ends: Any, indices: Any) -> None:
    thread = cuda.grid(1)
    if thread < ends.size:
        place = ends[thread - 1] if thread else 0
        for byte in range(thread * BYTES_PER_THREAD, min((thread + 1) * BYTES_PER_THREAD, bitmap.size)):
            word = bitmap[byte]
            for i in range(8):
                if (word >> i) & 1:
                    if place < indices.size:
                        indices[place] = byte * 8 + i
                    place += 1


def mark(elements: Tensor) -> Tensor:
    """Return the bitmap (`bitmap_bytes`) of the elements that are not zero of either sign."""
    bitmap = torch.empty(-(-elements.numel() // 8), dtype=torch.uint8, device=elements.device)
    _mark.launch(bitmap.numel(), bits(elements), magnitude_mask(elements), bitmap)
    return bitmap


def ends_of(bitmap: Tensor) -> Tensor:
    """Return how many bits are set up to the end of each `BYTES_PER_THREAD` bytes, int32."""
    counts = torch.empty(-(-bitmap.numel() // BYTES_PER_THREAD), dtype=torch.int32, device=bitmap.device)
    _count.launch(counts.numel(), bitmap, counts)
    return counts.cumsum(0, dtype=torch.int32)


def first_marked(bitmap: Tensor, ends: Tensor, count: int) -> Tensor:
    """Return the int32 indices of the first `count` bits that are set, ascending; zeros after them if they are fewer.

    Nobody waits for the GPU.

    Args:
        bitmap: As `mark` makes it.
        ends: Of the bitmap (`ends_of`).
        count: How many.
    """
    indices = torch.zeros(count, dtype=torch.int32, device=bitmap.device)
    if count:
        _write.launch(ends.numel(), bitmap, ends, indices)
    return indices


@Reading
def marked(bitmap: Tensor, count: int | None = None) -> Finding[Tensor]:
    """Return the int32 indices of the bits that are set, ascending.

    Args:
        bitmap: As `mark` makes it.
        count: How many that should be, where that is known: nobody waits for the GPU then.

    Raises:
        OpError: They are not so many.
    """
    ends = ends_of(bitmap)
    if not ends.numel():
        check_count(count or 0, 0)
    elif count is None:
        (count,) = yield ends[-1:]
    else:
        check_numbers(ends[-1:], partial(check_count, count))
    # What is found to be wrong only later is used meanwhile.
    return first_marked(bitmap, ends, count or 0)


def check_count(expected: int, found: int) -> None:
    """Raise OpError unless as many bits are set as there should be."""
    if found != expected:
        raise OpError(f"bitmap: {found} bits are set, of {expected}; pass the count it was made with")
