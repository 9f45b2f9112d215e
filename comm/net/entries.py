"""Some elements of a flat gradient as (index, value) pairs, and what is left of the gradient without them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CommError, MessageError
from ..ops.coo import Coo
from ..ops.kernels import bounds
from ..ops.scatter import coo_add, scatter_add
from ..ops.topk import topk
from .transport import from_bytes, to_bytes

_INDEX = torch.int32


def to_message(entries: Coo) -> Tensor:
    """Return elements as bytes; `size_bytes` of them."""
    wide_first = entries.values.itemsize > _INDEX.itemsize
    return to_bytes(*(reversed(entries) if wide_first else entries))


def from_message(message: Tensor, dtype: torch.dtype, *, end: int, start: int = 0) -> Coo:
    """Return the elements that `to_message` wrote, with values of `dtype` and indices in [start, end).

    Raises:
        MessageError: The message has a size that no number of elements has, or another index.
    """
    indices, values = unchecked(message, dtype)
    return Coo(within(indices, end, start=start), values)


def unchecked(message: Tensor, dtype: torch.dtype) -> Coo:
    """Return the same with whatever indices came, for what checks them itself.

    Raises:
        MessageError: The message has a size that no number of elements has.
    """
    count = message.numel() // size_bytes(1, dtype)
    if dtype.itemsize <= _INDEX.itemsize:
        return Coo(*from_bytes(message, (_INDEX, count), (dtype, count)))
    values, indices = from_bytes(message, (dtype, count), (_INDEX, count))
    return Coo(indices, values)


def within(indices: Tensor, end: int, *, start: int = 0) -> Tensor:
    """Return int32 indices that came in a message, and are in [start, end).

    Raises:
        MessageError: One is not.
    """

    low, high = bounds(indices)
    if indices.numel() and (low < start or high >= end):
        raise MessageError(
            f"a message came with indices from {low} to {high}, where {start} to {end - 1} were expected; "
            f"run the same version with the same options on all ranks"
        )
    return indices


def size_bytes(count: int, dtype: torch.dtype) -> int:
    """Return the size of a message with `count` elements of `dtype`."""
    return count * (_INDEX.itemsize + dtype.itemsize)


def kept_count(numel: int, density: float) -> int:
    """Return k: how many of `numel` elements are kept at this density, at least one."""
    if numel > torch.iinfo(_INDEX).max:
        raise CommError(f"a gradient of {numel} elements has no int32 indices; split it into smaller tensors")
    return min(numel, max(1, round(density * numel)))


def check_density(density: float) -> float:
    """Return the share of elements that is sent.

    Raises:
        CommError: It is not in (0, 1].
    """
    if not 0 < density <= 1:
        raise CommError(f"density {density} is not in (0, 1]; 0.01 sends one element of 100")
    return density


def check_residual(key: str, residual: Tensor, like: Tensor) -> Tensor:
    """Return what is to be added to `like`, the gradient of `key`.

    Raises:
        CommError: It is of another shape or type.
    """
    if residual.shape == like.shape and residual.dtype == like.dtype:
        return residual
    raise CommError(
        f"{key} is {tuple(like.shape)} of {like.dtype}, its residual {tuple(residual.shape)} of {residual.dtype}; load "
        f"the state of the same model"
    )


def top_k(values: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` elements of greatest magnitude; NaN is the greatest."""
    return topk(values, count).indices


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return finite `values` as the nearest finite ones of `dtype`; inf and NaN stay what they are."""
    if values.dtype == dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)


def all_finite(values: Tensor) -> Tensor:
    """Return as one bool, where `values` are, whether they have no inf and no NaN."""
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    # Of both extremes one tells it, in one reading pass.
    return torch.stack(torch.aminmax(values)).isfinite().all()


def take(work: Tensor, chosen: Tensor, dtype: torch.dtype) -> Coo:
    """Move the elements at the indices `chosen` out of the flat `work`, which keeps what rounding to `dtype` leaves."""
    exact = work[chosen]
    values = rounded(exact, dtype)
    work[chosen] = exact - values
    return Coo(indices=chosen, values=values)


def add_to(dense: Tensor, *lists: Coo) -> None:
    """Add the elements to the flat `dense`, in its precision, list by list."""
    for entries in lists:
        scatter_add(dense, entries.indices, entries.values.to(dense.dtype))


def added(lists: Sequence[Coo], exact: torch.dtype) -> Coo:
    """Return the sum of at least one list as one, in the precision of `exact`; added in the order given."""
    indices, values = lists[0].indices, lists[0].values.to(exact)
    for entries in lists[1:]:
        indices, values = coo_add(indices, values, entries.indices, entries.values.to(exact))
    return Coo(indices=indices, values=values)


def joined(lists: Sequence[Coo]) -> Coo:
    """Return lists of different parts of a gradient, one after the other, as one."""
    return Coo(
        indices=torch.cat([entries.indices for entries in lists]),
        values=torch.cat([entries.values for entries in lists]),
    )


def copied(exact: Tensor, room: Tensor) -> Tensor:
    """Return a copy of `exact`: in `room`, a tensor of its shape, if that has its dtype."""
    # Memory that is new costs a page fault for each page, on a CPU more than the copy itself.
    return room.copy_(exact) if room.dtype == exact.dtype else exact.clone()
