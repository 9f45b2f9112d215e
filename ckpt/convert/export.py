"""Turning the slots of all ranks of one step into a checkpoint that plain PyTorch loads.

Shards of DTensors become whole tensors, and state that is the same on every rank is kept once.
"""

import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..errors import SlotError, StateError
from ..format.manifest import ShardSpec, TensorSpec, parse
from ..format.slot import Slot
from ..state.loading import decode_placement
from ..state.tree import OPTIONAL_PARTS, same, unflatten

Format = Literal["dcp", "torch"]

RANKS = "resilient_ranks"
"""Key below which a checkpoint has what is not the same on every rank: rank → values, generators, other leaves."""


STEP = "resilient_step"
"""Key below which a checkpoint has its step."""


def export(slots: Sequence[Slot], to: Path, format_: Format) -> None:
    """Write the state in `slots`, verified and one for each rank of one step, to `to`.

    Args:
        slots: By rank.
        to: Directory of a DCP checkpoint, or the file of `torch.save`, which `weights_only=True` loads.
        format_: Which of the two.

    Raises:
        SlotError: A slot does not hold a state of this version.
        StateError: A shard cannot be put together.
        OSError: `to` cannot be written, or is not free (`is_free`).
    """
    state = gather(slots)
    state[STEP] = slots[0].header().step
    if format_ == "torch":
        # Not through a link that another user has put there.
        with open(to, "xb") as file:
            torch.save(_plain(state), file)
        return
    try:
        to.mkdir(parents=True)
    except FileExistsError:
        if not is_free(to):
            raise
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        # It warns that this is a single process; that is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=to, no_dist=True)


def is_free(to: Path) -> bool:
    """Tell whether nothing is at `to` but maybe an empty directory of this user."""
    try:
        about = to.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not any(to.iterdir())


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPieces:
    """A tensor of which the ranks hold shards: what is there of it, by offset."""

    shape: torch.Size
    dtype: torch.dtype
    parts: dict[tuple[int, ...], torch.Tensor] = field(compare=False)

    def whole(self) -> torch.Tensor:
        """Return the tensor; what no part holds is undefined."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for offset, part in self.parts.items():
            whole[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
        return whole


def gather(slots: Sequence[Slot]) -> dict[str, Any]:
    """Return the registered objects' states by name, whole tensors in place of shards, and `RANKS`.

    Of what differs between ranks the lowest rank's is in the object's place, and the other ranks' below `RANKS`.
    """
    return dict(_whole(merge({rank: read(slot) for rank, slot in enumerate(slots)})))


def merge(trees: Mapping[int, Any]) -> dict[str, Any]:
    """Return what `gather` does of these ranks' trees, with `TensorPieces` in place of shards."""
    differences: dict[int, dict[str, Any]] = {rank: {} for rank in trees}
    state = _merge("", {rank: tree["objects"] for rank, tree in trees.items()}, differences)
    state[RANKS] = {
        str(rank): {"values": tree["values"], "rng": tree["rng"], "objects": differences[rank]}
        for rank, tree in trees.items()
    }
    return dict(state)


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeldShard:
    spec: ShardSpec
    local: torch.Tensor = field(compare=False)


def read(slot: Slot, *, own: bool = False) -> Any:
    """Return the tree in a verified slot, for `merge`; its tensors are views of the slot unless `own`.

    Raises:
        SlotError: It does not hold the state of a Checkpointer.
    """
    header = slot.header()
    manifest = parse(slot.manifest(), header.payload_bytes)
    whole = torch.frombuffer(slot.buffer, dtype=torch.uint8)[header.payload_offset : header.used_bytes]

    def leaf(index: int) -> Any:
        spec, offset = manifest.tensors[index], manifest.offsets[index]
        data = whole[offset : offset + spec.nbytes]
        return _leaf(spec, data.clone() if own else data)

    tree = unflatten(manifest.tree, leaf)
    if (
        not isinstance(tree, dict)
        or tree.keys() - OPTIONAL_PARTS != {"objects", "values", "rng"}
        or not isinstance(tree["objects"], dict)
    ):
        raise SlotError(f"{slot.path} does not hold the state of a Checkpointer")
    return tree


def _leaf(spec: TensorSpec, data: torch.Tensor) -> Any:
    if spec.kind == "bytes":
        return data.numpy().tobytes()
    if spec.kind == "numpy":
        return np.ndarray(spec.shape, dtype=np.dtype(spec.dtype), buffer=data.numpy()).copy()
    dtype = getattr(torch, spec.dtype)
    tensor = data.view(dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype)
    return tensor if spec.shard is None else _HeldShard(spec=spec.shard, local=tensor)


def _merge(path: str, values: Mapping[int, Any], differences: dict[int, dict[str, Any]]) -> Any:
    """Return one value for what the ranks have at `path`."""
    first = values[min(values)]
    kinds = {type(value) for value in values.values()}
    if kinds == {dict}:
        keys = dict.fromkeys(key for value in values.values() for key in value)
        return {
            key: _merge(
                f"{path}.{key}" if path else str(key),
                {rank: value[key] for rank, value in values.items() if key in value},
                differences,
            )
            for key in keys
        }
    if kinds in ({list}, {tuple}) and len({len(value) for value in values.values()}) == 1:
        items = (
            _merge(f"{path}.{index}", {rank: value[index] for rank, value in values.items()}, differences)
            for index in range(len(first))
        )
        return type(first)(items)
    if kinds == {_HeldShard}:
        return _place(path, values)
    for rank, value in values.items():
        if not same(first, value):
            differences[rank][path] = value
    return first


def _place(path: str, shards: Mapping[int, _HeldShard]) -> TensorPieces:
    """Return where in the whole tensor the shards belong."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    first = shards[min(shards)]
    shape = torch.Size(first.spec.shape)
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, shard in shards.items():
        spec = shard.spec
        if spec.shape != first.spec.shape or rank not in spec.mesh_ranks:
            raise StateError(f"{path}: rank {rank} holds a shard of {list(spec.shape)} of another mesh")
        if any(placement[0] not in ("R", "S") for placement in spec.placements):
            raise StateError(f"{path}: partial and strided shards cannot be put together without their process group")
        at = [int(index) for index in np.unravel_index(spec.mesh_ranks.index(rank), spec.mesh_shape)]
        placements = [decode_placement(placement) for placement in spec.placements]
        size, offset = _compute_local_shape_and_global_offset(shape, spec.mesh_shape, at, placements)
        if tuple(size) != tuple(shard.local.shape):
            raise StateError(f"{path}: rank {rank} holds {list(shard.local.shape)}, its place has {list(size)}")
        if shard.local.numel():
            parts[tuple(offset)] = shard.local
    return TensorPieces(shape=shape, dtype=first.local.dtype, parts=parts)


def _whole(value: Any) -> Any:
    """Return `value` with a tensor in place of all `TensorPieces`."""
    match value:
        case TensorPieces():
            return value.whole()
        case dict():
            return {key: _whole(item) for key, item in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(_whole(item) for item in value)
    return value


def _plain(value: Any) -> Any:
    """Return `value` with numpy's types replaced by torch's and Python's, which `weights_only=True` allows."""
    match value:
        case dict():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value
        case np.ndarray() if value.dtype.kind in "biufc":
            return torch.from_numpy(value)
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case torch.Tensor():
            # A view would take the whole slot into the file.
            return value.clone()
    return value
