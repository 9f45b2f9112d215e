"""Bitmaps of non-zeros: one bit for each element, and the values (thesis section 3.3.4)."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import mark, marked
from .coo import coo_decode
from .kernels import check_numel, cpu_kernel, flat, host, host_bits
from .op import Op


class Bitmap(NamedTuple):
    """A sparse tensor of known size.

    Attributes:
        bitmap: uint8; bit i % 8 (1 << i % 8) of byte i // 8 says whether element i is in `values`; unused bits are 0.
        values: Ascending by index.
    """

    bitmap: Tensor
    values: Tensor


def bitmap_bytes(numel: int) -> int:
    """Return the size of the bitmap of `numel` elements, in bytes."""
    return -(-numel // 8)


def _encode_reference(dense: Tensor) -> Bitmap:
    """Return the bitmap and the values of the non-zeros of `dense`; what is zero is decided as in `coo_encode`.

    Of a server's share, in the order of `positions`, this is Algorithm 3.3's hash bitmap.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = flat("bitmap_encode", dense)
    present = elements != 0
    padded = torch.zeros(bitmap_bytes(elements.numel()) * 8, dtype=torch.bool, device=dense.device)
    padded[: elements.numel()] = present
    weights = 1 << torch.arange(8, device=dense.device)
    return Bitmap((padded.view(-1, 8) * weights).sum(1).to(torch.uint8), elements[present])


def _decode_reference(bitmap: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return the dense 1-D tensor of `numel` elements that was encoded.

    Raises:
        OpError: Bitmap, values and `numel` do not belong together.
    """
    indices = _bitmap_indices_reference(bitmap, numel)
    _check_values(indices.numel(), values)
    dense = torch.zeros(numel, dtype=values.dtype, device=values.device)
    dense[indices.long()] = values.detach()
    return dense


def _bitmap_indices_reference(bitmap: Tensor, numel: int) -> Tensor:
    """Return the int32 indices of the bits that are set, ascending.

    Raises:
        OpError: The bitmap is not that of `numel` elements.
    """
    _check_bitmap(bitmap, numel)
    present = (bitmap.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    indices = present.view(-1).nonzero().view(-1).int()
    _check_unused(indices, numel)
    return indices


def _check_bitmap(bitmap: Tensor, numel: int) -> None:
    check_numel("bitmap", numel)
    if bitmap.dtype != torch.uint8 or bitmap.shape != (bitmap_bytes(numel),):
        raise OpError(
            f"a bitmap of {numel} elements is 1-D uint8 of {bitmap_bytes(numel)} bytes, not {bitmap.dtype} of shape "
            f"{tuple(bitmap.shape)}; pass the numel it was made with"
        )


def _check_unused(indices: Tensor, numel: int) -> None:
    if indices.numel() and int(indices[-1]) >= numel:
        raise OpError(f"bitmap: element {int(indices[-1])} is marked, of {numel}; pass the numel it was made with")


def _check_values(count: int, values: Tensor) -> None:
    if values.shape != (count,):
        raise OpError(f"bitmap: {count} elements are marked, values are of shape {tuple(values.shape)}; pass its own")


@cpu_kernel
def _mark(bits: NDArray[Any], bitmap: NDArray[np.uint8]) -> int:
    mask = np.iinfo(bits.dtype).max
    count = 0
    for byte in range(bits.size // 8):
        word = 0
        for i in range(8):
            word |= ((bits[byte * 8 + i] & mask) != 0) << i
        bitmap[byte] = word
        for i in range(8):
            count += (word >> i) & 1
    if bits.size % 8:
        word = 0
        for i in range(bits.size // 8 * 8, bits.size):
            present = (bits[i] & mask) != 0
            word |= present << (i % 8)
            count += present
        bitmap[bits.size // 8] = word
    return count


@cpu_kernel
def _gather(bits: NDArray[Any], bitmap: NDArray[np.uint8], values: NDArray[Any]) -> None:
    # Every element of a byte that is not zero is written, so values are one longer than the count.
    place = 0
    for byte in range(bits.size // 8):
        word = bitmap[byte]
        if word:
            for i in range(8):
                values[place] = bits[byte * 8 + i]
                place += (word >> i) & 1
    for i in range(bits.size // 8 * 8, bits.size):
        values[place] = bits[i]
        place += (bitmap[i // 8] >> (i % 8)) & 1


def _encode_cpu(dense: Tensor) -> Bitmap:
    elements = flat("bitmap_encode", dense)
    array = host_bits(elements)
    bitmap = torch.empty(bitmap_bytes(elements.numel()), dtype=torch.uint8)
    count = _mark(array, host(bitmap))
    values = torch.empty(count + 1, dtype=elements.dtype)
    _gather(array, host(bitmap), host_bits(values))
    return Bitmap(bitmap, values[:count])


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


def _bitmap_indices_cpu(bitmap: Tensor, numel: int) -> Tensor:
    _check_bitmap(bitmap, numel)
    count = _count(host(bitmap))
    indices = torch.empty(count + 1, dtype=torch.int32)
    _list(host(bitmap), host(indices))
    _check_unused(indices[:count], numel)
    return indices[:count]


def _decode_cpu(bitmap: Tensor, values: Tensor, numel: int) -> Tensor:
    indices = _bitmap_indices_cpu(bitmap, numel)
    _check_values(indices.numel(), values)
    return coo_decode.cpu(indices, values, numel)


def _encode_cuda(dense: Tensor) -> Bitmap:
    elements = flat("bitmap_encode", dense)
    bitmap = mark(elements)
    return Bitmap(bitmap, elements.index_select(0, marked(bitmap)))


def _bitmap_indices_cuda(bitmap: Tensor, numel: int) -> Tensor:
    _check_bitmap(bitmap, numel)
    indices = marked(bitmap.contiguous())
    _check_unused(indices, numel)
    return indices


def _decode_cuda(bitmap: Tensor, values: Tensor, numel: int) -> Tensor:
    indices = _bitmap_indices_cuda(bitmap, numel)
    _check_values(indices.numel(), values)
    return coo_decode.cuda(indices, values, numel)


bitmap_encode = Op(name="bitmap_encode", reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda)
bitmap_decode = Op(name="bitmap_decode", reference=_decode_reference, cpu=_decode_cpu, cuda=_decode_cuda)
bitmap_indices = Op(
    name="bitmap_indices",
    reference=_bitmap_indices_reference,
    cpu=_bitmap_indices_cpu,
    cuda=_bitmap_indices_cuda,
)
