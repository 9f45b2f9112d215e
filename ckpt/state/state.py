"""The training state: what the user registered, gathered as one tree; `loading.py` replaces it by a checkpoint."""

import contextlib
import gc
import json
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
import xxhash

from ..errors import StateError
from ..format.manifest import Manifest, leaf_paths
from .fits import Layout, difference, layout
from .held import (
    ParameterOrder,
    begin_fsdp1,
    fsdp1_units,
    held_optimizers,
    keyed_parameters,
    later_bytes,
    mistaken_key,
    modules_of,
    named_parameters,
    parameters,
    state_dict_of,
    state_of,
    whole_state,
)
from .outside import Watch, ambiguous, has_others, outside, read_only, remember_modes
from .tree import Flattener, extent, overlaps, share
from .unsaved import REMEDY, Unsaved

_WATCHED: Final = 4


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
        objects: The objects by name, those in lists and dicts as "name.0" or "name.key"; of a DistributedDataParallel
            the module inside, so that names have no prefix.
        values: Plain data, captured at each step and replaced by `load`.
        has_rng: Whether the random number generators are part of it.
        modules: Those of the objects that are modules, by name.
        held: The torch optimizers that an object is or holds, by its name, if there are any.
        optimizers: All of them.
        trained: Names of the objects that are modules, or are or hold optimizers.
        apart: Names of the objects in which ranks differ on purpose, as `differs_between_ranks()` of an object says.
        order: The names of the optimizers' parameters when `flatten` was called last.
        unsaved: What no object's state had then.
    """

    def __init__(self, registered: dict[str, Any], *, rng: bool) -> None:
        """Sort what the user registered into stateful objects and plain values.

        Raises:
            StateError: A container mixes both, an object's state dict is not local to its rank, or a module lies in
                memory that cannot be written.
        """
        self.objects: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self._containers: dict[str, tuple[Any, dict[str, Any]]] = {}
        for name, item in registered.items():
            objects = dict(_objects(name, item))
            if not objects:
                self.values[name] = item
            elif isinstance(item, list | tuple | dict):
                self._containers[name] = item, dict(_leaves(name, item))
            for path, found in objects.items():
                if path in self.objects:
                    raise StateError(f"{path} is registered twice: give one of the two another name")
                self.objects[path] = found
        self.has_rng = rng
        self._begun: Layout | None = None
        self._layout: Layout = {}
        self.find_trained()
        self._check_modules()

    def replace(self, registered: dict[str, Any]) -> None:
        """Register other objects under names that are registered already.

        Raises:
            StateError: A name is not that of an object or of a container of as many objects; nothing was replaced.
        """
        objects: dict[str, Any] = {}
        for name, item in registered.items():
            new = dict(_objects(name, item))
            old = {path for path in self.objects if path == name or path.startswith(f"{name}.")}
            if not new or new.keys() != old:
                names, places = ", ".join(new) or "no object", ", ".join(sorted(old)) or "nothing"
                raise StateError(
                    f"{name}: {names} cannot take the place of {places}: "
                    "replace objects by objects, under the names that were registered"
                )
            objects |= new
        self.objects |= objects
        for name, (item, _) in self._containers.items():
            if any(path == name or path.startswith(f"{name}.") for path in registered):
                item = registered.get(name, item)
                self._containers[name] = item, dict(_leaves(name, item))
        self.find_trained()
        self._check_modules()
        if self._begun is not None:
            self._look()

    def outgrown(self) -> str | None:
        """Return what to tell of a registered list, tuple or dict that has other objects now, None if none has."""
        for name, (item, known) in self._containers.items():
            if any(leaf is not None and known.get(path) is not leaf for path, leaf in _leaves(name, item)):
                return (
                    f"{name} has other objects than it was registered with, which are in no checkpoint: register them "
                    "from the beginning, or call checkpointer.replace()"
                )
        return None

    def begin(self) -> None:
        """Let the state be as that of a new process, and remember how it looks where a restarted script restores it."""
        if reentered.is_set():
            for item in self.objects.values():
                if isinstance(item, torch.nn.Module | torch.optim.Optimizer):
                    item.zero_grad()
        remember_modes(self.modules)
        self._look()

    def _look(self) -> None:
        for module in self.modules.values():
            begin_fsdp1(module)
        states = {name: whole_state(item) for name, item in self.modules.items()}
        self._begun = layout(states, self.modules, self._registered())

    def changed(self) -> str | None:
        """Return what to tell of modules and optimizers that look otherwise since `begin`, None if they do not."""
        return None if self._begun is None else difference(self._begun, self._layout, self.modules)

    def outside(self) -> dict[str, Any]:
        """Return what the state depends on and no `state_dict()` says."""
        return outside(self.held, self.modules, keyed_parameters(self.modules))

    def flatten(self) -> Flattener:
        """Return the current state, its tensors by reference.

        Raises:
            StateError: It contains something that a checkpoint cannot hold, or could not bring back as it is.
        """
        with no_collection():
            flat = self._flatten()
            if self.unsaved.of_optimizers and self._held() != self.held:
                # A script has made them anew since: what the former ones have is in no state, and of no use.
                self.find_trained()
                flat = self._flatten()
            return flat

    def _flatten(self) -> Flattener:
        for name, several in self.held.items():
            for optimizer in several:
                if (key := mistaken_key(optimizer)) is not None:
                    raise StateError(
                        f"{name}: {type(optimizer).__qualname__} has the key {key!r} in its state, which its "
                        f"state_dict() takes for parameter {int(key)}: give it another one, such as text"
                    )
        objects = self.states()
        rng = get_rng() if self.has_rng else None
        try:
            flat = Flattener({"objects": objects, "values": self.values, "rng": rng})
            in_modules = keyed_parameters(self.modules)
            flat.add("order", self.order.names(self.held, in_modules, flat))
            flat.add("outside", outside(self.held, self.modules, in_modules))
            self.unsaved.take(self.objects, self.held, objects, in_modules, self.order, flat)
            flat.add("unsaved", self.unsaved.to_compare())
            if flat.shared:
                flat.add("shared", flat.shared)
            if flat.kinds:
                flat.add("kinds", flat.kinds)
            if flat.sharing or flat.repeating:
                self._check_memory(flat)
            self._check_arrays(flat)
        except StateError as error:
            raise StateError(str(error).removeprefix("objects.")) from None
        if self._begun is not None and (now := layout(objects, self.modules, self._registered())) != self._layout:
            self._layout = now
        return flat

    def states(self) -> dict[str, Any]:
        """Return what the `state_dict()` of each object gives, and leave optimizers without state as they are.

        That of DCP and torchtitan makes one by a step of zeros, and Adam would count it: its first steps would be
        others than without a checkpoint.
        """
        fresh = [optimizer for optimizer in self.optimizers if not state_of(optimizer)]
        is_watched = self._watched < _WATCHED and has_others()
        self._watched += is_watched
        try:
            return {name: _state_of(name, item, is_watched) for name, item in self.objects.items()}
        finally:
            for optimizer in fresh:
                if isinstance(made := state_of(optimizer), dict):
                    made.clear()

    def estimate_bytes(self, flat: Flattener) -> int:
        """Return the bytes of a capture of `flat`, with those that torch's optimizers without a state will have."""
        now_bytes = sum(spec.nbytes for spec in flat.specs())
        fresh = [optimizer for optimizer in self.optimizers if not state_of(optimizer)]
        return now_bytes + sum(map(later_bytes, fresh))

    def device(self) -> torch.device | None:
        """Return the first GPU that holds tensors of the state, None when there is none."""
        leaves = (leaf for leaf in self.flatten().leaves if isinstance(leaf, torch.Tensor))
        return next((leaf.device for leaf in leaves if leaf.is_cuda), None)

    def check_kept(self) -> None:
        """Check, after `flatten`, that the state has what registered optimizers train.

        Raises:
            StateError: It lacks a parameter. Of objects of other classes than torch's, which may keep it in a form of
                their own, that is not known before a restore.
        """
        if self.order.unkept and all(
            isinstance(item, torch.nn.Module) or type(item).__module__.partition(".")[0] == "torch"
            for item in self.objects.values()
        ):
            raise StateError(
                f"{self.order.unkept} is in no registered object, so no checkpoint would have it. {REMEDY}"
            )

    def topology(self, flat: Flattener, world_size: int) -> int:
        """Return the fingerprint of the world size and of the shapes of the device meshes that `flat` uses."""
        shapes = sorted({tuple(shard.device_mesh.mesh.shape) for shard in flat.shards.values()})
        return xxhash.xxh3_64_intdigest(json.dumps([world_size, shapes]).encode())

    def load(self, manifest: Manifest, payload: torch.Tensor, untouched: frozenset[str] = frozenset()) -> list[str]:
        """Replace the state by the one in `payload` (uint8, on the CPU); nothing keeps a reference to it.

        The objects `untouched` have their state already, and are only compared.

        Returns:
            Plain values of objects of others that are not what was loaded, for a warning.

        Raises:
            StateError: Names, shapes or dtypes differ, and nothing was loaded; or the state is not, bit for bit, what
                was loaded. The message has the first differences.
            TopologyError: A tensor was sharded over a mesh that the current state does not use; nothing was
                loaded.
            SlotError: The manifest is malformed; nothing was loaded.
        """
        # Only a restart needs it.
        from .loading import load

        with no_collection():
            return load(self, manifest, payload, untouched)

    def find_trained(self) -> None:
        """Look for the modules and optimizers of the objects, which may make others when they load."""
        self.held = self._held()
        self.modules = modules_of(self.objects)
        self.optimizers = list({id(found): found for several in self.held.values() for found in several}.values())
        self.trained = frozenset([*self.held, *self.modules])
        apart = {id(each) for item in self.objects.values() for each in _differing(item)}
        sharded = [module for module in self.modules.values() if fsdp1_units(module)]
        shards = {id(shard) for module in sharded for _, shard in named_parameters(module)}
        apart |= {id(module) for module in sharded}
        apart |= {id(each) for each in self.optimizers if not shards.isdisjoint(map(id, parameters(each)))}
        # An optimizer is apart with its parameters, and what holds it with the optimizer.
        self.apart = frozenset(
            name
            for name, item in self.objects.items()
            if not apart.isdisjoint(map(id, [item, *self.held.get(name, ())]))
        )
        self.order = ParameterOrder()
        self.unsaved = Unsaved()
        self._arrays: tuple[int, dict[int, int]] = (0, {})
        self._watched = 0  # a few times, as it takes its time: optimizers have their states by then

    def _registered(self) -> dict[str, list[torch.optim.Optimizer]]:
        """Return the optimizers that are objects themselves, which a restarted script has to make as they were."""
        return {name: several for name, several in self.held.items() if several[0] is self.objects[name]}

    def _held(self) -> dict[str, list[torch.optim.Optimizer]]:
        held = {name: held_optimizers(item) for name, item in self.objects.items()}
        return {name: several for name, several in held.items() if several}

    def _check_modules(self) -> None:
        if text := ambiguous(self.modules) or read_only(self.modules):
            raise StateError(text)

    def _check_arrays(self, flat: Flattener) -> None:
        """Refuse arrays of objects that share memory with something else, which a checkpoint does not bring back."""
        lent = {index: extent(leaf)[0] for index in flat.arrays if not _owns(leaf := flat.leaves[index])}
        if (len(flat.leaves), lent) == self._arrays:
            return
        paths = {index: path for path, index in leaf_paths(flat.node).items()}
        memory = {index: extent(leaf) for index, leaf in enumerate(flat.leaves) if not isinstance(leaf, bytes)}
        for overlap in overlaps({index: place for index, place in memory.items() if place[0] < place[1]}):
            for index in overlap.keys() & set(flat.arrays):
                for other in overlap.keys() - {index}:
                    both = [paths.get(each, "a key") for each in sorted((index, other))]
                    # Of values, the script's own are filled where they are.
                    if paths.get(index, "").startswith("objects.") and share(flat.leaves[index], flat.leaves[other]):
                        raise StateError(
                            f"{' and '.join(path.removeprefix('objects.') for path in both)} share memory, and one is "
                            "a numpy array, which a checkpoint brings back with memory of its own: let state_dict() "
                            "leave it out"
                        )
        self._arrays = len(flat.leaves), lent

    def _check_memory(self, flat: Flattener) -> None:
        """Refuse tensors that could not be brought back as they lie in memory."""
        modules: dict[int, str] = {}
        others: dict[int, str] = {}
        for path, index in leaf_paths(flat.node).items():
            path = path.removeprefix("objects.")
            owner = next((item for name, item in self.objects.items() if path.startswith(f"{name}.")), None)
            (modules if isinstance(owner, torch.nn.Module) else others).setdefault(index, path)
        for index in flat.repeating:
            if index in modules:
                raise StateError(
                    f"{modules[index]}: several of its elements are one in memory, which load_state_dict() cannot "
                    "write; register a copy of it, made by clone()"
                )
        for overlap in flat.sharing:
            paths = sorted(modules.get(index) or others[index] for index in overlap)
            # Modules are loaded into the memory that they have.
            if not flat.can_share(overlap) and not modules.keys() >= overlap.keys():
                problem = "and not all of them are dense"
            elif modules.keys() & overlap.keys() and others.keys() & (overlap.keys() - modules.keys()):
                problem = "of a module and of another object"
            else:
                continue
            raise StateError(
                f"{' and '.join(paths[:3])} share a part of their memory, {problem}, which a checkpoint does not bring "
                "back: let state_dict() return copies, or only one of them"
            )


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running: at thousands of tensors it would look at all of them dozens of times.

    What is made and freed within costs it nothing; what outlives this makes it look at everything sooner.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _state_of(name: str, item: Any, is_watched: bool) -> Any:
    if not is_watched:
        return state_dict_of(item)
    with Watch(name) as watch:
        state = state_dict_of(item)
    watch.check()
    return state


