"""Beginning a run with an import: the registered objects take what it has under their names, in any world size."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..errors import StateError
from ..state.held import fsdp1_units
from ..state.state import Stateful, TrainingState, set_rng
from ..state.tree import Flattener, same
from ..state.values import renew
from .export import RANKS
from .imported import Imported, StoredTensor

_SHOWN: Final = 10
_ABSENT: Final = object()


@dataclass(kw_only=True, slots=True)
class _Names:
    """What the import did not have, and what in it nobody took."""

    absent: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    generators: bool = False
    taken: int = 0

    def describe(self) -> str:
        parts = []
        if self.absent:
            parts.append(f"it does not have {_some(self.absent)}, which begin as the script made them")
        if not self.generators:
            parts.append("random number generators go on as the script seeded them")
        if self.unused:
            parts.append(f"nothing is registered for {_some(self.unused)}")
        return "; ".join(parts)


def load_import(state: TrainingState, imported: Imported, *, rank: int, world_size: int) -> str:
    """Replace what `imported` has of `state` and return what a person should know of the rest, "" for nothing.

    What the ranks that saved it had differently goes back to its own rank, and only in their world size; but modules
    and optimizers take the lowest rank's in any other.

    Raises:
        StateError: It does not fit, or something is absent and it is strict; nothing was loaded.
        SlotError: It is damaged.
        RestoreError: Its storage does not answer.
    """
    where = f"the import of step {imported.manifest.step} from {imported.manifest.source}"
    try:
        # Of a model one rank's is right for all, as DistributedDataParallel takes rank 0's buffers.
        whole = {
            name for name, item in state.objects.items() if isinstance(item, torch.nn.Module | torch.optim.Optimizer)
        }
        saved = _of_rank(imported.state, rank, world_size, whole)
        known = {*state.objects, *state.values, *(name.partition(".")[0] for name in state.objects)}
        names = _Names(unused=[str(name) for name in saved.objects if name not in known])
        loads = [_plan(name, item, saved, state, names) for name, item in state.objects.items()]
        values = {name: _take(name, value, saved.values, names) for name, value in state.values.items()}
    except StateError as error:
        raise StateError(f"{where} does not fit, nothing was loaded: {error}") from None
    if not names.taken or (imported.manifest.strict and names.absent):
        held = ", ".join(map(str, list(imported.state)[:_SHOWN]))
        raise StateError(
            f"{where} was refused, nothing was loaded: it does not have {_some(names.absent)}; it has {held}. "
            "Register the objects by the names that they have there, "
            f"{'or import it without --strict' if names.taken else 'or choose a new run id'}"
        )
    for load in loads:
        load()
    others = Flattener({name: item.state_dict() for name, item in state.objects.items()}).leaves
    renew(state.values, _read(values), others=others)
    if state.has_rng and saved.rng is not None:
        set_rng(_read(saved.rng))
    names.generators = not state.has_rng or saved.rng is not None
    text = names.describe()
    return f"{where}: {text}" if text else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """What an import has for one rank: objects by name, plain values by name, and generators if it has them."""

    objects: dict[str, Any]
    values: dict[str, Any]
    rng: Any


def _of_rank(state: Mapping[str, Any], rank: int, world_size: int, whole: Collection[str]) -> _Saved:
    objects = {name: value for name, value in state.items() if name != RANKS}
    ranks = state.get(RANKS)
    if not isinstance(ranks, dict) or not ranks:
        return _Saved(objects=objects, values=objects, rng=None)
    parts = list(ranks.values())
    if not all(map(_is_part, parts)) or ranks.keys() != {str(number) for number in range(len(ranks))}:
        raise StateError(f"what it has below {RANKS} was not written by `resilientctl export` of all ranks")
    own = ranks.get(str(rank), {}) if len(ranks) == world_size else {}
    if own:
        changes = own.get("objects", {})
    else:
        paths = {path for part in parts for path in part.get("objects", {})}
        changes = {path: _ABSENT for path in paths if not any(f"{path}.".startswith(f"{name}.") for name in whole)}
    for path in sorted(changes):
        objects = _with(objects, path, changes[path])
    values = own.get("values")
    if values is None:
        first, *others = (part.get("values", {}) for part in parts)
        values = {
            name: value for name, value in first.items() if all(_is_same(value, other.get(name)) for other in others)
        }
    return _Saved(objects=objects, values={**objects, **values}, rng=own.get("rng"))


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(part.get(name, {}), dict) for name in ("objects", "values"))


def _items(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict, list or tuple by key or index; nothing else has some."""
    if isinstance(tree, dict):
        return tree.items()
    return enumerate(tree) if isinstance(tree, list | tuple) else ()


