"""What a script remembers by itself: attributes of its trainer and callbacks, which are kept, and its globals.

Globals, and what its data sets hold, are compared and never kept. Not all of it can be seen: what another process or a
C extension remembers cannot.
"""

import copy
import copyreg
import dis
import functools
import inspect
import os
import random
import sys
import sysconfig
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import StateError
from ..state.held import Seen, local
from ..state.shown import form_of
from ..state.tree import is_strided
from .common import alike

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_FIXED: Final = (*_PLAIN, torch.dtype, torch.device, torch.Size)
_SEQUENCES: Final = (list, tuple, deque, set, frozenset)
_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_FACTORIES: Final = (None, int, float, bool, str, list, dict, set, tuple)
_GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_DEPTH: Final = 5
_ELEMENTS: Final = 64
_KEPT_ELEMENTS: Final = 4096
_OBJECTS: Final = 20_000
_ARRAY_BYTES: Final = 1 << 16
_COST: Final = 0.01
_TOO_MANY: Final = f"the script holds more than {_OBJECTS} objects, too many to compare"
_FRAMEWORKS: Final = frozenset({"builtins", "torch", "transformers", "lightning", "resilient_run"})
_REPEATED: Final = tuple(
    f"lightning.pytorch.callbacks.{name}" for name in ("weight_averaging", "stochastic_weight_avg")
)
"""Callbacks of Lightning that have a state of this kind, and make what it is loaded into anew in each epoch."""
_BASE: Final = frozenset(vars(nn.Module()))
_CONTENT: Final = ("training", "_parameters", "_buffers", "_modules")
_OF_PROCESS: Final = frozenset({"_external_params", "_original_parameters"})
"""Parameters that ZeRO 3 finds in modules, by their `id`s: each process finds its own."""
_SAME: Final = ["same"]
"""Stands for what a restarted script has made again, and nobody has to load."""


class Attributes:
    """What a trainer, its model and its callbacks hold beside what a checkpoint has of them.

    Kept are plain values, tensors, arrays, modules, random generators, objects with `state_dict()`, objects of the
    script's own classes, and lists, dicts, deques and sets of them, where they are not as they were when this was made.
    All else has to stay one and the same object as long as training goes on.

    """

    def __init__(self, things: Iterable[Any], managed: Iterable[Any], totals: Mapping[str, str] = {}) -> None:
        """Remember how it is.

        Args:
            things: The objects that have the attributes.
            managed: What they may hold, and is kept or made again otherwise: trained modules, optimizers, data.
            totals: Names of attributes of which only the "mean" or the "sum" over ranks counts.
        """
        self._totals = totals
        self._things: dict[str, Any] = {}
        for thing in things:
            kinds = [kind for kind in type(thing).__mro__ if _root(kind) != "resilient_run"]
            own = [(f"class {kind.__name__}", kind) for kind in kinds if _is_own(kind)]
            for name, each in ((kinds[0].__name__, thing), *own):
                if not any(each is known for known in self._things.values()):
                    count = sum(known.partition(" #")[0] == name for known in self._things)
                    self._things[f"{name} #{count + 1}" if count else name] = each
        self._managed = {id(each): each for each in (*self._things.values(), *managed)}
        self._first: _Walk | None = None
        self._first = self._look(None)
        self._begun: dict[str, Any] | None = None
        self._restored: dict[str, Any] | None = None

    def begin(self) -> None:
        """Load what was restored, once: what begins a training has made its objects by now.

        Raises:
            StateError: Something could not be brought back.
        """
        if self._begun is not None:
            return
        look = self._look(None)
        self._begun = look.found
        restored, self._restored = self._restored, None
        if restored is not None:
            for path, thing in self._things.items():
                _load_attributes(restored.get(path, {}), thing, path, look.objects)
            now = self._look(self._begun).nodes
            if (name := _other(restored, now)) is not None:
                raise StateError(f"{name[1:]} was not restored exactly{_REMEDY}")

    def state_dict(self) -> dict[str, Any]:
        """Return it.

        Raises:
            StateError: Something that cannot be kept has changed.
        """
        if self._restored is not None:
            return self._restored
        return self._look(self._begun).nodes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `begin` is to load."""
        self._restored = dict(state)

    def reshard(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return what `rank` of `world_size` loads of what another number of ranks had, by rank.

        Raises:
            StateError: They had something differently.
        """
        del rank
        made: dict[str, Any] = {}
        for path in dict.fromkeys(path for state in states.values() for path in state):
            made[path] = {}
            several = {other: state.get(path, {}) for other, state in states.items()}
            for name in dict.fromkeys(name for each in several.values() for name in each):
                values = {other: each.get(name, ["absent"]) for other, each in several.items()}
                if name in self._totals and not any(isinstance(value, list) for value in values.values()):
                    parts = len(values) if self._totals[name] == "mean" else world_size
                    made[path][name] = sum(values.values()) / parts
                else:
                    made[path][name] = alike(f"{path}.{name}", values)
        return made

    def kept(self) -> set[int]:
        """Return the `id`s of objects and containers that are kept."""
        return {id(each) for each in (*self._things.values(), *self._look(None).objects.values())}

    def _look(self, begun: dict[str, Any] | None) -> "_Walk":
        look = _Walk(self._managed, self._first, begun)
        look.nodes = {path: look.attributes(path, thing) for path, thing in self._things.items()}
        return look


