"""Restoring plain values where they are, so that a script's own references to them see what was restored."""

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import torch

from ..errors import some
from .exact import same_keys
from .held import equal, local
from .memory import Extents, writable
from .tree import PLAIN_TENSORS, Extent, Leaf, extent, raw

_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)
_MUTABLE: Final = (dict, list, torch.Tensor, np.ndarray)


def renew(
    values: dict[str, Any], restored: dict[str, Any], *, others: Iterable[Leaf], shared: Collection[int] = ()
) -> None:
    """Set `values` to what was restored: dicts, lists, tensors and arrays keep their identity where that can be exact.

    A `RuntimeWarning` names what is another object now: a script that has a name of its own for it would go on with
    what it was.

    Args:
        values: The registered values by name; those that were not restored stay.
        restored: The restored ones; they may be taken over as they are.
        others: Leaves of everything else that is registered, as they are now: their memory is not written.
        shared: `id`s of the restored tensors that were one with a tensor of these in the checkpoint.
    """
    renewal = _Renewal(others, shared, restored)
    values.update({name: renewal.of(values.get(name), wanted, name) for name, wanted in restored.items()})
    if renewal.replaced:
        warnings.warn(
            f"restore() could not fill what the script registered as {some(renewal.replaced, between=', ')}: "
            "read it from checkpointer.values, the script's own object is not what was restored",
            RuntimeWarning,
            stacklevel=2,
        )


class _Renewal:
    """Fills values one after the other.

    Attributes:
        replaced: Paths of what could have kept its identity, and did not.
    """

    def __init__(self, others: Iterable[Leaf], shared: Collection[int], restored: dict[str, Any]) -> None:
        self.replaced: list[str] = []
        self._others = Extents(map(_extent, others))
        self._shared = shared
        self._overlapping = _overlapping(restored)
        self._kept = Extents()
        self._writable = Extents(writable())
        self._made: dict[int, Any] = {}
        self._containers: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no id is given out twice

    def of(self, now: Any, wanted: Any, path: str) -> Any:
        """Return `now` with the content of `wanted` if it can hold that, else `wanted`."""
        self._alive += [now, wanted]
        made = self._made.get(id(wanted))  # one object of several places in the checkpoint
        if made is None:
            made = self._of(now, wanted, path)
            if isinstance(wanted, _MUTABLE):
                self._made[id(wanted)] = made
        if made is not now and _is_mutable(now) and not _are_tuples(now, wanted):
            self.replaced.append(path)
        return made

    def _of(self, now: Any, wanted: Any, path: str) -> Any:
        if _are_tuples(now, wanted):
            pairs = enumerate(zip(now, wanted, strict=True))
            made = tuple(self.of(item, value, f"{path}.{at}") for at, (item, value) in pairs)
            return now if all(one is other for one, other in zip(made, now, strict=True)) else made
        if isinstance(wanted, torch.Tensor | np.ndarray):
            return now if self._leaf(now, wanted) else wanted
        is_dict = (
            isinstance(wanted, dict) and type(now) in _DICTS and isinstance(now, Counter) == isinstance(wanted, Counter)
        )
        if not is_dict and not (isinstance(wanted, list) and type(now) is list):
            return wanted
        if id(now) in self._containers:  # filled under another name
            return now if _alike(self._containers[id(now)], wanted) else wanted
        self._containers[id(now)] = wanted
        if is_dict:
            content = {key: self.of(now.get(key), value, f"{path}.{key}") for key, value in wanted.items()}
            now.clear()
            now.update(content)
        else:
            pairs = enumerate(zip_longest(now[: len(wanted)], wanted))
            now[:] = [self.of(item, value, f"{path}.{at}") for at, (item, value) in pairs]
        return now

    def _leaf(self, now: Any, wanted: torch.Tensor | np.ndarray) -> bool:
        """Tell whether `now` holds what `wanted` does, filled if need be, without harm to what shares its memory."""
        if not isinstance(now, torch.Tensor | np.ndarray):
            return False
        here, there = _extent(now), _extent(wanted)
        is_equal = _has_form(now, wanted) and equal(now, wanted)
        if self._others.overlap(there):
            # It is a module's own tensor, or what an object has taken over.
            return here == there and is_equal
        if self._others.overlap(here):
            return is_equal and (id(wanted) in self._shared or isinstance(now, np.ndarray))
        if id(wanted) in self._overlapping:
            # To be restored with what shares its memory, of which the script's own may share nothing.
            return False
        if not is_equal:
            if self._kept.overlap(here) or (here is not None and _is_on_host(now) and not self._writable.covers(here)):
                return False
            if not _fill(now, wanted):
                return False
        if (filled := _extent(now)) is not None:
            self._kept.add(filled)
        return True


def _extent(leaf: Any) -> Extent | None:
    """Return the memory of a leaf, None when it has none."""
    leaf = local(leaf)
    if not isinstance(leaf, torch.Tensor | np.ndarray):
        return None
    begin, end = extent(leaf)
    return None if begin == end else (begin, end)


def _overlapping(restored: dict[str, Any]) -> set[int]:
    """Return the `id`s of the restored tensors that share memory with another one."""
    found: dict[int, set[int]] = {}
    remaining: list[Any] = [restored]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict | list | tuple):
            remaining.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, torch.Tensor) and local(value).numel():
            found.setdefault(local(value).untyped_storage().data_ptr(), set()).add(id(value))
    return {one for several in found.values() if len(several) > 1 for one in several}


def _are_tuples(now: Any, wanted: Any) -> bool:
    return type(now) is tuple and isinstance(wanted, tuple) and len(now) == len(wanted)


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, _MUTABLE)


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or bool(leaf.is_cpu)


def _has_form(now: Any, wanted: Any) -> bool:
    """Tell whether `now` can have the content of `wanted` as it is."""
    if isinstance(now, np.ndarray) or isinstance(wanted, np.ndarray):
        return type(now) is type(wanted) and (now.dtype, now.shape) == (wanted.dtype, wanted.shape)
    names = ("dtype", "shape", "device", "placements", "device_mesh")
    return all(getattr(now, name, None) == getattr(wanted, name, None) for name in names) and (
        type(now) is type(wanted) or (type(now) in PLAIN_TENSORS and type(wanted) in PLAIN_TENSORS)
    )


def _fill(now: Any, wanted: Any) -> bool:
    """Give `now` the content of `wanted`, and tell whether it has it."""
    try:
        with torch.no_grad():
            if _has_form(now, wanted):
                if isinstance(now, np.ndarray):
                    now[...] = wanted
                else:
                    raw(local(now)).copy_(raw(local(wanted)))
            elif (
                type(now) in PLAIN_TENSORS
                and type(wanted) in PLAIN_TENSORS
                and now.nbytes == now.untyped_storage().nbytes()
            ):
                now.data = wanted
            else:
                return False
    except (RuntimeError, ValueError):
        # Read-only, or several elements are one in memory, or it does not take another form.
        return False
    return equal(now, wanted)


def _alike(one: Any, other: Any) -> bool:
    """Tell whether two restored containers have the same content."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same_keys(one, other) and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return equal(one, other) if isinstance(one, torch.Tensor | np.ndarray) else repr(one) == repr(other)
