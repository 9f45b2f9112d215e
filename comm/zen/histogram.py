"""Two-pass histogram partition: which server gets which non-zeros, exact, stable and without hash memory."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError
from ..ops.kernels import CudaKernel, bits, check_list, check_range, cpu_kernel, host, host_bits
from ..ops.op import Op
from ..ops.spread import Spread, count_owners, index_cuda, owner_cuda, write_indices

_MIN_RUN = 16


class Parts(NamedTuple):
    """A sparse tensor, divided: the entries of part 0, then those of part 1, and so on.

    Attributes:
        places: Where each stands in its part, int32, in [0, spread.size(part)): a server needs memory for its own share
            of the tensor only.
        values: As many.
        counts: Entries of each part.
    """

    places: Tensor
    values: Tensor
    counts: list[int]


def _check_partition(indices: Tensor, values: Tensor, spread: Spread) -> tuple[Tensor, Tensor, Spread]:
    """Return the entries of a sparse tensor by the part of `spread` that owns them, in their order within a part.

    It gives each part the same set as Algorithm 3.2 of the thesis with the same h0 (see `hierarchical_hash`).

    Raises:
        OpError: The lists do not belong together, or an index does not fit the tensor of `spread`.
    """
    check_list("partition", indices, values)
    check_range("partition", indices, spread.numel)
    return indices, values.detach(), spread


def _partition_reference(indices: Tensor, values: Tensor, spread: Spread) -> Parts:
    owners = spread.owners(indices)
    order = owners.argsort(stable=True)
    counts: list[int] = torch.bincount(owners, minlength=spread.parts).tolist()
    return Parts(spread.positions(indices)[order], values[order], counts)


@cpu_kernel
def _distribute(
    stripes: NDArray[np.int32],
    values: NDArray[Any],
    owners: NDArray[np.int32],
    next_: NDArray[np.int64],
    places: NDArray[np.int32],
    sorted_values: NDArray[Any],
) -> None:
    for i in range(stripes.size):
        at = next_[owners[i]]
        next_[owners[i]] = at + 1
        places[at] = stripes[i]
        sorted_values[at] = values[i]


def _partition_cpu(indices: Tensor, values: Tensor, spread: Spread) -> Parts:
    owners, stripes = np.empty((2, indices.numel()), np.int32)
    counts = np.zeros(spread.parts, np.int64)
    count_owners(host(indices), spread.parts, spread.seed, owners, stripes, counts)
    places, sorted_values = torch.empty_like(indices), torch.empty_like(values)
    next_ = np.cumsum(counts) - counts
    _distribute(stripes, host_bits(values), owners, next_, host(places), host_bits(sorted_values))
    return Parts(places, sorted_values, counts.tolist())


@CudaKernel
def _count_kernel(indices: Any, run: int, threads: int, parts: int, seed: int, counts: Any) -> None:
    thread = cuda.grid(1)
    if thread < threads:
        for i in range(thread * run, min((thread + 1) * run, indices.size)):
            counts[owner_cuda(indices[i], parts, seed) * threads + thread] += 1


@CudaKernel
def _distribute_kernel(
    indices: Any,
    values: Any,
    run: int,
    threads: int,
    parts: int,
    seed: int,
    next_: Any,
    places: Any,
    sorted_values: Any,
) -> None:
    thread = cuda.grid(1)
    if thread < threads:
        for i in range(thread * run, min((thread + 1) * run, indices.size)):
            counter = owner_cuda(indices[i], parts, seed) * threads + thread
            at = next_[counter]
            next_[counter] = at + 1
            places[at] = np.uint32(indices[i]) // np.uint32(parts)
            sorted_values[at] = values[i]


def _partition_cuda(indices: Tensor, values: Tensor, spread: Spread) -> Parts:
    indices, elements = indices.contiguous(), bits(values.contiguous())
    # A thread has a counter for each part, and enough indices that counters are the smaller part of its work.
    run = max(_MIN_RUN, 4 * spread.parts)
    threads = -(-indices.numel() // run)
    counts = torch.zeros(spread.parts, threads, dtype=torch.int32, device=indices.device)
    sizes = (run, threads, spread.parts, spread.seed)
    _count_kernel.launch(threads, indices, *sizes, counts.view(-1))
    next_ = counts.view(-1).cumsum(0, dtype=torch.int32) - counts.view(-1)
    places, sorted_values = torch.empty_like(indices), torch.empty_like(elements)
    _distribute_kernel.launch(threads, indices, elements, *sizes, next_, places, sorted_values)
    return Parts(places, sorted_values.view(values.dtype), counts.sum(1).tolist())


def _check_indices(positions: Tensor, spread: Spread, part: int) -> tuple[Tensor, Spread, int]:
    """Return the int32 indices that stand at `positions` of `part`.

    Raises:
        OpError: There is no such part, or a position is not of it.
    """
    if not 0 <= part < spread.parts:
        raise OpError(f"part {part} is none of the {spread.parts} parts; number them from 0")
    check_list("indices_at", positions)
    check_range("indices_at", positions, spread.size(part))
    return positions, spread, part


def _indices_reference(positions: Tensor, spread: Spread, part: int) -> Tensor:
    return spread.indices(positions, part)


def _indices_cpu(positions: Tensor, spread: Spread, part: int) -> Tensor:
    indices = torch.empty_like(positions)
    write_indices(host(positions), part, spread.parts, spread.seed, host(indices))
    return indices


@CudaKernel
def _indices_kernel(positions: Any, part: int, parts: int, seed: int, indices: Any) -> None:
    i = cuda.grid(1)
    if i < positions.size:
        indices[i] = index_cuda(positions[i], part, parts, seed)


def _indices_cuda(positions: Tensor, spread: Spread, part: int) -> Tensor:
    positions = positions.contiguous()
    indices = torch.empty_like(positions)
    _indices_kernel.launch(positions.numel(), positions, part, spread.parts, spread.seed, indices)
    return indices


partition = Op(
    name="partition", check=_check_partition, reference=_partition_reference, cpu=_partition_cpu, cuda=_partition_cuda
)
indices_at = Op(
    name="indices_at", check=_check_indices, reference=_indices_reference, cpu=_indices_cpu, cuda=_indices_cuda
)
