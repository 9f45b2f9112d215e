"""What the states of objects show of their optimizers, and how values are compared that they do not show."""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
import xxhash

from .held import Optimizer, dict_items, has_groups, has_hooks, in_memory, local, parameters, state_of
from .memory import digest_of
from .tree import Flattener, bytes_of, extent, is_strided

NOTHING: Final = object()
"""Stands for what is not there, and has no form."""
_FIXED: Final = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.Size)
_Way = tuple[Any, ...]


class FlatTensors:
    """The tensors of a flattened state, by identity and by their memory."""

    def __init__(self, flat: Flattener) -> None:
        self._flat = flat
        self._same: set[int] | None = None
        self._kept: set[Hashable] | None = None

    def __contains__(self, item: Any) -> bool:
        """Tell whether `item` is a tensor that the state has, in the same memory."""
        if not isinstance(item, torch.Tensor):
            return False
        if self._same is None:
            self._same = {id(leaf) for leaf in chain(self._flat.leaves, self._flat.shards.values())}
        if id(item) in self._same:
            return True
        if self._kept is None:
            self._kept = {in_memory(leaf) for leaf in self._flat.leaves}
        return in_memory(item) in self._kept


def left_out(
    objects: dict[str, Any], held: dict[str, list[Optimizer]], states: dict[str, Any], kept: FlatTensors
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return what optimizers have and no object's state shows as it is, as SAM leaves out its base's.

    A registered optimizer of torch without hooks shows all. A scheduler holds an optimizer, too, and is not meant to
    keep it: of objects that hold some only those count that keep one, or a tensor that it trains or has.

    Returns:
        What is left out, by path; plain values of which nobody knows, because the state has a form of its own; and
        of optimizers in such a form what they have states for.
    """
    registered = {name: item for name, item in objects.items() if isinstance(item, Optimizer)}
    plain = {id(item) for item in registered.values() if not has_hooks(item)}
    inside = {id(optimizer) for name in registered for optimizer in held[name]}
    found: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, several in held.items():
        skipped = plain if name in registered else inside
        due = [(place, optimizer) for place, optimizer in enumerate(several) if id(optimizer) not in skipped]
        given = list(_optimizer_states(states[name])) if due else []
        keeps = given or name in registered or has_groups(states[name])
        if not due or not (keeps or _shows_any(states[name], [optimizer for _, optimizer in due])):
            continue
        parts = {place: list(_parts(optimizer)) for place, optimizer in due}
        own = {place: [state for state in given if _shows_one(state, parts[place])] for place, _ in due}
        others = [state for state in given if not any(state is each for several in own.values() for each in several)]
        for place, optimizer in due:
            shown = own[place]
            options = bool(shown) or has_hooks(optimizer)
            missing, is_flat = _missing(parts[place], shown or others or given, kept, options=options)
            for way, item in missing:
                is_lost = bool(given) or isinstance(item, torch.Tensor)
                (found if is_lost else unknown)[_path(name, optimizer, place, way)] = item
            if is_flat:
                places[_place(name, optimizer, place)] = _places(parts[place])
    return found, unknown, places


def live_parts(held: dict[str, list[Optimizer]]) -> dict[str, Any]:
    """Return what optimizers have now, by the paths of `left_out`, whether a state shows it or not."""
    return {
        _path(name, optimizer, place, item_way): item
        for name, several in held.items()
        for place, optimizer in enumerate(several)
        for way, part in _parts(optimizer)
        for item_way, item in _leaves(part, way)
    }


def places_of(held: dict[str, list[Optimizer]]) -> dict[str, str]:
    """Return what optimizers have states for now, as the last part of what `left_out` returns."""
    return {
        _place(name, optimizer, place): _places(list(_parts(optimizer)))
        for name, several in held.items()
        for place, optimizer in enumerate(several)
    }


def _missing(
    parts: list[tuple[_Way, Any]], given: list[Mapping[str, Any]], kept: FlatTensors, *, options: bool
) -> tuple[list[tuple[_Way, Any]], bool]:
    """Return what of an optimizer no state shows as it is, and whether some of it is shown in a form of its own.

    Args:
        parts: What the optimizer has.
        given: States of torch's form that may be its own: the one that shows most is.
        kept: Of the whole state.
        options: Whether its options count. An object that shows copies, or nothing, says itself which it keeps.
    """
    best: tuple[list[tuple[_Way, Any]], bool] | None = None
    for state in given or [{}]:
        missing, is_flat = [], False
        for way, part in parts:
            if _at(state, way) is part or (way[0] == "param_groups" and not options):
                continue
            for item_way, item in _leaves(part, way):
                shown = _at(state, item_way)
                if shown is NOTHING and item in kept:
                    is_flat = True
                elif shown is NOTHING or not is_shown(item, shown):
                    missing.append((item_way, item))
        if best is None or len(missing) < len(best[0]):
            best = missing, is_flat
        if not missing:
            break
    assert best is not None
    return best


def _shows_one(state: Mapping[str, Any], parts: list[tuple[_Way, Any]]) -> bool:
    """Tell whether `state` has the very state that an optimizer of these parts has for a parameter."""
    return any(isinstance(part, dict) and _at(state, way) is part for way, part in parts)


def _shows_any(state: Any, optimizers: list[Optimizer]) -> bool:
    """Tell whether an object's state has a tensor that one of these trains or has."""
    shown = {in_memory(item) for _, item in _leaves(state, ()) if isinstance(item, torch.Tensor)}
    return bool(shown) and any(
        in_memory(tensor) in shown
        for optimizer in optimizers
        for tensor in chain(
            parameters(optimizer),
            (item for way, part in _parts(optimizer) if way[0] == "state" for _, item in _leaves(part, way)),
        )
        if isinstance(tensor, torch.Tensor)
    )


def _optimizer_states(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the dicts in an object's state that have the form of an optimizer's."""
    if isinstance(state, dict) and {"state", "param_groups"} <= state.keys():
        if not _has_names(state["param_groups"]):
            yield state
    elif isinstance(state, dict | list | tuple):
        for child in state.values() if isinstance(state, dict) else state:
            yield from _optimizer_states(child)


def _has_names(groups: Any) -> bool:
    """Tell whether groups have their parameters' names, as those of DCP, and their states are found by these."""
    return any(
        isinstance(name, str)
        for key, names in dict_items(groups)
        if key == "params" and isinstance(names, list)
        for name in names[:1]
    )


def _parts(optimizer: Optimizer) -> Iterator[tuple[_Way, Any]]:
    """Yield what an optimizer has for each parameter, and each option, by its way in a state of torch's form."""
    places: dict[int, int] = {}
    for place, parameter in enumerate(parameters(optimizer)):
        places.setdefault(id(parameter), place)
    for key, state in state_of(optimizer).items():
        if isinstance(key, torch.Tensor):
            key = places.setdefault(id(key), len(places))  # a wrapper may have no groups
        yield ("state", key), state
    for index, group in enumerate(getattr(optimizer, "param_groups", None) or []):
        for key, option in group.items():
            if key != "params":
                yield ("param_groups", index, key), option


def _leaves(tree: Any, way: _Way) -> Iterator[tuple[_Way, Any]]:
    if isinstance(tree, dict | list | tuple) and tree:
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(child, (*way, key))
    else:
        yield way, tree


def _path(name: str, optimizer: Optimizer, place: int, way: _Way) -> str:
    """Return what to call a part of an optimizer that is the `place`-th of an object's."""
    of = f"{type(optimizer).__qualname__} {place}"
    # No two ways have one path.
    part, which, *keys = (each if isinstance(each, str) and each.isidentifier() else repr(each) for each in way)
    if part == "state":
        return f"{name}: {'.'.join(keys) or part} of parameter {which} in {of}"
    return f"{name}.{part}.{which}.{'.'.join(keys)} of {of}"


def _place(name: str, optimizer: Optimizer, place: int) -> str:
    return f"{name}: what {type(optimizer).__qualname__} {place} has a state for"


def _places(parts: list[tuple[_Way, Any]]) -> str:
    """Return for which parameters an optimizer has a state, and of how many parts."""
    sizes = ((way[1], len(part) if isinstance(part, dict) else 1) for way, part in parts if way[0] == "state")
    return xxhash.xxh3_128_hexdigest(" ".join(sorted(map(repr, sizes))).encode())


def _at(tree: Any, way: _Way) -> Any:
    for key in way:
        try:
            tree = tree[key] if isinstance(tree, dict | list | tuple) else NOTHING
        except (LookupError, TypeError):
            return NOTHING
    return tree


def is_shown(item: Any, shown: Any) -> bool:
    """Tell whether `shown` is the same as `item`, bit for bit, of DTensors the shard of this rank."""
    if not isinstance(item, torch.Tensor):
        return item is shown or form_of(item) == form_of(shown)
    if not isinstance(shown, torch.Tensor):
        return False
    tensor, shown = local(item), local(shown)
    if any(not is_strided(each) or each.is_meta for each in (tensor, shown)):
        return True  # captures refuse such a leaf, or the object makes it a tensor of its own kind
    if (tensor.dtype, tensor.shape) != (shown.dtype, shown.shape):
        return False
    views = [(each.stride(), each.is_neg(), each.is_conj()) for each in (tensor, shown)]
    is_one = extent(tensor) == extent(shown) and views[0] == views[1]
    return is_one or torch.equal(bytes_of(tensor), bytes_of(shown))


def form_of(item: Any) -> str | None:
    """Return what an item is compared by, the same for lists and dicts of any class; None if it has no fixed form."""
    if isinstance(item, torch.Tensor):
        plain = local(item)
        return digest_of(plain) if is_strided(plain) and not plain.is_meta else None
    if isinstance(item, np.ndarray):
        return (
            None if item.dtype.hasobject else f"{item.dtype} {item.shape} {xxhash.xxh3_128_hexdigest(item.tobytes())}"
        )
    if isinstance(item, deque):
        item = list(item)  # which is how a state may show it
    if isinstance(item, tuple | list | dict):
        items = [part for pair in item.items() for part in pair] if isinstance(item, dict) else list(item)
        forms = [form_of(each) for each in items]
        kind = next(kind for kind in (tuple, list, dict) if isinstance(item, kind))
        return None if None in forms else f"{kind.__name__} {forms}"
    fixed = item is None or isinstance(item, _FIXED)
    return f"{type(item).__name__} {item!r}" if fixed else None
