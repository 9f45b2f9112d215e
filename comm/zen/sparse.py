"""Gradients of which few rows are not zero: taken out of a tensor, added up, put back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CommError
from ..ops.block import block_encode
from ..ops.coo import coo_decode, coo_encode
from ..ops.scatter import coo_add, scatter_add

_DENSE_SHARE = 1 / 8
"""From how many entries per row on marking them in a dense vector, or adding elements into one, beats sorting."""
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sparse:
    """A matrix of `length` rows, given by those that are not zero.

    A gradient becomes one by cutting it into rows of `width` consecutive elements: 1 to treat each element by itself,
    more for embeddings, whose gradients are zero by whole rows.

    Attributes:
        indices: int32, ascending: which rows are given.
        values: (number of indices, width).
        length: Rows of the matrix.
    """

    indices: Tensor
    values: Tensor
    length: int

    @property
    def count(self) -> int:
        """Number of rows given."""
        return self.indices.numel()

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.values.shape[1]


def row_width(shape: Sequence[int], at_most: int) -> int:
    """Return the greatest width up to `at_most` that cuts the last dimensions of `shape` evenly; 1 for vectors."""
    last = math.prod(shape[1:]) if len(shape) > 1 else 1
    return max((width for width in range(1, min(at_most, last) + 1) if last % width == 0), default=1)


def compress(gradient: Tensor, width: int = 1) -> Sparse:
    """Return the rows of `gradient` that are not all zero; inf and NaN are not zero.

    Args:
        gradient: Any shape, the last row filled up with zeros; or a torch sparse COO tensor with one sparse dimension,
            whose other dimensions `width` divides.
        width: Elements of a row.

    Raises:
        CommError: The sparse tensor is not such a one.
    """
    if gradient.is_sparse:
        return _compress_coo(gradient, width)
    indices, values = coo_encode(gradient) if width == 1 else block_encode(gradient, width)
    return Sparse(indices=indices, values=values.view(-1, width), length=-(-gradient.numel() // width))


def _compress_coo(gradient: Tensor, width: int) -> Sparse:
    gradient = gradient.detach().coalesce()
    if gradient.sparse_dim() != 1 or math.prod(gradient.shape[1:]) % width:
        raise CommError(
            f"a sparse gradient of shape {list(gradient.shape)} with {gradient.sparse_dim()} sparse dimensions cannot "
            f"be cut into rows of {width} elements; give one sparse dimension and a width that divides the others"
        )
    found = compress(gradient.values().contiguous(), width)
    per_row = math.prod(gradient.shape[1:]) // width
    rows = gradient.indices()[0][found.indices // per_row]
    indices = rows * per_row + found.indices % per_row
    return Sparse(indices=indices.int(), values=found.values, length=gradient.shape[0] * per_row)


def expand(sparse: Sparse, like: Tensor) -> Tensor:
    """Return the matrix, whose indices may be in any order, as a tensor of the shape and layout of `like`."""
    if like.is_sparse:
        return _expand_coo(sparse, like)
    # Single elements are put back faster as a list than as rows of one.
    return coo_decode(sparse.indices, sparse.values.squeeze(1), like.numel()).view(like.shape)


def _expand_coo(sparse: Sparse, like: Tensor) -> Tensor:
    per_row = max(1, math.prod(like.shape[1:]) // sparse.width)
    rows, places = torch.unique(sparse.indices // per_row, return_inverse=True)
    values = sparse.values.new_zeros(rows.numel() * per_row, sparse.width)
    values[places * per_row + sparse.indices % per_row] = sparse.values
    return torch.sparse_coo_tensor(
        rows[None].long(),
        values.view(rows.numel(), *like.shape[1:]),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of at least one matrix; each element is added in the order of `parts`.

    Numbers of less than four bytes are added as float32 and rounded once, at the end.
    """
    first = parts[0]
    wide = _WIDE.get(first.values.dtype, first.values.dtype)
    if first.width == 1 and len(parts) == 2:
        one, other = ((part.indices, part.values.view(-1).to(wide)) for part in parts)
        indices, sums = coo_add(*one, *other)
        sums = sums.view(-1, 1)
    elif first.width == 1 and sum(part.count for part in parts) >= _DENSE_SHARE * first.length:
        whole = first.values.new_zeros(first.length, 1, dtype=wide)
        for part in parts:
            scatter_add(whole, part.indices, part.values.view(-1).to(wide))
        total = compress(whole)
        indices, sums = total.indices, total.values
    else:
        indices, places = _union(parts)
        sums = first.values.new_zeros(indices.numel(), first.width, dtype=wide)
        for part, place in zip(parts, torch.split(places, [part.count for part in parts]), strict=True):
            sums.index_add_(0, place, part.values.to(wide))
    return Sparse(indices=indices, values=sums.to(first.values.dtype), length=first.length)


def _union(parts: Sequence[Sparse]) -> tuple[Tensor, Tensor]:
    """Return which rows are given, ascending, and where among them each row of each part stands."""
    given, length = torch.cat([part.indices for part in parts]), parts[0].length
    if given.numel() < _DENSE_SHARE * length:
        indices, places = torch.unique(given, return_inverse=True)
        return indices, places
    present = torch.zeros(length, dtype=torch.bool, device=given.device)
    present.index_fill_(0, given.long(), True)
    # On a CPU torch adds at places of int64 several times faster than at those of int32.
    return present.nonzero().view(-1).int(), present.cumsum(0).index_select(0, given) - 1
