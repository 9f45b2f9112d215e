"""Restoring plain values where they are, so that a script's own references to them see what was restored."""

import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import torch

from ..errors import some
from .held import local
from .memory import Extents, overlap, writable
from .shown import form_of
from .tree import PLAIN_TENSORS, Extent, Leaf, extent, raw, same

_DICTS: Final = (dict, OrderedDict, defaultdict, Counter)


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
            f"restore() could not fill what the script registered as {some(renewal.replaced)}: "
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
        self._written = Extents()
        self._writable = Extents(writable())
        self._made: dict[int, Any] = {}
        self._containers: dict[int, Any] = {}
        self._renewed: dict[int, Any] = {}
        self._filled: list[tuple[Extent, Any, Any]] = []
        self._alive: list[Any] = []  # so that no id is given out twice

    def of(self, now: Any, wanted: Any, path: str) -> Any:
        """Return `now` with the content of `wanted` if it can hold that, else `wanted`."""
        self._alive += [now, wanted]
        if id(wanted) in self._renewed:
            # One list or dict of several places in the checkpoint.
            if self._renewed[id(wanted)] is not now and _is_mutable(now):
                self.replaced.append(path)
            return self._renewed[id(wanted)]
        made = self._of(now, wanted, path)
        if isinstance(wanted, dict | list):
            self._renewed[id(wanted)] = made
        return made

    def _of(self, now: Any, wanted: Any, path: str) -> Any:
        if isinstance(wanted, dict) and type(now) in _DICTS and isinstance(now, Counter) == isinstance(wanted, Counter):
            if self._is_taken(now, wanted):
                return self._of_taken(now, wanted, path)
            content = {key: self.of(now.get(key), value, f"{path}.{key}") for key, value in wanted.items()}
            now.clear()
            now.update(content)
            return now
        if isinstance(wanted, list) and type(now) is list:
            if self._is_taken(now, wanted):
                return self._of_taken(now, wanted, path)
            pairs = enumerate(zip_longest(now[: len(wanted)], wanted))
            now[:] = [self.of(item, value, f"{path}.{at}") for at, (item, value) in pairs]
            return now
        if isinstance(wanted, tuple) and type(now) is tuple and len(now) == len(wanted):
            pairs = enumerate(zip(now, wanted, strict=True))
            made = tuple(self.of(item, value, f"{path}.{at}") for at, (item, value) in pairs)
            return now if all(one is other for one, other in zip(made, now, strict=True)) else made
        if isinstance(wanted, torch.Tensor | np.ndarray):
            if id(wanted) not in self._made:
                self._made[id(wanted)] = now if self._leaf(now, wanted) else wanted
            made = self._made[id(wanted)]
            if made is not now and isinstance(now, torch.Tensor | np.ndarray):
                self.replaced.append(path)
            return made
        if _is_mutable(now):
            self.replaced.append(path)
        return wanted

    def _is_taken(self, now: Any, wanted: Any) -> bool:
        """Tell whether the container `now` has been filled under another name."""
        if id(now) in self._containers:
            return True
        self._containers[id(now)] = wanted
        return False

    def _of_taken(self, now: Any, wanted: Any, path: str) -> Any:
        if (form := form_of(wanted)) is not None and form_of(self._containers[id(now)]) == form:
            return now
        self.replaced.append(path)
        return wanted

    def _leaf(self, now: Any, wanted: torch.Tensor | np.ndarray) -> bool:
        """Tell whether `now` holds what `wanted` does, filled if need be, without harm to what shares its memory."""
        if not isinstance(now, torch.Tensor | np.ndarray):
            return False
        here, there = _extent(now), _extent(wanted)
        is_equal = _has_form(now, wanted) and _equal(now, wanted)
        if self._others.overlap(there):
            # It is a module's own tensor, or what an object has taken over.
            return here == there and is_equal
        if self._others.overlap(here):
            return is_equal and (id(wanted) in self._shared or isinstance(now, np.ndarray))
        if id(wanted) in self._overlapping:
            # To be restored with what shares its memory, of which the script's own may share nothing.
            return False
        if not is_equal and here is not None and _is_on_host(now) and not self._writable.covers(here):
            return False
        mates = []
        if here is not None and self._written.overlap(here):
            mates = [(mate, its) for extent, mate, its in self._filled if overlap(extent, here)]
        backup = _copy(now) if mates else None
        if not is_equal and not _fill(now, wanted):
            return False
        if not all(_equal(mate, its) for mate, its in mates):
            _fill(now, backup)
            return False
        filled = _extent(now)
        if filled is not None:
            self._written.add(filled)
            self._filled.append((filled, now, wanted))
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


def _is_mutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, dict | list | torch.Tensor | np.ndarray)


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
    return _equal(now, wanted)


def _equal(now: Any, wanted: Any) -> bool:
    one, other = local(now), local(wanted)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.detach().resolve_conj().resolve_neg(), other.detach().resolve_conj().resolve_neg()
        # Parameters are tensors here.
        return one.device == other.device and same(one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
    return same(one, other)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    plain = leaf.detach()
    return raw(plain).clone().view(torch.bool) if plain.dtype is torch.bool else plain.clone()
