"""Bitmaps: which elements of a tensor are given, one bit for each (thesis section 3.3.4)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import mark, marked
from .kernels import check_list, check_numel, check_range, cpu_kernel, host
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
        _check_count(count, indices.numel())
    return indices


def _check_count(expected: int, found: int) -> None:
    if found != expected:
        raise OpError(f"bitmap: {found} bits are set, of {expected}; pass the count it was made with")


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
        _check_count(count, found)
    indices = torch.empty(found + 1, dtype=torch.int32)
    _list(array, host(indices))
    indices = indices[:found]
    check_range("bitmap", indices, numel)
    return indices


def _indices_cuda(bitmap: Tensor, numel: int, count: int | None = None) -> Tensor:
    _check_bitmap(bitmap, numel)
    indices = marked(bitmap.contiguous())
    if count is not None:
        _check_count(count, indices.numel())
    check_range("bitmap", indices, numel)
    return indices


def _encode_reference(indices: Tensor, numel: int) -> Tensor:
    """Return the bitmap of `numel` elements in which the bits of `indices`, int32 in any order, are set.

    Of positions in a server's share (`Spread`) it is the hash bitmap of Zen (Algorithm 3.3): the index set of the paper
    is a table of all indices on each worker, and is computed here.

    Raises:
        OpError: An index does not fit.
    """
    present = _present(indices, numel, bitmap_bytes(numel) * 8)
    weights = 1 << torch.arange(8, device=indices.device)
    return (present.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _present(indices: Tensor, numel: int, size: int) -> Tensor:
    check_numel("bitmap", numel)
    check_list("bitmap", indices)
    check_range("bitmap", indices, numel)
    return torch.zeros(size, dtype=torch.int8, device=indices.device).index_fill_(0, indices.long(), 1)


@cpu_kernel
def _set(indices: NDArray[np.int32], bitmap: NDArray[np.uint8]) -> None:
    for i in range(indices.size):
        bitmap[indices[i] >> 3] |= 1 << (indices[i] & 7)


def _encode_cpu(indices: Tensor, numel: int) -> Tensor:
    check_numel("bitmap", numel)
    check_list("bitmap", indices)
    check_range("bitmap", indices, numel)
    bitmap = torch.zeros(bitmap_bytes(numel), dtype=torch.uint8)
    _set(host(indices), host(bitmap))
    return bitmap


def _encode_cuda(indices: Tensor, numel: int) -> Tensor:
    # Bits of one byte would have to be set one after the other; bytes of their own need no order.
    return mark(_present(indices, numel, numel))


bitmap_indices = Op(name="bitmap_indices", reference=_indices_reference, cpu=_indices_cpu, cuda=_indices_cuda)
bitmap_encode = Op(name="bitmap_encode", reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda)
