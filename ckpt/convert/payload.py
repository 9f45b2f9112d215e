"""The payload that a rank would have captured: of each leaf the part that it has, out of the slots of other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from ..format.manifest import Layout, TensorSpec
from ..state.tree import Leaf, bytes_of
from .captures import BATCH_BYTES, Captures


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a tensor that one rank's slot has: of leaf `index` of `rank`, from element `start` on, what lies at
    `offset` and has `size`. Of a flat tensor, these are `times` as many, `every[0]` elements apart there, and
    `every[1]` apart in what is made.
    """

    rank: int
    index: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int = 0
    times: int = 1
    every: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A leaf to be made: the part of `size` at `offset` of the tensor that `pieces` are; or `given`.

    If it has another dtype than they have, it is cast. What no piece has is zero.
    """

    spec: TensorSpec
    pieces: tuple[Piece, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    given: Leaf | None = None

    def box(self, offset: Sequence[int], size: Sequence[int]) -> "Made":
        """Return what is made of the same, but the part of `size` at `offset`."""
        spec = replace(self.spec, shape=tuple(size), shard=None, stride=None, within=None)
        return replace(self, spec=spec, offset=tuple(offset), size=tuple(size))


def fill(captures: Captures, leaves: Sequence[Made], layout: Layout) -> torch.Tensor:
    """Return the payload that has `leaves`, read and verified now, some at a time.

    Raises:
        RestoreError: Nobody has a verified copy of something.
    """
    whole = np.zeros(layout.payload_bytes, dtype=np.uint8)
    batch: list[tuple[Made, Any]] = []
    size_bytes = 0
    for number, (one, offset) in enumerate(zip(leaves, layout.offsets, strict=True)):
        target = whole[offset : offset + one.spec.nbytes]
        if one.given is not None:
            target[:] = np.frombuffer(_content(one.given), dtype=np.uint8)
        for piece in one.pieces:
            if (rows := _rows(captures, one, piece)) is not None:
                captures.want(piece.rank, *rows[:2])
        batch.append((one, target))
        size_bytes += one.spec.nbytes
        if size_bytes >= BATCH_BYTES or number == len(leaves) - 1:
            captures.fetch(keep=False)
            for made, place in batch:
                _fill(captures, made, place)
            batch, size_bytes = [], 0
    return torch.from_numpy(whole)


def _content(leaf: Leaf) -> bytes:
    if isinstance(leaf, bytes):
        return leaf
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else bytes_of(leaf).numpy().tobytes()


def _rows(captures: Captures, made: Made, piece: Piece) -> tuple[int, int, tuple[slice, ...], tuple[slice, ...]] | None:
    """Return which bytes of a rank's payload have what is wanted of `piece`, and where that is in both.

    Those are whole rows of its first dimension.
    """
    manifest = captures.ranks[piece.rank].manifest
    itemsize = manifest.tensors[piece.index].itemsize
    start = manifest.offsets[piece.index] + piece.start * itemsize
    if piece.times > 1:  # flat tensors are made whole
        return start, start + ((piece.times - 1) * piece.every[0] + piece.size[0]) * itemsize, (), ()
    begins = [max(*pair) for pair in zip(made.offset, piece.offset, strict=True)]
    ends = [
        min(start + size, other + length)
        for start, size, other, length in zip(made.offset, made.size, piece.offset, piece.size, strict=True)
    ]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)) or 0 in made.size:
        return None
    source = [slice(begin - at, end - at) for begin, end, at in zip(begins, ends, piece.offset, strict=True)]
    target = tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, made.offset, strict=True))
    if not source:
        return start, start + itemsize, (), ()
    row_bytes = prod(piece.size[1:]) * itemsize
    rows = source[0]
    source[0] = slice(0, rows.stop - rows.start)
    return start + rows.start * row_bytes, start + rows.stop * row_bytes, tuple(source), target


def _fill(captures: Captures, made: Made, target: Any) -> None:
    if not target.size or not made.pieces:
        return
    stored = captures.ranks[made.pieces[0].rank].manifest.tensors[made.pieces[0].index]
    is_other = stored.dtype != made.spec.dtype
    raw = np.zeros(prod(made.size) * stored.itemsize, dtype=np.uint8) if is_other else target
    place = raw.reshape(*made.size, -1)
    for piece in made.pieces:
        if (rows := _rows(captures, made, piece)) is not None:
            begin, end, source, where = rows
            data = captures.data(piece.rank, begin, end)
            if piece.times > 1:
                size = piece.times, piece.size[0] * stored.itemsize
                before, after = ((each * stored.itemsize, 1) for each in piece.every)
                rows_there = as_strided(np.frombuffer(data, dtype=np.uint8), size, before)
                as_strided(raw[piece.offset[0] * stored.itemsize :], size, after)[:] = rows_there
                continue
            count = source[0].stop if source else 1
            shape = (count, *piece.size[1:], place.shape[-1]) if source else (place.shape[-1],)
            place[where] = np.frombuffer(data, dtype=np.uint8).reshape(shape)[source]
    if is_other:
        converted = torch.from_numpy(raw).view(getattr(torch, stored.dtype)).to(getattr(torch, made.spec.dtype))
        target[:] = converted.view(torch.uint8).numpy()