_REMEDY: Final = (
    ". Keep it in an object that is there before training and has state_dict() and load_state_dict(), in plain values, "
    "or in tensors"
)


class _Walk:
    """One walk through attributes, which makes nodes of them.

    A node is a plain value, a tensor or an array as it is, or a list that begins with the kind of what it was.

    Attributes:
        nodes: Those of each thing.
        plain: Nodes of attributes without tensors, by path.
        names: The attributes of each object, by its path.
        found: What no node can make again, by path.
        objects: Containers and objects that are kept, by path.
    """

    def __init__(self, managed: Mapping[int, Any], first: "_Walk | None", begun: Mapping[str, Any] | None) -> None:
        self.nodes: dict[str, Any] = {}
        self.plain: dict[str, Any] = {}
        self.names: dict[str, set[str]] = {}
        self.found: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        self._paths: dict[int, str] = {}
        self._managed = managed
        self._first = first
        self._begun = begun
        self._live = 0
        self._is_repeated = False

    def attributes(self, path: str, owner: Any) -> dict[str, Any]:
        """Return the nodes of attributes that are not what they were first."""
        members = _members(owner, content=id(owner) not in self._managed)
        kind = cast("Hashable", type(owner))
        known, nodes = framework_names(kind).difference(_CONTENT), dict[str, Any]()
        first = _Walk({}, None, None) if self._first is None else self._first
        self.names[path] = set(members)
        if path.count(".") == 0:
            self._is_repeated = is_repeated(owner)
        for name, value in members.items():
            where, live = f"{path}.{name}", self._live
            # Of what the classes of a framework have for themselves, only counters and sums, and the script's objects.
            if name in known and type(value) not in (*_FIXED, torch.Tensor) and not _is_own(type(value)):
                continue
            if name in known and id(value) in self._managed:
                continue
            node = self.node(where, value, inside=name in _CONTENT)
            if self._live == live:
                self.plain[where] = node
                if node is _SAME or (where in first.plain and first.plain[where] == node):
                    continue
            nodes[name] = node
        return nodes | {name: ["gone"] for name in first.names.get(path, set()) - self.names[path]}

    def node(self, path: str, value: Any, *, inside: bool = False) -> Any:
        """Return the node of a value; of one that is `inside` a module, whatever it is."""
        kind = type(value)
        if kind in _FIXED or issubclass(kind, np.generic):
            return value
        if issubclass(kind, torch.Tensor):
            return self._tensor(path, value, inside)
        if kind is np.ndarray and not value.dtype.hasobject:
            self._live += 1
            return value
        if id(value) in self._paths:
            return ["at", self._paths[id(value)]]
        if id(value) in self._managed or not (make := self._maker(kind, value)):
            self._remember(path, value, (value, *_elements(value)))
            return _SAME
        self._paths[id(value)], self.objects[path] = path, value
        if kind not in (*_SEQUENCES, *_DICTS) or getattr(value, "default_factory", None) not in _FACTORIES:
            self._remember(path, value, kind)
        return make(path, value, inside)

    def _maker(self, kind: type, value: Any) -> Any:
        if kind in (*_SEQUENCES, *_DICTS):
            may = len(value) <= _KEPT_ELEMENTS and (kind in _SEQUENCES or all(map(_is_key, value)))
            return self._container if may else None
        if issubclass(kind, (*_SEQUENCES, dict, type, Dataset, DataLoader, Sampler, random.SystemRandom)):
            return None
        if issubclass(kind, _GENERATORS):
            return lambda _path, value, _inside: self._of("generator", _generator_state(value))
        if not issubclass(kind, nn.Module) and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
            return lambda _path, value, _inside: self._of("stateful", value.state_dict())
        if issubclass(kind, nn.Module) or _is_own(kind):
            return lambda path, value, _inside: ["object", self.attributes(path, value)]
        return None

    def _of(self, tag: str, state: Any) -> list[Any]:
        self._live += 1
        return [tag, state]

    def _container(self, path: str, value: Any, inside: bool) -> list[Any]:
        nodes = {key: self.node(f"{path}[{key!r}]", each, inside=inside) for key, each in _items(value)}
        if not isinstance(value, dict):
            return [type(value).__name__, getattr(value, "maxlen", None), list(nodes.values())]
        made = copy.copy(value)
        made.clear()
        made.update(nodes)  # which adds up what a Counter has already
        return ["dict", None, made]

    def _tensor(self, path: str, value: torch.Tensor, inside: bool) -> Any:
        plain = local(value)
        if not is_strided(plain) or plain.is_meta:
            self._remember(path, value, (value, None if plain.is_inference() else plain._version))
            return _SAME
        # `.data` is written without a count, mostly of modules and of small ones: only of others the count is taken.
        if plain.nbytes > _ARRAY_BYTES and not inside and not plain.is_inference():
            seen = None if self._begun is None else self._begun.get(path)
            if isinstance(seen, Seen) and seen.is_as_before(value):
                return _SAME
            self.found[path] = Seen(value)
        self._live += 1
        return value

    def _remember(self, path: str, value: Any, mark: Any) -> None:
        """Note what a restarted script has to have made again.

        Raises:
            StateError: Training has made it, or another one.
        """
        self.found[path] = mark
        if self._begun is not None and not self._is_repeated and not _is_one(self._begun.get(path), mark):
            raise StateError(
                f"{path} changes in training, and no checkpoint can have it ({type(value).__qualname__}){_REMEDY}"
            )


