"""Random-k without indices on the wire: all ranks draw the same elements from a seed (Stich et al., 2018).

One element of each of k equal strides is drawn. So each element has the same chance, k / numel (in strides that differ
by one element: up to that rounding), none is drawn twice, the list is ascending, and the i-th index is computed from i.
"""

from typing import Any

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from .kernels import CudaKernel, bits, check_numel, cpu_kernel, flat, host_bits
from .op import Op
from .spread import murmur, murmur_cpu, murmur_cuda

_AHEAD = 256


def random_indices(numel: int, k: int, *, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the int32 indices that `seed` draws, ascending: the specification of the kernels.

    Raises:
        OpError: `k` is not in [0, numel], or the seed not in [0, 2^32).
    """
    _check(numel, k, seed)
    strides = torch.arange(k, device=device)
    starts, ends = strides * numel // max(k, 1), (strides + 1) * numel // max(k, 1)
    return (starts + (murmur(strides, seed) * (ends - starts) >> 32)).int()


def _select_reference(dense: Tensor, k: int, *, seed: int) -> Tensor:
    """Return the `k` elements of `dense`, in row-major order, that `seed` draws.

    Args:
        dense: Floating point, of any shape.
        k: In [0, numel].
        seed: In [0, 2^32), the same on all ranks.

    Raises:
        OpError: An argument is out of its range.
    """
    elements = flat("random_select", dense)
    return elements[random_indices(elements.numel(), k, seed=seed, device=dense.device).long()]


def _place_reference(values: Tensor, numel: int, *, seed: int) -> Tensor:
    """Return a 1-D tensor of `numel` elements: `values` where `random_select` took them, 0 elsewhere.

    Raises:
        OpError: An argument is out of its range.
    """
    indices = random_indices(numel, values.numel(), seed=seed, device=values.device)
    dense = torch.zeros(numel, dtype=values.dtype, device=values.device)
    dense[indices.long()] = values.detach()
    return dense


def _check(numel: int, k: int, seed: int) -> None:
    check_numel("random_k", numel)
    if not (0 <= k <= numel and 0 <= seed < 2**32):
        raise OpError(f"random_k: k {k} of {numel} elements, seed {seed}; give a k in [0, {numel}] and 32 bits of seed")


@cpu_kernel
def _select(elements: NDArray[Any], seed: int, values: NDArray[Any]) -> None:
    # Places come first, so that many reads of far memory are under way at once.
    places = np.empty(min(_AHEAD, values.size), np.int64)
    begin = 0
    for first in range(0, values.size, _AHEAD):
        count = min(_AHEAD, values.size - first)
        for i in range(count):
            end = (first + i + 1) * elements.size // values.size
            places[i] = begin + ((murmur_cpu(first + i, seed) * (end - begin)) >> 32)
            begin = end
        for i in range(count):
            values[first + i] = elements[places[i]]


def _select_cpu(dense: Tensor, k: int, *, seed: int) -> Tensor:
    elements = flat("random_select", dense)
    _check(elements.numel(), k, seed)
    values = torch.empty(k, dtype=dense.dtype)
    _select(host_bits(elements), seed, host_bits(values))
    return values


@cpu_kernel
def _place(values: NDArray[Any], seed: int, dense: NDArray[Any]) -> None:
    start = 0
    for i in range(values.size):
        end = (i + 1) * dense.size // values.size
        dense[start + ((murmur_cpu(i, seed) * (end - start)) >> 32)] = values[i]
        start = end


def _place_cpu(values: Tensor, numel: int, *, seed: int) -> Tensor:
    _check(numel, values.numel(), seed)
    dense = torch.zeros(numel, dtype=values.dtype)
    _place(host_bits(values), seed, host_bits(dense))
    return dense


@CudaKernel
def _select_kernel(elements, seed, values):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < values.size:
        start, end = i * elements.size // values.size, (i + 1) * elements.size // values.size
        values[i] = elements[start + ((murmur_cuda(i, seed) * (end - start)) >> 32)]


def _select_cuda(dense: Tensor, k: int, *, seed: int) -> Tensor:
    elements = flat("random_select", dense)
    _check(elements.numel(), k, seed)
    values = torch.empty(k, dtype=dense.dtype, device=dense.device)
    _select_kernel.launch(k, bits(elements), seed, bits(values))
    return values


@CudaKernel
def _place_kernel(values, seed, dense):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < values.size:
        start, end = i * dense.size // values.size, (i + 1) * dense.size // values.size
        dense[start + ((murmur_cuda(i, seed) * (end - start)) >> 32)] = values[i]


def _place_cuda(values: Tensor, numel: int, *, seed: int) -> Tensor:
    _check(numel, values.numel(), seed)
    dense = torch.zeros(numel, dtype=values.dtype, device=values.device)
    _place_kernel.launch(values.numel(), bits(values.contiguous()), seed, bits(dense))
    return dense


random_select = Op(name="random_select", reference=_select_reference, cpu=_select_cpu, cuda=_select_cuda)
random_place = Op(name="random_place", reference=_place_reference, cpu=_place_cpu, cuda=_place_cuda)
