"""Coordinate lists: dense tensors to (indices, values) of their non-zeros and back (thesis section 3.2.2)."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cuda
from numpy.typing import NDArray
from torch import Tensor

from .compaction import count_reaching, mark, marked, reaching
from .kernels import CudaKernel, bits, check_list, check_numel, check_range, cpu_kernel, flat, host, host_bits
from .op import Finding, Op, Reading


class Coo(NamedTuple):
    """A sparse tensor.

    Attributes:
        indices: Where values stand in row-major order, int32.
        values: What stands there, as many.
    """

    indices: Tensor
    values: Tensor


def _encode_reference(dense: Tensor) -> Coo:
    """Return the non-zeros of `dense`, which has any shape, in ascending order.

    Zero of either sign is no entry; inf and nan are entries. Values keep their bits.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements.
    """
    elements = flat("coo_encode", dense)
    found = elements.nonzero().view(-1)
    return Coo(found.int(), elements[found])


def _decode_reference(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return the dense 1-D tensor of `numel` elements that has `values` at `indices` and zeros elsewhere.

    Indices may come in any order, none twice.

    Raises:
        OpError: The lists do not belong together or do not fit `numel`.
    """
    _check_decode(indices, values, numel)
    dense = torch.zeros(numel, dtype=values.dtype, device=values.device)
    dense[indices.long()] = values
    return dense


def _check_decode(indices: Tensor, values: Tensor, numel: int) -> None:
    check_numel("coo_decode", numel)
    check_list("coo_decode", indices, values)
    check_range("coo_decode", indices, numel)


def _encode_cpu(dense: Tensor) -> Coo:
    elements = flat("coo_encode", dense)
    found = reaching(elements, 1, count_reaching(elements, 1))
    assert found is not None
    return Coo(*found)


@cpu_kernel
def _place(indices: NDArray[np.int32], values: NDArray[Any], dense: NDArray[Any]) -> None:
    for i in range(indices.size):
        dense[indices[i]] = values[i]


def _decode_cpu(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    _check_decode(indices, values, numel)
    dense = torch.zeros(numel, dtype=values.dtype)
    _place(host(indices), host_bits(values), host_bits(dense))
    return dense


@Reading
def _encode_cuda(dense: Tensor) -> Finding[Coo]:
    elements = flat("coo_encode", dense)
    indices = yield from marked.finding(mark(elements))
    return Coo(indices, elements.index_select(0, indices))


@CudaKernel
def _place_kernel(indices: Any, values: Any, dense: Any) -> None:
    i = cuda.grid(1)
    if i < indices.size and 0 <= indices[i] < dense.size:
        dense[indices[i]] = values[i]


def _decode_cuda(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    _check_decode(indices, values, numel)
    dense = torch.zeros(numel, dtype=values.dtype, device=values.device)
    _place_kernel.launch(indices.numel(), indices.contiguous(), bits(values.contiguous()), bits(dense))
    return dense


coo_encode = Op(name="coo_encode", reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda)
coo_decode = Op(name="coo_decode", reference=_decode_reference, cpu=_decode_cpu, cuda=_decode_cuda)
