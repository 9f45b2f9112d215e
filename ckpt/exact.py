"""Putting exact values where an optimizer's `load_state_dict` made others of them: torch casts what it loads."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .export import same
from .held import held_optimizers


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
        return {key: _castable(item) for key, item in value.items() if not isinstance(item, str | bytes | np.ndarray)}
    return value


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


def put(item: Any, wanted: Any) -> None:
    """Make the state of `item`, which has loaded `wanted`, equal to it wherever that is in reach.

    In reach are the tensors that `item.state_dict()` hands out, and plain values in the dicts and lists of the
    optimizers that `item` holds. Whether everything is equal afterwards is for others to check.
    """
    live = {id(container) for optimizer in held_optimizers(item) for container in _containers(optimizer)}
    made: dict[int, torch.Tensor] = {}
    for container, key, now, value in _differences(item.state_dict(), wanted):
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            first = made.setdefault(id(value), now)
            if first is now or id(container) not in live:
                _become(now, value)
            else:
                container[key] = first
        elif id(container) in live:
            container[key] = value
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
    with torch.no_grad():
        if (now.dtype, now.device.type, now.shape) == (wanted.dtype, wanted.device.type, wanted.shape):
            now.copy_(wanted)
        elif type(now) is torch.Tensor:
            now.data = wanted
        else:
            # A DTensor's `data` would leave its shard as it is. One that cannot be swapped is found by the check.
            with contextlib.suppress(RuntimeError):
                torch.utils.swap_tensors(now, wanted.detach())  # type: ignore[no-untyped-call]


def _containers(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the dicts and lists in the optimizer's state."""
    remaining = [getattr(optimizer, "state", None)]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict | list):
            yield value
            remaining.extend(value.values() if isinstance(value, dict) else value)


def _differences(now: Any, wanted: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield each dict or list of `now`, the key, and both values, where `wanted` has something else."""
    for key, value in wanted.items() if isinstance(wanted, dict) else enumerate(wanted):
        there = now.get(key) if isinstance(now, dict) else now[key]
        both = (
            isinstance(value, dict)
            and isinstance(there, dict)
            and isinstance(value, Counter) == isinstance(there, Counter)
        )
        if both or (isinstance(value, list) and isinstance(there, list) and len(value) == len(there)):
            yield from _differences(there, value)
        elif not _is_same(there, value):
            yield now, key, there, value


def _is_same(now: Any, wanted: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(wanted, torch.Tensor):
        one, other = _local(now), _local(wanted)
        return now is wanted or (one.device.type == other.device.type and same(one, other))
    return type(now) is type(wanted) and not isinstance(now, tuple) and repr(now) == repr(wanted)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor
