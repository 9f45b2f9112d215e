"""Comparing a state, bit for bit, with the slot that it was loaded from."""

import ctypes
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from ..format.manifest import Manifest, Node, TensorSpec
from .memory import content_of, leaf_of
from .tree import Flattener, unflatten

_SHOWN: Final = 60
_WITH_CHILDREN: Final = ("l", "t", "d", "C")

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One place where the state is not what the slot has.

    Attributes:
        path: Where, as `object.key`.
        text: What the slot has there, and what there is now.
        plain: Whether no tensor and no array is concerned.
    """

    path: str
    text: str
    plain: bool

    def __str__(self) -> str:
        """Return all of it as text."""
        return f"{self.path}: {self.text}"


class Comparison:
    """One flattened state beside the slot that it was loaded from."""

    def __init__(self, manifest: Manifest, payload: torch.Tensor, now: Flattener) -> None:
        """Compare `now` with what `manifest` and `payload` (uint8, on the CPU) have."""
        self._manifest = manifest
        self._payload = payload
        self._now = now
        self._specs = now.specs()
        self._others: dict[tuple[str, str, int], tuple[tuple[str, int], str]] = {}
        self._groups: dict[int, tuple[int, int]] = {}

    def differences(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        """Yield where the node `now` of the state is not what `saved` of the slot is; both are at `path`."""
        if not isinstance(saved, list) or not isinstance(now, list) or saved[0] != now[0]:
            # Numbers of another type are others, and so is a zero of another sign.
            if isinstance(saved, list) or isinstance(now, list) or (type(saved), repr(saved)) != (type(now), repr(now)):
                yield self._differing(saved, now, path)
        elif saved[0] == "x":
            yield from self._leaf(saved[1], now[1], path)
        elif saved[0] in _WITH_CHILDREN and len(saved) == len(now):
            befores, afters = _children(saved), _children(now)
            for key in dict.fromkeys([*befores, *afters]):
                place = _below(path, key)
                if key in befores and key in afters:
                    yield from self.differences(befores[key], afters[key], place)
                else:
                    yield self._absent(befores.get(key), afters.get(key), place, is_new=key in afters)
        elif saved != now:
            yield self._differing(saved, now, path)

    def links(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        """Yield what is one object, shares memory or requires grad in only one of the two.

        Call it for nodes that have no other differences. What concerns the memory of tensors is not `plain`.
        """
        for before, after, place in _pairs(saved, now, path):
            if before[0] != "x":
                yield from self._other(("container", id(before)), ("container", id(after)), place, "object")
                continue
            was, is_ = self._manifest.tensors[before[1]], self._specs[after[1]]
            if was.grad != is_.grad:
                yield Difference(path=place, text=f"requires_grad was {was.grad}, is {is_.grad}", plain=True)
            if was.kind == "bytes" or (was.kind == "torch" and not was.nbytes):
                continue
            what = "object" if was.kind == "numpy" else "tensor"
            others = list(self._other(("leaf", before[1]), ("leaf", after[1]), place, what))
            yield from others
            if others:
                continue
            if (was.within is None) != (is_.within is None):
                where = "now" if is_.within else "in the checkpoint"
                yield Difference(path=place, text=f"shares memory with another one only {where}", plain=False)
            elif was.within is not None and is_.within is not None:
                moved = (is_.within[0], is_.within[1] - was.within[1])
                if self._groups.setdefault(was.within[0], moved) != moved:
                    yield Difference(path=place, text="shares other memory in the checkpoint than now", plain=False)

    def _other(self, one: tuple[str, int], other: tuple[str, int], path: str, what: str) -> Iterator[Difference]:
        """Yield that `one` in the checkpoint is not the only one which is `other` now, if an earlier pair says so."""
        known, known_path = self._others.setdefault(("saved", *one), (other, path))
        origin, origin_path = self._others.setdefault(("now", *other), (one, path))
        text = None
        if known != other:
            text = f"one {what} with {known_path} in the checkpoint, two now"
        elif origin != one:
            text = f"one {what} with {origin_path} now, two in the checkpoint"
        if text is not None:
            yield Difference(path=path, text=text, plain=what != "tensor")

    def _absent(self, saved: Node, now: Node, path: str, *, is_new: bool) -> Difference:
        """Return that one of the two has nothing at `path`."""
        node, specs = (now, self._specs) if is_new else (saved, self._manifest.tensors)
        shown, plain = self._shown(node, specs), self._is_plain(node, specs)
        text = f"nothing in the checkpoint, {shown} now" if is_new else f"{shown} in the checkpoint, nothing now"
        return Difference(path=path, text=text, plain=plain)

    def _leaf(self, index: int, other: int, path: str) -> Iterator[Difference]:
        before, after = self._manifest.tensors[index], self._specs[other]
        plain = before.kind == after.kind == "bytes"
        if before.content != after.content:
            yield Difference(path=path, text=f"{before} in the checkpoint, {after} now", plain=plain)
            return
        offset = self._manifest.offsets[index]
        stored = self._payload[offset : offset + before.nbytes]
        live = content_of(self._now.leaves[other])
        if before.nbytes and _memcmp(live.data_ptr(), stored.data_ptr(), before.nbytes):
            yield Difference(path=path, text=_first(before, stored, live), plain=plain)

    def _differing(self, saved: Node, now: Node, path: str) -> Difference:
        return Difference(
            path=path,
            text=f"{self._shown(saved, self._manifest.tensors)} in the checkpoint, {self._shown(now, self._specs)} now",
            plain=self._is_plain(saved, self._manifest.tensors) and self._is_plain(now, self._specs),
        )

    def _is_plain(self, node: Node, specs: tuple[TensorSpec, ...]) -> bool:
        if not isinstance(node, list):
            return True
        if node[0] == "x":
            return specs[node[1]].kind == "bytes"
        return all(self._is_plain(child, specs) for child in _children(node).values())

    def _shown(self, node: Node, specs: tuple[TensorSpec, ...]) -> str:
        text = repr(unflatten(node, lambda index: _Shown(specs[index])))
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Shown:
    """A leaf in a message."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec

    def __repr__(self) -> str:
        return str(self._spec)


