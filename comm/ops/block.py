"""Tensor blocks: the blocks of a tensor that have a non-zero, whole (OmniReduce; thesis section 3.3.4)."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .compaction import mark, marked
from .kernels import (
    CudaKernel,
    bits,
    check_list,
    check_numel,
    check_range,
    cpu_kernel,
    flat,
    host,
    host_bits,
    magnitude_mask,
)
from .op import Op

BLOCK = 256
"""Elements of a block, as in OmniReduce."""


class Blocks(NamedTuple):
    """Blocks of a tensor.

    Attributes:
        ids: Which blocks, int32, ascending; block b begins at element b * block.
        data: [ids, block]; behind the tensor's end there are zeros.
    """

    ids: Tensor
    data: Tensor


def _check_encode(dense: Tensor, block: int = BLOCK) -> tuple[Tensor, int]:
    """Return the blocks of `dense`, which has any shape, that have a non-zero; zero is decided as in `coo_encode`.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements, or `block` is below 1.
    """
    _check_block("block_encode", block)
    return flat("block_encode", dense), block


def _encode_reference(elements: Tensor, block: int) -> Blocks:
    blocks = -(-elements.numel() // block)
    padded = torch.nn.functional.pad(elements, (0, blocks * block - elements.numel())).view(blocks, block)
    ids = (padded != 0).any(1).nonzero().view(-1)
    return Blocks(ids.int(), padded[ids])


def _check_block(name: str, block: int) -> None:
    if block < 1:
        raise OpError(f"{name}: a block has at least 1 element, not {block}")


def block_decode(ids: Tensor, data: Tensor, numel: int) -> Tensor:
    """Return the dense 1-D tensor of `numel` elements that has `data` in blocks `ids` and zeros elsewhere.

    Raises:
        OpError: Ids, data and `numel` do not belong together.
    """
    check_numel("block_decode", numel)
    check_list("block_decode", ids)
    if data.dim() != 2 or data.shape[0] != ids.numel():
        raise OpError(f"block_decode: {ids.numel()} ids come with data of shape {tuple(data.shape)}; pass its own")
    block = data.shape[1]
    _check_block("block_decode", block)
    blocks = -(-numel // block)
    check_range("block_decode", ids, blocks)
    padded = torch.zeros(blocks, block, dtype=data.dtype, device=data.device)
    return padded.index_copy_(0, ids.long(), data.detach()).view(-1)[:numel]


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


@cpu_kernel
def _copy_out(bits: NDArray[Any], ids: NDArray[np.int32], data: NDArray[Any]) -> None:
    block = data.shape[1]
    for row in range(ids.size):
        start = ids[row] * block
        source, target = bits[start : start + block], data[row]
        # Quicker than assignments to slices, which are not vectorized.
        for i in range(source.size):
            target[i] = source[i]
        target[source.size :] = 0


def _encode_cpu(elements: Tensor, block: int) -> Blocks:
    array = host_bits(elements)
    ids = torch.empty(-(-elements.numel() // block), dtype=torch.int32)
    ids = ids[: _find(array, block, host(ids))]
    data = torch.empty(ids.numel(), block, dtype=elements.dtype)
    _copy_out(array, host(ids), host_bits(data))
    return Blocks(ids, data)


@CudaKernel
def _find_kernel(bits: Any, mask: int, block: int, present: Any) -> None:
    i = cuda.grid(1)
    if i < bits.size and bits[i] & mask:
        present[i // block] = 1


@CudaKernel
def _copy_out_kernel(bits: Any, ids: Any, block: int, data: Any) -> None:
    i = cuda.grid(1)
    if i < data.size:
        source = np.int64(ids[i // block]) * block + i % block
        data[i] = bits[source] if source < bits.size else 0


def _encode_cuda(elements: Tensor, block: int) -> Blocks:
    present = torch.zeros(-(-elements.numel() // block), dtype=torch.int8, device=elements.device)
    _find_kernel.launch(elements.numel(), bits(elements), magnitude_mask(elements), block, present)
    ids = marked(mark(present))
    data = torch.empty(ids.numel(), block, dtype=elements.dtype, device=elements.device)
    _copy_out_kernel.launch(data.numel(), bits(elements), ids, block, bits(data).view(-1))
    return Blocks(ids, data)


block_encode = Op(
    name="block_encode", check=_check_encode, reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda
)
