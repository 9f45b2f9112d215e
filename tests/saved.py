"""Slots without a daemon: the manifest and payload of a state, and restoring a state from them."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resilient_run.ckpt.format import manifest
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import same, unflatten


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a slot has of a state: the bytes of its manifest and of its payload."""

    manifest: bytes
    payload: bytes

    def load(self, **registered: Any) -> list[str]:
        """Restore `registered` from it, through the bytes, and overwrite them then: nothing may have kept them."""
        payload = torch.frombuffer(bytearray(self.payload or b"\0"), dtype=torch.uint8)
        parsed = manifest.parse(self.manifest, len(self.payload))
        found = TrainingState(registered, rng=False).load(parsed, payload[: len(self.payload)])
        payload.fill_(0xAA)
        return found

    def altered(self, **replaced: Any) -> "Saved":
        """Return one with parts of the manifest's JSON replaced."""
        return Saved(manifest=json.dumps(json.loads(self.manifest) | replaced).encode(), payload=self.payload)


def save(**registered: Any) -> Saved:
    """Return what a capture of `registered` has."""
    flat = TrainingState(registered, rng=False).flatten()
    layout = manifest.plan_payload(flat.specs())
    payload = bytearray(layout.payload_bytes)
    for leaf, spec, offset in zip(flat.leaves, flat.specs(), layout.offsets, strict=True):
        payload[offset : offset + spec.nbytes] = content(leaf)
    tensors = manifest.encode_tensors(flat.specs(), layout)
    return Saved(manifest=manifest.encode(tensors, flat.node), payload=bytes(payload))


def content(leaf: Any) -> bytes:
    if isinstance(leaf, bytes):
        return leaf
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    plain = leaf.detach().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that two sets of objects and values have the same state, bit by bit, with dtypes and ties."""
    flats = [TrainingState(registered, rng=False).flatten() for registered in (one, other)]
    trees = [unflatten(flat.node, flat.leaves.__getitem__) for flat in flats]
    for tree in trees:
        tree.pop("unsaved", None)  # of what is no part of the state
    _assert_same(*trees, "")


def _assert_same(one: Any, other: Any, path: str) -> None:
    assert type(one) is type(other), f"{path}: {type(one)}, {type(other)}"
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            _assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            _assert_same(left, right, f"{path}.{index}")
    elif isinstance(one, torch.Tensor):
        assert same(one.detach().clone(), other.detach().clone()), f"{path}: {one} is not {other}"
    else:
        assert repr(one) == repr(other), f"{path}: {one!r} is not {other!r}"
