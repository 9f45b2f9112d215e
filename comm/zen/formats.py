"""How a sparse matrix becomes bytes: a list of coordinates, a bitmap, or all of it, whichever is smallest."""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ..errors import MessageError, OpError
from ..net.entries import within
from ..net.transport import from_bytes, to_bytes
from ..ops.bitmap import bitmap_bytes, bitmap_encode, bitmap_indices
from .sparse import Sparse

_INDEX_BYTES = 4
_TAG_BYTES = 1


class Format(IntEnum):
    """Ways to write a matrix; the number is the last byte of a message.

    Over a range of positions that a permutation gave a server, `BITMAP` is the hash bitmap of Zen (thesis 3.3.4).
    """

    COO = 0
    BITMAP = 1
    DENSE = 2


ALL = tuple(Format)


def payload_bytes(form: Format, *, count: int, length: int, row_bytes: int) -> int:
    """Return the bytes of a message about `count` of `length` rows of `row_bytes` each, without its tag."""
    match form:
        case Format.COO:
            return count * (_INDEX_BYTES + row_bytes)
        case Format.BITMAP:
            return bitmap_bytes(length) + count * row_bytes
    return length * row_bytes


def cheapest(allowed: Sequence[Format], *, count: int, length: int, row_bytes: int) -> Format:
    """Return the allowed format with the fewest bytes; for fp32 elements that is COO up to a density of 1/32, the
    bitmap up to 31/32."""
    return min(allowed, key=lambda form: payload_bytes(form, count=count, length=length, row_bytes=row_bytes))


def encode(parts: Sequence[Sparse], allowed: Sequence[Format] = ALL) -> list[Tensor]:
    """Return a message of each matrix that `decode` reads, in the cheapest format allowed; without rows it is empty."""
    return [_encode(part, allowed) for part in parts]


def _encode(sparse: Sparse, allowed: Sequence[Format]) -> Tensor:
    if not sparse.count:
        return torch.empty(0, dtype=torch.uint8, device=sparse.values.device)
    row_bytes = sparse.width * sparse.values.itemsize
    form = cheapest(allowed, count=sparse.count, length=sparse.length, row_bytes=row_bytes)
    tag = torch.full((_TAG_BYTES,), int(form), dtype=torch.uint8, device=sparse.values.device)
    if form is Format.COO:
        return to_bytes(sparse.indices, sparse.values, tag)
    if form is Format.BITMAP:
        return to_bytes(sparse.values, bitmap_encode(sparse.indices, sparse.length), tag)
    rows = sparse.values.new_zeros(sparse.length, sparse.width)
    rows[sparse.indices] = sparse.values
    return to_bytes(rows, tag)


def decode(messages: Sequence[Tensor], lengths: Sequence[int], *, width: int, dtype: torch.dtype) -> list[Sparse]:
    """Return the matrices of messages of `encode`, each of so many rows of `width` elements of `dtype`.

    Raises:
        MessageError: One is not such a message.
    """
    try:
        return [_decode(message, length, width, dtype) for message, length in zip(messages, lengths, strict=True)]
    except OpError as error:
        raise MessageError(f"a message came that is not a matrix: {error}") from error


def _decode(message: Tensor, length: int, width: int, dtype: torch.dtype) -> Sparse:
    if not message.numel():
        indices = torch.empty(0, dtype=torch.int32, device=message.device)
        return Sparse(indices=indices, values=message.new_empty(0, width, dtype=dtype), length=length)
    row_bytes, size, form = width * dtype.itemsize, message.numel() - _TAG_BYTES, int(message[-1])
    tag = (torch.uint8, _TAG_BYTES)
    if form == Format.COO:
        count = size // (_INDEX_BYTES + row_bytes)
        given, values, _ = from_bytes(message, (torch.int32, count), (dtype, count * width), tag)
        indices = within(given, length)
    elif form == Format.BITMAP:
        count = max(0, size - bitmap_bytes(length)) // row_bytes
        values, bitmap, _ = from_bytes(message, (dtype, count * width), (torch.uint8, bitmap_bytes(length)), tag)
        indices = bitmap_indices(bitmap, length)
        if indices.numel() != count:
            raise MessageError(
                f"a message came with {count} rows and a bitmap of {indices.numel()}; run the same version on all ranks"
            )
    elif form == Format.DENSE:
        values, _ = from_bytes(message, (dtype, length * width), tag)
        indices = torch.arange(length, dtype=torch.int32, device=message.device)
    else:
        raise MessageError(f"a message in format {form}; run the same version on all ranks")
    return Sparse(indices=indices, values=values.view(-1, width), length=length)
