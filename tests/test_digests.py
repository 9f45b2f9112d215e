"""The digests in manifests: the same for the same bytes however they were copied, and another one for other bytes."""

from typing import Any

import numpy as np
import pytest
import torch

from resilient_run.ckpt import digests
from resilient_run.ckpt.copying import CapturePlan
from resilient_run.ckpt.digests import Digester, Digests
from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.manifest import encode, parse
from resilient_run.ckpt.slot import CHUNK_BYTES
from resilient_run.ckpt.tree import Flattener


def state(**changes: torch.Tensor) -> dict[str, Any]:
    """Return a tree with leaves of every size: within a chunk, over several, whole chunks of one leaf."""
    torch.manual_seed(3)
    sizes = {"small": 7, "middle": 100_000, "large": 5 * CHUNK_BYTES // 4 + 3, "last": 20}
    model = {name: torch.randn(size) for name, size in sizes.items()} | changes
    model["count"] = torch.tensor(5)
    loader = {"generator": torch.arange(100, dtype=torch.uint8), "average": torch.ones(3)}
    return {"objects": {"model": model, "loader": loader}, "values": {"w": torch.ones(2)}, "rng": None}


def captured(tree: dict[str, Any], *, rank: int = 0, eager: bool = False) -> tuple[Digests, list[str], bytes]:
    """Return what a capture of `tree` has: its digests, their names, and the manifest."""
    flat = Flattener(tree)
    plan = CapturePlan(flat, eager={"*"} if eager else ())
    staged = plan.stage(flat)
    payload = bytearray(plan.layout.payload_bytes)
    for leaf, offset, spec in zip(flat.leaves, plan.layout.offsets, plan.specs, strict=True):
        assert isinstance(leaf, torch.Tensor)
        payload[offset : offset + spec.nbytes] = leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    starts = range(0, len(payload), CHUNK_BYTES)
    checksums = np.array(
        [digests.xxhash.xxh3_64_intdigest(payload[at : at + CHUNK_BYTES]) for at in starts], dtype=np.uint64
    )
    pieces = [(piece.leaf, piece.start) for chunk in plan.chunks for piece in chunk if piece.leaf is not None]
    digester = Digester(plan.specs, plan.layout, flat.node, pieces, rank=rank, trained={"model"})
    manifest = encode(plan.tensors, flat.node)
    extended = digester.extend(manifest, memoryview(payload), checksums, staged.fingerprints)
    assert len(extended) == len(manifest) + digester.encoded_bytes
    assert parse(extended, len(payload)) == parse(manifest, len(payload))
    return Digests.parse(extended), digests.names(extended), extended


def test_every_trained_tensor_has_a_digest() -> None:
    """Of modules and optimizers all, of other objects floating-point ones; no values, no generators."""
    _, names, _ = captured(state())
    assert sorted(names) == [
        "loader.average",
        "model.count",
        "model.large",
        "model.last",
        "model.middle",
        "model.small",
    ]


def test_staged_and_live_leaves_have_the_same_digests() -> None:
    live, _, _ = captured(state())
    staged, _, _ = captured(state(), eager=True)
    strided, _, _ = captured(state(middle=state()["objects"]["model"]["middle"].repeat_interleave(2)[::2]))
    assert live.structure == staged.structure == strided.structure
    assert live.values.tolist() == staged.values.tolist() == strided.values.tolist()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("name", "byte"), [("small", 27), ("middle", 0), ("large", 0), ("large", -1), ("last", 5)])
def test_a_flipped_bit_changes_one_digest(name: str, byte: int, eager: bool) -> None:
    before, names, _ = captured(state(), eager=eager)
    tree = state()
    tree["objects"]["model"][name].view(torch.uint8)[byte] ^= 4
    after, _, _ = captured(tree, eager=eager)
    assert [names[index] for index in np.flatnonzero(before.values != after.values)] == [f"model.{name}"]
    mask = np.array([other != f"model.{name}" for other in names])
    assert before.combined(mask) == after.combined(mask)
    assert before.combined(~mask) != after.combined(~mask)


def test_other_structures_have_other_names() -> None:
    found = {captured(tree)[0].structure for tree in (state(), state(small=torch.ones(8)), state(more=torch.ones(1)))}
    assert len(found) == 3


def test_large_states_have_one_digest_for_several_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_DIGESTS", 4)
    before, names, _ = captured(state())
    assert names[0] == "model.small or one of the 1 after it"
    assert len(before.values) == 3
    tree = state()
    tree["objects"]["model"]["middle"][5] = 0
    assert np.flatnonzero(captured(tree)[0].values != before.values).tolist() == [0]


@pytest.mark.parametrize("manifest", [b"", b"{}", b'{"digests":"12"}', b'{"version":1,"digests":"zz"}'])
def test_malformed_digests_are_refused(manifest: bytes) -> None:
    with pytest.raises(SlotError, match="without digests"):
        Digests.parse(manifest)
    with pytest.raises(SlotError, match="without names"):
        digests.names(manifest)
