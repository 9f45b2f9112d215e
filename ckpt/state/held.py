"""Which torch optimizers an object holds, whatever its class, and which one trains parameters behind our back."""

import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ..errors import StateError, some
from ..format.manifest import leaf_paths
from .flat import FLAT, description, of_units
from .memory import Extents, digest_of
from .tree import Flattener, Leaf, extent, is_strided

Optimizer = torch.optim.Optimizer

_MAX_DEPTH: Final = 6
_MAX_OBJECTS: Final = 10_000
_MAX_CHILDREN: Final = 1_000
_OWN: Final = ("state", "param_groups", "defaults")
"""What an optimizer has of its parameters: large, and without optimizers in it."""
_KEPT: Final = {
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop", "SparseAdam"), 2),
    **dict.fromkeys(("ASGD", "RMSprop"), 1),
    **dict.fromkeys(("Muon", "SGD"), 0),
}
"""How many tensors of a parameter's size an optimizer of torch comes to have for each, without those it is asked for.

Those that are not here have them from the start, or other ones.
"""
_ASKED: Final = ("momentum", "amsgrad", "centered")
_CODE: Final = (type, types.ModuleType, types.FunctionType, types.MethodType)
_LEAVES: Final = (torch.Tensor, torch.nn.Module, str, bytes, int, float, *_CODE)


def held_optimizers(item: Any) -> list[Optimizer]:
    """Return the optimizers that `item` is or holds in attributes, lists and dicts, the outermost first.

    The search is bounded, and does not look into modules.
    """
    found: list[Optimizer] = []
    seen: set[int] = set()
    queue = deque([(item, 0)])
    while queue and len(seen) < _MAX_OBJECTS:
        value, depth = queue.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found.append(value)
        if depth < _MAX_DEPTH:
            queue.extend((child, depth + 1) for child in islice(_children(value), _MAX_CHILDREN))
    return found


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors that `optimizer` updates, none of a wrapper that has no groups of its own."""
    return [tensor for group in _groups([optimizer]) for tensor in group]


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield key and tensor of all parameters in `module`; a method of its own may leave some out.

    Those of FSDP1 are what an optimizer has: a gathered unit has others in their places.
    """
    owned: dict[tuple[int, str], torch.Tensor] = {}
    for unit in fsdp1_units(module):
        if (flat := unit._flat_param) is not None and flat._params is not None:
            both = chain(flat._param_infos, flat._shared_param_infos), chain(flat._params, flat._shared_params)
            owned |= {(id(info.module), info.param_name): parameter for info, parameter in zip(*both, strict=True)}
    for key, inner, name, tensor in _registered(module) if owned else ():
        yield key, owned.get((id(inner), name), tensor)
    if not owned:
        yield from torch.nn.Module.named_parameters(module, remove_duplicate=False)


