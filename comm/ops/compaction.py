"""Stable compaction on CUDA: bits that say which elements to take, and the indices of those, ascending."""

from typing import Any

import torch
from numba import cuda
from torch import Tensor

from .kernels import CudaKernel, bits, magnitude_mask

_BYTES_PER_THREAD = 8


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
    """Return the bitmap (as `bitmap_encode` defines it) of the elements that are not zero of either sign."""
    bitmap = torch.empty(-(-elements.numel() // 8), dtype=torch.uint8, device=elements.device)
    _mark.launch(bitmap.numel(), bits(elements), magnitude_mask(elements), bitmap)
    return bitmap


def marked(bitmap: Tensor) -> Tensor:
    """Return the int32 indices of the bits that are set, ascending."""
    counts = torch.empty(-(-bitmap.numel() // _BYTES_PER_THREAD), dtype=torch.int32, device=bitmap.device)
    _count.launch(counts.numel(), bitmap, counts)
    ends = counts.cumsum(0, dtype=torch.int32)
    indices = torch.empty(int(ends[-1]) if ends.numel() else 0, dtype=torch.int32, device=bitmap.device)
    if indices.numel():
        _write.launch(ends.numel(), bitmap, ends, indices)
    return indices
