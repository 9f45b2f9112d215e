"""Tensor blocks: the blocks of a tensor that have a non-zero, whole (OmniReduce; thesis section 3.3.4)."""

from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import mark, marked
from .coo import Coo
from .kernels import CudaKernel, bits, cpu_kernel, flat, host, host_bits, magnitude_mask
from .op import Op

BLOCK = 256
"""Elements of a block, as in OmniReduce."""


def _check_encode(dense: Tensor, block: int = BLOCK) -> tuple[Tensor]:
    """Return the blocks of `dense`, which has any shape, that have a non-zero, ascending: block b begins at b * block.

    Zero is decided as in `coo_encode`. Behind the tensor's end there are zeros.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements, or `block` is below 1.
    """
    if block < 1:
        raise OpError(f"block_encode: a block has at least 1 element, not {block}")
    elements = flat("block_encode", dense)
    missing = -elements.numel() % block
    return ((torch.nn.functional.pad(elements, (0, missing)) if missing else elements).view(-1, block),)


def _encode_reference(blocks: Tensor) -> Coo:
    return _taken(blocks, (blocks != 0).any(1).nonzero().view(-1).int())


def _taken(blocks: Tensor, ids: Tensor) -> Coo:
    return Coo(ids, blocks.index_select(0, ids))


@cpu_kernel
def _has_non_zero(bits: NDArray[Any]) -> bool:
    mask = np.iinfo(bits.dtype).max
    seen = 0
    for i in range(bits.size):
        seen |= bits[i] & mask
    return seen != 0


@cpu_kernel
def _find(bits: NDArray[Any], block: int, ids: NDArray[np.int32]) -> int:
    # Loops over a few elements are slow: small blocks are looked at in groups, of which most have no non-zero.
    group = max(1, BLOCK // block)
    count = 0
    for first in range(0, ids.size, group):
        last = min(first + group, ids.size)
        if group == 1 or _has_non_zero(bits[first * block : last * block]):
            for b in range(first, last):
                ids[count] = b
                count += _has_non_zero(bits[b * block : (b + 1) * block])
    return count


def _encode_cpu(blocks: Tensor) -> Coo:
    ids = torch.empty(len(blocks), dtype=torch.int32)
    return _taken(blocks, ids[: _find(host_bits(blocks.view(-1)), blocks.shape[1], host(ids))])


@CudaKernel
def _find_kernel(bits: Any, mask: int, block: int, present: Any) -> None:
    i = cuda.grid(1)
    if i < bits.size and bits[i] & mask:
        present[i // block] = 1


def _encode_cuda(blocks: Tensor) -> Coo:
    present = torch.zeros(len(blocks), dtype=torch.int8, device=blocks.device)
    elements = blocks.view(-1)
    _find_kernel.launch(elements.numel(), bits(elements), magnitude_mask(elements), blocks.shape[1], present)
    return _taken(blocks, marked(mark(present)))


block_encode = Op(
    name="block_encode", check=_check_encode, reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda
)
