"""What training goes on with and no `state_dict()` shows as it is: of it a checkpoint has digests, and no more."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from ..errors import SlotError
from ..format.manifest import Node
from .held import (
    Optimizer,
    ParameterOrder,
    Seen,
    equal_leaves,
    has_hooks,
    keyed_tensors,
    local,
    modules_of,
    named_buffers,
    parameters,
    state_of,
)
from .memory import digest_of
from .outside import are_names
from .shown import NOTHING, FlatTensors, form_of, is_shown, left_out, live_parts, places_of
from .tree import Flattener, is_strided, plain

_PARAMETERS: Final = "parameters"
_BUFFERS: Final = "buffers"
_CHANGED: Final = "changed"
_OPTIMIZERS: Final = "optimizers"
_PLACES: Final = "places"
_EXTRA: Final = "extra"
_KINDS: Final = frozenset({_PARAMETERS, _BUFFERS, _CHANGED, _OPTIMIZERS, _PLACES, _EXTRA})

REMEDY: Final = "Register the module or the optimizer that has it, or a list of such tensors"
_REMEDY: Final = f"{REMEDY}; if a hook or a method makes state_dict() give something else, remove it"

_Known = tuple[Seen, str]


class Unsaved:
    """The digests of what is in no object's state, or not as it is, taken at each capture.

    These are parameters and buffers, extra state of modules, and what optimizers have. A frozen parameter, or a buffer
    that is not persistent, is hashed again when torch says that it was written, or has other memory: a frozen model is
    large. All else is hashed each time.

    Attributes:
        digests: Those taken last, for a manifest, by kind and then by path: "parameters", and persistent "buffers"
            among them, that no state has; other "buffers"; parameters and buffers that a state has, "changed" by a hook
            or a method; what is not shown of "optimizers"; "places", for which an optimizer has states that are shown
            in a form of its object's own; "extra" states of modules that a hook changes.
        trained: What to tell of something that is trained and in no object's state as it is, None if nothing is.
        changing: What to tell of a buffer that was another one when `take` was called before, None if none was.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.digests: dict[str, dict[str, str]] = {}
        self.trained: str | None = None
        self.changing: str | None = None
        self._known: dict[str, _Known] = {}
        self._judged: dict[str, bool] = {}

    def take(
        self,
        objects: dict[str, Any],
        held: dict[str, list[Optimizer]],
        states: dict[str, Any],
        in_modules: dict[str, torch.Tensor],
        order: ParameterOrder,
        flat: Flattener,
    ) -> None:
        """Take the digests anew.

        Args:
            objects: The registered objects by name.
            held: The optimizers that they are or hold, by name.
            states: What the `state_dict()` of each object returned, by name.
            in_modules: The parameters of registered modules by key.
            order: Of the optimizers' parameters; its `names` was called for `flat`.
            flat: The flattened state.
        """
        before, known = self.digests, self._known
        self.digests, self._known = {}, {}
        modules = modules_of(objects)
        hooked = {name: module for name, module in modules.items() if has_hooks(module)}
        hidden = list(_hidden(modules, hooked, states, in_modules))
        kept = FlatTensors(flat)
        hidden = [item for item in hidden if item[0] == _CHANGED or item[2] not in kept]
        every = [*hidden, *((_PARAMETERS, *item) for item in order.elsewhere(held).items())]
        # torch does not count what its fused optimizers write.
        written = {id(key) for several in held.values() for each in several for key in state_of(each)} if every else ()
        for kind, path, tensor in every:
            plain = local(tensor)
            if is_strided(plain) and not plain.is_meta:
                is_frozen = kind == _PARAMETERS and isinstance(tensor, torch.nn.Parameter) and id(tensor) not in written
                may_last = kind == _BUFFERS or is_frozen
                digest = self._digest(path, tensor, known.get(path)) if may_last else digest_of(plain)
                self.digests.setdefault(kind, {})[path] = digest
        missing, unknown, places = left_out(objects, held, states, kept)
        for kind, found in ((_OPTIMIZERS, missing | unknown), (_EXTRA, dict(_changed_extra(hooked, states)))):
            digests = {path: form for path, item in found.items() if (form := form_of(item)) is not None}
            if digests:
                self.digests[kind] = digests
        if places:
            self.digests[_PLACES] = places
        optimizers = [each for several in held.values() for each in several] if hidden else []
        updated = {id(tensor) for each in optimizers for tensor in parameters(each)}
        dropped = [
            path
            for kind, path, tensor in hidden
            if kind == _CHANGED or (tensor.requires_grad and id(tensor) in updated)
        ]
        dropped += filter(None, [order.unkept])
        dropped += [path for path in self.digests.get(_PARAMETERS, {}) if self._changes(_PARAMETERS, path, before)]
        dropped += self._lost(missing.keys() & self.digests.get(_OPTIMIZERS, {}).keys(), missing, flat)
        dropped += self.digests.get(_EXTRA, {})
        self.trained = (
            f"{dropped[0]} is trained, and no registered object's state has it as it is: a recovery compares it, and "
            f"is refused unless it is the same by then. {_REMEDY}"
            if dropped
            else None
        )
        changing = next(
            (path for path in self.digests.get(_BUFFERS, {}) if self._changes(_BUFFERS, path, before)), None
        )
        self.changing = changing and (
            f"{changing} changes, and state_dict() leaves it out: it is not part of checkpoints, and a recovery goes "
            "on with another one. Make it persistent if training depends on it"
        )

    @property
    def of_optimizers(self) -> bool:
        """Whether an optimizer has something that no state shows as it is."""
        return not self.digests.keys().isdisjoint((_OPTIMIZERS, _PLACES))

    def to_compare(self) -> dict[str, dict[str, str]]:
        """Return `digests` for a manifest, with those of parameters also if there are none: older ones do not tell."""
        return {_PARAMETERS: {}, **self.digests}

    def _changes(self, kind: str, path: str, before: dict[str, dict[str, str]]) -> bool:
        now = self.digests[kind][path]
        return before.get(kind, {}).get(path, now) != now

    def _lost(self, paths: set[str], missing: dict[str, Any], flat: Flattener) -> list[str]:
        """Return which of this has no equal in the state, either: its object may hand out copies of it."""
        new = paths - self._judged.keys()
        if new:
            tensors = {path: missing[path] for path in new if isinstance(missing[path], torch.Tensor)}
            equal = equal_leaves({id(each): local(each) for each in tensors.values()}, dict(enumerate(flat.leaves)))
            self._judged |= {path: path not in tensors or not equal[id(tensors[path])] for path in new}
        return [path for path in missing if path in paths and self._judged[path]]

    def _digest(self, path: str, tensor: torch.Tensor, known: _Known | None) -> str:
        if tensor.requires_grad or tensor.is_inference():
            return digest_of(local(tensor))
        if known is None or not known[0].is_as_before(tensor):
            known = Seen(tensor), digest_of(local(tensor))
        self._known[path] = known
        return known[1]


