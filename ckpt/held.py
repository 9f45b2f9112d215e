"""Which torch optimizers an object holds, whatever its class, and which one trains parameters behind our back."""

import operator
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import torch

Optimizer = torch.optim.Optimizer

_MAX_DEPTH: Final = 6
_MAX_OBJECTS: Final = 10_000
_MAX_CHILDREN: Final = 1_000
_OWN: Final = ("state", "param_groups", "defaults")
"""What an optimizer has of its parameters: large, and without optimizers in it."""
_LEAVES: Final = (
    torch.Tensor,
    torch.nn.Module,
    str,
    bytes,
    int,
    float,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
)


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


def _groups(optimizers: Iterable[Optimizer]) -> list[list[torch.Tensor]]:
    return [group["params"] for held in optimizers for group in getattr(held, "param_groups", None) or []]


class ParameterOrder:
    """By their names in registered modules, the parameters of registered optimizers, in the order of their states.

    An optimizer's `state_dict()` knows its parameters by their position alone.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._known: dict[str, list[list[torch.Tensor]]] = {}
        self._names: dict[str, list[list[str | None]]] = {}

    def names(
        self, optimizers: dict[str, list[Optimizer]], modules: dict[str, torch.nn.Module]
    ) -> dict[str, list[list[str | None]]]:
        """Return the names of each group's parameters, by the name of the object; None for those of no module."""
        groups = {name: _groups(several) for name, several in optimizers.items()}
        if not _are_same(groups, self._known):
            named = {id(parameter): key for key, parameter in reversed(list(_named(modules)))}
            self._names = {
                name: [[named.get(id(parameter)) for parameter in group] for group in several]
                for name, several in groups.items()
            }
            self._known = {name: [list(group) for group in several] for name, several in groups.items()}
        return self._names


def order_differences(
    name: str,
    saved: list[list[str | None]],
    optimizers: list[Optimizer],
    modules: dict[str, torch.nn.Module],
    *,
    has_state: bool,
) -> Iterator[str]:
    """Yield which parameters have another place than in `saved`, which `ParameterOrder.names` made of object `name`.

    Args:
        name: Of the object that is or holds `optimizers`.
        saved: The names in each group of the checkpoint.
        optimizers: Those that the object holds now.
        modules: The registered modules.
        has_state: Whether the checkpoint has a state for parameters: without one only their groups matter.
    """
    known = {key: id(parameter) for key, parameter in _named(modules)}
    named = {place: key for key, place in reversed(known.items())}
    for index, (before, now) in enumerate(zip(saved, _groups(optimizers), strict=False)):
        members = {id(parameter) for parameter in now}
        for position, (key, parameter) in enumerate(zip(before, now, strict=False)):
            if key in known and (known[key] != id(parameter) if has_state else known[key] not in members):
                is_now = named.get(id(parameter), "another tensor")
                yield (
                    f"{name}: parameter {position} of group {index} is {key} in the checkpoint, {is_now} in the "
                    "optimizer, which must get them in the same order each time (a set has none)"
                )
                return


def _named(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, module in modules.items():
        for key, parameter in module.named_parameters(remove_duplicate=False):
            yield f"{name}.{key}", parameter


def _are_same(one: dict[str, list[list[torch.Tensor]]], other: dict[str, list[list[torch.Tensor]]]) -> bool:
    return one.keys() == other.keys() and all(
        len(groups) == len(other[name])
        and all(
            len(group) == len(known) and all(map(operator.is_, group, known))
            for group, known in zip(groups, other[name], strict=True)
        )
        for name, groups in one.items()
    )


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
    """Return what to tell of an optimizer that steps parameters of registered modules and is itself in no object.

    Args:
        optimizer: The one that is about to step.
        objects: The registered objects by name.
    """
    mine = {id(tensor) for held in held_optimizers(optimizer) for tensor in parameters(held)}
    names = [
        f"{name}.{key}"
        for name, item in objects.items()
        if isinstance(item, torch.nn.Module)
        for key, parameter in item.named_parameters()
        if id(parameter) in mine
    ]
    registered = {id(held) for item in objects.values() for held in held_optimizers(item)}
    # One that holds a registered one, as SAM does, is that one's wrapper.
    if not names or any(id(held) in registered for held in held_optimizers(optimizer)):
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{type(optimizer).__qualname__} steps {names[0]}{more}, but no registered object holds it: its state is not "
        "part of checkpoints, and a recovery goes on without it. Register it, or call checkpointer.replace() if "
        "it took the place of one that is registered"
    )


class Unregistered:
    """Warns once of an optimizer that trains registered modules without being registered."""

    def __init__(self, objects: Callable[[], dict[str, Any]]) -> None:
        """Watch for optimizers that none of `objects()` holds."""
        self._objects = objects
        self._judged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned = False

    def before_step(self, optimizer: Optimizer) -> None:
        """Judge `optimizer` when it is seen for the first time; cheap from then on."""
        if self._warned or optimizer in self._judged:
            return
        self._judged.add(optimizer)
        text = unregistered(optimizer, self._objects())
        if text is not None:
            self._warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def forget(self) -> None:
        """Judge anew from now on: other objects are registered."""
        self._judged = weakref.WeakSet()
