"""What a state depends on and no `state_dict()` says: compared at a restore, not set; and what none may be or do."""

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import SlotError, StateError, some
from ..format.manifest import Node
from .held import Optimizer, keyed_tensors, local, state_dict_of
from .memory import Extents, writable
from .tree import extent, is_strided, plain

_CLASSES: Final = "classes"
_FROZEN: Final = "frozen"
_EVALUATING: Final = "evaluating"
_COMMUNICATING: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
_LOCAL: Final = ("wait_tensor", "_wrap_tensor_autograd")
_DCP: Final = "torch.distributed.checkpoint.state_dict"
_begun: Final = WeakKeyDictionary[torch.nn.Module, tuple[bool, dict[str, tuple[torch.dtype, bool]]]]()


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
    found: dict[str, Any] = plain(node)
    match found:
        case {"classes": dict(classes), "frozen": list(frozen), "evaluating": list(evaluating)} if len(found) == 3:
            if all(map(are_names, [list(classes), frozen, evaluating, *classes.values()])):
                return found
    raise SlotError(f"manifest has {str(found)[:200]} for what is outside of states")


def are_names(value: Any) -> bool:
    """Tell whether `value`, of a manifest, is a list of texts."""
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
            value, names = changed[0] not in saved[part], some(changed, 1)
            yield f"{attribute} of {names} was {value}, is {not value}, and restore() leaves it to the script"


def remember_modes(modules: dict[str, torch.nn.Module]) -> None:
    """Remember how modules are trained where a script restores them first, for `set_modes`."""
    for inner in chain.from_iterable(module.modules() for module in modules.values()):
        required = {key: (each.dtype, each.requires_grad) for key, each in inner.named_parameters(recurse=False)}
        _begun.setdefault(inner, (inner.training, required))


def set_modes() -> None:
    """Let the modules that are still there be trained as they were then, and forget it."""
    for inner, (training, required) in _begun.items():
        inner.training = training
        for key, parameter in inner.named_parameters(recurse=False):
            before = required.get(key)
            if before is not None and before[0] == parameter.dtype:  # else it has been quantized
                parameter.requires_grad = before[1]
    _begun.clear()


def ambiguous(modules: dict[str, torch.nn.Module]) -> str | None:
    """Return what is wrong with two tensors of one name, as modules "a" and "a.b" may have, or None."""
    known: dict[str, torch.Tensor] = {}
    for path, tensor in keyed_tensors(modules):
        if known.setdefault(path, tensor) is not tensor:
            return f"{path} is a tensor of two modules: give one of them another name"
    return None


def read_only(modules: dict[str, torch.nn.Module]) -> str | None:
    """Return what to tell of a tensor of a module that no restore could write: of a file mapped for reading, say."""
    tensors = {
        f"{name}.{key}": local(tensor)
        for name, module in modules.items()
        for key, tensor in state_dict_of(module).items()
        if isinstance(tensor, torch.Tensor)
    }
    remedy = "so that no checkpoint could be restored into it: register a copy of it, made by clone()"
    if key := next((key for key, tensor in tensors.items() if tensor.is_inference()), None):
        return f"{key} was made in torch.inference_mode() and cannot be written outside of it, {remedy}"
    extents = {key: extent(tensor) for key, tensor in tensors.items() if is_strided(tensor) and tensor.is_cpu}
    places = Extents(writable())
    key = next((key for key, place in extents.items() if place[0] < place[1] and not places.covers(place)), None)
    return key and f"{key} lies in memory that cannot be written, as of a file mapped for reading, {remedy}"


def has_others() -> bool:
    """Tell whether there are other ranks that this process could talk to by now."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which an object's `state_dict()` is refused before its first message to other ranks.

    Where they capture other steps than this one, such a message would be taken for one of training: both wait for ever,
    or go on with what was not meant for them.
    """

    def __init__(self, name: str) -> None:
        """Watch the object that is registered as `name`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name
        self._refusal: StateError | None = None
        self._is_of_rank_0 = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let `func` run, unless it is a message."""
        kwargs = kwargs or {}
        self._is_of_rank_0 = self._is_of_rank_0 or _dcp_gives_all_to_rank_0()
        if _is_message(func) and _ranks((*args, *kwargs.values())) > 1:
            self._refusal = StateError(
                f"{self._name}: its state_dict() talks to other ranks ({func}), which need not ask for theirs at the "
                "same step: both would wait for ever, or take it for a message of training. Let it return what this "
                "rank has, without gathering it: with torch.distributed.checkpoint leave out full_state_dict"
            )
            raise self._refusal
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # so that a DTensor shows what it sends
        return func(*args, **kwargs)

    def check(self) -> None:
        """Check the object once it has returned its state.

        Raises:
            StateError: It caught the refusal, or has its state on rank 0 alone.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._is_of_rank_0:
            raise StateError(
                f"{self._name}: its state_dict() gives all to rank 0 and nothing to the others, as "
                "torch.distributed.checkpoint does with full_state_dict and cpu_offload: a restore would hang, or "
                "leave the others as they are, wherever not all of it is broadcast. Let it return what this rank has: "
                "leave out full_state_dict"
            )


def _is_message(func: Any) -> bool:
    return getattr(func, "namespace", None) in _COMMUNICATING and not func._schema.name.endswith(_LOCAL)


def _ranks(arguments: tuple[Any, ...]) -> int:
    """Return the size of the process group that an operation was given, of all if it is not to be told."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(each).size())
            except RuntimeError:  # another object, such as the kind of a reduction
                continue
        if isinstance(each, str):
            try:
                return int(dist.distributed_c10d._resolve_process_group(each).size())  # type: ignore[arg-type, attr-defined]
            except (RuntimeError, ValueError):
                continue
    return dist.get_world_size()


def _dcp_gives_all_to_rank_0() -> bool:
    """Tell whether this is called by a function of DCP that is to do so."""
    frame = sys._getframe() if _DCP in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _DCP and (info := frame.f_locals.get("info")) is not None:
            return bool(info.full_state_dict and info.cpu_offload)
        frame = frame.f_back
    return False
