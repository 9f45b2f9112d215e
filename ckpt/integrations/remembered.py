"""What a script remembers by itself, and no checkpoint has: its globals, and what its own objects hold.

It is compared, never kept. Not all of it can be seen: what another process or a C extension remembers cannot.
"""

import functools
import os
import random
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_DEPTH: Final = 5
_ELEMENTS: Final = 64
_OBJECTS: Final = 20_000
_ARRAY_BYTES: Final = 1 << 16
_COST: Final = 0.01
_TOO_MANY: Final = f"the script holds more than {_OBJECTS} objects, and no look can compare them all"


class Remembered:
    """Looks at a script's globals, and at what `roots` lead to, before training and again in it.

    Args:
        roots: Name → object of the script that a trainer holds.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
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
        return difference(self._before, now)

    def _look(self) -> dict[str, str]:
        script = {name: module for name, module in list(sys.modules.items()) if _is_script(name, module)}
        found: dict[str, str] = {}
        seen: set[int] = set()
        queue: deque[tuple[str, Any, int]] = deque()
        for module in script.values():
            queue += [(name, value, 0) for name, value in list(vars(module).items()) if not name.startswith("__")]
        queue += [(name, value, 0) for name, value in self._roots.items()]
        while queue:
            if len(seen) > _OBJECTS:
                return {_TOO_MANY: ""}
            path, value, depth = queue.popleft()
            if isinstance(value, _PLAIN):
                found[path] = repr(value)
            elif id(value) not in seen:
                seen.add(id(value))
                if (look := _state(value)) is not None:
                    found[path] = look
                if depth < _DEPTH:
                    queue += [(f"{path}{name}", part, depth + 1) for name, part in _parts(value, script)]
        return found


def difference(before: dict[str, str], now: dict[str, str]) -> str | None:
    """Return what has changed between two looks, None if nothing has.

    Args:
        before: Name → how it was.
        now: Name → how it is.
    """
    for name in before | now:
        if before.get(name) != now.get(name):
            return f"{name} changes in training, and no checkpoint has it"
    return None


def _is_script(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or name.partition(".")[0] in ("resilient_run", "sitecustomize"):
        return False
    return name == "__main__" or (isinstance(file, str) and not _is_installed(file))


@functools.cache
def _is_installed(file: str) -> bool:
    path = os.path.realpath(file)
    places = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.startswith(os.path.realpath(place) + os.sep) for place in places)


def _state(value: Any) -> str | None:
    """Return what tells whether an object has changed by itself, None where only its parts tell it."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return str(hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, torch.Generator):
        return str(hash(value.get_state().numpy().tobytes()))
    if isinstance(value, torch.Tensor):
        # Parameters are in the checkpoint.
        parameter = isinstance(value, nn.Parameter) or value.is_inference()
        return None if parameter else f"{id(value)} {value._version}"
    if isinstance(value, np.ndarray) and value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject:
        return str(hash(value.tobytes()))
    if isinstance(value, list | tuple | set | frozenset | deque | dict):
        return str(len(value))
    return None


def _parts(value: Any, script: Mapping[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    """Yield what an object is made of, as far as the script has made it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items())[:_ELEMENTS])
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from ((f"[{number}]", part) for number, part in enumerate(list(value)[:_ELEMENTS]))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        if value.__module__ in script:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if (content := _content(cell)) is not None:
                    yield f".{name}", content
            yield ".__defaults__", value.__defaults__
            yield from ((f".{name}", part) for name, part in vars(value).items())
    elif isinstance(value, type):
        if value.__module__ in script:
            yield from ((f".{name}", part) for name, part in list(vars(value).items()) if not name.startswith("__"))
    elif isinstance(value, nn.Module):
        yield from ((f".{name}", child) for name, child in value.named_children())
        if type(value).__module__ in script:
            yield from ((f".{name}", part) for name, part in vars(value).items() if name in own_names(type(value)))
    elif type(value).__module__ in script:
        own = own_names(type(value)) if _has_framework(type(value)) else None
        yield from (
            (f".{name}", part)
            for name, part in list(getattr(value, "__dict__", {}).items())
            if own is None or name in own
        )
    elif type(value).__module__.startswith("torch.utils.data"):
        names = ("dataset", "collate_fn", "sampler", "batch_sampler", "generator")
        yield from ((f".{name}", vars(value)[name]) for name in names if name in getattr(value, "__dict__", {}))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


_FRAMEWORKS: Final = frozenset({"builtins", "torch", "transformers", "lightning", "resilient_run"})


def _has_framework(kind: type) -> bool:
    return any(each.__module__.partition(".")[0] in _FRAMEWORKS - {"builtins"} for each in kind.__mro__)


def own_names(kind: type) -> frozenset[str]:
    """Return the names of attributes in the methods of a script's own classes that a framework's do not have."""
    own: set[str] = set()
    known: set[str] = set()
    for each in kind.__mro__:
        names = known if each.__module__.partition(".")[0] in _FRAMEWORKS else own
        names.update(name for member in vars(each).values() for name in _names(member))
    return frozenset(own - known)


def _names(member: Any) -> Iterator[str]:
    for function in (member, *(getattr(member, name, None) for name in ("fget", "fset", "__func__", "__wrapped__"))):
        code = getattr(function, "__code__", None)
        remaining = [code] if isinstance(code, CodeType) else []
        while remaining:
            found = remaining.pop()
            yield from found.co_names
            remaining += [constant for constant in found.co_consts if isinstance(constant, CodeType)]