def _with(tree: Any, path: str, value: Any) -> Any:
    """Return `tree` with `value` at the dotted `path`, if there is something; `_ABSENT` takes that away."""
    key: Any = next((key for key, _ in _items(tree) if f"{path}.".startswith(f"{key}.")), _ABSENT)
    if key is _ABSENT:
        return tree
    changed = value if str(key) == path else _with(tree[key], path.removeprefix(f"{key}."), value)
    if isinstance(tree, dict):
        return {other: item for other, item in {**tree, key: changed}.items() if item is not _ABSENT}
    # A list without one of its items would be another list.
    return _ABSENT if changed is _ABSENT else type(tree)([*tree[:key], changed, *tree[key + 1 :]])


def _is_same(left: Any, right: Any) -> bool:
    """Tell whether two values are bit-identical; False where a tensor would have to be read for that."""
    try:
        one, other = Flattener(left), Flattener(right)
    except StateError:
        return False
    return one.node == other.node and all(map(same, one.leaves, other.leaves))


def _plan(name: str, item: Stateful, saved: _Saved, state: TrainingState, names: _Names) -> Callable[[], Any]:
    """Return what loads `item`, once it is known that it fits."""
    found = _at(saved.objects, name)
    if found is _ABSENT:
        names.absent.append(name)
        return lambda: None
    if isinstance(item, torch.nn.Module):
        return _plan_module(name, item, found, names)
    if isinstance(item, torch.optim.Optimizer):
        return _plan_optimizer(name, item, found, state, names)
    merged = _merge(name, item.state_dict(), found, names)
    return lambda: item.load_state_dict(_read(merged))


def _at(objects: Any, name: str) -> Any:
    """Return what is at `name`, which is a dotted path for objects in lists and dicts; `_ABSENT` if nothing is."""
    if isinstance(objects, dict) and name in objects:
        return objects[name]
    for key, item in _items(objects):
        if str(key) == name:
            return item
        if name.startswith(f"{key}."):
            return _at(item, name.removeprefix(f"{key}."))
    return _ABSENT


def _plan_module(name: str, module: torch.nn.Module, found: Any, names: _Names) -> Callable[[], Any]:
    if fsdp1_units(module):
        raise StateError(
            f"{name} is sharded by FSDP1, which takes no whole tensors: train with fully_shard (FSDP2), or load the "
            "import into the module before it is wrapped, in a script of your own"
        )
    current = module.state_dict()
    flat = dict(_flat(found, current))
    if not any(key.startswith("module.") for key in current):
        # What a DistributedDataParallel puts before each name, which a Checkpointer leaves out.
        flat = {key.removeprefix("module."): value for key, value in flat.items()}
    pairs: list[tuple[torch.Tensor, StoredTensor]] = []
    for key, value in current.items():
        if key not in flat:
            names.absent.append(f"{name}.{key}")
            continue
        names.taken += 1
        stored = flat.pop(key)
        if not isinstance(value, torch.Tensor):
            current[key] = stored
        elif not isinstance(stored, StoredTensor) or stored.shape != value.shape:
            raise StateError(f"{name}.{key} is {_shown(stored)} there, {_shown(value)} in the model")
        else:
            pairs.append((value, stored))
    names.unused += [f"{name}.{key}" for key in flat]

    def load() -> None:
        for target, stored in pairs:
            stored.read_into(target)
        # They are its own by now, unless a hook made copies of them.
        module.load_state_dict(_read(current))

    return load


