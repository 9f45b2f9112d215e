"""Stable compaction: which elements reach a magnitude, with their indices, ascending."""

from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from .kernels import CudaKernel, bits, cpu_kernel, host, host_bits, magnitude_mask

_BYTES_PER_THREAD = 8
"""Of a bitmap, where a kernel counts what is set before each thread's own bits."""
_BLOCK = 16
_FEW = 2


@cpu_kernel
def _count_reaching(bits: NDArray[Any], threshold: int) -> int:
    mask = np.iinfo(bits.dtype).max
    count = 0
    for i in range(bits.size):
        count += (bits[i] & mask) >= threshold
    return count


@cpu_kernel
def _write_reaching(bits: NDArray[Any], threshold: int, indices: NDArray[np.int32], values: NDArray[Any]) -> int:
    """Write what reaches `threshold`, and return how many do; -1 if they are more than the outputs less a block."""
    # Blocks in which nothing does are passed over. In others every element is written, and the place advances behind
    # some of them: nothing for the processor to guess.
    mask = np.iinfo(bits.dtype).max
    least = bits.dtype.type(threshold)
    last = indices.size - _BLOCK
    place = 0
    for start in range(0, bits.size, _BLOCK):
        end = min(start + _BLOCK, bits.size)
        is_hit = end - start < _BLOCK
        if not is_hit:
            for i in range(start, start + _BLOCK):
                is_hit |= (bits[i] & mask) >= least
        if is_hit:
            if place > last:
                return -1
            for i in range(start, end):
                indices[place] = i
                values[place] = bits[i]
                place += (bits[i] & mask) >= least
    return place if place <= last else -1


def reaching(elements: Tensor, threshold: int, most: int) -> tuple[Tensor, Tensor] | None:
    """Return indices and values of those elements of a CPU tensor; None if they are more than `most`."""
    count = most if most * _FEW < elements.numel() else int(_count_reaching(host_bits(elements), threshold))
    if count > most:
        return None
    indices = torch.empty(count + _BLOCK, dtype=torch.int32)
    values = torch.empty(count + _BLOCK, dtype=elements.dtype)
    count = _write_reaching(host_bits(elements), threshold, host(indices), host_bits(values))
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
        for byte in range(thread * _BYTES_PER_THREAD, min((thread + 1) * _BYTES_PER_THREAD, bitmap.size)):
            count += cuda.popc(bitmap[byte])
        counts[thread] = count


@CudaKernel
def _write(bitmap: Any, ends: Any, indices: Any) -> None:
    thread = cuda.grid(1)
    if thread < ends.size:
        place = ends[thread - 1] if thread else 0
        for byte in range(thread * _BYTES_PER_THREAD, min((thread + 1) * _BYTES_PER_THREAD, bitmap.size)):
            word = bitmap[byte]
            for i in range(8):
                if (word >> i) & 1:
                    indices[place] = byte * 8 + i
                    place += 1


def mark(elements: Tensor) -> Tensor:
    """Return the bitmap (`bitmap_bytes`) of the elements that are not zero of either sign."""
    bitmap = torch.empty(-(-elements.numel() // 8), dtype=torch.uint8, device=elements.device)
    _mark.launch(bitmap.numel(), bits(elements), magnitude_mask(elements), bitmap)
    return bitmap


def marked(bitmap: Tensor) -> Tensor:
    """Return the int32 indices of the bits that are set, ascending."""
    counts = torch.empty(-(-bitmap.numel() // _BYTES_PER_THREAD), dtype=torch.int32, device=bitmap.device)
    _count.launch(counts.numel(), bitmap, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    indices = torch.empty(int(ends[-1]) if ends.numel() else 0, dtype=torch.int32, device=bitmap.device)
    _write.launch(ends.numel(), bitmap, ends, indices)
    return indices
