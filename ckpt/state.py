"""The training state: what the user registered, gathered as one tree, compared with a checkpoint, and loaded."""

import json
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from .errors import SlotError, StateError, TopologyError
from .manifest import Manifest, Node, ShardSpec, TensorSpec
from .tree import Flattener, entries, shard_spec, unflatten

_MAX_DIFFERENCES = 5


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint holds through its two methods."""

    def state_dict(self) -> Any:
        """Return the state as plain data and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state that `state_dict` returned."""


class TrainingState:
    """Registered objects, plain values and random number generators.

    Attributes:
        objects: The objects by name; of a DistributedDataParallel the module inside, so that names have no
            prefix.
        values: Plain data, captured at each step and replaced by `load`.
        has_rng: Whether the random number generators are part of it.
    """

    def __init__(self, registered: dict[str, Any], *, rng: bool) -> None:
        """Sort what the user registered into stateful objects and plain values.

        Raises:
            StateError: A module is wrapped in FSDP1, whose state dict is not local to its rank.
        """
        self.objects = {name: _unwrap(name, item) for name, item in registered.items() if isinstance(item, Stateful)}
        self.values = {name: item for name, item in registered.items() if not isinstance(item, Stateful)}
        self.has_rng = rng
        self.optimizers = [item for item in self.objects.values() if isinstance(item, torch.optim.Optimizer)]

    def flatten(self) -> Flattener:
        """Return the current state, its tensors by reference.

        Raises:
            StateError: It contains something that a checkpoint cannot hold.
        """
        objects = {name: item.state_dict() for name, item in self.objects.items()}
        rng = _get_rng() if self.has_rng else None
        try:
            return Flattener({"objects": objects, "values": self.values, "rng": rng})
        except StateError as error:
            raise StateError(str(error).removeprefix("objects.")) from None

    def estimate_bytes(self) -> int:
        """Return the bytes of a capture, counting two tensors per parameter for an optimizer that has no state yet."""
        now_bytes = sum(spec.nbytes for spec in self.flatten().specs())
        fresh = [optimizer for optimizer in self.optimizers if not optimizer.state]
        later_bytes = sum(2 * _local(parameter).nbytes for optimizer in fresh for parameter in _parameters(optimizer))
        return now_bytes + later_bytes

    def device(self) -> torch.device | None:
        """Return the first GPU that holds tensors of the state, None when there is none."""
        leaves = (leaf for leaf in self.flatten().leaves if isinstance(leaf, torch.Tensor))
        return next((leaf.device for leaf in leaves if leaf.is_cuda), None)

    def topology(self, world_size: int) -> int:
        """Return the fingerprint of the world size and of the shapes of the device meshes in use."""
        shapes = sorted({tuple(shard.device_mesh.mesh.shape) for shard in self.flatten().shards.values()})
        return xxhash.xxh3_64_intdigest(json.dumps([world_size, shapes]).encode())

    def load(self, manifest: Manifest, payload: torch.Tensor) -> None:
        """Replace the state by the one in `payload` (uint8, on the CPU); nothing keeps a reference to it.

        Raises:
            StateError: Names, shapes or dtypes differ; the message has the first differences, and nothing
                was loaded.
            TopologyError: A tensor was sharded over a mesh that the current state does not use; nothing was
                loaded.
            SlotError: The manifest is malformed; nothing was loaded.
        """
        current = self.flatten()
        loader = _Loader(manifest, payload, current)
        saved = entries(manifest.tree)
        if saved.keys() != {"objects", "values", "rng"}:
            raise SlotError(f"manifest tree has the parts {list(saved)}, not objects, values and rng")
        objects = entries(saved["objects"])
        self._compare(objects, entries(entries(current.node)["objects"]), manifest.tensors, current.specs())
        values = unflatten(saved["values"], loader.own)
        if not isinstance(values, dict):
            raise SlotError(f"manifest tree has a {type(values).__name__} for the values, not a dict")
        rng = unflatten(saved["rng"], loader.own)
        states = {name: self._object_state(item, objects[name], loader) for name, item in self.objects.items()}
        for name, item in self.objects.items():
            item.load_state_dict(states[name])
        self.values.update(values)
        if self.has_rng and rng is not None:
            set_rng(rng)

    def _object_state(self, item: Stateful, node: Node, loader: "_Loader") -> Any:
        if not isinstance(item, torch.nn.Module):
            return unflatten(node, loader.own)
        # A module copies tensors into its own, so it can be given the slot's memory; extra state it may keep.
        current = item.state_dict()
        state = OrderedDict(
            (key, unflatten(child, loader.view if isinstance(current[key], torch.Tensor) else loader.own))
            for key, child in entries(node).items()
        )
        state._metadata = getattr(current, "_metadata", None)  # type: ignore[attr-defined]
        return state

    def _compare(
        self,
        saved: dict[str, Node],
        current: dict[str, Node],
        saved_specs: tuple[TensorSpec, ...],
        current_specs: tuple[TensorSpec, ...],
    ) -> None:
        differences = [f"{name}: not in the checkpoint" for name in current if name not in saved]
        differences += [f"{name}: in the checkpoint, but not registered" for name in saved if name not in current]
        for name, item in self.objects.items():
            if name not in saved:
                continue
            before = unflatten(saved[name], saved_specs.__getitem__)
            now = unflatten(current[name], current_specs.__getitem__)
            if isinstance(item, torch.nn.Module):
                differences += _module_differences(name, before, now)
            elif isinstance(item, torch.optim.Optimizer):
                differences += _optimizer_differences(name, before, now)
        if differences:
            more = len(differences) - _MAX_DIFFERENCES
            shown = differences[:_MAX_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
            raise StateError(
                "the checkpoint does not fit, nothing was loaded: "
                + "; ".join(shown)
                + ". Register the same objects with the same shapes, or start a new run id"
            )


class _Loader:
    """Makes tensors of the leaves of one manifest, on the meshes of the current state."""

    def __init__(self, manifest: Manifest, payload: torch.Tensor, current: Flattener) -> None:
        self._manifest = manifest
        self._payload = payload
        self._meshes = {_mesh_key(shard_spec(shard)): shard.device_mesh for shard in current.shards.values()}

    def view(self, index: int) -> Any:
        """Return leaf `index` as a view of the payload wherever that is possible."""
        return self._make(index, lambda tensor: tensor)

    def own(self, index: int) -> Any:
        """Return leaf `index` in memory of its own, on the type of device that it was captured from."""
        return self._make(index, torch.clone)

    def _make(self, index: int, take: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        spec, offset = self._manifest.tensors[index], self._manifest.offsets[index]
        data = self._payload[offset : offset + spec.nbytes]
        if spec.kind == "bytes":
            return data.numpy().tobytes()
        if spec.kind == "numpy":
            return np.ndarray(spec.shape, dtype=np.dtype(spec.dtype), buffer=data.numpy()).copy()
        dtype = getattr(torch, spec.dtype)
        tensor = data.view(dtype).view(spec.shape) if spec.nbytes else torch.empty(spec.shape, dtype=dtype)
        tensor = take(tensor) if spec.device == "cpu" else tensor.to(spec.device)
        return tensor if spec.shard is None else self._shard(spec.shard, tensor)

    def _shard(self, spec: ShardSpec, local: torch.Tensor) -> Any:
        mesh = self._meshes.get(_mesh_key(spec))
        if mesh is None:
            raise TopologyError(
                f"the checkpoint has a tensor sharded over a mesh of shape {list(spec.mesh_shape)} and ranks "
                f"{list(spec.mesh_ranks)}, which the current state does not use: shard the model as before, "
                "or start a new run id"
            )
        from torch.distributed.tensor import DTensor

        placements = [decode_placement(placement) for placement in spec.placements]
        shape, stride = torch.Size(spec.shape), tuple(spec.stride)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def decode_placement(placement: tuple[str | int, ...]) -> Any:
    """Return torch's placement for one of a `ShardSpec`."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match placement:
        case ("S", int(dim)):
            return Shard(dim)
        case ("SS", int(dim), int(split_factor)):
            return _StridedShard(dim, split_factor=split_factor)
        case ("P", str(operation)):
            return Partial(operation)
    return Replicate()