def _differing(item: Any) -> Iterable[Any]:
    """Return the objects in which ranks differ on purpose, as a registered one tells, by reference."""
    # Asked of the class: a module may have any attribute.
    told = getattr(type(item), "differs_between_ranks", None)
    return () if told is None else told(item)


def _objects(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the stateful objects that `item` is or has, by name; none for plain values."""
    try:
        leaves = dict(_leaves(name, item))
    except RecursionError:
        return
    objects = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Stateful)}
    plain = [path for path, leaf in leaves.items() if path not in objects and leaf is not None]
    if objects and plain:
        raise StateError(
            f"{name} has objects with state_dict() ({next(iter(objects))}) and plain values ({plain[0]}): "
            "register them under names of their own"
        )
    for path, leaf in objects.items():
        yield path, _unwrap(path, leaf)


def _leaves(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, Stateful) or not isinstance(item, list | tuple | dict):
        yield name, item
        return
    for key, child in item.items() if isinstance(item, dict) else enumerate(item):
        yield from _leaves(f"{name}.{key}", child)


def _unwrap(name: str, item: Any) -> Any:
    if hasattr(item, "consolidate_state_dict"):
        raise StateError(
            f"{name}: the state dict of {type(item).__qualname__} is gathered from all ranks by "
            "consolidate_state_dict(); register the optimizer of this rank's part, its attribute `optim`"
        )
    if not isinstance(item, torch.nn.Module):
        return item
    return item.module if isinstance(item, torch.nn.parallel.DistributedDataParallel) else item


def _owns(array: Any) -> bool:
    return array.base is None and bool(array.flags.owndata)


class DueRng:
    """What the random generators have to be when training goes on after a restore, as `get_rng` returned it.

    Attributes:
        states: None once they are set, or a step is completed.
        steps: How many steps this process has completed.
    """

    states: dict[str, Any] | None = None
    steps: int = 0

    def completed(self) -> None:
        """Record that a step is completed."""
        self.states = None
        self.steps += 1


due_rng: Final = DueRng()
reentered: Final = threading.Event()
"""Set where training goes on in the process that it has failed in: gradients may be left, which a new one has not."""


def get_rng() -> dict[str, Any]:
    """Return the states of the generators of this process, for `set_rng`."""
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
