"""Whether a checkpoint fits the registered objects, before anything is loaded, and what they must be by then.

A restarted script has to make the tensors of modules and the groups of optimizers before it restores. One that changes
them in the middle trains on, and only its restart would find that nothing fits. So it is told.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from ..errors import StateError, some
from ..format.manifest import Node, TensorSpec
from .tree import unflatten

_REMEDY: Final = (
    "Register the same objects with the same shapes (Checkpointer.planned_step says before restore() which step it "
    "continues from), or start a new run id"
)
_RIGID: Final = ("torch.nn.modules.", "torch.nn.utils.", "torch.distributed.", "torch._dynamo.")
_LAZY: Final = "torch.nn.modules.lazy"

Layout = Mapping[str, object]
"""Path → shape and dtype of a tensor of a module, None while it has none; or the sizes of an optimizer's groups."""


def check_fits(
    objects: dict[str, Any],
    saved: dict[str, Node],
    current: dict[str, Node],
    saved_specs: tuple[TensorSpec, ...],
    current_specs: tuple[TensorSpec, ...],
) -> dict[str, str]:
    """Compare names, the shapes and dtypes of modules, and the parameter groups of optimizers.

    A module may have code that loads what has another form than it has now, as torch's observers for quantization and
    its lazy modules do: it is asked to load that, and what it made of it is compared.

    Args:
        objects: The registered objects by name.
        saved: The nodes that the checkpoint has of them.
        current: Their nodes now.
        saved_specs: What the leaves of `saved` are.
        current_specs: What the leaves of `current` are.

    Returns:
        What to tell of a module, by its name, if it does not load that after all.

    Raises:
        StateError: They differ.
        SlotError: A node is malformed.
    """
    differences = [f"{name}: not in the checkpoint" for name in current if name not in saved]
    differences += [f"{name}: in the checkpoint, but not registered" for name in saved if name not in current]
    doubts: dict[str, list[str]] = {}
    for name, item in objects.items():
        if name not in saved:
            continue
        before = unflatten(saved[name], saved_specs.__getitem__)
        now = unflatten(current[name], current_specs.__getitem__)
        if isinstance(item, torch.nn.Module) and not isinstance(before, dict):
            differences.append(f"{name}: in the checkpoint, but not as a module")
        elif isinstance(item, torch.nn.Module):
            for key, difference in _module_differences(name, before, now):
                (doubts.setdefault(name, []) if adapts(item, key) else differences).append(difference)
        elif is_optimizer_state(now):
            differences += _optimizer_differences(name, before, now)
        elif isinstance(now, dict) and isinstance(item, torch.optim.Optimizer) and not isinstance(before, dict):
            differences.append(f"{name}: in the checkpoint, but not as an optimizer")
    if differences:
        listed = some([*differences, *chain(*doubts.values())], between="; ")
        raise StateError(f"the checkpoint does not fit, nothing was loaded: {listed}. {_REMEDY}")
    return {
        name: f". The checkpoint does not fit: {some(several, between='; ')}. {_REMEDY}"
        for name, several in doubts.items()
    }


def adapts(module: torch.nn.Module, key: str) -> bool:
    """Tell whether `module` may load, under this key of its state, what has another form than it has now.

    torch's own code refuses that, except in the cases of `check_fits`. A module's may load it for those inside.
    """
    inner: Any = module
    loaders: list[Any] = [module.load_state_dict]
    for part in str(key).split("."):  # a damaged checkpoint may have any
        if not isinstance(inner, torch.nn.Module):
            break
        hooks = (getattr(hook, "hook", hook) for hook in inner._load_state_dict_pre_hooks.values())
        loaders += [inner._load_from_state_dict, *hooks]
        inner = getattr(inner, part, None)
    places = [getattr(loader, "__module__", None) or "" for loader in loaders]
    return any(place == _LAZY or not place.startswith(_RIGID) for place in places)


def _module_differences(name: str, saved: dict[str, Any], current: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, before in saved.items():
        if key not in current:
            yield key, f"{name}.{key}: in the checkpoint, but not in the model"
            continue
        now = current[key]
        if is_extra(key):
            continue
        if isinstance(before, TensorSpec) and isinstance(now, TensorSpec):
            if before.content != now.content:
                yield key, f"{name}.{key}: {before} in the checkpoint, {now} in the model"
        elif isinstance(now, TensorSpec):
            yield key, f"{name}.{key}: no tensor in the checkpoint, {now} in the model"
    for key in current:
        if key not in saved:
            yield key, f"{name}.{key}: in the model, but not in the checkpoint"


def _optimizer_differences(name: str, saved: Any, current: dict[str, Any]) -> Iterator[str]:
    if not is_optimizer_state(saved):
        yield f"{name}: in the checkpoint, but not as an optimizer"
        return
    before = [len(group["params"]) for group in saved["param_groups"]]
    now = [len(group["params"]) for group in current["param_groups"]]
    if before != now:
        yield f"{name}: parameter groups of {before} tensors in the checkpoint, of {now} in the optimizer"


def is_optimizer_state(saved: Any) -> bool:
    """Tell whether `saved` is laid out as torch's optimizers do, which check little of what they load."""
    match saved:
        case {"state": dict(), "param_groups": list(groups)}:
            members = [group.get("params") if isinstance(group, dict) else None for group in groups]
            return all(isinstance(ids, list) and all(type(item) is int for item in ids) for ids in members)
    return False


def is_extra(key: str) -> bool:
    """Tell whether `key` of a module's state is what `get_extra_state()` returned, which has no fixed form."""
    return key.rpartition(".")[2] == "_extra_state"


def layout(
    states: Mapping[str, Any],
    modules: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, Sequence[torch.optim.Optimizer]],
) -> Layout:
    """Return the layout of a state.

    Args:
        states: What `state_dict()` returned, by the name of the object.
        modules: Those of the objects that are modules.
        optimizers: Those that an object is or holds.
    """
    found: dict[str, object] = {
        f"{name}.{key}": None if is_lazy(value) else (value.shape, value.dtype)
        for name in modules
        for key, value in states[name].items()
        if isinstance(value, torch.Tensor) and not is_extra(key)
    }
    for name, several in optimizers.items():
        found[name] = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in several]
    return found


def difference(before: Layout, now: Layout, modules: Mapping[str, torch.nn.Module]) -> str | None:
    """Return what to tell of a layout that is not as it was at `restore()`, None if it is, or `modules` adapt to it."""
    if before == now:
        return None

    def is_taken(path: str) -> bool:
        keys = ((item, path.removeprefix(f"{name}.")) for name, item in modules.items())
        return any(key != path and adapts(item, key) for item, key in keys)

    new = (f"{path} is new" for path in now if path not in before and not is_taken(path))
    gone = (f"{path} is gone" for path in before if path not in now and not is_taken(path))
    other = (
        f"{path} has other {'groups' if isinstance(now[path], list) else 'shapes'}"
        for path in now
        if before.get(path) is not None and before[path] != now[path] and not is_taken(path)
    )
    change = next(chain(new, gone, other), None)
    return change and (
        f"{change} since restore(): a restarted script must make that change before it calls restore(), or its "
        "recovery is refused. checkpointer.planned_step says there which step it goes on from"
    )
