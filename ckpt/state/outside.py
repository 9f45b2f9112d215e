"""What a state depends on and no `state_dict()` says: compared at a restore, never set."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import torch

from ..errors import SlotError
from ..format.manifest import Node
from .held import Optimizer, local, named_buffers, named_parameters
from .memory import Extents, writable
from .tree import extent, is_strided, unflatten

_CLASSES: Final = "classes"
_FROZEN: Final = "frozen"
_EVALUATING: Final = "evaluating"


def outside(
    held: dict[str, list[Optimizer]], modules: dict[str, torch.nn.Module], parameters: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return what a manifest is to have.

    Args:
        held: The optimizers that objects are or hold, by the object's name.
        modules: The registered modules by name.
        parameters: Their parameters by key.
    """
    return {
        _CLASSES: {name: [type(optimizer).__qualname__ for optimizer in several] for name, several in held.items()},
        _FROZEN: [key for key, parameter in parameters.items() if not parameter.requires_grad],
        _EVALUATING: [
            f"{name}.{key}" if key else name
            for name, module in modules.items()
            for key, inner in module.named_modules()
            if not inner.training
        ],
    }


def parse(node: Node) -> dict[str, Any]:
    """Return what a manifest has, as `outside` made it.

    Raises:
        SlotError: It is malformed.
    """
    found: dict[str, Any] = unflatten(node, lambda index: index)
    match found:
        case {"classes": dict(classes), "frozen": list(frozen), "evaluating": list(evaluating)} if len(found) == 3:
            if all(map(_is_names, [list(classes), frozen, evaluating, *classes.values()])):
                return found
    raise SlotError(f"manifest has {str(found)[:200]} for what is outside of states")


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def other_classes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield which optimizers were of another class: it may take their state, and mean something else by it."""
    for name, classes in now[_CLASSES].items():
        before = saved[_CLASSES].get(name, classes)
        if before != classes:
            yield f"{name}: {', '.join(before)} in the checkpoint, {', '.join(classes)} now"


def other_modes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield which modules are trained otherwise now: scripts change that at times of their own."""
    for part, attribute in ((_FROZEN, "requires_grad"), (_EVALUATING, "training")):
        changed = sorted(set(saved[part]) ^ set(now[part]))
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            value = changed[0] not in saved[part]
            name = f"{changed[0]}{more}"
            yield f"{attribute} of {name} was {value}, is {not value}, and restore() leaves it to the script"


def ambiguous(modules: dict[str, torch.nn.Module]) -> str | None:
    """Return what to tell of two tensors whose names are the same, as those of "a" and "a.b" may be."""
    known: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        for key, tensor in chain(named_parameters(module), named_buffers(module)):
            if known.setdefault(f"{name}.{key}", tensor) is not tensor:
                return f"{name}.{key} is a tensor of two modules: give one of them another name"
    return None


def read_only(modules: dict[str, torch.nn.Module]) -> str | None:
    """Return what to tell of a tensor of a module that no restore could write: of a file mapped for reading, say."""
    tensors = {
        f"{name}.{key}": local(tensor)
        for name, module in modules.items()
        for key, tensor in module.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    remedy = "so that no checkpoint could be restored into it: register a copy of it, made by clone()"
    if key := next((key for key, tensor in tensors.items() if tensor.is_inference()), None):
        return f"{key} was made in torch.inference_mode() and cannot be written outside of it, {remedy}"
    extents = {key: extent(tensor) for key, tensor in tensors.items() if is_strided(tensor) and tensor.is_cpu}
    places = Extents(writable())
    key = next((key for key, place in extents.items() if place[0] < place[1] and not places.covers(place)), None)
    return key and f"{key} lies in memory that cannot be written, as of a file mapped for reading, {remedy}"
