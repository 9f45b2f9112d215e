"""Putting exact values where an optimizer's `load_state_dict` made others of them: torch casts what it loads."""

import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from .held import fsdp1_units, held_optimizers, inside, local, parameters, whole_state
from .tree import extent, is_strided, overlaps, raw, same


def same_keys(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Tell whether two dicts have the same keys in the same order; NumPy compares its numbers with each of a tuple."""
    return len(one) == len(other) and all(
        left is right or (type(left) is type(right) and hash(left) == hash(right) and left == right)
        for left, right in zip(one, other, strict=True)
    )


def load_into(item: Any, state: Any) -> None:
    """Let `item` load a state that `whole_state` returned."""
    units = fsdp1_units(item) if isinstance(item, torch.nn.Module) else []
    if not units:
        item.load_state_dict(state)
        return
    from torch.distributed.fsdp._runtime_utils import _reshard

    for unit in units:
        handle = unit._handle
        # What a forward pass left gathered would be used by the next one in place of what is loaded.
        if handle is not None and handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):
            _reshard(unit, handle, True)
    for prefix, inner in inside(item, units):
        # Hooks of `state_dict()` did not rename the keys, so those of loading (activation checkpointing has both) must
        # not either. What a module does not take is found by the comparison that follows.
        hooks, inner._load_state_dict_pre_hooks = inner._load_state_dict_pre_hooks, OrderedDict()
        try:
            inner._load_from_state_dict(state, prefix, {}, False, [], [], [])
        finally:
            inner._load_state_dict_pre_hooks = hooks


def without_uncastable(state: Any) -> Any:
    """Return an optimizer's `state` without what torch's cast would break: text, bytes and arrays; `put` brings them.

    What is not laid out as torch does comes back as it is.
    """
    match state:
        case {"state": dict(states), "param_groups": list()}:
            return {**state, "state": {key: _castable(value) for key, value in states.items()}}
    return state


def _castable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _castable(item) for key, item in value.items() if not _is_uncastable(item)}
    return value


def _is_uncastable(value: Any) -> bool:
    """Tell whether `value` is text, bytes or an array, or a list or tuple with one in it."""
    if isinstance(value, list | tuple):
        return any(_is_uncastable(list(item.values()) if isinstance(item, dict) else item) for item in value)
    return isinstance(value, str | bytes | np.ndarray)


@contextlib.contextmanager
def sharing_kept(item: Any) -> Iterator[None]:
    """Let optimizers in `item` that have one `state` or one list of groups between them have one again afterwards.

    A wrapper such as Lightning's shows the state of the optimizer inside as its own; loading gives it one of its own.
    """
    shared = [
        (one, other, name, before)
        for one, other in itertools.combinations(held_optimizers(item), 2)
        for name in ("state", "param_groups")
        if (before := getattr(one, name, None)) is not None and before is getattr(other, name, None)
    ]
    yield
    for one, other, name, before in shared:
        if getattr(one, name) is getattr(other, name):
            continue
        loaded = getattr(other if getattr(one, name) is before else one, name)
        for optimizer in (one, other):
            setattr(optimizer, name, loaded)


class OwnTensors:
    """What an object's optimizers have, and others may have names for: groups, states, and the tensors in them.

    A script may keep a learning rate, a wrapper the groups, an optimizer a list of its state in an attribute; torch
    replaces all of them by copies of what it loads.
    """

    def __init__(self, item: Any) -> None:
        """Remember those that `item` has now."""
        optimizers = held_optimizers(item)
        self._groups = [
            (optimizer, groups, [(group, dict(group)) for group in groups])
            for optimizer in optimizers
            if (groups := getattr(optimizer, "param_groups", None)) and not _borrows_groups(optimizer)
        ]
        self._states = [
            (optimizer, key, state, dict(state))
            for optimizer in optimizers
            for key, state in (getattr(optimizer, "state", None) or {}).items()
            if isinstance(state, dict)
        ]
        trained = [tensor for optimizer in optimizers for tensor in parameters(optimizer)]
        in_state = [
            value for *_, before in self._states for value in before.values() if isinstance(value, torch.Tensor)
        ]
        extents = {id(tensor): extent(plain) for tensor in [*trained, *in_state] if is_strided(plain := local(tensor))}
        self._overlapping = set(chain(*overlaps({key: place for key, place in extents.items() if place[0] < place[1]})))

    def put_back(self) -> None:
        """Let groups and states have them again, with the content of what took their place."""
        chosen: dict[int, torch.Tensor] = {}
        taken: set[int] = set()
        for optimizer, groups, befores in self._groups:
            loaded_groups = optimizer.param_groups
            if len(loaded_groups) != len(befores):
                continue
            for loaded, (_, before) in zip(loaded_groups, befores, strict=True):
                for key, original in before.items():
                    if key != "params" and key in loaded:
                        loaded[key] = _put_back(original, loaded[key], chosen, taken)
            if loaded_groups is not groups and type(groups) is list:
                groups[:] = [
                    _refilled(group, loaded, taken) for loaded, (group, _) in zip(loaded_groups, befores, strict=True)
                ]
                optimizer.param_groups = groups
        for optimizer, key, state, before in self._states:
            loaded_state = optimizer.state.get(key)
            if not isinstance(loaded_state, dict):
                continue
            for name, original in before.items():
                new = loaded_state.get(name)
                if id(original) not in self._overlapping and _lies_alike(original, new):
                    loaded_state[name] = _put_back(original, new, chosen, taken)
            optimizer.state[key] = _refilled(state, loaded_state, taken)


def _borrows_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the groups are a property that cannot be set: those of the optimizer inside."""
    shown = getattr(type(optimizer), "param_groups", None)
    return isinstance(shown, property) and shown.fset is None


def _refilled(before: dict[Any, Any], loaded: dict[Any, Any], taken: set[int]) -> dict[Any, Any]:
    """Return `before` with the content of `loaded`, or `loaded` where `before` is taken, or another kind of dict."""
    if before is loaded or type(before) is not type(loaded) or id(before) in taken:
        return loaded
    taken.add(id(before))
    content = dict(loaded)
    before.clear()
    before.update(content)
    return before


def _lies_alike(original: Any, new: Any) -> bool:
    """Tell whether `new` is a tensor with the strides of `original`, and with memory that no other tensor has."""
    if not isinstance(new, torch.Tensor) or type(original) is not type(new):
        return False
    one, other = local(original), local(new)
    if not is_strided(one) or not is_strided(other):
        return False
    return one.stride() == other.stride() and other.untyped_storage().nbytes() == other.nbytes


def _put_back(original: Any, new: Any, chosen: dict[int, torch.Tensor], taken: set[int]) -> Any:
    if isinstance(original, tuple) and isinstance(new, tuple) and len(original) == len(new):
        return tuple(_put_back(one, other, chosen, taken) for one, other in zip(original, new, strict=True))
    if not (isinstance(original, torch.Tensor) and isinstance(new, torch.Tensor)):
        return new
    # Groups that have one tensor between them in the checkpoint get one of these.
    if id(new) not in chosen and id(original) not in taken:
        taken.add(id(original))
        chosen[id(new)] = new if new is original else _filled(original, new)
    return chosen.get(id(new), new)


def _filled(original: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `original` with the content of `new`, or `new` where that has another form."""
    if (original.dtype, original.shape, original.device) != (new.dtype, new.shape, new.device):
        return new
    with torch.no_grad():
        try:
            _copy(original, new)
            return original
        except RuntimeError:  # several of its elements are one in memory
            return new


def put(item: Any, wanted: Any) -> None:
    """Make the state of `item`, which has loaded `wanted`, equal to it wherever that is in reach.

    In reach are the tensors that `item.state_dict()` hands out, and plain values in the dicts and lists of the
    optimizers that `item` holds. Whether everything is equal afterwards is for others to check.
    """
    live = {id(container) for optimizer in held_optimizers(item) for container in _containers(optimizer)}
    made: dict[int, torch.Tensor] = {}
    for container, key, now, value in _differences(whole_state(item), wanted, {}):
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            first = made.setdefault(id(value), now)
            if first is now or id(container) not in live:
                _become(now, value)
            else:
                container[key] = first
        elif id(container) in live:
            container[key] = value
    for now, value in _dicts(whole_state(item), wanted):
        if id(now) in live and not same_keys(now, value) and now.keys() == value.keys():
            ordered = {key: now[key] for key in value}
            now.clear()
            now.update(ordered)
    _share_options(item, wanted)


def _share_options(item: Any, wanted: Any) -> None:
    """Give parameter groups the very tensors of `wanted`, of which torch makes copies: groups may have one `lr`."""
    match wanted:
        case {"state": dict(), "param_groups": list(wanted_groups)}:
            for optimizer in held_optimizers(item):
                groups = getattr(optimizer, "param_groups", None) or []
                if [len(group["params"]) for group in groups] == [len(group["params"]) for group in wanted_groups]:
                    for group, options in zip(groups, wanted_groups, strict=True):
                        group.update({key: value for key, value in options.items() if isinstance(value, torch.Tensor)})


def _become(now: torch.Tensor, wanted: torch.Tensor) -> None:
    """Give `now` the dtype, device and bytes of `wanted`, for everybody who has a reference to it."""
    if (local(now) is now) != (local(wanted) is wanted):
        return  # a load_state_dict() may shard what it is given
    with torch.no_grad():
        if (now.dtype, now.device.type, now.shape) == (wanted.dtype, wanted.device.type, wanted.shape):
            _copy(now, wanted)
        elif type(now) is torch.Tensor:
            now.data = wanted
        else:
            # A DTensor's `data` would leave its shard as it is. One that cannot be swapped is found by the check.
            with contextlib.suppress(RuntimeError):
                torch.utils.swap_tensors(now, wanted.detach())  # type: ignore[no-untyped-call]


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    if to.dtype is torch.bool:
        to, of = raw(local(to)), raw(local(of))
    to.copy_(of)


def put_flags(now: Any, wanted: Any) -> None:
    """Let tensors of flags in the state `now` have the bytes of those in `wanted`, where they say the same."""
    if isinstance(now, torch.Tensor) and isinstance(wanted, torch.Tensor):
        if now.dtype is wanted.dtype is torch.bool and now.shape == wanted.shape:
            there = raw(local(wanted)).to(now.device)
            if torch.equal(raw(local(now)) != 0, there != 0):
                raw(local(now)).copy_(there)
    elif isinstance(now, dict) and isinstance(wanted, dict):
        for key in now.keys() & wanted.keys():
            put_flags(now[key], wanted[key])
    elif isinstance(now, list | tuple) and isinstance(wanted, list | tuple):
        for one, other in zip(now, wanted, strict=False):
            put_flags(one, other)


def _containers(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the dicts and lists in the optimizer's state."""
    remaining = [getattr(optimizer, "state", None)]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict | list):
            yield value
            remaining.extend(value.values() if isinstance(value, dict) else value)


def _differences(now: Any, wanted: Any, met: dict[int, Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield each dict or list of `now`, the key, and both values, where `wanted` has something else.

    Args:
        now: What there is.
        wanted: A dict or list.
        met: For each dict or list of `wanted`, by its id, the one in its place: what is one there has to be one here.
    """
    for key, value in wanted.items() if isinstance(wanted, dict) else enumerate(wanted):
        there = now.get(key) if isinstance(now, dict) else now[key]
        both = _are_dicts(there, value)
        if both or (isinstance(value, list) and isinstance(there, list) and len(value) == len(there)):
            first = met.setdefault(id(value), there)
            if first is there:
                yield from _differences(there, value, met)
            else:
                yield now, key, there, first
        elif not _is_same(there, value):
            yield now, key, there, value


def _dicts(now: Any, wanted: Any) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Yield the dicts in `now` that have a dict of `wanted` in their place."""
    if _are_dicts(now, wanted):
        yield now, wanted
        for key, value in wanted.items():
            yield from _dicts(now.get(key), value)
    elif isinstance(now, list | tuple) and isinstance(wanted, list | tuple):
        for one, other in zip(now, wanted, strict=False):
            yield from _dicts(one, other)


def _are_dicts(now: Any, wanted: Any) -> bool:
    return (
        isinstance(wanted, dict) and isinstance(now, dict) and isinstance(wanted, Counter) == isinstance(now, Counter)
    )


def _is_same(now: Any, wanted: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(wanted, torch.Tensor):
        one, other = local(now), local(wanted)
        return now is wanted or (one.device.type == other.device.type and same(one, other))
    return type(now) is type(wanted) and not isinstance(now, tuple | np.ndarray) and repr(now) == repr(wanted)
