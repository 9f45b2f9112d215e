"""What a state depends on and no `state_dict()` says: compared at a restore, never set."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import torch

from ..errors import SlotError
from ..format.manifest import Node
from .held import Optimizer, local
from .tree import PLAIN_TENSORS, entries, extent, same, unflatten

_CLASSES: Final = "classes"
_FROZEN: Final = "frozen"
_EVALUATING: Final = "evaluating"

Outside = dict[str, dict[str, list[str]]]
"""By `_CLASSES`, the classes of the optimizers of each object; of each module, the parameters that are frozen, and the
modules in it that are in evaluation mode."""


def outside(held: dict[str, list[Optimizer]], modules: dict[str, torch.nn.Module]) -> Outside:
    """Return it for the optimizers that objects are or hold, and for the registered modules, by name."""
    return {
        _CLASSES: {name: [type(optimizer).__qualname__ for optimizer in several] for name, several in held.items()},
        _FROZEN: {
            name: [key for key, parameter in module.named_parameters() if not parameter.requires_grad]
            for name, module in modules.items()
        },
        _EVALUATING: {
            name: [key for key, inner in module.named_modules() if not inner.training]
            for name, module in modules.items()
        },
    }


def parse(node: Node) -> Outside:
    """Return what a manifest has.

    Raises:
        SlotError: It is malformed.
    """
    found = {part: entries(child) for part, child in entries(node).items()}
    names = {
        part: {name: unflatten(child, lambda index: index) for name, child in of_part.items()}
        for part, of_part in found.items()
    }
    lists = [each for of_part in names.values() for each in of_part.values()]
    if names.keys() != {_CLASSES, _FROZEN, _EVALUATING} or not all(map(_is_names, lists)):
        raise SlotError(f"manifest has {str(names)[:200]} for what is outside of states")
    return names


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def other_classes(saved: Outside, now: Outside) -> Iterator[str]:
    """Yield which optimizers were of another class: it may take their state, and mean something else by it."""
    for name, classes in now[_CLASSES].items():
        before = saved[_CLASSES].get(name, classes)
        if before != classes:
            yield f"{name}: {', '.join(before)} in the checkpoint, {', '.join(classes)} now"


def other_modes(saved: Outside, now: Outside) -> Iterator[str]:
    """Yield which modules are trained otherwise now: scripts change that at times of their own."""
    for part, attribute in ((_FROZEN, "requires_grad"), (_EVALUATING, "training")):
        for name, keys in now[part].items():
            before = saved[part].get(name, keys)
            changed = sorted(set(before) ^ set(keys))
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                value = changed[0] not in before
                place = ".".join(filter(None, (name, changed[0])))
                yield f"{attribute} of {place}{more} was {value}, is {not value}, and restore() leaves it to the script"


def not_shown(modules: dict[str, torch.nn.Module]) -> Iterator[str]:
    """Yield the parameters and buffers of which `state_dict()` gives other values or another dtype: hooks may."""
    for name, module in modules.items():
        state = module.state_dict()
        for key, tensor in chain(module.named_parameters(), module.named_buffers()):
            shown = state.get(key)
            if isinstance(shown, torch.Tensor) and not _is_shown(local(tensor), local(shown)):
                yield f"{name}.{key}"


def _is_shown(tensor: torch.Tensor, shown: torch.Tensor) -> bool:
    tensor, shown = tensor.detach(), shown.detach()
    if any(
        type(each) not in PLAIN_TENSORS or each.layout is not torch.strided or each.is_meta for each in (tensor, shown)
    ):
        return True  # captures refuse such a leaf, or the module makes it a tensor of its own kind
    is_one = extent(tensor) == extent(shown) and tensor.stride() == shown.stride() and tensor.dtype == shown.dtype
    return is_one or same(tensor.cpu(), shown.cpu())


def warning_of(names: list[str]) -> str:
    """Return what to tell of parameters that are `not_shown`."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"state_dict() gives other values than {names[0]}{more} has: a recovery goes on with what it gives. "
        "Remove the hook that changes them"
    )
