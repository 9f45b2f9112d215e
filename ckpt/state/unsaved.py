"""Tensors that training goes on with and no `state_dict()` shows: of them a checkpoint has digests, and no more."""

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
import xxhash

from ..errors import SlotError
from ..format.manifest import Node
from .held import Optimizer, ParameterOrder, dict_items, equal_leaves, in_memory, local, parameters, state_of
from .tree import Flattener, bytes_of, is_strided, unflatten

_PARAMETERS: Final = "parameters"
_BUFFERS: Final = "buffers"

REMEDY: Final = "Register the module or the optimizer that has it, or a list of such tensors"

_Known = tuple["weakref.ref[torch.Tensor]", int, int, str]


class Unsaved:
    """The digests of parameters and buffers that are in no object's state, taken at each capture.

    A tensor that does not require grad is hashed again when torch says that it was written, or has other memory: a
    frozen model is large.

    Attributes:
        digests: Those taken last, for a manifest: by "parameters" and "buffers", then by path.
        trained: What to tell of a parameter that is trained and in no object's state, None if none is.
        changing: What to tell of a buffer that was another one when `take` was called before, None if none was.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.digests: dict[str, dict[str, str]] = {}
        self.trained: str | None = None
        self.changing: str | None = None
        self._known: dict[str, _Known] = {}
        self._whole: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def take(
        self,
        modules: dict[str, torch.nn.Module],
        held: dict[str, list[Optimizer]],
        states: dict[str, Any],
        order: ParameterOrder,
        flat: Flattener,
    ) -> None:
        """Take the digests anew.

        Args:
            modules: The registered modules by name.
            held: The optimizers that objects are or hold, by the object's name.
            states: What the `state_dict()` of each object returned, by name.
            order: Of the optimizers' parameters; its `names` was called for `flat`.
            flat: The flattened state.
        """
        hidden = list(_hidden(modules, states, order.in_modules))
        kept = {in_memory(leaf) for leaf in flat.leaves} if hidden else set()
        hidden = [(kind, path, tensor) for kind, path, tensor in hidden if in_memory(tensor) not in kept]
        before, known = self.digests, self._known
        self.digests, self._known = {}, {}
        left_out = self._left_out(held, states, flat)
        others = [(_PARAMETERS, *item) for item in [*order.elsewhere.items(), *left_out.items()]]
        for kind, path, tensor in [*hidden, *others]:
            plain = local(tensor)
            if is_strided(plain) and not plain.is_meta:
                self.digests.setdefault(kind, {})[path] = self._digest(path, plain, known.get(path))
        dropped = (path for kind, path, tensor in hidden if kind == _PARAMETERS and tensor.requires_grad)
        trained = next(dropped, order.unkept or next(iter(left_out), None))
        self.trained = trained and (
            f"{trained} is trained, and no registered object's state has it as it is: a recovery compares it, and is "
            f"refused unless it is the same by then. {REMEDY}"
        )
        buffers, earlier = self.digests.get(_BUFFERS, {}), before.get(_BUFFERS, {})
        changing = next((path for path, digest in buffers.items() if earlier.get(path, digest) != digest), None)
        self.changing = changing and (
            f"{changing} changes, and state_dict() leaves it out: it is not part of checkpoints, and a recovery goes "
            "on with another one. Make it persistent if training depends on it"
        )

    def _left_out(
        self, held: dict[str, list[Optimizer]], states: dict[str, Any], flat: Flattener
    ) -> dict[str, torch.Tensor]:
        """Return what optimizers have for their parameters and no object's state has, as SAM leaves out its base's.

        A scheduler holds an optimizer, too, and is not meant to keep it: only objects count that keep some optimizer.
        """
        due = {
            optimizer: name
            for name, several in held.items()
            for optimizer in several
            if self._whole.get(optimizer, 0) != len(state_of(optimizer)) and _keeps(states[name])
        }
        found: dict[str, torch.Tensor] = {}
        kept = {in_memory(leaf) for leaf in flat.leaves} if due else set()
        for optimizer, name in due.items():
            places = {id(parameter): place for place, parameter in enumerate(parameters(optimizer))}
            tensors = {
                f"{name}: {key} of parameter {places.get(id(parameter))} in {type(optimizer).__qualname__}": tensor
                for parameter, state in state_of(optimizer).items()
                for key, tensor in _tensors(state, "")
                if in_memory(tensor) not in kept
            }
            equal = equal_leaves(
                {id(tensor): local(tensor) for tensor in tensors.values()}, dict(enumerate(flat.leaves))
            )
            lost = {path: tensor for path, tensor in tensors.items() if not equal[id(tensor)]}
            if not lost:
                self._whole[optimizer] = len(state_of(optimizer))
            found |= lost
        return found

    def _digest(self, path: str, tensor: torch.Tensor, known: _Known | None) -> str:
        if tensor.requires_grad or tensor.is_inference():
            return _digest(tensor)
        place = tensor.data_ptr(), tensor._version
        if known is None or known[0]() is not tensor or known[1:3] != place:
            known = weakref.ref(tensor), *place, _digest(tensor)
        self._known[path] = known
        return known[3]


def parse(node: Node) -> dict[str, dict[str, str]]:
    """Return what a manifest has, as `Unsaved.digests` was.

    Raises:
        SlotError: It is malformed.
    """
    found = unflatten(node, lambda index: index)
    parts = found.values() if isinstance(found, dict) and found.keys() <= {_PARAMETERS, _BUFFERS} else [None]
    if all(isinstance(part, dict) and all(isinstance(item, str) for item in [*part, *part.values()]) for part in parts):
        return dict(found)
    raise SlotError(f"manifest has {str(found)[:200]} for tensors that are not saved")


def lost(saved: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield which parameters are not what the checkpoint's step had."""
    after = now.get(_PARAMETERS, {})
    for path, digest in saved.get(_PARAMETERS, {}).items():
        if after.get(path) != digest:
            yield f"{path} is in no registered object's state, and not what it was. {REMEDY}"


def other_buffers(saved: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield which buffers are not what the checkpoint's step had; one that is not there yet the module makes anew."""
    after = now.get(_BUFFERS, {})
    for path, digest in saved.get(_BUFFERS, {}).items():
        if after.get(path, digest) != digest:
            yield f"{path} is another one, which state_dict() leaves out"


def _hidden(
    modules: dict[str, torch.nn.Module], states: dict[str, Any], parameters: dict[str, torch.Tensor]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    shown = {f"{name}.{key}" for name in modules for key in states[name]}
    for path, parameter in parameters.items():
        if path not in shown:
            yield _PARAMETERS, path, parameter
    for name, module in modules.items():
        for key, buffer in module.named_buffers():
            if key not in states[name]:
                yield _BUFFERS, f"{name}.{key}", buffer


def _keeps(state: Any) -> bool:
    return any("param_groups" in str(key).split(".") for key, _ in dict_items(state))


def _tensors(state: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in what an optimizer has for a parameter, and what to call each."""
    if isinstance(state, torch.Tensor):
        yield key, state
    elif isinstance(state, dict | list | tuple):
        for name, child in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _tensors(child, f"{key}.{name}" if key else str(name))


def _digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(bytes_of(tensor).numpy().data)}"
