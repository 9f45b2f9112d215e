"""Beginning a run with an import: what it has under the names of the registered objects, in any world size.

An import is the slot of a run of one rank, whose tree is that of the checkpoint which was imported. It is put into the
form that the registered objects have now, with what they are where it lacks something. The result is loaded as any slot
is: exactly, or not at all.
"""

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

import torch

from ..errors import SlotError, StateError, some
from ..format.manifest import TensorSpec
from ..state.fits import is_extra
from ..state.held import fsdp1_units
from ..state.shown import form_of
from ..state.state import TrainingState, get_rng
from ..state.tree import Flattener, shard_spec
from .assembly import Assembled, counts_reads, filled, opened
from .captures import Captures
from .export import RANKS
from .payload import Made, whole
from .pieces import place

SOURCE: Final = "imported_from"
STRICT: Final = "strict"
"""Plain values of an import: where it comes from, and whether a run must refuse it if it lacks something."""

_SHOWN: Final = 10
_ABSENT: Final = object()
_CONTENTS: Final = "contents"


def take_over(state: TrainingState, captures: Captures, *, rank: int, world_size: int) -> Assembled:
    """Return what `rank` of `world_size` is to load of an import; nothing is loaded yet.

    What the ranks that saved it had differently goes back to its own rank, and only in their world size; but modules
    and optimizers take the lowest rank's in any other.

    Raises:
        StateError: It does not fit, or something is absent and it is strict.
        SlotError: It is damaged.
        RestoreError: Its storage does not answer.
    """
    about, found = _opened(captures)
    where = f"the import of step {captures.pair[1]} from {about.get(SOURCE)}"
    try:
        taking = _TakingOver(state, found, rank, world_size)
        flat = Flattener(taking.tree())
    except StateError as error:
        raise StateError(f"{where} does not fit, nothing was loaded: {error}") from None
    if not taking.taken or (about.get(STRICT) and taking.absent):
        raise StateError(
            f"{where} was refused, nothing was loaded: it does not have {some(taking.absent, _SHOWN)}; it has "
            f"{', '.join(map(str, list(found)[:_SHOWN]))}. Register the objects by the names that they have there, "
            f"{'or import it without --strict' if taking.taken else 'or choose a new run id'}"
        )
    leaves = taking.leaves(flat)
    flat.add("shared", flat.shared)
    flat.add("kinds", flat.kinds)
    told = taking.told()
    made = filled(captures, flat.node, leaves, [f"{where}: {'; '.join(told)}"] if told else [])
    return replace(made, untouched=frozenset(state.objects).intersection(taking.absent))


