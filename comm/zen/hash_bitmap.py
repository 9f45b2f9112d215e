"""The hash bitmap: one bit for each index that a server owns (Algorithm 3.3 of the thesis, section 3.3.4).

The index set I_i of the paper is a table of |G| indices on each worker. Here `Spread` computes it, so neither side
stores anything: `bitmap_indices`, then `indices_at` is the way back.
"""

from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from ..ops.bitmap import bitmap_bytes
from ..ops.compaction import mark
from ..ops.kernels import CudaKernel, check_numbers, cpu_kernel, host
from ..ops.op import Op
from ..ops.spread import Spread, count_owners
from .histogram import indices_of, positions


def _encode_reference(indices: Tensor, spread: Spread, part: int) -> Tensor:
    """Return the hash bitmap, uint8, of indices that `part` owns; their values follow in ascending order of indices.

    Indices may come in any order.

    Raises:
        OpError: There is no such part, or an index is not of it.
    """
    spread.check_part(part)
    own = positions.reference(indices, spread)
    if not bool((spread.owners(indices) == part).all()):
        raise _not_owned(part)
    present = torch.zeros(bitmap_bytes(spread.size(part)) * 8, dtype=torch.bool, device=indices.device)
    present[own.long()] = True
    weights = 1 << torch.arange(8, device=indices.device)
    return (present.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _not_owned(part: int) -> OpError:
    return OpError(f"hash_bitmap_encode: not all indices are of part {part}; encode what `partition` gave it")


@cpu_kernel
def _mark(positions: NDArray[np.int32], bitmap: NDArray[np.uint8]) -> None:
    for i in range(positions.size):
        bitmap[positions[i] >> 3] |= 1 << (positions[i] & 7)


def _encode_cpu(indices: Tensor, spread: Spread, part: int) -> Tensor:
    spread.check_part(part)
    own = positions.cpu(indices, spread)
    if spread.parts > 1:
        owners, counts = np.empty(own.numel(), np.int32), np.zeros(spread.parts, np.int64)
        count_owners(host(indices), spread.parts, spread.seed, owners, counts)
        if counts[part] != own.numel():
            raise _not_owned(part)
    bitmap = torch.zeros(bitmap_bytes(spread.size(part)), dtype=torch.uint8)
    _mark(host(own), host(bitmap))
    return bitmap


def _encode_cuda(indices: Tensor, spread: Spread, part: int) -> Tensor:
    spread.check_part(part)
    own = positions.cuda(indices, spread)
    size = spread.size(part)

    def verify(others: int) -> None:
        if others:
            raise _not_owned(part)

    if own.numel() and spread.parts > 1:
        # The position of another part's index may lie behind this part's end.
        others = (own >= size) | (indices_of(own, spread, part) != indices)
        check_numbers(others.any().view(1), verify)
    # Bits of one byte would have to be set one after the other; bytes of their own need no order.
    present = torch.zeros(size, dtype=torch.int8, device=indices.device)
    _set_kernel.launch(own.numel(), own, present)
    return mark(present)


@CudaKernel
def _set_kernel(positions: Any, present: Any) -> None:
    i = cuda.grid(1)
    if i < positions.size and 0 <= positions[i] < present.size:
        present[positions[i]] = 1


hash_bitmap_encode = Op(name="hash_bitmap_encode", reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda)
