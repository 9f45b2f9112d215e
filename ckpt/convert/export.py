"""Turning the slots of all ranks of one step into a checkpoint that plain PyTorch loads.

Shards of DTensors become whole tensors, and state that is the same on every rank is kept once.
"""

import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..errors import SlotError, StateError
from ..format.manifest import ShardSpec, TensorSpec, parse
from ..format.slot import Slot
from ..state.held import FSDP1
from ..state.tree import OPTIONAL_PARTS, same, unflatten
from .pieces import TensorPieces, place

Format = Literal["dcp", "torch"]

RANKS = "resilient_ranks"
"""Key below which a checkpoint has what is not the same on every rank: rank → values, generators, other leaves."""


STEP = "resilient_step"
"""Key below which a checkpoint has its step."""


def export(slots: Sequence[Slot], to: Path, format_: Format) -> None:
    """Write the state in `slots` to `to`; nothing is left there by an export that fails.

    Args:
        slots: Verified ones of all ranks of one step.
        to: Directory of a DCP checkpoint, or the file of `torch.save`, which `weights_only=True` loads.
        format_: Which of the two.

    Raises:
        SlotError: A rank is missing, or a slot does not hold a state of this version.
        StateError: Shards cannot be put together, or are not the whole tensor.
        OSError: `to` cannot be written, or is not free (`is_free`).
    """
    state = gather(slots)
    state[STEP] = slots[0].header().step
    if format_ == "torch":
        # Not through a link that another user has put there.
        with open(to, "xb") as file, _undone(to, to.unlink):
            torch.save(_plain(state), file)
        return
    undo: Callable[[], object] = partial(shutil.rmtree, to)
    try:
        to.mkdir(parents=True)
    except FileExistsError:
        if not is_free(to):
            raise
        undo = partial(_clear, to)
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings(), _undone(to, undo):
        # It warns that this is a single process; that is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=to, no_dist=True)


@contextmanager
def _undone(to: Path, undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block, which writes `to`, raises; any failure but an interrupt becomes an OSError."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            undo()
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        # DCP's own, which is no Exception, ends with what went wrong.
        reason = str(error).strip().rpartition("\n")[2]
        raise OSError(f"{to} cannot be written, and nothing of it is left: {reason}") from error


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def is_free(to: Path) -> bool:
    """Tell whether nothing is at `to` but maybe an empty directory of this user."""
    try:
        about = to.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not any(to.iterdir())


def gather(slots: Sequence[Slot]) -> dict[str, Any]:
    """Return what `merge_slots` does, whole tensors in place of shards."""
    return dict(_whole("", merge_slots(slots)))


def merge_slots(slots: Sequence[Slot]) -> dict[str, Any]:
    """Return what `merge` does of the states in verified slots, which must be of all ranks of one step of one run.

    Raises:
        SlotError: They are not, or do not hold the state of a Checkpointer.
        StateError: Shards do not belong to one tensor.
    """
    by_rank = {slot.header().rank: slot for slot in slots}
    first, *others = (slot.header() for slot in slots)
    for header in others:
        if (header.run_id, header.pair, header.world_size) != (first.run_id, first.pair, first.world_size):
            raise SlotError(
                f"rank {first.rank} is of step {first.step} (generation {first.generation}) of {first.world_size}, "
                f"rank {header.rank} of step {header.step} (generation {header.generation}) of {header.world_size}"
            )
    if missing := sorted(set(range(first.world_size)) - by_rank.keys()):
        raise SlotError(f"rank(s) {missing} of {first.world_size} are missing")
    return merge({rank: read(slot) for rank, slot in sorted(by_rank.items())})


def merge(trees: Mapping[int, Any]) -> dict[str, Any]:
    """Return the registered objects' states by name, `TensorPieces` in place of shards, and `RANKS`.

    Of what differs between ranks the lowest rank's is in the object's place, and the other ranks' below `RANKS`.

    Raises:
        StateError: Shards do not belong to one tensor, or are those of FSDP1.
    """
    for name, held in ((name, held) for tree in trees.values() for name, held in tree["objects"].items()):
        if isinstance(held, dict) and FSDP1 in held:
            raise StateError(
                f"{name} is in shards of FSDP1, which do not tell how to put them together: let the script save it "
                "under FullyShardedDataParallel.state_dict_type(), or train with fully_shard (FSDP2)"
            )
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
        return held_leaf(spec, data.clone() if own else data)

    tree = unflatten(manifest.tree, leaf)
    if (
        not isinstance(tree, dict)
        or tree.keys() - OPTIONAL_PARTS != {"objects", "values", "rng"}
        or not isinstance(tree["objects"], dict)
    ):
        raise SlotError(f"{slot.path} does not hold the state of a Checkpointer")
    return tree


def held_leaf(spec: TensorSpec, data: torch.Tensor) -> Any:
    """Return the leaf of which `data` is the content, a tensor as a view of it."""
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
        return _pieces(path, values)
    for rank, value in values.items():
        if _has_shard(value):
            raise StateError(f"{path}: rank {rank} holds a shard where another rank has something else")
        if not same(first, value):
            differences[rank][path] = value
    return first


def _has_shard(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, _HeldShard) or any(map(_has_shard, items))


def _pieces(path: str, shards: Mapping[int, _HeldShard]) -> TensorPieces:
    """Return where in the whole tensor the shards belong; all ranks that hold the same part must agree on it."""
    lowest = min(shards)
    first = shards[lowest]
    mesh = first.spec.mesh_ranks
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    # Other ranks of tensor parallelism have meshes of their own with the same parts: they fill no hole of this one.
    for rank in sorted(shards, key=lambda rank: (rank not in mesh, rank)):
        shard = shards[rank]
        alike = replace(shard.spec, mesh_ranks=mesh, stride=first.spec.stride) == first.spec
        if not alike or shard.local.dtype != first.local.dtype:
            raise StateError(f"{path}: ranks {lowest} and {rank} hold shards of different tensors or kinds of meshes")
        offset, _ = place(path, shard.spec, rank, shard.local.shape)
        if not shard.local.numel():
            continue
        if rank in mesh:
            parts.setdefault(offset, shard.local)
        if offset not in parts or not same(parts[offset], shard.local):
            raise StateError(f"{path}: rank {rank} and a lower one hold different values of the same part")
    return TensorPieces(shape=torch.Size(first.spec.shape), dtype=first.local.dtype, parts=parts)


def _whole(path: str, value: Any) -> Any:
    """Return `value` with a tensor in place of all `TensorPieces`."""
    match value:
        case TensorPieces():
            return value.whole(path.removeprefix("."))
        case dict():
            return {key: _whole(f"{path}.{key}", item) for key, item in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(_whole(f"{path}.{index}", item) for index, item in enumerate(value))
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