def _plan_optimizer(
    name: str, optimizer: torch.optim.Optimizer, found: Any, state: TrainingState, names: _Names
) -> Callable[[], Any]:
    current = optimizer.state_dict()
    groups, states = _parts(name, found)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    called = _names_of(parameters, state)
    before = [len(group.get("params", ())) for group in groups]
    now = [len(group["params"]) for group in current["param_groups"]]
    if groups and before != now:
        raise StateError(f"{name}: parameter groups of {before} tensors there, of {now} in the optimizer")
    loaded: dict[int, Any] = {}
    for index, parameter in enumerate(parameters):
        stored = next((states[key] for key in (str(index), *called[index]) if key in states), None)
        if stored is not None:
            names.taken += 1
            loaded[index] = {key: (value, parameter) for key, value in stored.items()}
        elif states:
            names.absent.append(f"{name}.state.{[*called[index], index][0]}")
    if not groups:
        names.absent.append(f"{name}.param_groups")
    merged = [
        {**_merge(f"{name}.param_groups.{index}", group, groups[index], names), "params": group["params"]}
        for index, group in enumerate(current["param_groups"] if groups else ())
    ]

    def load() -> None:
        of_parameters = {index: {key: _like(*pair) for key, pair in stored.items()} for index, stored in loaded.items()}
        optimizer.load_state_dict(
            {
                **current,
                "state": {**current["state"], **of_parameters},
                "param_groups": _read(merged) or current["param_groups"],
            }
        )

    return load


def _parts(name: str, found: Any) -> tuple[list[dict[Any, Any]], dict[Any, dict[Any, Any]]]:
    """Return the parameter groups and the states of parameters in `found`, as far as they are there."""
    match found:
        case {"param_groups": _} | {"state": _}:
            groups, states = found.get("param_groups", []), found.get("state", {})
            whole = isinstance(groups, list) and isinstance(states, dict)
            if whole and all(isinstance(item, dict) for item in [*groups, *states.values()]):
                return groups, states
    raise StateError(f"{name} is no state of an optimizer there")


def _names_of(parameters: list[torch.Tensor], state: TrainingState) -> list[list[str]]:
    """Return the names that `get_optimizer_state_dict` may have given to each parameter."""
    names: dict[int, list[str]] = {}
    for module in state.objects.values():
        if isinstance(module, torch.nn.Module):
            for name, parameter in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), []).append(name)
    return [names.get(id(parameter), []) for parameter in parameters]


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """Return an optimizer's `value`, read and laid out as its parameter if it has the same shape."""
    if not isinstance(value, StoredTensor) or value.shape != parameter.shape:
        return _read(value)
    target = torch.empty_like(parameter.detach(), dtype=value.dtype)
    value.read_into(target)
    return target


def _take(name: str, value: Any, saved: Mapping[str, Any], names: _Names) -> Any:
    if name not in saved:
        names.absent.append(name)
        return value
    return _merge(name, value, saved[name], names)


def _merge(path: str, current: Any, found: Any, names: _Names) -> Any:
    """Return `found`, with what only `current` has, and `current`'s keys: DCP turns all of them into text."""
    if not isinstance(current, dict) or not isinstance(found, dict):
        names.taken += 1
        return found
    keys = {str(key): key for key in current}
    numbers = bool(keys) and all(type(key) is int for key in current)
    merged = copy.copy(current)
    for text, value in found.items():
        key = keys.get(text, int(text) if numbers and text.isdecimal() else text)
        merged[key] = _merge(f"{path}.{text}", current.get(key), value, names)
    names.absent += [f"{path}.{text}" for text in keys if text not in found]
    return merged


def _read(value: Any) -> Any:
    """Return `value` with every tensor in it read."""
    match value:
        case StoredTensor():
            return value.read()
        case dict():
            # In a copy of its own type, which may be a Counter or have attributes.
            made = copy.copy(value)
            for key, item in value.items():
                made[key] = _read(item)
            return made
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(_read(item) for item in value)
    return value


def _flat(found: Any, names: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by dotted name, and what has one of `names` as it is."""
    if not isinstance(found, dict) or prefix in names:
        yield prefix, found
        return
    for key, value in found.items():
        yield from _flat(value, names, f"{prefix}.{key}" if prefix else str(key))


def _shown(value: Any) -> str:
    if isinstance(value, StoredTensor | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
