"""Coordinate lists: dense tensors to (indices, values) of their non-zeros and back (thesis section 3.2.2)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .compaction import mark, marked, reaching
from .kernels import check_list, check_numel, check_range, flat
from .op import Op


class Coo(NamedTuple):
    """A sparse tensor.

    Attributes:
        indices: Where values stand in row-major order, int32; or which blocks are given, of a tensor cut into blocks.
        values: What stands there, as many; or [indices, block], behind the tensor's end zeros.
    """

    indices: Tensor
    values: Tensor


def _check_encode(dense: Tensor) -> tuple[Tensor]:
    """Return the non-zeros of `dense`, which has any shape, in ascending order.

    Zero of either sign is no entry; inf and nan are entries. Values keep their bits.

    Raises:
        OpError: `dense` is not floating point, or has more than 2^31-1 elements.
    """
    return (flat("coo_encode", dense),)


def _encode_reference(elements: Tensor) -> Coo:
    found = elements.nonzero().view(-1)
    return Coo(found.int(), elements[found])


def _encode_cpu(elements: Tensor) -> Coo:
    found = reaching(elements, 1, elements.numel())
    assert found is not None
    return Coo(*found)


def _encode_cuda(elements: Tensor) -> Coo:
    indices = marked(mark(elements))
    return Coo(indices, elements.index_select(0, indices))


coo_encode = Op(name="coo_encode", check=_check_encode, reference=_encode_reference, cpu=_encode_cpu, cuda=_encode_cuda)


def coo_decode(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return the dense 1-D tensor of `numel` elements that has `values` at `indices` and zeros elsewhere.

    Indices may come in any order, none twice. Values with two dimensions are blocks, indices theirs.

    Raises:
        OpError: The lists do not belong together or do not fit `numel`.
    """
    check_numel("coo_decode", numel)
    check_list("coo_decode", indices, values, most_dims=2)
    count = -(-numel // values.shape[1:].numel())
    check_range("coo_decode", indices, count)
    dense = torch.zeros(count, *values.shape[1:], dtype=values.dtype, device=values.device)
    return dense.index_copy_(0, indices.long(), values.detach()).view(-1)[:numel]
