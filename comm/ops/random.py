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
from .kernels import CudaKernel, check_numel, cpu_kernel, flat, host
from .op import Op
from .spread import murmur, murmur_cpu, murmur_cuda


def _check(like: Tensor, numel: int, k: int, *, seed: int) -> tuple[torch.device, int, int, int]:
    """Return the int32 indices that `seed` draws of `numel` elements, ascending.

    Args:
        like: A tensor on the device where they are wanted.
        numel: Elements to draw from.
        k: How many are drawn, in [0, numel].
        seed: In [0, 2^32), the same on all ranks.

    Raises:
        OpError: An argument is out of its range.
    """
    check_numel("random_k", numel)
    if not (0 <= k <= numel and 0 <= seed < 2**32):
        raise OpError(f"random_k: k {k} of {numel} elements, seed {seed}; give a k in [0, {numel}] and 32 bits of seed")
    return like.device, numel, k, seed


def _indices_reference(device: torch.device, numel: int, k: int, seed: int) -> Tensor:
    strides = torch.arange(k, device=device)
    starts, ends = strides * numel // max(k, 1), (strides + 1) * numel // max(k, 1)
    return (starts + (murmur(strides, seed) * (ends - starts) >> 32)).int()


@cpu_kernel
def _draw(numel: int, seed: int, indices: NDArray[np.int32]) -> None:
    start = 0
    for i in range(indices.size):
        end = (i + 1) * numel // indices.size
        indices[i] = start + ((murmur_cpu(i, seed) * (end - start)) >> 32)
        start = end


def _indices_cpu(device: torch.device, numel: int, k: int, seed: int) -> Tensor:
    indices = torch.empty(k, dtype=torch.int32)
    _draw(numel, seed, host(indices))
    return indices


@CudaKernel
def _draw_kernel(numel: int, seed: int, indices: Any) -> None:
    i = cuda.grid(1)
    if i < indices.size:
        start, end = i * numel // indices.size, (i + 1) * numel // indices.size
        indices[i] = start + ((murmur_cuda(i, seed) * (end - start)) >> 32)


def _indices_cuda(device: torch.device, numel: int, k: int, seed: int) -> Tensor:
    indices = torch.empty(k, dtype=torch.int32, device=device)
    _draw_kernel.launch(k, numel, seed, indices)
    return indices


random_indices = Op(
    name="random_indices", check=_check, reference=_indices_reference, cpu=_indices_cpu, cuda=_indices_cuda
)


def random_select(dense: Tensor, k: int, *, seed: int) -> Tensor:
    """Return the `k` elements of `dense`, floating point, in row-major order, that `seed` draws (`random_indices`)."""
    elements = flat("random_select", dense)
    return elements.index_select(0, random_indices(elements, elements.numel(), k, seed=seed))


def random_place(values: Tensor, numel: int, *, seed: int) -> Tensor:
    """Return a 1-D tensor of `numel` elements: `values` where `random_select` took them, 0 elsewhere."""
    indices = random_indices(values, numel, values.numel(), seed=seed)
    return torch.zeros(numel, dtype=values.dtype, device=values.device).index_copy_(0, indices.long(), values.detach())
