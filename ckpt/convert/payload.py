"""The payload that a rank would have captured: of each leaf the part that it has, out of the slots of other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from ..format.manifest import Layout, TensorSpec
from ..state.memory import content_of
from ..state.tree import Leaf
from .captures import BATCH_BYTES, Captures


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a tensor that one rank's slot has: of leaf `index` of `rank`, from element `start` on, what lies at
    `offset` and has `size`.
    """

    rank: int
    index: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """The part of `size` at `offset` of the tensor that `pieces` are, which a leaf has from element `at` on."""

    pieces: tuple[Piece, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    at: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A leaf to be made of `regions`, of which a flat tensor has several; or `given`.

    If it has another dtype than the pieces, it is cast. What no piece has is zero.
    """

    spec: TensorSpec
    regions: tuple[Region, ...] = ()
    given: Leaf | None = None

    def box(self, offset: Sequence[int], size: Sequence[int]) -> "Made":
        """Return what is made of the same, but the part of `size` at `offset`."""
        (region,) = self.regions
        spec = replace(self.spec, shape=tuple(size), shard=None, stride=None, within=None)
        return replace(self, spec=spec, regions=(replace(region, offset=tuple(offset), size=tuple(size)),))


def whole(rank: int, index: int, spec: TensorSpec) -> Made:
    """Return the leaf that `rank` has as `index`, wherever it lies in memory."""
    offset = (0,) * len(spec.shape)
    piece = Piece(rank=rank, index=index, offset=offset, size=spec.shape)
    region = Region(pieces=(piece,), offset=offset, size=spec.shape)
    return Made(spec=replace(spec, within=None), regions=(region,))


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
            torch.from_numpy(target).copy_(content_of(one.given))
        for region in one.regions:
            for piece in region.pieces:
                if (rows := _rows(captures, region, piece)) is not None:
                    captures.want(piece.rank, *rows[:2])
        batch.append((one, target))
        size_bytes += one.spec.nbytes
        if size_bytes >= BATCH_BYTES or number == len(leaves) - 1:
            captures.fetch(keep=False)
            for made, place in batch:
                _fill(captures, made, place)
            batch, size_bytes = [], 0
    return torch.from_numpy(whole)


def _rows(
    captures: Captures, region: Region, piece: Piece
) -> tuple[int, int, tuple[slice, ...], tuple[slice, ...]] | None:
    """Return which bytes of a rank's payload have what is wanted of `piece`, and where that is in both.

    Those are whole rows of its first dimension.
    """
    manifest = captures.ranks[piece.rank].manifest
    itemsize = manifest.tensors[piece.index].itemsize
    start = manifest.offsets[piece.index] + piece.start * itemsize
    begins = [max(*pair) for pair in zip(region.offset, piece.offset, strict=True)]
    ends = [
        min(start + size, other + length)
        for start, size, other, length in zip(region.offset, region.size, piece.offset, piece.size, strict=True)
    ]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)) or 0 in region.size:
        return None
    source = [slice(begin - at, end - at) for begin, end, at in zip(begins, ends, piece.offset, strict=True)]
    target = tuple(slice(begin - at, end - at) for begin, end, at in zip(begins, ends, region.offset, strict=True))
    if not source:
        return start, start + itemsize, (), ()
    row_bytes = prod(piece.size[1:]) * itemsize
    rows = source[0]
    source[0] = slice(0, rows.stop - rows.start)
    return start + rows.start * row_bytes, start + rows.stop * row_bytes, tuple(source), target


def _fill(captures: Captures, made: Made, target: Any) -> None:
    pieces = [(region, piece) for region in made.regions for piece in region.pieces]
    if not target.size or not pieces:
        return
    first = pieces[0][1]
    stored = captures.ranks[first.rank].manifest.tensors[first.index]
    is_other = stored.dtype != made.spec.dtype
    raw = np.zeros(prod(made.spec.shape) * stored.itemsize, dtype=np.uint8) if is_other else target
    for region, piece in pieces:
        if (rows := _rows(captures, region, piece)) is not None:
            begin, end, source, where = rows
            at = region.at * stored.itemsize
            place = raw[at : at + prod(region.size) * stored.itemsize].reshape(*region.size, -1)
            data = np.frombuffer(captures.data(piece.rank, begin, end), dtype=np.uint8)
            count = source[0].stop if source else 1
            shape = (count, *piece.size[1:], place.shape[-1]) if source else (place.shape[-1],)
            place[where] = data.reshape(shape)[source]
    if is_other:
        converted = torch.from_numpy(raw).view(getattr(torch, stored.dtype)).to(getattr(torch, made.spec.dtype))
        target[:] = converted.view(torch.uint8).numpy()