def _opened(captures: Captures) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return what an import tells of itself, and its state with its tensors as they are to be made."""
    manifest = captures.ranks[0].manifest
    match opened(captures, manifest.tree, [whole(0, *each) for each in enumerate(manifest.tensors)]):
        case {"values": dict() as about, "objects": dict() as state}:
            return about, state
    raise SlotError("the import has no objects, or does not tell of itself")


class _TakingOver:
    """The registered objects' state, in which tensors that the import has take theirs from there.

    Attributes:
        absent: What the import does not have.
        taken: How much it has.
    """

    def __init__(self, state: TrainingState, found: dict[Any, Any], rank: int, world_size: int) -> None:
        self.absent: list[str] = []
        self.taken = 0
        self._unused: list[str] = []
        self._state = state
        self._rank = rank
        # A tensor in the state, what its content is, and the parameter whose state it is, if it is one's.
        self._contents: list[tuple[Any, Made, Any]] = []
        self._dtypes: dict[int, str] = {}  # of parameters, by id, as the import has them
        self._names: dict[int, list[str]] = {}  # that `get_optimizer_state_dict` may have given to parameters, by id
        for module in state.modules.values():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                self._names.setdefault(id(parameter), []).append(name)
        self._objects = {name: value for name, value in found.items() if name != RANKS}
        self._values = self._objects
        self._rng = None
        if ranks := found.get(RANKS):
            self._take_ranks(ranks, rank, world_size)

    def _take_ranks(self, ranks: Any, rank: int, world_size: int) -> None:
        """Take what an export has of single ranks."""
        parts: list[Any] = list(ranks.values()) if isinstance(ranks, dict) else [None]
        if not all(map(_is_part, parts)) or ranks.keys() != {str(number) for number in range(len(ranks))}:
            raise StateError(f"what it has below {RANKS} was not written by `resilientctl export` of all ranks")
        if len(parts) == world_size:
            own = ranks[str(rank)]
            changes, values, self._rng = own.get("objects", {}), own.get("values", {}), own.get("rng")
        else:
            # Of a model one rank's is right for all, as DistributedDataParallel takes rank 0's buffers.
            kinds = torch.nn.Module | torch.optim.Optimizer
            whole = tuple(f"{name}." for name, item in self._state.objects.items() if isinstance(item, kinds))
            paths = {path for part in parts for path in part.get("objects", {})}
            paths = {path for path in paths if not f"{path}.".startswith(whole)}
            paths |= {name for name in self._state.objects if counts_reads(self._state, name)}
            changes = dict.fromkeys(paths, _ABSENT)
            first, *others = (part.get("values", {}) for part in parts)
            values = {name: value for name, value in first.items() if _is_same(value, name, others)}
        self._objects = _changed(self._objects, "", {f".{path}": value for path, value in changes.items()})
        self._values = {**self._objects, **values}

    def tree(self) -> dict[str, Any]:
        """Return the state, without what says how it was made.

        Raises:
            StateError: It does not fit.
        """
        known = {*self._state.objects, *self._state.values, *(name.partition(".")[0] for name in self._state.objects)}
        self._unused = [str(name) for name in self._objects if name not in known]
        states = self._state.states()
        objects = {name: self._object(name, item, states[name]) for name, item in self._state.objects.items()}
        values = {
            name: self._merge(name, value, self._values.get(name, _ABSENT))
            for name, value in self._state.values.items()
        }
        rng = get_rng() if self._state.has_rng else None
        if rng is not None and self._rng is not None:
            rng = self._merge("rng", {}, self._rng)
        return {"objects": objects, "values": values, "rng": rng, _CONTENTS: [tensor for tensor, *_ in self._contents]}

    def told(self) -> list[str]:
        """Return what a person should know."""
        told = []
        if self.absent:
            told.append(f"it does not have {some(self.absent, _SHOWN)}, which begin as the script made them")
        if self._state.has_rng and self._rng is None:
            told.append("random number generators go on as the script seeded them")
        if self._unused:
            told.append(f"nothing is registered for {some(self._unused, _SHOWN)}")
        return told

    def leaves(self, flat: Flattener) -> list[Made]:
        """Return the leaves of the state in `flat`, out of which what names those that the import has is taken.

        They are laid out as they are now.
        """
        leaves = [Made(spec=spec, given=leaf) for leaf, spec in zip(flat.leaves, flat.specs(), strict=True)]
        _, keys, children = flat.node
        keys.pop()
        # Of tensors that are one, each may be the one that the import has.
        for (_, index), (tensor, stored, like) in zip(children.pop()[1:], self._contents, strict=True):
            leaves[index] = self._leaf(tensor, leaves[index].spec, stored, like)
        return leaves

    def _leaf(self, tensor: Any, spec: TensorSpec, stored: Made, like: Any) -> Made:
        if like is not None:
            spec = replace(spec, dtype=self._dtype(stored, like), device=like.device.type)
            if tuple(like.shape) == spec.shape:
                # Fused optimizers take for granted that a state lies in memory as its parameter does.
                laid_out = torch.empty_like(like.to_local() if hasattr(like, "to_local") else like, device="meta")
                spec = replace(spec, stride=None if laid_out.is_contiguous() else laid_out.stride())
                tensor = like
        if not hasattr(tensor, "to_local"):
            return replace(stored, spec=spec)
        shard, local = shard_spec(tensor), tuple(tensor.to_local().shape)
        # A rank that is not in the mesh has no elements, and no place.
        offset, size = ((0,) * len(local), local) if 0 in local else place("a tensor", shard, self._rank, local)
        return replace(stored.box(offset, size), spec=replace(spec, shape=local, shard=shard))

    def _object(self, name: str, item: Any, current: Any) -> Any:
        found = _at(self._objects, name)
        if found is _ABSENT or not isinstance(item, torch.nn.Module | torch.optim.Optimizer):
            return self._merge(name, current, found)
        if isinstance(item, torch.optim.Optimizer):
            return self._optimizer(name, item, current, found)
        if fsdp1_units(item):
            raise StateError(
                f"{name} is sharded by FSDP1, which takes no whole tensors: train with fully_shard (FSDP2), or load "
                "the import into the module before it is wrapped, in a script of your own"
            )
        flat = dict(_flat(found, current))
        if not any(key.startswith("module.") for key in current):
            # What a DistributedDataParallel puts before each name, which a Checkpointer leaves out.
            flat = {key.removeprefix("module."): value for key, value in flat.items()}
        self._unused += [f"{name}.{key}" for key in flat if key not in current]
        taken = {key: flat[key] for key in current if key in flat}
        for key, value in taken.items():
            if isinstance(current[key], torch.Tensor) and not is_extra(key) and not _fits(value, current[key]):
                raise StateError(f"{name}.{key} is {_shown(value)} there, {_shown(current[key])} in the model")
        for key, parameter in item.named_parameters(remove_duplicate=False):
            if isinstance(stored := taken.get(key), Made):
                self._dtypes[id(parameter)] = stored.spec.dtype
        return self._merge(name, current, taken, is_model=True)

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer, current: Any, found: Any) -> Any:
        groups, states = _parts(name, found)
        before, now = ([len(group.get("params", ())) for group in each] for each in (groups, optimizer.param_groups))
        if groups and before != now:
            raise StateError(f"{name}: parameter groups of {before} tensors there, of {now} in the optimizer")
        if not groups:
            self.absent.append(f"{name}.param_groups")
        merged = [
            {**self._merge(f"{name}.param_groups.{index}", group, groups[index]), "params": group["params"]}
            for index, group in enumerate(current["param_groups"] if groups else ())
        ] or current["param_groups"]
        made = dict(current["state"])
        several = zip(optimizer.param_groups, merged, strict=True)
        parameters = [(parameter, group) for held, group in several for parameter in held["params"]]
        for index, (parameter, group) in enumerate(parameters):
            called = [str(index), *self._names.get(id(parameter), ())]
            key = next((key for key in called if key in states), None)
            if key is not None:
                # As torch's optimizers load it.
                on_device = group.get("capturable") or group.get("fused")
                step = torch.empty((), dtype=torch.float32, device=parameter.device) if on_device else None
                made[index] = {
                    part: self._merge(
                        f"{name}.state.{key}.{part}", _ABSENT, value, step if part == "step" else parameter
                    )
                    for part, value in states[key].items()
                }
            elif states:
                self.absent.append(f"{name}.state.{called[-1]}")
        return {**current, "state": made, "param_groups": merged}

    def _dtype(self, stored: Made, like: torch.Tensor) -> str:
        """Return the dtype that a state of the parameter `like` has: that of the parameter now, if it had it before.

        torch's optimizers cast all of them when they load, which would round those that one keeps in another dtype.
        """
        before = stored.spec.dtype
        is_cast = like.is_floating_point() and getattr(torch, before).is_floating_point
        is_cast = is_cast and before == self._dtypes.get(id(like), before)
        return str(like.dtype).removeprefix("torch.") if is_cast else before

    def _merge(self, path: str, current: Any, found: Any, like: Any = None, *, is_model: bool = False) -> Any:
        """Return `found`, with what only `current` has, and `current`'s keys: DCP turns all of them into text.

        `is_model`: tensors, but those in other dicts, get the dtypes that `current` has.
        """
        if found is _ABSENT:
            self.absent.append(path)
            return current
        if isinstance(found, dict):
            # A copy of its own type, which may be a Counter or have attributes.
            merged = copy.copy(current) if isinstance(current, dict) else type(found)()
            keys = {str(key): key for key in merged}
            numbers = bool(keys) and all(type(key) is int for key in merged)
            for text, value in found.items():
                key = keys.get(text, int(text) if numbers and text.isdecimal() else text)
                of_model = is_model and not isinstance(value, dict)
                merged[key] = self._merge(f"{path}.{text}", merged.get(key, _ABSENT), value, is_model=of_model)
            self.absent += [f"{path}.{text}" for text in keys if text not in found]
            return merged
        self.taken += 1
        if type(found) in (list, tuple):
            return type(found)(self._merge(f"{path}.{index}", _ABSENT, item) for index, item in enumerate(found))
        if not isinstance(found, Made):
            return found
        shape, dtype = found.spec.shape, getattr(torch, found.spec.dtype)
        if not _fits(found, current) or (current.dtype != dtype and not is_model):
            # One element, so that it takes no memory.
            current = torch.empty((1,) * len(shape), dtype=dtype, device="cpu").expand(shape)
        self._contents.append((current, found, like))
        return current


def _fits(found: Any, current: Any) -> bool:
    """Tell whether `found` is a tensor that can take the place of the tensor `current`."""
    return isinstance(found, Made) and isinstance(current, torch.Tensor) and found.spec.shape == tuple(current.shape)


def _changed(tree: Any, path: str, changes: dict[str, Any]) -> Any:
    """Return `tree`, which is at the dotted `path`, with the `changes`; `_ABSENT` takes something away."""
    if path in changes:
        return changes[path]
    if isinstance(tree, dict):
        items = {key: _changed(item, f"{path}.{key}", changes) for key, item in tree.items()}
        return type(tree)({key: item for key, item in items.items() if item is not _ABSENT})
    if type(tree) in (list, tuple):
        several = [_changed(item, f"{path}.{index}", changes) for index, item in enumerate(tree)]
        # A list without one of its items would be another list.
        return _ABSENT if any(item is _ABSENT for item in several) else type(tree)(several)
    return tree


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name, {}), dict) for name in ("objects", "values"))


def _is_same(value: Any, name: str, others: list[dict[Any, Any]]) -> bool:
    """Tell whether all of `others` have this value; False where a tensor would have to be read for that."""
    form = form_of(value)
    return form is not None and all(form_of(other.get(name)) == form for other in others)


def _at(tree: Any, name: str) -> Any:
    """Return what is at `name`, which is a dotted path for objects in lists and dicts; `_ABSENT` if nothing is."""
    items = tree if isinstance(tree, dict) else dict(enumerate(tree)) if isinstance(tree, list | tuple) else {}
    below = (_at(item, name.removeprefix(f"{key}.")) for key, item in items.items() if name.startswith(f"{key}."))
    exact = (item for key, item in items.items() if str(key) == name)
    return next((found for found in (*exact, *below) if found is not _ABSENT), _ABSENT)


def _parts(name: str, found: Any) -> tuple[list[dict[Any, Any]], dict[Any, dict[Any, Any]]]:
    """Return the parameter groups and the states of parameters in `found`, as far as they are there."""
    match found:
        case {"param_groups": _} | {"state": _}:
            groups, states = found.get("param_groups", []), found.get("state", {})
            whole = isinstance(groups, list) and isinstance(states, dict)
            if whole and all(isinstance(item, dict) for item in [*groups, *states.values()]):
                return groups, states
    raise StateError(f"{name} is not an optimizer state there")


def _flat(found: Any, names: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by dotted name, and what has one of `names` as it is."""
    if not isinstance(found, dict) or prefix in names:
        yield prefix, found
        return
    for key, value in found.items():
        yield from _flat(value, names, f"{prefix}.{key}" if prefix else str(key))


def _shown(value: Any) -> str:
    if isinstance(value, Made):
        return str(value.spec)
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
