"""Sums of sparse tensors: into a dense tensor, and of two coordinate lists."""

from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .coo import Coo
from .kernels import CudaKernel, check_list, check_range, cpu_kernel, cuda_function, flat, host
from .op import Op

_NATIVE = (torch.float32, torch.float64)


def scatter_add(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Add each value to the element of `dense` at its index, in place, and return `dense`.

    An index may occur more than once. On the CPU its values are added in the order of the list; on CUDA in any order,
    so there the result is the same bit for bit only where no index of one list occurs twice. Half precision rounds
    after each addition.

    Args:
        dense: Contiguous, of any shape.
        indices: Into the row-major order of `dense`, int32.
        values: Of the dtype of `dense`.

    Raises:
        OpError: The tensors do not belong together, or an index does not fit; `dense` is as it was.
    """
    if not dense.is_contiguous():
        raise OpError(f"scatter_add: cannot write to a tensor with strides {tuple(dense.stride())}; make it contiguous")
    elements = flat("scatter_add", dense)
    check_list("scatter_add", indices, values)
    if values.dtype != dense.dtype:
        raise OpError(f"scatter_add: values of {values.dtype} cannot be added to {dense.dtype}; convert them")
    check_range("scatter_add", indices, elements.numel())
    elements.index_add_(0, indices, values.detach())
    return dense


def _check_add(
    indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum of two sparse tensors as one list, ascending.

    Each list is ascending and without duplicates. An index of both is one entry, also where the sum is zero. The result
    is the same bit for bit on all backends, up to the payload of nan.

    Raises:
        OpError: The lists do not belong together. That they ascend is not checked.
    """
    check_list("coo_add", indices, values)
    check_list("coo_add", other_indices, other_values)
    if values.dtype != other_values.dtype:
        raise OpError(f"coo_add: lists of {values.dtype} and {other_values.dtype} have no common sum; convert one")
    return indices, values.detach(), other_indices, other_values.detach()


def _add_reference(indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor) -> Coo:
    both, inverse = torch.unique(torch.cat([indices, other_indices]), return_inverse=True)
    sums = torch.zeros(both.numel(), dtype=values.dtype, device=values.device)
    # Not added to zero: that would lose the sign of -0.0.
    sums[inverse[: indices.numel()]] = values
    theirs = inverse[indices.numel() :]
    ours = torch.zeros(both.numel(), dtype=torch.bool, device=values.device)
    ours[inverse[: indices.numel()]] = True
    sums[theirs] = torch.where(ours[theirs], sums[theirs] + other_values, other_values)
    return Coo(both, sums)


@cpu_kernel
def _merge(
    indices: NDArray[np.int32],
    values: NDArray[Any],
    other_indices: NDArray[np.int32],
    other_values: NDArray[Any],
    both: NDArray[np.int32],
    sums: NDArray[Any],
) -> int:
    i = j = place = 0
    while i < indices.size and j < other_indices.size:
        ours, theirs = indices[i], other_indices[j]
        both[place] = min(ours, theirs)
        if ours == theirs:
            sums[place] = values[i] + other_values[j]
        else:
            sums[place] = values[i] if ours < theirs else other_values[j]
        i += ours <= theirs
        j += theirs <= ours
        place += 1
    while i < indices.size:
        both[place], sums[place] = indices[i], values[i]
        i += 1
        place += 1
    while j < other_indices.size:
        both[place], sums[place] = other_indices[j], other_values[j]
        j += 1
        place += 1
    return place


def _add_cpu(indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor) -> Coo:
    # Half precision is widened: each sum has one addition, so rounding once at the end is what torch does as well.
    wide = values.dtype if values.dtype in _NATIVE else torch.float32
    both = torch.empty(indices.numel() + other_indices.numel(), dtype=torch.int32)
    sums = torch.empty(both.numel(), dtype=wide)
    count = _merge(
        host(indices),
        host(values.to(wide)),
        host(other_indices),
        host(other_values.to(wide)),
        host(both),
        host(sums),
    )
    return Coo(both[:count], sums[:count].to(values.dtype))


@cuda_function
def _below(indices: Any, index: int) -> int:
    """Return how many of the ascending indices are below `index`."""
    low = 0
    high = indices.size
    while low < high:
        middle = (low + high) >> 1
        if indices[middle] < index:
            low = middle + 1
        else:
            high = middle
    return low


@CudaKernel
def _match_kernel(indices: Any, other_indices: Any, matches: Any) -> None:
    i = cuda.grid(1)
    if i < indices.size:
        j = _below(other_indices, indices[i])
        matches[i] = 1 if j < other_indices.size and other_indices[j] == indices[i] else 0


@CudaKernel
def _merge_kernel(
    indices: Any, values: Any, other_indices: Any, other_values: Any, matched: Any, both: Any, sums: Any
) -> None:
    # matched[i] counts the indices up to and with i that both lists have; each of those is one entry of the result.
    i = cuda.grid(1)
    if i < indices.size:
        j = _below(other_indices, indices[i])
        before = matched[i - 1] if i else 0
        both[i + j - before] = indices[i]
        sums[i + j - before] = values[i] + other_values[j] if matched[i] > before else values[i]
    elif i < indices.size + other_indices.size:
        j = i - indices.size
        i = _below(indices, other_indices[j])
        before = matched[i - 1] if i else 0
        if i == indices.size or indices[i] != other_indices[j]:
            both[i + j - before] = other_indices[j]
            sums[i + j - before] = other_values[j]


def _add_cuda(indices: Tensor, values: Tensor, other_indices: Tensor, other_values: Tensor) -> Coo:
    wide = values.dtype if values.dtype in _NATIVE else torch.float32
    indices, other_indices = indices.contiguous(), other_indices.contiguous()
    matches = torch.empty_like(indices)
    _match_kernel.launch(indices.numel(), indices, other_indices, matches)
    matched = matches.cumsum(0, dtype=torch.int32)
    count = indices.numel() + other_indices.numel() - (int(matched[-1]) if indices.numel() else 0)
    both = torch.empty(count, dtype=torch.int32, device=indices.device)
    sums = torch.empty(count, dtype=wide, device=indices.device)
    first, second = values.to(wide).contiguous(), other_values.to(wide).contiguous()
    threads = indices.numel() + other_indices.numel()
    _merge_kernel.launch(threads, indices, first, other_indices, second, matched, both, sums)
    return Coo(both, sums.to(values.dtype))


coo_add = Op(name="coo_add", check=_check_add, reference=_add_reference, cpu=_add_cpu, cuda=_add_cuda)