def _is_one(before: Any, now: Any) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):
        return before[0] is now[0] and before[1:] == now[1:]
    return before is now


def _elements(value: Any) -> tuple[Any, ...]:
    """Return what a container that is not kept is recognised by."""
    if not issubclass(type(value), (*_SEQUENCES, dict)):
        return ()
    return len(value), *(id(each) for each in islice(value, _ELEMENTS))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a container; a set has its own order in each process."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else type(key) in _PLAIN


def _members(owner: Any, *, content: bool) -> dict[str, Any]:
    """Return the attributes that an object or a class has of its own, without asking it.

    Args:
        owner: The object.
        content: Whether those of a module count that torch gives it.
    """
    kind = type(owner)
    if issubclass(kind, type):
        return {name: value for name, value in vars(owner).items() if not name.startswith("__")}
    found = dict(getattr(owner, "__dict__", {}))
    # Lightning's DDP leaves a module with its own method as an attribute.
    found = {
        name: value
        for name, value in found.items()
        if not (
            type(value) is MethodType
            and value.__self__ is owner
            and value.__func__ is inspect.getattr_static(kind, name, None)
        )
    }
    found |= {name: getattr(owner, name) for name in copyreg._slotnames(kind) if hasattr(owner, name)}  # type: ignore[attr-defined]
    if not issubclass(kind, nn.Module):
        return found
    own = _is_own(kind) or _is_metric(kind)
    others = {name: value for name, value in found.items() if name not in _BASE | _OF_PROCESS} if own else {}
    return others | ({name: found[name] for name in _CONTENT} if content else {})


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.get_state(legacy=False)


def _load_attributes(nodes: Mapping[str, Any], owner: Any, path: str, made: dict[str, Any]) -> None:
    members = _members(owner, content=True)
    for name, node in nodes.items():
        value = _loaded(node, members.get(name), f"{path}.{name}", made, inside=name in _CONTENT)
        if type(node) is list and node[0] == "gone":
            (type if isinstance(owner, type) else object).__delattr__(owner, name)
        elif value is not members.get(name) or name not in members:
            (type if isinstance(owner, type) else object).__setattr__(owner, name, value)