def _mesh_key(spec: ShardSpec) -> tuple[Any, ...]:
    return spec.mesh_shape, spec.mesh_ranks, spec.mesh_dim_names


def _module_differences(name: str, saved: Any, current: dict[str, Any]) -> Iterator[str]:
    if not isinstance(saved, dict):
        yield f"{name}: in the checkpoint, but not as a module"
        return
    for key, before in saved.items():
        if key not in current:
            yield f"{name}.{key}: in the checkpoint, but not in the model"
            continue
        now = current[key]
        if isinstance(before, TensorSpec) and isinstance(now, TensorSpec):
            if replace(before, device=now.device) != now:
                yield f"{name}.{key}: {before} in the checkpoint, {now} in the model"
        elif isinstance(now, TensorSpec):
            yield f"{name}.{key}: no tensor in the checkpoint, {now} in the model"
    for key in current:
        if key not in saved:
            yield f"{name}.{key}: in the model, but not in the checkpoint"


def _optimizer_differences(name: str, saved: Any, current: dict[str, Any]) -> Iterator[str]:
    if not _is_optimizer_state(saved):
        yield f"{name}: in the checkpoint, but not as an optimizer"
        return
    before = [len(group["params"]) for group in saved["param_groups"]]
    now = [len(group["params"]) for group in current["param_groups"]]
    if before != now:
        yield f"{name}: parameter groups of {before} tensors in the checkpoint, of {now} in the optimizer"


def _is_optimizer_state(saved: Any) -> bool:
    """Tell whether torch would understand `saved`; it checks little of what it loads."""
    match saved:
        case {"state": dict(), "param_groups": list(groups)}:
            members = [group.get("params") if isinstance(group, dict) else None for group in groups]
            return all(isinstance(ids, list) and all(type(item) is int for item in ids) for ids in members)
    return False


def _unwrap(name: str, item: Any) -> Any:
    if not isinstance(item, torch.nn.Module):
        return item
    # Looked up and not imported, because whoever uses it has imported it.
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp1 is not None and any(isinstance(module, fsdp1) for module in item.modules()):
        raise StateError(f"{name}: FullyShardedDataParallel gathers its state across ranks; use fully_shard (FSDP2)")
    return item.module if isinstance(item, torch.nn.parallel.DistributedDataParallel) else item


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _get_rng() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_rng(state: dict[str, Any]) -> None:
    """Make the generators of this process go on from `state`, which a capture has under "rng"."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
