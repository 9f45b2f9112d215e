"""Loading a slot into the registered objects: exactly, or not at all.

Objects load through their own methods. torch's optimizers cast what they load, so what they made of it is replaced;
then the whole state is flattened again and compared with the slot, bit for bit.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ..errors import SlotError, StateError, TopologyError, some
from ..format.manifest import Manifest, Node, ShardSpec, TensorSpec, leaf_paths
from . import outside, unsaved
from .exact import OwnTensors, load_into, put, put_flags, sharing_kept, without_uncastable
from .fits import check_fits
from .held import dict_items, held_optimizers, state_dict_of, trained_by, whole_state
from .memory import leaf_of
from .state import TrainingState, get_rng, set_rng
from .tree import OPTIONAL_PARTS, Flattener, entries, kinds_at, link, plain, raw, shard_spec, unflatten
from .values import renew
from .verify import Comparison, Difference


def load(state: TrainingState, manifest: Manifest, payload: torch.Tensor, untouched: frozenset[str]) -> list[str]:
    """Do what `TrainingState.load` says."""
    current = state.flatten()
    loader = _LeafLoader(manifest, payload, current)
    saved = entries(manifest.tree)
    if saved.keys() - OPTIONAL_PARTS != {"objects", "values", "rng"}:
        raise SlotError(f"manifest tree has the parts {list(saved)}, not objects, values and rng")
    objects, now = entries(saved["objects"]), entries(entries(current.node)["objects"])
    kinds = kinds_at(manifest.tree, plain(saved["kinds"])) if "kinds" in saved else {}
    if "shared" in saved:
        link(manifest.tree, plain(saved["shared"]))
    doubts = check_fits(state.objects, objects, now, manifest.tensors, current.specs())
    modules = state.modules
    was_outside = outside.parse(saved["outside"]) if "outside" in saved else None
    if was_outside is not None and (others := list(outside.other_classes(was_outside, state.outside()))):
        raise StateError(
            f"the checkpoint does not fit, nothing was loaded: {some(others, between='; ')}; start a new run id"
        )
    was_unsaved = unsaved.parse(saved["unsaved"]) if "unsaved" in saved else {}
    order = entries(saved["order"]) if "order" in saved else {}
    if differences := _other_order(state, order, objects, loaded=False):
        raise StateError(f"the checkpoint does not fit, nothing was loaded: {some(differences, between='; ')}")
    loader.keep(current, [(objects[name], now[name]) for name in modules])
    containers: dict[int, Any] = {}
    values = unflatten(saved["values"], loader.own_leaf, containers, kinds)
    if not isinstance(values, dict):
        raise SlotError(f"manifest tree has a {type(values).__name__} for the values, not a dict")
    rng = unflatten(saved["rng"], loader.own)
    # Modules first: what others share with them is right by the time that they load it.
    states = {name: _module_state(item, objects[name], loader, kinds) for name, item in modules.items()}
    states |= {
        name: unflatten(
            node,
            # An optimizer casts what it loads, and of a leaf that requires grad the cast would be none.
            loader.own if isinstance(state.objects[name], torch.optim.Optimizer) else loader.own_leaf,
            containers,
            kinds,
        )
        for name, node in objects.items()
        if name not in modules
    }
    trained = [(optimizer, trained_by([optimizer], modules)) for optimizer in state.optimizers]
    before = [OwnTensors(item) for item in state.objects.values() if _holds(item)]
    for name, loaded in states.items():
        if name in untouched:
            continue
        with _loading(f"{name}: load_state_dict()", doubts.get(name, "")), sharing_kept(state.objects[name]):
            load_into(state.objects[name], without_uncastable(loaded) if _holds(state.objects[name]) else loaded)
    for tensors in before:
        tensors.put_back()
    state.find_trained()  # an object may have made its optimizers anew
    with _loading("state_dict() of what was loaded"):
        leaves = Flattener({name: state_dict_of(item) for name, item in state.objects.items()}).leaves
    renew(state.values, values, others=leaves, shared=loader.owned(leaf_paths(saved["objects"]).values()))
    warnings = [
        f"values.{name} is not in the checkpoint and stays what it was" for name in state.values if name not in values
    ]
    if state.has_rng and rng is None:
        warnings.append("the checkpoint has no states of random number generators, which stay what they are")
    warnings += _check(state, manifest, payload, states, before)
    for optimizer, names in trained:
        still = set(trained_by([optimizer], modules))
        lost = [name for name in names if name not in still]
        if lost:
            raise _inexact(
                [f"{name}: load_state_dict() made another parameter of it than the optimizer has" for name in lost]
            )
    if others := _other_order(state, order, objects, loaded=True):
        raise _inexact(others)
    if others := list(unsaved.lost(was_unsaved, state.unsaved.digests, state.objects, state.held)):
        raise _inexact(others)
    warnings += unsaved.other_buffers(was_unsaved, state.unsaved.digests)
    # Last, because making a state may draw numbers.
    if state.has_rng and rng is not None:
        with _loading("rng: setting it"):
            set_rng(rng)
        _check_rng(saved["rng"], manifest, payload)
    if was_outside is not None:
        warnings += outside.other_modes(was_outside, state.outside())
    return warnings


def _other_order(state: TrainingState, saved: dict[str, Node], objects: dict[str, Node], *, loaded: bool) -> list[str]:
    """Return which optimizers have their parameters in another order: each would go on with the state of another one.

    The order now is that of the latest `state.flatten()`. Until it is loaded, an object that holds other optimizers
    than it did may make them anew.
    """
    names = {name: _names(saved[name]) for name in state.held if name in saved}
    return [
        difference
        for name, before in names.items()
        if loaded or state.objects[name] in state.optimizers or [*map(len, before)] == state.order.sizes(name)
        for difference in state.order.differences(name, before, has_state=_has_state(objects[name]))
    ]


def _has_state(node: Node) -> bool:
    """Tell whether an object may have states of parameters: any leaf may be one, but not a torch optimizer's option."""
    match tree := unflatten(node, str):
        case {"state": dict(states), "param_groups": list()}:
            return bool(states)
    return bool(leaf_paths(node)) or any(
        key == "state" and isinstance(value, dict) and value for key, value in dict_items(tree)
    )


