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


def unpacked(bitmap: Tensor) -> Tensor:
    """Return each bit as a uint8, those behind the last element too."""
    return ((bitmap.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1).view(-1)


def packed(present: Tensor) -> Tensor:
    """Return the bitmap of elements that are 0 or 1."""
    filled = torch.nn.functional.pad(present, (0, -present.numel() % 8)).view(-1, 8)
    return (filled * (1 << torch.arange(8, device=present.device))).sum(1).to(torch.uint8)


def check_bitmap(bitmap: Tensor, numel: int) -> tuple[Tensor]:
    """Return the int32 indices of the bits that are set, ascending.

    Args:
        bitmap: Of a tensor.
        numel: Its elements.

    Raises:
        OpError: The bitmap is not that of `numel` elements.
    """
    check_numel("bitmap", numel)
    if bitmap.dtype != torch.uint8 or bitmap.shape != (bitmap_bytes(numel),):
        raise OpError(
            f"a bitmap of {numel} elements is 1-D uint8 of {bitmap_bytes(numel)} bytes, not {bitmap.dtype} of shape "
            f"{tuple(bitmap.shape)}; pass the numel it was made with"
        )
    if numel % 8 and int(bitmap[-1]) >> numel % 8:
        raise OpError(f"a bitmap of {numel} elements has bits set behind the last one; pass the numel it was made with")
    return (bitmap.contiguous(),)


def _indices_reference(bitmap: Tensor) -> Tensor:
    return unpacked(bitmap).nonzero().view(-1).int()


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


def _indices_cpu(bitmap: Tensor) -> Tensor:
    found = _count(host(bitmap))
    indices = torch.empty(found + 1, dtype=torch.int32)
    _list(host(bitmap), host(indices))
    return indices[:found]


def _check_encode(indices: Tensor, numel: int) -> tuple[Tensor, int]:
    """Return the bitmap of `numel` elements in which the bits of `indices`, int32 in any order, are set.

    Of positions in a server's share (`Spread`) it is the hash bitmap of Zen (Algorithm 3.3): the index set of the paper
    is a table of all indices on each worker, and is computed here.

    Raises:
        OpError: An index does not fit.
    """
    check_numel("bitmap", numel)
    check_list("bitmap", indices)
    check_range("bitmap", indices, numel)
    return indices, numel


def _encode_reference(indices: Tensor, numel: int) -> Tensor:
    return packed(_present(indices, numel))


def _present(indices: Tensor, numel: int) -> Tensor:
    return torch.zeros(numel, dtype=torch.int8, device=indices.device).index_fill_(0, indices.long(), 1)


@cpu_kernel
def _set(indices: NDArray[np.int32], bitmap: NDArray[np.uint8]) -> None:
    for i in range(indices.size):
        bitmap[indices[i] >> 3] |= 1 << (indices[i] & 7)


def _encode_cpu(indices: Tensor, numel: int) -> Tensor:
    bitmap = torch.zeros(bitmap_bytes(numel), dtype=torch.uint8)
    _set(host(indices), host(bitmap))
    return bitmap


def _encode_cuda(indices: Tensor, numel: int) -> Tensor:
    # Bits of one byte would have to be set one after the other; bytes of their own need no order.
    return mark(_present(indices, numel))


bitmap_indices = Op(
    name="bitmap_indices", check=check_bitmap, reference=_indices_reference, cpu=_indices_cpu, cuda=marked
)
bitmap_encode = Op(
    name="bitmap_encode", check=_check_encode, reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda
)
