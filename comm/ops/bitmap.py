"""Bitmaps: which elements of a tensor are given, one bit for each (thesis section 3.3.4)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import check_count, marked
from .kernels import check_numel, check_range, cpu_kernel, host
from .op import Op


def bitmap_bytes(numel: int) -> int:
    """Return the size of the bitmap of `numel` elements, in bytes.

    It is uint8: bit i % 8 (1 << i % 8) of byte i // 8 stands for element i; bits behind the last element are 0.
    """
    return -(-numel // 8)


def _indices_reference(bitmap: Tensor, numel: int, count: int | None = None) -> Tensor:
    """Return the int32 indices of the bits that are set, ascending.

    Args:
        bitmap: Of a tensor.
        numel: Its elements.
        count: How many bits that should be, where it is known.

    Raises:
        OpError: The bitmap is not that of `numel` elements, or has not `count` bits set.
    """
    _check_bitmap(bitmap, numel)
    present = (bitmap.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    indices = present.view(-1).nonzero().view(-1).int()
    check_range("bitmap", indices, numel)
    if count is not None:
        check_count(count, indices.numel())
    return indices


def _check_bitmap(bitmap: Tensor, numel: int) -> None:
    check_numel("bitmap", numel)
    if bitmap.dtype != torch.uint8 or bitmap.shape != (bitmap_bytes(numel),):
        raise OpError(
            f"a bitmap of {numel} elements is 1-D uint8 of {bitmap_bytes(numel)} bytes, not {bitmap.dtype} of shape "
            f"{tuple(bitmap.shape)}; pass the numel it was made with"
        )


@cpu_kernel
def _count(bitmap: NDArray[np.uint8]) -> int:
    count = 0
    for byte in range(bitmap.size):
        for i in range(8):
            count += (bitmap[byte] >> i) & 1
    return count


@cpu_kernel
def _list(bitmap: NDArray[np.uint8], indices: NDArray[np.int32]) -> None:
    place = 0
    for byte in range(bitmap.size):
        word = bitmap[byte]
        if word:
            for i in range(8):
                indices[place] = byte * 8 + i
                place += (word >> i) & 1


def _indices_cpu(bitmap: Tensor, numel: int, count: int | None = None) -> Tensor:
    _check_bitmap(bitmap, numel)
    array = host(bitmap)
    found = _count(array)
    if count is not None:
        check_count(count, found)
    indices = torch.empty(found + 1, dtype=torch.int32)
    _list(array, host(indices))
    indices = indices[:found]
    check_range("bitmap", indices, numel)
    return indices


def _indices_cuda(bitmap: Tensor, numel: int, count: int | None = None) -> Tensor:
    _check_bitmap(bitmap, numel)
    indices = marked(bitmap.contiguous(), count)
    check_range("bitmap", indices, numel)
    # What is found to be wrong only later is used meanwhile.
    return indices.clamp(max=numel - 1)


bitmap_indices = Op(name="bitmap_indices", reference=_indices_reference, cpu=_indices_cpu, cuda=_indices_cuda)
