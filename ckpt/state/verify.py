"""Comparing a state, bit for bit, with the slot that it was loaded from."""

import ctypes
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ..format.manifest import Manifest, Node, TensorSpec
from .tree import Flattener, Leaf, bytes_of, unflatten

_SHOWN: Final = 60

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
        self._places: dict[int, tuple[int, str]] = {}
        self._origins: dict[int, tuple[int, str]] = {}
        self._groups: dict[int, tuple[int, int]] = {}
        self._objects: dict[tuple[str, str, int], tuple[tuple[str, int], str]] = {}

    def differences(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        """Yield where the node `now` of the state is not what `saved` of the slot is; both are at `path`."""
        if not isinstance(saved, list) or not isinstance(now, list) or saved[0] != now[0]:
            # Numbers of another type are others, and so is a zero of another sign.
            if isinstance(saved, list) or isinstance(now, list) or (type(saved), repr(saved)) != (type(now), repr(now)):
                yield self._differing(saved, now, path)
            return
        match saved[0]:
            case "x":
                yield from self._leaf(saved[1], now[1], path)
            case "l" | "t" if len(saved) == len(now):
                for index, (before, after) in enumerate(zip(saved[1:], now[1:], strict=True)):
                    yield from self.differences(before, after, f"{path}.{index}")
            case "d" | "C":
                yield from self._dict(saved, now, path)
            case _ if saved != now:
                yield self._differing(saved, now, path)

    def sharing(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        """Yield which tensors share memory in only one of the two; call it for nodes that have no other differences."""
        for one, two, place in _pairs(saved, now, path):
            if one[0] != "x":
                continue
            index, other = one[1], two[1]
            before, after = self._manifest.tensors[index], self._specs[other]
            if before.kind != "torch" or not before.nbytes:
                continue
            known, known_path = self._places.setdefault(index, (other, place))
            origin, origin_path = self._origins.setdefault(other, (index, place))
            if known != other:
                yield _plainly(place, f"one tensor with {known_path} in the checkpoint, two now")
            elif origin != index:
                yield _plainly(place, f"one tensor with {origin_path} now, two in the checkpoint")
            elif (before.within is None) != (after.within is None):
                yield _plainly(
                    place, f"shares memory with another one only {'now' if after.within else 'in the checkpoint'}"
                )
            elif before.within is not None and after.within is not None:
                moved = (after.within[0], after.within[1] - before.within[1])
                if self._groups.setdefault(before.within[0], moved) != moved:
                    yield _plainly(place, "shares other memory in the checkpoint than now")

    def aliases(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        """Yield which lists, dicts and arrays are one object in only one of the two; call it as `sharing`."""
        for before, after, place in _pairs(saved, now, path):
            if before[0] == "x":
                if self._specs[after[1]].kind != "numpy":
                    continue
                one, other = ("array", before[1]), ("array", after[1])
            else:
                one, other = ("container", id(before)), ("container", id(after))
            known, known_path = self._objects.setdefault(("saved", *one), (other, place))
            origin, origin_path = self._objects.setdefault(("now", *other), (one, place))
            if known != other:
                yield Difference(
                    path=place, text=f"one object with {known_path} in the checkpoint, two now", plain=True
                )
            elif origin != one:
                yield Difference(
                    path=place, text=f"one object with {origin_path} now, two in the checkpoint", plain=True
                )

    def frozen(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        """Yield which leaves require grad in only one of the two; call it as `sharing`."""
        for before, after, place in _pairs(saved, now, path):
            if before[0] == "x":
                was, is_ = self._manifest.tensors[before[1]].grad, self._specs[after[1]].grad
                if was != is_:
                    yield Difference(path=place, text=f"requires_grad was {was}, is {is_}", plain=True)

    def _dict(self, saved: Node, now: Node, path: str) -> Iterator[Difference]:
        befores = {json.dumps(key): child for key, child in zip(saved[1], saved[2], strict=True)}
        afters = {json.dumps(key): child for key, child in zip(now[1], now[2], strict=True)}
        for key in dict.fromkeys([*befores, *afters]):
            place = f"{path}.{_key(json.loads(key))}"
            if key not in afters:
                yield Difference(
                    path=place,
                    text=f"{self._shown(befores[key], self._manifest.tensors)} in the checkpoint, nothing now",
                    plain=self._is_plain(befores[key], self._manifest.tensors),
                )
            elif key not in befores:
                yield Difference(
                    path=place,
                    text=f"nothing in the checkpoint, {self._shown(afters[key], self._specs)} now",
                    plain=self._is_plain(afters[key], self._specs),
                )
            else:
                yield from self.differences(befores[key], afters[key], place)

    def _leaf(self, index: int, other: int, path: str) -> Iterator[Difference]:
        before, after = self._manifest.tensors[index], self._specs[other]
        plain = before.kind == after.kind == "bytes"
        if before.content != after.content:
            yield Difference(path=path, text=f"{before} in the checkpoint, {after} now", plain=plain)
            return
        offset = self._manifest.offsets[index]
        stored = self._payload[offset : offset + before.nbytes]
        live = _bytes(self._now.leaves[other])
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
        children = node[2] if node[0] in ("d", "C") else node[1:] if node[0] in ("l", "t") else ()
        return all(self._is_plain(child, specs) for child in children)

    def _shown(self, node: Node, specs: tuple[TensorSpec, ...]) -> str:
        text = repr(unflatten(node, lambda index: _Shown(specs[index])))
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Shown:
    """A leaf in a message."""

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec

    def __repr__(self) -> str:
        return str(self._spec)


def _pairs(saved: Node, now: Node, path: str) -> Iterator[tuple[Node, Node, str]]:
    """Yield the nodes of leaves, lists and dicts of two equal trees, and their paths."""
    if not isinstance(saved, list):
        return
    if saved[0] in ("x", "l", "d", "C"):
        yield saved, now, path
    if saved[0] in ("l", "t"):
        for index, (before, after) in enumerate(zip(saved[1:], now[1:], strict=True)):
            yield from _pairs(before, after, f"{path}.{index}")
    elif saved[0] in ("d", "C"):
        others = {json.dumps(key): child for key, child in zip(now[1], now[2], strict=True)}
        for key, child in zip(saved[1], saved[2], strict=True):
            yield from _pairs(child, others[json.dumps(key)], f"{path}.{_key(key)}")


def _plainly(path: str, text: str) -> Difference:
    return Difference(path=path, text=text, plain=False)


def _key(node: Node) -> str:
    # A number of NumPy is another key than the number that it is equal to.
    key = unflatten(node, lambda index: f"leaf {index}")
    return key if isinstance(key, str) else repr(key)


def _bytes(leaf: Leaf) -> torch.Tensor:
    """Return the content of `leaf` as bytes of the CPU, contiguous."""
    if isinstance(leaf, bytes):
        return torch.from_numpy(np.frombuffer(leaf, dtype=np.uint8).copy())
    if isinstance(leaf, np.ndarray):
        return _bytes(leaf.tobytes())
    return bytes_of(leaf)


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
        bits = piece.numpy().tobytes()
        if spec.kind == "numpy":
            return f"{np.frombuffer(bits, dtype=np.dtype(spec.dtype))[0]} (bytes {bits.hex()})"
        # Not each of torch's types can be made a number of Python's.
        number = piece.view(getattr(torch, spec.dtype)).to(
            torch.complex64 if "complex" in spec.dtype else torch.float64
        )
        return f"{number[0].item()} (bytes {bits.hex()})"

    return f"{value(stored)} at {place} in the checkpoint, {value(live)} now"