def _loaded(node: Any, live: Any, path: str, made: dict[str, Any], *, inside: bool) -> Any:
    """Return what a node stands for: what is there, filled, or else something new.

    Args:
        node: As `_Walk.node` made it.
        live: What is there.
        path: Of both.
        made: What was loaded already, by path.
        inside: Whether it is a module's.
    """
    if not isinstance(node, list):
        if isinstance(node, torch.Tensor) and isinstance(live, torch.Tensor) and (inside or live.requires_grad):
            if live is not node:
                with torch.no_grad():
                    live.copy_(node)
            return live
        return node
    tag, *rest = node
    if tag == "at":
        return made[rest[0]]
    if tag in ("same", "gone"):
        return live
    made[path] = live
    if tag == "object":
        _load_attributes(rest[0], live, path, made)
    elif tag == "stateful":
        live.load_state_dict(rest[0])
    elif tag == "generator":
        if isinstance(live, random.Random):
            live.setstate(rest[0])
        elif isinstance(live, np.random.Generator):
            live.bit_generator.state = rest[0]
        else:
            live.set_state(rest[0])
    else:
        maxlen, content = rest
        kind = next((each for each in _SEQUENCES if each.__name__ == tag), type(content))
        is_filled = kind in _DICTS or kind in (list, deque)
        if is_filled and type(live) not in (_DICTS if kind in _DICTS else (kind,)):
            made[path] = deque(maxlen=maxlen) if kind is deque else copy.copy(content)
        there = dict(_items(live)) if type(live) in (*_SEQUENCES, *_DICTS) else {}
        filled = {
            key: _loaded(each, there.get(key), f"{path}[{key!r}]", made, inside=inside) for key, each in _items(content)
        }
        if is_filled:
            made[path].clear()
            made[path].update(filled) if kind in _DICTS else made[path].extend(filled.values())
        else:
            made[path] = kind(filled.values())
    return made[path]


def _other(saved: Any, now: Any, path: str = "") -> str | None:
    """Return the path of what was not loaded as it was saved, None if all was."""
    if isinstance(saved, list) and isinstance(now, list) and saved[0] == now[0] == "object":
        saved, now = saved[1], now[1]
    if isinstance(saved, dict) and isinstance(now, dict):
        found = (_other(saved[name], now[name], f"{path}.{name}") for name in saved.keys() & now.keys())
        return next(filter(None, found), None)
    return None if form_of(saved) == form_of(now) else path


class Remembered:
    """Looks at a script's globals, and at what `roots` lead to, before training and again in it.

    Args:
        roots: Name → object of the script that a trainer holds.
        attributes: What is kept, and may change.
    """

    def __init__(self, roots: Mapping[str, Any], attributes: Attributes | None = None) -> None:
        self._roots = dict(roots)
        self._attributes = attributes
        self._before: dict[str, str] | None = None
        self._next_s = 0.0
        self._looks = 0

    def begin(self) -> None:
        """Remember how it is, once."""
        if self._before is None:
            self._before = self._look()

    def changed(self) -> str | None:
        """Return what is not as it was or cannot be compared, None if all is or it is not yet time to look.

        The first looks are taken at once, later ones as often as they cost a hundredth of the time.
        """
        began_s = time.monotonic()
        if self._before is None or (self._looks >= 2 and began_s < self._next_s):
            return None
        now = self._look()
        ended_s = time.monotonic()
        self._looks += 1
        self._next_s = ended_s + (ended_s - began_s) / _COST
        if _TOO_MANY in now:
            return _TOO_MANY
        changed = next((name for name in self._before | now if self._before.get(name) != now.get(name)), None)
        return changed and f"{changed} changes in training, and no checkpoint has it"

    def _look(self) -> dict[str, str]:
        script = {name: module for name, module in list(sys.modules.items()) if _is_script(name, module)}
        found: dict[str, str] = {}
        seen = set() if self._attributes is None else self._attributes.kept()
        queue: deque[tuple[str, Any, int]] = deque()
        for module in script.values():
            queue += [(name, value, 0) for name, value in list(vars(module).items()) if not name.startswith("__")]
        queue += [(name, value, 0) for name, value in self._roots.items()]
        while queue:
            if len(seen) > _OBJECTS:
                return {_TOO_MANY: ""}
            path, value, depth = queue.popleft()
            # An object is never asked for its class: torch's deprecated ones would warn.
            if issubclass(type(value), _PLAIN):
                found[path] = repr(value)
            elif id(value) not in seen:
                seen.add(id(value))
                if (look := _state(value)) is not None:
                    found[path] = look
                if depth < _DEPTH:
                    queue += [(f"{path}{name}", part, depth + 1) for name, part in _parts(value, script)]
        return found


