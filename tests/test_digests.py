"""The digests in manifests: the same for the same bytes however they were copied, and another one for other bytes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from resilient_run.ckpt.capture.copying import CapturePlan, Copier
from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format import digests
from resilient_run.ckpt.format.digests import Digester
from resilient_run.ckpt.format.manifest import encode, parse
from resilient_run.ckpt.format.slot import CHUNK_BYTES
from resilient_run.ckpt.state.tree import Flattener


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """What a capture has: for each registered object the name of its structure, and one digest per leaf."""

    structures: dict[str, str]
    digests: dict[str, int]

    def of(self, name: str) -> tuple[str, dict[str, int]]:
        """Return what is compared of one object."""
        return self.structures[name], {leaf: at for leaf, at in self.digests.items() if leaf.startswith(f"{name}.")}


def state(**changes: torch.Tensor) -> dict[str, Any]:
    """Return a tree with leaves of every size: within a chunk, over several, whole chunks of one leaf."""
    torch.manual_seed(3)
    sizes = {"small": 7, "middle": 100_000, "large": 5 * CHUNK_BYTES // 4 + 3, "last": 20}
    model = {name: torch.randn(size) for name, size in sizes.items()} | changes
    model["count"] = torch.tensor(5)
    model["norm.num_batches_tracked"] = torch.tensor(5)
    loader = {"generator": torch.arange(100, dtype=torch.uint8), "average": torch.ones(3)}
    return {"objects": {"model": model, "loader": loader}, "values": {"w": torch.ones(2)}, "rng": None}


def captured(tree: dict[str, Any]) -> Captured:
    """Return what a capture of `tree` has."""
    flat = Flattener(tree)
    plan = CapturePlan(flat)
    payload = torch.zeros(plan.layout.payload_bytes, dtype=torch.uint8)
    Copier().stage(plan, flat.leaves, payload)
    digester = Digester(plan.specs, plan.layout, flat.node, rank=0, trained={"model", "average"})
    manifest = encode(plan.tensors, flat.node)
    extended, checksums = digester.extend(manifest, digester.hashes(payload.numpy().data))
    starts = range(0, len(payload), CHUNK_BYTES)
    chunks = [payload[at : at + CHUNK_BYTES].numpy() for at in starts]
    assert checksums.tolist() == [digests.xxhash.xxh3_64_intdigest(chunk) for chunk in chunks]
    assert len(extended) == len(manifest) + digester.encoded_bytes
    assert replace(parse(extended, len(payload)), compared=None) == parse(manifest, len(payload))
    values, names = digests.parse(extended), digests.names(extended)
    assert values.keys() == names.keys()
    return Captured(
        structures={leaves[0].partition(".")[0]: structure for structure, leaves in names.items()},
        digests={
            name: int(value)
            for structure, leaves in names.items()
            for name, value in zip(leaves, values[structure], strict=True)
        },
    )


def test_every_trained_tensor_has_a_digest() -> None:
    """Of modules and optimizers all but BatchNorm's counter, of other objects floating-point ones; no generators."""
    assert sorted(captured(state()).digests) == [
        "loader.average",
        "model.count",
        "model.large",
        "model.last",
        "model.middle",
        "model.small",
    ]


def test_leaves_have_the_same_digests_however_they_lie() -> None:
    strided = state(middle=state()["objects"]["model"]["middle"].repeat_interleave(2)[::2])
    assert captured(strided) == captured(state())


@pytest.mark.parametrize(("name", "byte"), [("small", 27), ("middle", 0), ("large", 0), ("large", -1), ("last", 5)])
def test_a_flipped_bit_changes_one_digest(name: str, byte: int) -> None:
    before = captured(state())
    tree = state()
    tree["objects"]["model"][name].view(torch.uint8)[byte] ^= 4
    after = captured(tree)
    assert {leaf for leaf, _ in before.digests.items() ^ after.digests.items()} == {f"model.{name}"}
    assert before.structures == after.structures


