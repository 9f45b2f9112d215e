"""Tensors of which several hold parts: where a part belongs, and the proof that the parts are the whole."""

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from ..errors import StateError
from ..format.manifest import ShardSpec

Box = tuple[Sequence[int], Sequence[int]]
"""Offset and size of a part."""


def missing(path: str, shape: Sequence[int], boxes: Iterable[Box]) -> int:
    """Return how many elements of a tensor are in none of `boxes`; each other one is in exactly one.

    Raises:
        StateError: A box is not inside the tensor, or two have an element in common; `path` names the tensor.
    """
    boxes = [(offset, size) for offset, size in boxes if prod(size)]
    for offset, size in boxes:
        inside = (at >= 0 and at + length <= end for at, length, end in zip(offset, size, shape, strict=False))
        if not len(offset) == len(size) == len(shape) or not all(inside):
            raise StateError(f"{path}: a part of {list(size)} at {list(offset)} is not inside of {list(shape)}")
    if len(boxes) > 1:
        # Between two cuts of each dimension, a box has all elements or none.
        cuts = [
            np.unique([at for offset, size in boxes for at in (offset[dim], offset[dim] + size[dim])])
            for dim in range(len(shape))
        ]
        taken = np.zeros([len(cut) - 1 for cut in cuts], dtype=bool)
        for offset, size in boxes:
            sides = zip(cuts, offset, size, strict=True)
            cells = tuple(slice(*np.searchsorted(cut, (at, at + length))) for cut, at, length in sides)
            if taken[cells].any():
                raise StateError(f"{path}: the part of {list(size)} at {list(offset)} overlaps with another one")
            taken[cells] = True
    return prod(shape) - sum(prod(size) for _, size in boxes)


def place(path: str, spec: ShardSpec, rank: int, local: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of the part of a DTensor that `rank` holds, which has the shape `local` there.

    Raises:
        StateError: It holds none, another one, or none that lies together; `path` names the tensor.
    """
    if rank not in spec.mesh_ranks:
        raise StateError(f"{path}: rank {rank} is not in its mesh of ranks {list(spec.mesh_ranks)}")
    coordinate = np.unravel_index(spec.mesh_ranks.index(rank), spec.mesh_shape)
    runs = [[range(size)] for size in spec.shape]
    for placement, count, index in zip(spec.placements, spec.mesh_shape, map(int, coordinate), strict=True):
        match placement:
            case ("R",):
                pass
            case ("S", int(dim)) if dim < len(runs):
                runs[dim] = _chunk(runs[dim], count, index)
            # FSDP2 over tensor parallelism: what a later mesh dimension has split already.
            case ("SS", int(dim), int(pieces)) if dim < len(runs) and pieces <= len(spec.mesh_ranks):
                split = [_chunk(runs[dim], pieces, piece) for piece in range(pieces)]
                runs[dim] = [run for piece in split for run in _chunk(piece, count, index)]
            case _:
                raise StateError(f"{path}: a shard placed as {placement} cannot be put together")
    size = tuple(sum(map(len, indices)) for indices in runs)
    if any(indices and indices[-1].stop - indices[0].start != sum(map(len, indices)) for indices in runs):
        raise StateError(f"{path}: what rank {rank} holds does not lie together ({spec.placements})")
    # torch gives a shard without elements whatever shape.
    if tuple(local) != size and (0 not in local or 0 not in size):
        raise StateError(f"{path}: rank {rank} holds {list(local)}, its place has {list(size)}")
    return tuple(indices[0].start if indices else 0 for indices in runs), size


def _chunk(runs: list[range], count: int, index: int) -> list[range]:
    """Return the indices that `torch.chunk` gives to `index` of `count`."""
    length = sum(map(len, runs))
    size = -(-length // count)
    start, end, found = index * size, index * size + size, list[range]()
    for run in runs:
        if part := run[max(start, 0) : max(end, 0)]:
            found.append(part)
        start, end = start - len(run), end - len(run)
    return found