def _is_script(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or name.partition(".")[0] in ("resilient_run", "sitecustomize"):
        return False
    return name == "__main__" or (isinstance(file, str) and not _is_installed(file))


@functools.cache
def _is_installed(file: str) -> bool:
    path = os.path.realpath(file)
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):  # of another environment than this one, too
        return True
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.startswith(os.path.realpath(place) + os.sep) for place in places)


def _state(value: Any) -> str | None:
    """Return what tells whether an object has changed by itself, None where only its parts tell it."""
    kind = type(value)
    if issubclass(kind, _GENERATORS) and not issubclass(kind, random.SystemRandom):
        return form_of(_generator_state(value))
    if issubclass(kind, torch.Tensor):
        # Parameters are in the checkpoint.
        parameter = issubclass(kind, nn.Parameter) or value.is_inference()
        return None if parameter else f"{id(value)} {value._version}"
    if issubclass(kind, np.ndarray) and value.nbytes <= _ARRAY_BYTES:
        return form_of(value)
    if issubclass(kind, list | tuple | set | frozenset | deque | dict):
        return str(len(value))
    return None


def _parts(value: Any, script: Mapping[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made of, as far as the script has made it."""
    kind = type(value)
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:_ELEMENTS])
    elif issubclass(kind, list | tuple | deque | set | frozenset):
        yield from ((f"[{number}]", part) for number, part in enumerate(list(value)[:_ELEMENTS]))
    elif issubclass(kind, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif issubclass(kind, MethodType):
        yield ".__self__", value.__self__
    elif issubclass(kind, FunctionType):
        if value.__module__ in script:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if (content := _content(cell)) is not None:
                    yield f".{name}", content
            yield ".__defaults__", value.__defaults__
            yield from ((f".{name}", part) for name, part in vars(value).items())
    elif issubclass(kind, type):
        if value.__module__ in script:
            yield from ((f".{name}", part) for name, part in list(vars(value).items()) if not name.startswith("__"))
    elif issubclass(kind, nn.Module) or kind.__module__ in script:
        if issubclass(kind, nn.Module):
            yield from ((f".{name}", child) for name, child in value.named_children())
        if kind.__module__ in script:
            members = _members(value, content=False)
            known = framework_names(cast("Hashable", kind))
            yield from ((f".{name}", part) for name, part in members.items() if name not in known)
    elif kind.__module__.startswith("torch.utils.data"):
        names = ("dataset", "collate_fn", "sampler", "batch_sampler", "generator")
        yield from ((f".{name}", vars(value)[name]) for name in names if name in getattr(value, "__dict__", {}))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_repeated(callback: Any) -> bool:
    """Tell whether a callback is one of Lightning that makes anew what its state is loaded into."""
    return any(kind.__module__ in _REPEATED for kind in type(callback).__mro__)


def own_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules in `module` that may hold more than parameters and buffers."""
    return [each for each in module.modules() if _is_own(type(each)) or _is_metric(type(each))]


def _is_metric(kind: type) -> bool:
    return any(_root(each) == "torchmetrics" for each in kind.__mro__)


def _is_own(kind: type) -> bool:
    """Tell whether a class is the script's own."""
    return _is_script(kind.__module__, sys.modules.get(kind.__module__))


@functools.cache
def framework_names(kind: Any) -> frozenset[str]:
    """Return the names of attributes that the methods of a framework's classes give an object of this class."""
    found: set[str] = set()
    for each in kind.__mro__:
        if _root(each) in _FRAMEWORKS and each.__module__ not in _REPEATED:
            found.update(name for member in vars(each).values() for name in _assigned(member))
    return frozenset(found)


def _assigned(member: Any) -> Iterator[str]:
    """Yield the names that a method assigns to attributes of its first argument."""
    for function in (member, *(getattr(member, name, None) for name in ("fget", "fset", "__func__", "__wrapped__"))):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and code.co_varnames:
            for before, instruction in pairwise(dis.get_instructions(code)):
                # Newer versions of Python load two names at once.
                loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
                if instruction.opname == "STORE_ATTR" and loaded[-1:] == code.co_varnames[:1]:
                    yield instruction.argval