def _children(node: Node) -> dict[str, Node]:
    """Return the nodes in that of a list, tuple or dict by their keys, as JSON; of another one nothing."""
    if not isinstance(node, list) or node[0] not in _WITH_CHILDREN:
        return {}
    if node[0] in ("l", "t"):
        return {str(index): child for index, child in enumerate(node[1:])}
    return {json.dumps(key): child for key, child in zip(node[1], node[2], strict=True)}


def _pairs(saved: Node, now: Node, path: str) -> Iterator[tuple[Node, Node, str]]:
    """Yield the nodes of leaves, lists and dicts of two equal trees, and their paths."""
    if isinstance(saved, list) and saved[0] in ("x", "l", "d", "C"):
        yield saved, now, path
    others = _children(now)
    for key, child in _children(saved).items():
        yield from _pairs(child, others[key], _below(path, key))


def _below(path: str, key: str) -> str:
    found = json.loads(key)
    if isinstance(found, list):
        # A number of NumPy is another key than the number that it is equal to.
        found = repr(unflatten(found, lambda index: f"leaf {index}"))
    return f"{path}.{found}"


def _first(spec: TensorSpec, stored: torch.Tensor, live: torch.Tensor) -> str:
    """Describe the first element that differs."""
    at = int((stored != live).nonzero()[0])
    if spec.kind == "bytes":
        return f"byte {at} differs"
    size = spec.nbytes // max(1, int(np.prod(spec.shape)))
    begin = at // size * size
    place = [int(index) for index in np.unravel_index(at // size, spec.shape)]

    def value(data: torch.Tensor) -> str:
        piece = data[begin : begin + size].clone()
        number: Any = leaf_of(replace(spec, shape=()), piece)
        if isinstance(number, torch.Tensor):
            # Not each of torch's types can be made a number of Python's.
            number = number.to(torch.complex64 if number.is_complex() else torch.float64).item()
        return f"{number} (bytes {piece.numpy().tobytes().hex()})"

    return f"{value(stored)} at {place} in the checkpoint, {value(live)} now"