def test_one_digest_of_those_of_a_mask() -> None:
    values, other = np.array([1, 2, 3], dtype="<u8"), np.array([1, 2, 4], dtype="<u8")
    mask = np.array([True, True, False])
    assert digests.combined(values, mask) == digests.combined(other, mask)
    assert digests.combined(values, ~mask) != digests.combined(other, ~mask)


def test_other_structures_have_other_names() -> None:
    trees = [state(), state(small=torch.ones(8)), state(more=torch.ones(1))]
    found = [captured(tree).structures for tree in trees]
    assert len({structures["model"] for structures in found}) == 3
    assert len({structures["loader"] for structures in found}) == 1, "what the model has is none of the loader's"


def module(*sizes: int) -> dict[str, torch.Tensor]:
    return {str(index): torch.randn(size, dtype=torch.float32) for index, size in enumerate(sizes)}


SMALL = (3, 200_000, 7, 300_000, 60_000, 70_000)
"""Of 2.5 MB: of some leaves a chunk has the beginning only, wherever they begin."""
LARGE = (3, 200_000, 7, 900_000, 17_000, 400_001, 64)
BEFORE: dict[str, list[dict[str, Any]]] = {
    "an object of one rank": [{"average": module(50, 70_000)}],
    "a large object of one rank": [{"average": module(50, 2_000_000)}],
    "an uneven object": [{"loader": {"order": torch.arange(500 + rank * 100)}} for rank in range(3)],
    "an object that shrinks": [{"loader": {"left": torch.randn(size)}} for size in range(3_000_000, 0, -555_555)],
    "one that grows to a large one": [
        {"loader": {"seen": torch.ones(size)}} for size in range(900_000, 1_200_000, 77_777)
    ],
    "bytes": [{"loader": {"state": torch.zeros(size, dtype=torch.uint8)}} for size in (1, 63, 65, 99_999)],
}


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_what_else_is_registered_changes_nothing(before: list[dict[str, Any]], sizes: tuple[int, ...]) -> None:
    model, rest = module(*sizes), {"values": {}, "rng": None}
    alone = captured({"objects": {"model": model}, **rest}).of("model")
    assert len(alone[1]) == len(sizes)
    for other in before:
        for objects in ({**other, "model": model}, {"model": model, **other}):
            assert captured({"objects": objects, **rest}).of("model") == alone


def test_tensors_of_two_objects_are_compared_in_both() -> None:
    model = module(3, 70_000, 200_000)
    tree = {"objects": {"average": {"0": model["1"], "1": torch.ones(3)}, "model": model}, "values": {}, "rng": None}
    found = captured(tree)
    assert found.of("model") == captured({"objects": {"model": model}, "values": {}, "rng": None}).of("model")
    assert found.digests["average.0"] == found.digests["model.1"]


def test_large_states_have_one_digest_for_several_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest object first; others are compared leaf by leaf as long as that does."""
    exact = captured(state())
    monkeypatch.setattr(digests, "MAX_DIGESTS", 4)
    before = captured(state())
    assert "model.small or one of the 1 after it" in before.digests
    assert len(before.digests) == 4
    assert before.of("loader") == exact.of("loader")
    tree = state()
    tree["objects"]["model"]["middle"][5] = 0
    changed = before.digests.items() ^ captured(tree).digests.items()
    assert {leaf for leaf, _ in changed} == {"model.small or one of the 1 after it"}
    monkeypatch.setattr(digests, "MAX_DIGESTS", 1)
    assert list(captured(state()).structures) == ["model"]


@pytest.mark.parametrize("manifest", [b"", b"{}", b'{"digests":"12"}', b'{"version":1,"digests":"zz"}'])
def test_malformed_digests_are_refused(manifest: bytes) -> None:
    with pytest.raises(SlotError, match="without digests"):
        digests.parse(manifest)
    with pytest.raises(SlotError, match="without names"):
        digests.names(manifest)