def _names(node: Node) -> list[list[str | None]]:
    """Return the parameters' names that the manifest has for each group of an object."""
    groups = plain(node)
    lists: list[list[str | None]] = (
        [each for each in groups if isinstance(each, list)] if isinstance(groups, list) else []
    )
    if lists != groups or not all(name is None or isinstance(name, str) for name in chain(*lists)):
        raise SlotError(f"manifest has {groups!r:.200} for the names of parameters, not a list of names for each group")
    return lists


def _check(
    state: TrainingState,
    manifest: Manifest,
    payload: torch.Tensor,
    states: dict[str, Any],
    before: list[OwnTensors],
) -> list[str]:
    """Return what a person should know, after a second chance for what optimizers and modules made of their state."""
    strict, lenient, unshared = _differences(state, manifest, payload)
    if strict or unshared:
        for name, loaded in states.items():
            item = state.objects[name]
            with _loading(f"{name}: state_dict() of what was loaded"):
                if isinstance(item, torch.nn.Module) or _holds(item):
                    put(item, loaded)
                else:
                    put_flags(item.state_dict(), loaded)
        strict, lenient, unshared = _differences(state, manifest, payload)
    if strict:
        raise _inexact(map(str, strict))
    return list(map(str, [*lenient, *unshared]))


def _differences(
    state: TrainingState, manifest: Manifest, payload: torch.Tensor
) -> tuple[list[Difference], list[Difference], list[Difference]]:
    """Return what must not differ from the slot and does, what may, and what is one object in only one of the two."""
    with _loading("state_dict() of what was loaded"):
        try:
            current = state.flatten()
        except StateError as error:
            raise _inexact([str(error)]) from None
    comparison = Comparison(manifest, payload, current)
    saved, now = entries(manifest.tree), entries(current.node)
    befores, afters = entries(saved["objects"]), entries(now["objects"])
    strict: list[Difference] = []
    lenient: list[Difference] = []
    unshared: list[Difference] = []
    places = [(name, befores[name], afters[name], item) for name, item in state.objects.items()]
    before, after = entries(saved["values"]), entries(now["values"])
    places += [(f"values.{name}", node, after[name], None) for name, node in before.items()]
    for path, was, is_, item in places:
        found = list(comparison.differences(was, is_, path))
        links = [] if found else list(comparison.links(was, is_, path))
        may_differ = item is not None and not _is_strict(item)
        strict += [each for each in found if not (may_differ and each.plain)]
        lenient += [each for each in found if may_differ and each.plain]
        # Of values the script has tensors of its own, which `renew` has filled.
        is_memory = not may_differ and item is not None
        strict += [each for each in links if is_memory and not each.plain]
        unshared += [each for each in links if not is_memory or each.plain]
    return strict, lenient, unshared


def _check_rng(saved: Node, manifest: Manifest, payload: torch.Tensor) -> None:
    flat = Flattener({"rng": get_rng()})
    before, now = entries(saved), entries(entries(flat.node)["rng"])
    comparison = Comparison(manifest, payload, flat)
    # Generators of GPUs that are not here cannot be used.
    names = [name for name in now if name in before and (name != "cuda" or len(before[name]) == len(now[name]))]
    found = [
        difference for name in names for difference in comparison.differences(before[name], now[name], f"rng.{name}")
    ]
    if found:
        raise _inexact(map(str, found))


def _inexact(differences: Any) -> StateError:
    return StateError(
        "the checkpoint was not restored exactly; the state is loaded in part, and the run ends here: "
        + some(differences, between="; ")
        + ". Let load_state_dict() take all that state_dict() returns, as it is"
    )