def _registered(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in inner._parameters.items():
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, inner, name, tensor


def named_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield key and tensor of all buffers in `module`."""
    return torch.nn.Module.named_buffers(module, remove_duplicate=False)


def keyed_parameters(modules: dict[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the parameters of registered modules by "name.key"."""
    return {f"{name}.{key}": tensor for name, module in modules.items() for key, tensor in named_parameters(module)}


def keyed_tensors(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield "name.key" and tensor of the parameters and buffers of registered modules."""
    for name, module in modules.items():
        for key, tensor in chain(named_parameters(module), named_buffers(module)):
            yield f"{name}.{key}", tensor


def modules_of(objects: dict[str, Any]) -> dict[str, torch.nn.Module]:
    """Return those of registered objects that are modules."""
    return {name: item for name, item in objects.items() if isinstance(item, torch.nn.Module)}


def trained_by(optimizers: Iterable[Optimizer], modules: dict[str, torch.nn.Module]) -> list[str]:
    """Return the names of the registered modules' parameters that these optimizers update."""
    trained = {id(tensor) for optimizer in optimizers for tensor in parameters(optimizer)}
    return [path for path, parameter in keyed_parameters(modules).items() if id(parameter) in trained]


def state_dict_of(item: Any) -> Any:
    """Return what `whole_state` does, of a module without what has no data before its first forward pass."""
    state = whole_state(item)
    if isinstance(item, torch.nn.Module) and any(map(is_lazy, state.values())):
        return OrderedDict((key, value) for key, value in state.items() if not is_lazy(value))
    return state


def whole_state(item: Any) -> Any:
    """Return what `item.state_dict()` does; where FSDP1 would gather it, what this rank has of it.

    Raises:
        StateError: FSDP1's parameters are gathered for something that has not ended.
    """
    units = fsdp1_units(item) if isinstance(item, torch.nn.Module) else []
    return _local_state(item, units) if units else item.state_dict()


def begin_fsdp1(module: torch.nn.Module) -> None:
    """Let FSDP1 cast the buffers of `module` as its first forward pass does."""
    units = fsdp1_units(module)
    if any(unit.mixed_precision.buffer_dtype is not None for unit in units):
        type(units[0]).fsdp_modules(module, root_only=True)  # which initializes the outermost


def fsdp1_units(module: torch.nn.Module) -> list[Any]:
    """Return the modules in `module` that are FSDP1's."""
    # Looked up and not imported, because whoever uses it has imported it.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return [] if kind is None else [inner for inner in module.modules() if isinstance(inner, kind)]


def _local_state(module: torch.nn.Module, units: list[Any]) -> dict[str, Any]:
    handles = [unit._handle for unit in units if unit._handle is not None]
    if any(handle._training_state.name != "IDLE" for handle in handles):
        raise StateError(
            "FSDP1's parameters are gathered, by summon_full_params() or a forward or backward pass that has not "
            "ended: call step() after it"
        )
    state: dict[str, Any] = OrderedDict()
    for prefix, inner in inside(module, units):
        inner._save_to_state_dict(state, prefix, False)
    prefixes = {id(inner): prefix for prefix, inner in inside(module, [])}
    parameters = list(named_parameters(module))
    state.update((key, local(tensor).detach()) for key, tensor in parameters)
    # Modules and parameters with these ids are those of units that have these shards.
    shards = [unit._flat_param._shard_param_infos for unit in units if unit._flat_param is not None]
    names = [*prefixes.items(), *((key, id(tensor)) for key, tensor in parameters)]
    state[FLAT] = description(module, (names, shards), lambda: of_units(prefixes, units, parameters))
    return state


def inside(module: torch.nn.Module, units: list[Any]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the prefixes of keys, and the modules, but for FSDP1's own, which have hooks that gather."""
    own = set(map(id, units))
    for prefix, inner in module.named_modules(remove_duplicate=False):
        if id(inner) not in own:
            yield f"{prefix}." if prefix else "", inner


def state_of(optimizer: Optimizer) -> dict[Any, Any]:
    """Return what `optimizer` has for its parameters, by parameter; nothing if it is a wrapper without a state."""
    return getattr(optimizer, "state", None) or {}


def later_bytes(optimizer: Optimizer) -> int:
    """Return what `optimizer`, which has no state yet, will have for its parameters; 0 if it is of no known class."""
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or (kept := _KEPT.get(kind.__name__)) is None:
        return 0
    return sum(
        (kept + sum(bool(group.get(name)) for name in _ASKED)) * local(parameter).nbytes
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    )


def has_hooks(item: torch.nn.Module | Optimizer) -> bool:
    """Tell whether a hook, or a method of its own, may change what torch's `state_dict()` gives of `item`.

    A hook that comes before changes the item itself at most, which training goes on with.
    """
    if isinstance(item, torch.nn.Module):
        plain = torch.nn.Module
        return any(
            each._state_dict_hooks
            or getattr(each.state_dict, "__func__", None) is not plain.state_dict
            or getattr(each._save_to_state_dict, "__func__", None) is not plain._save_to_state_dict
            for each in item.modules()
        )
    return getattr(item.state_dict, "__func__", None) is not Optimizer.state_dict or bool(
        getattr(item, "_optimizer_state_dict_post_hooks", None)
    )


def mistaken_key(optimizer: Optimizer) -> Any:
    """Return a key of its own in an optimizer's state that `state_dict()` takes for a parameter's position, or None."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return None  # it may tell them apart
    own = (key for key in state_of(optimizer) if not isinstance(key, torch.Tensor))
    numbers = [key for key in own if isinstance(key, int | float | np.generic)]
    positions = range(len(parameters(optimizer)) if numbers else 0)
    return next((key for key in numbers if key in positions), None)


def _groups(optimizers: Iterable[Optimizer]) -> list[list[torch.Tensor]]:
    return [group["params"] for held in optimizers for group in getattr(held, "param_groups", None) or []]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor or of FSDP1's flat parameter, and any other tensor as it is."""
    if not _is_sharded(tensor):
        # A flat parameter is its shard until its first forward pass, and may be gathered from then on.
        return getattr(tensor, "_local_shard", tensor)
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


class Seen:
    """A tensor as it was when it was looked at, to be recognised later.

    This has neither the tensor nor a weak reference to it, which torch's swapping of tensors would fail on. An id and
    an address are given out again as soon as a tensor is gone, so torch itself tells whether its memory is: it keeps a
    weak count beside each storage, as for those that it sends to other processes. That frees the memory when nobody
    has it, stays out of the way of whatever a script does to the tensor or the storage, and never means another one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Look at a strided tensor, or at the shard of a DTensor, that was not made in inference mode."""
        self._is = id(tensor), (plain := local(tensor)).data_ptr()
        self._version = plain._version
        self._storage = StorageWeakRef(plain.untyped_storage())  # type: ignore[no-untyped-call]

    def is_one_with(self, tensor: torch.Tensor) -> bool:
        """Tell whether this is `tensor`, written or not."""
        is_gone = self._storage.expired()  # type: ignore[no-untyped-call]
        return not is_gone and self._is == (id(tensor), local(tensor).data_ptr())

    def is_as_before(self, tensor: torch.Tensor) -> bool:
        """Tell whether this is `tensor`, not written since, as far as torch knows."""
        return self.is_one_with(tensor) and self._version == local(tensor)._version


class ParameterOrder:
    """The names of the parameters of registered optimizers, in the order of their states.

    An optimizer's `state_dict()` knows its parameters by their position alone. A parameter's name is its key in a
    registered module, or else the path, in the flattened state, of the leaf that is the same tensor in memory, or else
    of the only leaf of no module that is equal to it bit for bit: an object may hand out copies.

    Between two calls there are ids of tensors here, and no tensors. A new one that has got the id of another stands
    where that one stood in every group and module, or `names` begins anew: it has the name that it would be given, or,
    if it is only equal to a leaf, that of what it took the place of. `replaced` would warn of it too often, no more.

    Attributes:
        replaced: What to tell of a parameter that left its module since `names` was called before, None if none did.
        unkept: What to call a parameter of those `elsewhere` that requires grad and is equal to no leaf, None if there
            is none.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._groups: dict[str, list[list[int]]] = {}
        self._in_modules: dict[str, int] = {}
        self._in_leaves: list[tuple[int, int]] = []
        self._elsewhere: dict[str, int] = {}
        self._sharded: set[int] = set()
        self._named: dict[str, set[int]] = {}
        self._names: dict[str, list[list[str | None]]] = {}
        self.replaced: str | None = None
        self.unkept: str | None = None

    def names(
        self, optimizers: dict[str, list[Optimizer]], in_modules: dict[str, torch.Tensor], flat: Flattener
    ) -> dict[str, list[list[str | None]]]:
        """Return the names of each group's parameters, by the name of the object; None for those without a name.

        Cheap while groups, `in_modules`, what `keyed_parameters` returned, and `flat`, the state with everything
        registered, have the same tensors in the same places as before; other objects under the same names need a new
        `ParameterOrder`.
        """
        groups = {name: [list(map(id, group)) for group in _groups(several)] for name, several in optimizers.items()}
        keys = {key: id(parameter) for key, parameter in in_modules.items()}
        same = groups == self._groups and list(keys.items()) == list(self._in_modules.items())
        if not (same and self._are_leaves(optimizers, flat)):
            before = {identity: key for key, identity in self._in_modules.items()}
            self._groups, self._in_modules = groups, keys
            self._find(_by_id(optimizers), in_modules, flat)
            self.replaced = self._replaced(before)
        return self._names

    def elsewhere(self, optimizers: dict[str, list[Optimizer]]) -> dict[str, torch.Tensor]:
        """Return parameters that are in no module and no leaf, by what to call them; call it right after `names`."""
        tensors = _by_id(optimizers) if self._elsewhere else {}
        return {label: tensors[identity] for label, identity in self._elsewhere.items()}

    def sizes(self, name: str) -> list[int]:
        """Return how many parameters each group of an object has."""
        return [len(group) for group in self._groups[name]]

    def differences(self, name: str, saved: list[list[str | None]], *, has_state: bool) -> Iterator[str]:
        """Yield which parameters had another place in `saved` than when `names` was called last.

        Args:
            name: Of the object that is or holds the optimizers.
            saved: The names in each group of the checkpoint.
            has_state: Whether the checkpoint has a state for parameters: without one only their groups matter.
        """
        for index, (before, now) in enumerate(zip(saved, self._groups[name], strict=False)):
            for position, (key, parameter) in enumerate(zip(before, now, strict=False)):
                allowed = {parameter} if has_state else set(now)
                is_now = self._names[name][index][position]
                if key is None and is_now in self._in_modules and parameter not in self._sharded:
                    yield (
                        f"{name}: parameter {position} of group {index} is {is_now} in the optimizer, which had "
                        f"another one in the checkpoint: what the module had as {is_now} was not trained. Give the "
                        "optimizer what the module has"
                    )
                    return
                if key in self._named and not self._named[key] & allowed:
                    yield (
                        f"{name}: parameter {position} of group {index} is {key} in the checkpoint, "
                        f"{is_now or 'another tensor'} in the optimizer, which must get them in the same order each "
                        "time (a set has none)"
                    )
                    return

    def _find(self, trained: dict[int, torch.Tensor], in_modules: dict[str, torch.Tensor], flat: Flattener) -> None:
        named = list(self._in_modules.items())
        known = set(self._in_modules.values())
        others = {identity: tensor for identity, tensor in trained.items() if identity not in known}
        self._sharded = {identity for identity, tensor in trained.items() if _is_sharded(tensor)}
        self._in_leaves, self._elsewhere, self.unkept = [], {}, None
        if others:
            leaves = {in_memory(leaf): index for index, leaf in enumerate(flat.leaves)}
            found = {identity: leaves.get(in_memory(tensor)) for identity, tensor in others.items()}
            self._in_leaves = [(identity, index) for identity, index in found.items() if index is not None]
            taken = {leaves.get(in_memory(parameter)) for parameter in in_modules.values()} | set(found.values())
            equal = equal_leaves(
                {identity: others[identity] for identity, index in found.items() if index is None},
                {index: leaf for index, leaf in enumerate(flat.leaves) if index not in taken},
            )
            paths: dict[int, list[str]] = {}
            for path, index in leaf_paths(flat.node).items():
                paths.setdefault(index, []).append(path.removeprefix("objects."))
            places = [*self._in_leaves]
            places += [(identity, indices[0]) for identity, indices in equal.items() if len(indices) == 1]
            named += [(path, identity) for identity, index in places for path in paths[index]]
            self._elsewhere = {
                f"{name}: parameter {position} of group {index}": identity
                for name, several in self._groups.items()
                for index, group in enumerate(several)
                for position, identity in enumerate(group)
                if identity in equal
            }
            covered = Extents(
                extent(leaf) for leaf in flat.leaves if isinstance(leaf, torch.Tensor) and leaf.is_contiguous()
            )
            unkept = (
                name
                for name, identity in self._elsewhere.items()
                if others[identity].requires_grad
                and not equal[identity]
                and not (is_strided(plain := local(others[identity])) and covered.covers(extent(plain)))
            )
            self.unkept = next(unkept, None)
        self._named = {}
        for key, identity in named:
            self._named.setdefault(key, set()).add(identity)
        names = {identity: key for key, identity in reversed(named)}
        self._names = {
            name: [list(map(names.get, group)) for group in several] for name, several in self._groups.items()
        }

    def _replaced(self, keys: dict[int, str]) -> str | None:
        """Return what to tell of a parameter that a module had, by its key, and an optimizer alone has now."""
        found = (
            (name, keys[identity])
            for name, several in self._groups.items()
            for identity, key in zip(chain(*several), chain(*self._names[name]), strict=True)
            # The shards that an optimizer has leave FSDP2's modules while those are gathered.
            if identity in keys and key is None and keys[identity] in self._in_modules and identity not in self._sharded
        )
        for name, key in found:
            return (
                f"{name} has the parameter that was {key}, and the module another one in its place, which is not "
                "trained: a recovery from now on is refused. Give the optimizer what the module has"
            )
        return None

    def _are_leaves(self, optimizers: dict[str, list[Optimizer]], flat: Flattener) -> bool:
        """Tell whether the parameters that were found in leaves are the same leaves of `flat`."""
        tensors = _by_id(optimizers) if self._in_leaves else {}
        return all(
            index < len(flat.leaves) and in_memory(tensors[identity]) == in_memory(flat.leaves[index])
            for identity, index in self._in_leaves
        )


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _by_id(optimizers: dict[str, list[Optimizer]]) -> dict[int, torch.Tensor]:
    """Return the parameters of all groups."""
    return {id(tensor): tensor for several in optimizers.values() for group in _groups(several) for tensor in group}


def equal_leaves(tensors: dict[int, torch.Tensor], leaves: dict[int, Leaf]) -> dict[int, list[int]]:
    """Return the indices of those of `leaves` that are equal to each of `tensors`."""
    forms = {_form(tensor) for tensor in tensors.values() if is_strided(tensor)}
    contents: dict[Hashable, list[int]] = {}
    for index, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and _form(leaf) in forms:
            contents.setdefault(_content(leaf), []).append(index)
    return {identity: contents.get(_content(tensor), []) for identity, tensor in tensors.items()}


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.shape


def _content(tensor: torch.Tensor) -> Hashable:
    if not is_strided(tensor) or tensor.is_meta:
        return id(tensor)
    return digest_of(tensor)


def in_memory(leaf: Any) -> Hashable:
    """Return what equal tensors in the same memory have in common; of others something that nothing else has."""
    tensor = local(leaf)
    if isinstance(tensor, torch.Tensor) and is_strided(tensor) and tensor.data_ptr():
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return id(leaf)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    own = _OWN if isinstance(value, Optimizer) else ()
    attributes = getattr(value, "__dict__", {})
    slots = (name for kind in type(value).__mro__ for name in _slots(kind))
    return [
        *(child for name, child in attributes.items() if name not in own),
        *(getattr(value, name) for name in slots if name not in own and hasattr(value, name)),
    ]


def _slots(kind: type) -> Iterable[str]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else names


def unregistered(optimizer: Optimizer, objects: dict[str, Any]) -> str | None:
    """Return what to tell of an optimizer that steps parameters of registered modules and has its state in no object.

    An object that holds an optimizer keeps its state if it is an optimizer itself, or if its `state_dict()` has the key
    "param_groups" somewhere: a scheduler holds one and does not keep it. An object whose `state_dict()` fails now may
    well keep it.
    """
    # One that holds a registered one, as SAM does, is that one's wrapper.
    wrapped = held_optimizers(optimizer)
    names = trained_by(wrapped, modules_of(objects))
    inside = set(map(id, wrapped))
    if not names or any(
        inside.intersection(map(id, held_optimizers(item))) and _keeps(item) for item in objects.values()
    ):
        return None
    return (
        f"{type(optimizer).__qualname__} steps {some(names, 1)}, but no registered object keeps its state: it is not "
        "part of checkpoints, and a recovery goes on without it. Register it, or call checkpointer.replace() if "
        "it took the place of one that is registered"
    )


def _keeps(item: Any) -> bool:
    if isinstance(item, Optimizer):
        return True
    try:
        return has_groups(item.state_dict())
    except Exception:  # noqa: BLE001 - an object of the script; what it raises, its capture raises too
        return True


def has_groups(state: Any) -> bool:
    """Tell whether a state has the key "param_groups" somewhere, as a part of a dotted name too."""
    return any("param_groups" in str(key).split(".") for key, _ in dict_items(state))


def dict_items(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of the dicts in `tree`, of dicts, lists and tuples, at any depth."""
    if isinstance(tree, dict):
        yield from tree.items()
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from dict_items(child)


class Unregistered:
    """Tells once of an optimizer that trains registered modules without being registered."""

    def __init__(self, objects: Callable[[], dict[str, Any]]) -> None:
        """Watch for optimizers that none of `objects()` holds."""
        self._objects = objects
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned = False

    def before_step(self, optimizer: Optimizer) -> str | None:
        """Judge `optimizer` when it is seen for the first time, and return what to tell of it; cheap from then on."""
        if self._warned or optimizer in self._judged:
            return None
        self._judged.add(optimizer)
        text = unregistered(optimizer, self._objects())
        self._warned = text is not None
        return text

    def forget(self) -> None:
        """Judge anew from now on: other objects are registered."""
        self._judged = weakref.WeakSet()


class Accumulation:
    """Tells once where gradients outlive `Checkpointer.step`: they are no part of a checkpoint."""

    def __init__(self) -> None:
        """Watch from now on."""
        # An optimizer's gradient when it was used last, and, where it was written since, whether any of it is not zero.
        self._used: weakref.WeakKeyDictionary[Optimizer, Seen] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[Optimizer, tuple[Seen, torch.Tensor]] = weakref.WeakKeyDictionary()
        # Those whose leftovers are zeros, which `zero_grad(set_to_none=False)` writes: to look costs a GPU's stream.
        self._zeroed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._step = 0
        self._warned = False

    def completed(self, step: int) -> None:
        """Note that `step` is completed, and gradients that were written since their optimizer stepped."""
        self._step = step
        for optimizer, used in [] if self._warned else self._used.items():
            gradient = _gradient(optimizer)
            if gradient is None or optimizer in self._zeroed:
                continue
            if not used.is_as_before(gradient):
                self._kept[optimizer] = Seen(gradient), local(gradient).any()

    def before_step(self, optimizer: Optimizer) -> str | None:
        """Return what to tell if `optimizer` is about to use one of the gradients that were noted."""
        kept, gradient = self._kept.pop(optimizer, None), _gradient(optimizer)
        if kept is None or gradient is None or not kept[0].is_one_with(gradient) or self._warned:
            return None
        if not kept[1]:
            self._zeroed.add(optimizer)
            return None
        self._warned = True
        return (
            f"gradients outlive step({self._step}) and are not part of a checkpoint, so a recovery loses their update: "
            "call Checkpointer.step() after optimizer.step(), and where they are accumulated over several batches, or "
            "written by what another optimizer trains, only when none is left"
        )

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` has used its gradients; only now, because a closure makes them in its step."""
        gradient = _gradient(optimizer)
        if gradient is not None:
            self._used[optimizer] = Seen(gradient)


def _gradient(optimizer: Optimizer) -> torch.Tensor | None:
    """Return an optimizer's first gradient that is not sparse, which tells for all: if not begun anew, it stays."""
    gradients = (parameter.grad for parameter in chain(*_groups([optimizer])))
    found = (each for each in gradients if each is not None and not each.is_inference() and is_strided(local(each)))
    return next(found, None)