def parse(node: Node) -> dict[str, dict[str, str]]:
    """Return what a manifest has, as `Unsaved.digests` was.

    Raises:
        SlotError: It is malformed.
    """
    found = plain(node)
    parts = found.values() if isinstance(found, dict) and found.keys() <= _KINDS else [None]
    if all(isinstance(part, dict) and are_names([*part, *part.values()]) for part in parts):
        return dict(found)
    raise SlotError(f"manifest has {str(found)[:200]} for what is not saved")


def lost(
    saved: dict[str, dict[str, str]],
    now: dict[str, dict[str, str]],
    objects: dict[str, Any],
    held: dict[str, list[Optimizer]],
) -> Iterator[str]:
    """Yield what is not what the checkpoint's step had, but for buffers that are not persistent."""
    before, after = saved.get(_PARAMETERS, {}), now.get(_PARAMETERS, {})
    found = [path for path, digest in before.items() if after.get(path) != digest]
    for path in after.keys() - before.keys() if _PARAMETERS in saved else ():
        yield (
            f"{path} was in the state of a registered object, which has another tensor in its place now: "
            "load_state_dict() has to fill the one that there is"
        )
    for kind in (_CHANGED, _OPTIMIZERS, _EXTRA):
        # What is shown as it is in only one of the two: the checkpoint has the other's.
        before = saved.get(kind, {})
        if paths := dict.fromkeys([*before, *now.get(kind, {})]):
            live = _live(kind, modules_of(objects), held)
            found += [path for path in paths if form_of(live.get(path, NOTHING)) != before.get(path)]
    if placed := saved.get(_PLACES):
        places = places_of(held)
        found += [path for path, digest in placed.items() if places.get(path) != digest]
    for path in found:
        yield f"{path} is not what it was, and no registered object's state has it as it is. {_REMEDY}"


def other_buffers(saved: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield which buffers are not what the checkpoint's step had; one that is not there yet the module makes anew."""
    after = now.get(_BUFFERS, {})
    for path, digest in saved.get(_BUFFERS, {}).items():
        if after.get(path, digest) != digest:
            yield f"{path} is another one, which state_dict() leaves out"


def _live(kind: str, modules: dict[str, torch.nn.Module], held: dict[str, list[Optimizer]]) -> dict[str, Any]:
    """Return what the objects have now of this kind, by path, whether a state shows it or not."""
    if kind == _OPTIMIZERS:
        return live_parts(held)
    if kind == _EXTRA:
        return {f"{name}.{key}": made for name, module in modules.items() for key, made in _extra(module)}
    return dict(keyed_tensors(modules))


def _hidden(
    modules: dict[str, torch.nn.Module],
    hooked: dict[str, torch.nn.Module],
    states: dict[str, Any],
    parameters: dict[str, torch.Tensor],
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind, path and tensor of the parameters and buffers that are not in a module's state as they are."""
    given = {f"{name}.{key}": shown for name in modules for key, shown in states[name].items()}
    begins = tuple(f"{name}." for name in hooked)
    for path, parameter in parameters.items():
        if path not in given:
            if not is_lazy(parameter):
                yield _PARAMETERS, path, parameter
        elif path.startswith(begins) and not is_shown(parameter, given[path]):
            yield _CHANGED, path, parameter
    for name, module in modules.items():
        passing: set[str] | None = None
        for key, buffer in named_buffers(module):
            if is_lazy(buffer):
                continue
            if (path := f"{name}.{key}") not in given:
                passing = _not_persistent(module) if passing is None else passing
                yield _BUFFERS if key in passing else _PARAMETERS, path, buffer
            elif name in hooked and not is_shown(buffer, given[path]):
                yield _CHANGED, path, buffer


def _not_persistent(module: torch.nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set
    }


def _extra(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield key and extra state of the modules in `module` that have one."""
    for prefix, inner in module.named_modules(remove_duplicate=False):
        if type(inner).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", inner.get_extra_state()


def _changed_extra(hooked: dict[str, torch.nn.Module], states: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, module in hooked.items():
        for key, made in _extra(module):
            if (form := form_of(made)) is not None and form_of(states[name].get(key, NOTHING)) != form:
                yield f"{name}.{key}", made
