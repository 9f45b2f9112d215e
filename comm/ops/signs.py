"""Signs and means: what 1-bit compressors send (EFSignSGD, Karimireddy et al., 2019; 1-bit SGD, Seide et al., 2014)."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .bitmap import bitmap_bytes, check_bitmap, packed, unpacked
from .kernels import cpu_kernel, flat, host
from .op import Op

_LANES = 32


class Signs(NamedTuple):
    """A tensor of known size, one bit for each element.

    Attributes:
        bitmap: uint8; bit i % 8 of byte i // 8 says whether element i is below zero; unused bits are 0.
        means: float32: of the elements that are not below zero, of those that are, and of all magnitudes; 0 where there
            are none. A nan is not below zero.
    """

    bitmap: Tensor
    means: Tensor


def _check_encode(dense: Tensor) -> tuple[Tensor]:
    """Return the signs and means of `dense`. Means are of sums in float64, whose order the backends choose.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements.
    """
    return (flat("signs_encode", dense),)


def _encode_reference(elements: Tensor) -> Signs:
    return Signs(packed((elements < 0).to(torch.uint8)), _means(elements))


def _means(elements: Tensor) -> Tensor:
    count_below = (elements < 0).sum()
    above = elements.where(~(elements < 0), 0).sum(dtype=torch.float64)
    below = elements.where(elements < 0, 0).sum(dtype=torch.float64)
    counts = torch.stack([elements.numel() - count_below, count_below, torch.full_like(count_below, elements.numel())])
    return (torch.stack([above, below, above - below]) / counts.clamp(min=1)).float()


def signs_decode(bitmap: Tensor, levels: Tensor, numel: int) -> Tensor:
    """Return a 1-D tensor of `numel` elements: `levels[1]` where the bit is set, `levels[0]` elsewhere.

    Args:
        bitmap: Of `numel` elements.
        levels: Two numbers of the wanted dtype, on the device of `bitmap`.
        numel: Number of elements.

    Raises:
        OpError: They do not belong together.
    """
    (bitmap,) = check_bitmap(bitmap, numel)
    if levels.shape != (2,) or not levels.is_floating_point():
        raise OpError(f"signs_decode: levels are two floating-point numbers, not {levels.dtype} {tuple(levels.shape)}")
    # All that a byte may stand for, eight elements each: as fast as a kernel.
    table = levels[unpacked(torch.arange(256, dtype=torch.uint8, device=bitmap.device)).long()].view(256, 8)
    return table.index_select(0, bitmap.int()).view(-1)[:numel]


@cpu_kernel
def _sums(elements: NDArray[Any]) -> tuple[float, float]:
    """Return the sum of what is not below zero, and of what is."""
    # In lanes and without branches: signs cannot be guessed, and one sum would be a chain of waits.
    above, below = np.zeros(_LANES), np.zeros(_LANES)
    whole = elements.size // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            value = elements[start + lane]
            above[lane] += 0.0 if value < 0 else value
            below[lane] += value if value < 0 else 0.0
    for i in range(whole, elements.size):
        value = elements[i]
        above[0] += 0.0 if value < 0 else value
        below[0] += value if value < 0 else 0.0
    return above.sum(), below.sum()


@cpu_kernel
def _pack(elements: NDArray[Any], bitmap: NDArray[np.uint8]) -> int:
    """Write the signs; return how many elements are below zero."""
    for byte in range(elements.size // 8):
        word = 0
        for i in range(8):
            word |= (elements[byte * 8 + i] < 0) << i
        bitmap[byte] = word
    for i in range(elements.size // 8 * 8, elements.size):
        bitmap[i // 8] |= (elements[i] < 0) << (i % 8)
    count = 0
    for byte in range(bitmap.size):
        for i in range(8):
            count += (bitmap[byte] >> i) & 1
    return count


def _encode_cpu(elements: Tensor) -> Signs:
    numel = elements.numel()
    bitmap = torch.zeros(bitmap_bytes(numel), dtype=torch.uint8)
    wide = elements if elements.dtype == torch.float64 else elements.float()
    count_below = _pack(host(wide), host(bitmap))
    above, below = _sums(host(wide))
    means = (above / max(numel - count_below, 1), below / max(count_below, 1), (above - below) / max(numel, 1))
    return Signs(bitmap, torch.tensor(means, dtype=torch.float32))


signs_encode = Op(name="signs_encode", check=_check_encode, reference=_encode_reference, cpu=_encode_cpu)