@contextlib.contextmanager
def _loading(what: str, doubts: str = "") -> Iterator[None]:
    ends = f"the state is loaded in part, and the run ends here{doubts}"
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"{what} raised {error!r}; {ends}") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and (doubts or str(error).startswith("Error(s) in loading state_dict")):
            raise StateError(f"{what}: {' '.join(str(error).split())}; {ends}") from error
        # It may be a collective that another rank's failure broke: a restart may cure it.
        error.add_note(f"in {what}")
        raise


def _holds(item: Any) -> bool:
    return bool(held_optimizers(item))


def _is_strict(item: Any) -> bool:
    """Tell whether plain values of `item` have to come back exactly, too; tensors always have to."""
    return isinstance(item, torch.nn.Module) or type(item).__module__.partition(".")[0] == "torch" or _holds(item)


def _module_state(module: torch.nn.Module, node: Node, loader: "_LeafLoader", kinds: dict[int, str]) -> Any:
    current = whole_state(module)
    # What the module does with it nobody knows, so it gets no view of the slot, whose memory goes.
    state = OrderedDict((key, unflatten(child, loader.make, kinds=kinds)) for key, child in entries(node).items())
    state |= {key: value for key, value in current.items() if is_lazy(value) and key not in state}
    state._metadata = getattr(current, "_metadata", None)  # type: ignore[attr-defined]
    return state


class _LeafLoader:
    """Makes tensors of the leaves of one manifest, on the meshes of the current state."""

    def __init__(self, manifest: Manifest, payload: torch.Tensor, current: Flattener) -> None:
        self._manifest = manifest
        self._payload = payload
        self._meshes = {_mesh_key(shard_spec(shard)): shard.device_mesh for shard in current.shards.values()}
        self._kept: dict[int, Any] = {}
        self._owned: dict[int, Any] = {}
        self._spans: dict[int, int] = {}
        for spec in manifest.tensors:
            if spec.within is not None:
                first, offset = spec.within
                self._spans[first] = max(self._spans.get(first, 0), offset + spec.nbytes)
        self._spanning: dict[int, torch.Tensor] = {}

    def keep(self, current: Flattener, modules: list[tuple[Node, Node]]) -> None:
        """Let others that had a module's tensors have them again: `modules` has nodes of the slot and of `current`."""
        for saved, now in modules:
            places = leaf_paths(now)
            for path, index in leaf_paths(saved).items():
                leaf = current.leaves[places[path]] if path in places else None
                if isinstance(leaf, torch.Tensor):
                    self._kept[index] = current.shards.get(places[path], leaf)

    def own(self, index: int) -> Any:
        """Return leaf `index`, the same each time, in a module's memory if it was there, else in memory of its own."""
        if index in self._kept:
            return self._kept[index]
        if index not in self._owned:
            self._owned[index] = self.make(index)
        return self._owned[index]

    def own_leaf(self, index: int) -> Any:
        """Return the same as `own`, requiring grad if it did."""
        made = self.own(index)
        if self._manifest.tensors[index].grad and index not in self._kept:
            made.requires_grad_()
        return made

    def owned(self, indices: Iterable[int]) -> set[int]:
        """Return the `id`s of those of these leaves that `own` has returned in memory of their own."""
        return {id(self._owned[index]) for index in indices if index in self._owned}

    def make(self, index: int) -> Any:
        """Return leaf `index` in memory of its own, on the type of device that it was captured from."""
        spec, offset = self._manifest.tensors[index], self._manifest.offsets[index]
        data = self._payload[offset : offset + spec.nbytes]
        stored = leaf_of(spec, data)
        if isinstance(stored, bytes):
            return stored
        if isinstance(stored, np.ndarray):
            return _laid_out(stored, spec.stride or ())
        if spec.within is not None:
            made = self._shared(spec, stored, *spec.within)
        else:
            stride = spec.stride or stored.stride()
            made = torch.empty_strided(spec.shape, stride, dtype=stored.dtype, device=spec.device)
            raw(made).copy_(raw(stored))
        return made if spec.shard is None else self._shard(spec.shard, made)

    def _shared(self, spec: TensorSpec, stored: torch.Tensor, first: int, offset: int) -> torch.Tensor:
        """Return `stored` in the memory that it shares with others."""
        if first not in self._spanning:
            self._spanning[first] = torch.empty(self._spans[first], dtype=torch.uint8, device=spec.device)
        storage, size = self._spanning[first].untyped_storage(), stored.element_size()
        empty = torch.empty(0, dtype=stored.dtype, device=spec.device)
        made = empty.set_(storage, offset // size, spec.shape, spec.stride or stored.stride())
        raw(made).copy_(raw(stored))
        return made

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


def _laid_out(stored: np.ndarray[Any, Any], stride: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a copy of `stored` whose dimensions lie in memory as `stride` says; () if it is contiguous."""
    if not stride:
        return stored.copy()
    if sorted(stride) == list(stride):
        return stored.copy("F")
    order = np.argsort(stride, kind="stable")[::-1]
    return stored.transpose(order).copy("C").transpose(np.argsort(order))


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
