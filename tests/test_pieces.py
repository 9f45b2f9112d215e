"""A tensor of many parts is whole or refused: no element from nobody, none from two, and none from a missing rank."""

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launchers import run_trainers
from test_export import make_slot, shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from resilient_run.ckpt.convert.captures import of_slots
from resilient_run.ckpt.convert.export import Format, export, gather
from resilient_run.ckpt.convert.pieces import missing, place
from resilient_run.ckpt.errors import RestoreError, SlotError, StateError
from resilient_run.ckpt.format.manifest import ShardSpec
from resilient_run.ckpt.format.slot import Slot

TRAINER = Path(__file__).with_name("sharded_trainer.py")
ROWS = (("S", 0),)
WHOLE = torch.arange(20, dtype=torch.float32).view(5, 4)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_holes_and_overlaps_are_those_that_counting_finds() -> None:
    chance = random.Random(1)
    found = set()
    for _ in range(3000):
        shape = [chance.randrange(4) for _ in range(chance.randrange(4))]
        count = np.zeros(shape, dtype=int)
        boxes = []
        for _ in range(chance.randrange(5)):
            offset = [chance.randrange(size + 1) for size in shape]
            sizes = [chance.randrange(size - at + 1) for at, size in zip(offset, shape, strict=True)]
            count[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))] += 1
            boxes.append((offset, sizes))
        if (count > 1).any():
            with pytest.raises(StateError, match="overlaps with another"):
                missing("name", shape, boxes)
            found.add("overlap")
        else:
            assert missing("name", shape, boxes) == (count == 0).sum()
            found.add("hole" if (count == 0).any() else "whole")
    assert found == {"overlap", "hole", "whole"}
    for box in (((0,), (4,)), ((-1,), (2,)), ((0, 0), (1, 1))):
        with pytest.raises(StateError, match=r"is not inside of \[3\]"):
            missing("name", [3], [box])


@pytest.mark.parametrize("sizes", [(0, 3), (1, 5), (7, 6), (13, 8)])
def test_places_are_those_of_torch(sizes: tuple[int, int]) -> None:
    """Of every rank, and together they are the whole."""
    shape, mesh = (*sizes, 2), (2, 3)
    kinds: dict[tuple[str | int, ...], Any] = {("R",): Replicate(), ("S", 0): Shard(0), ("S", 1): Shard(1)}
    pairs = [(one, other) for one in kinds for other in kinds]
    kinds[("SS", 0, 3)] = _StridedShard(0, split_factor=3)
    pairs.append((("SS", 0, 3), ("S", 0)))
    for pair in pairs:
        spec = ShardSpec(
            shape=shape, stride=(1, 1, 1), mesh_shape=mesh, mesh_ranks=(5, 4, 3, 2, 1, 0), mesh_dim_names=None,
            placements=pair,
        )  # fmt: skip
        boxes = set()
        for rank in range(6):
            at = [(5 - rank) // 3, (5 - rank) % 3]
            size, offset = _compute_local_shape_and_global_offset(shape, mesh, at, [kinds[each] for each in pair])
            assert place("name", spec, rank, size)[1] == tuple(size)
            if 0 not in size:
                assert place("name", spec, rank, size)[0] == tuple(offset)
                boxes.add((tuple(offset), tuple(size)))
        assert missing("name", shape, boxes) == 0


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Callable[..., list[Slot]]]:
    """Return a function that makes the slots of these ranks, by what each has below "model"."""
    made: list[Slot] = []

    def make(held: dict[int, Any], spec: ShardSpec | None = None, *, world_size: int = 4) -> list[Slot]:
        for rank, model in held.items():
            tree = {"objects": {"model": model}, "values": {}, "rng": None}
            path = tmp_path / f"{len(made)}.slot"
            made.append(make_slot(path, tree, rank=rank, world_size=world_size, shards=spec and {0: spec}))
        return made[-len(held) :]

    yield make
    for slot in made:
        slot.close()


def parts(*ranks: int) -> dict[int, dict[str, torch.Tensor]]:
    several = [*WHOLE.chunk(4), WHOLE[:0]]
    return {rank: {"weight": several[rank].clone()} for rank in ranks}


@pytest.mark.parametrize("format_", ["dcp", "torch"])
@pytest.mark.parametrize("lost", range(4))
def test_a_missing_rank_is_named_and_nothing_is_written(
    slots: Callable[..., list[Slot]], tmp_path: Path, format_: Format, lost: int
) -> None:
    """Also the last one, whose shard has no elements, but whose values would be lost."""
    held = slots(parts(*({*range(4)} - {lost})), shard(ROWS, (4,)))
    with pytest.raises(SlotError, match=rf"rank\(s\) \[{lost}\] of 4 are missing"):
        export(of_slots(held), tmp_path / "out", format_)
    assert not (tmp_path / "out").exists()


def test_slots_tell_whose_they_are(slots: Callable[..., list[Slot]]) -> None:
    held = slots(parts(0, 1, 2, 3), shard(ROWS, (4,)))
    assert torch.equal(gather(of_slots(held[::-1]))["model"]["weight"], WHOLE)
    other = slots(parts(3), shard(ROWS, (4,)), world_size=5)
    with pytest.raises(
        RestoreError, match=r"rank 3: training has overwritten step 3 \(generation 1\), or it is damaged"
    ):
        gather(of_slots([*held[:3], *other]))


@pytest.mark.parametrize(
    ("placements", "mesh_shape", "change", "message"),
    [
        pytest.param(ROWS, (4,), lambda held: held[1].clear(), "no rank holds 8 of its 20 elements", id="hole"),
        pytest.param(
            (("R",), ("S", 0)),
            (2, 2),
            lambda held: held[3]["weight"].view(-1)[1:2].zero_(),
            "rank [13] and another one hold different values of the same part",
            id="replicas",
        ),
        pytest.param(
            ROWS,
            (4,),
            lambda held: held[1].update(weight=held[1]["weight"].double()),
            "rank 1 holds a shard where another rank has something else",
            id="dtypes",
        ),
        pytest.param(
            ROWS,
            (4,),
            lambda held: held[1].update(weight=torch.ones(1, 4)),
            r"rank 1 holds \[1, 4\], its place has \[2, 4\]",
            id="size",
        ),
        pytest.param(
            (("SS", 0, 2), ("R",)), (2, 2), lambda held: None, "what rank 0 holds does not lie together", id="strided"
        ),
    ],
)
def test_shards_that_are_no_whole_are_refused(
    slots: Callable[..., list[Slot]], placements: Any, mesh_shape: Any, change: Callable[[Any], Any], message: str
) -> None:
    held = parts(0, 1, 2, 3)
    if mesh_shape == (2, 2):
        halves = WHOLE.chunk(2)
        held = {rank: {"weight": halves[rank % 2].clone()} for rank in range(4)}
    change(held)
    made = [slots({rank: model}, shard(placements, mesh_shape) if model else None)[0] for rank, model in held.items()]
    with pytest.raises(StateError, match=rf"^model\.weight: {message}"):
        gather(of_slots(made))


def test_shards_of_different_meshes_must_agree(slots: Callable[..., list[Slot]]) -> None:
    """As they do for ranks of tensor parallelism, and not for stages of a pipeline, each with a parameter 0."""
    spec = ShardSpec(
        shape=(4, 4), stride=(4, 1), mesh_shape=(2,), mesh_ranks=(0, 1), mesh_dim_names=None, placements=ROWS
    )

    def made(*values: float, without: int | None = None) -> list[Slot]:
        return [
            slots({rank: {}})[0]
            if rank == without
            else slots({rank: {"weight": torch.full((2, 4), value)}}, replace(spec, mesh_ranks=mesh))[0]
            for rank, (value, mesh) in enumerate(zip(values, [(0, 1), (0, 1), (2, 3), (2, 3)], strict=True))
        ]

    assert gather(of_slots(made(0, 1, 0, 1)))["model"]["weight"][:, 0].tolist() == [0, 0, 1, 1]
    with pytest.raises(StateError, match=r"model\.weight: rank 2 and another one hold different values"):
        gather(of_slots(made(0, 1, 2, 3)))
    # What rank 1 does not have is not taken from the other mesh.
    with pytest.raises(StateError, match=r"model\.weight: rank 3 and another one hold different values"):
        gather(of_slots(made(0, 1, 0, 1, without=1)))


def test_a_shard_beside_something_else_is_refused(slots: Callable[..., list[Slot]]) -> None:
    spec = shard(ROWS, (4,))
    made = [slots({0: {"weight": WHOLE.clone()}})[0], *slots(parts(1, 2, 3), spec)]
    with pytest.raises(StateError, match=r"model\.weight: rank 1 holds a shard where another rank has something else"):
        gather(of_slots(made))
    lists = {rank: {"layers": [part["weight"], *[1] * rank]} for rank, part in parts(0, 1, 2, 3).items()}
    with pytest.raises(StateError, match=r"model\.layers: rank 1 holds a shard where"):
        gather(of_slots(slots(lists, spec)))


@contextmanager
def no_more_than(limit_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("format_", ["dcp", "torch"])
def test_a_full_disk_leaves_nothing_half_written(
    slots: Callable[..., list[Slot]], tmp_path: Path, format_: Format, made: bool
) -> None:
    held = slots({0: {"weight": torch.ones(1 << 20)}}, world_size=1)
    out = tmp_path / "out"
    if made and format_ == "dcp":
        out.mkdir()
    with no_more_than(1 << 20), pytest.raises(OSError, match="out cannot be written, and nothing of it is left"):
        export(of_slots(held), out, format_)
    assert out.exists() == (made and format_ == "dcp")
    if out.exists():
        assert not list(out.iterdir())
    export(of_slots(held), out, format_)


@pytest.mark.jobs
@pytest.mark.parametrize("world_size", [3, 4])
def test_states_of_fsdp_are_whole_or_refused(tmp_path: Path, world_size: int) -> None:
    run_trainers([str(TRAINER), str(tmp_path)], world_size)
    expected = torch.load(tmp_path / "whole.pt")
    held = [Slot.open(tmp_path / f"{rank}.slot", writable=True) for rank in range(world_size)]
    export(of_slots(held), tmp_path / "out.pt", "torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.testing.assert_close(found["fsdp"], expected["trained"], rtol=0, atol=0)
    moments = {
        f"{index}.{name}": value
        for index, state in found["optimizer"]["state"].items()
        for name, value in state.items()
    }
    torch.testing.assert_close(moments, expected["moments"], rtol=0, atol=0)
    assert found["scalar"].item() == 2.5
    for name in ("hsdp", "tp") if world_size == 4 else ():
        torch.testing.assert_close(found[name], expected["model"], rtol=0, atol=0)
    for lost in range(world_size):
        with pytest.raises(SlotError, match=rf"rank\(s\) \[{lost}\] of {world_size} are missing"):
            export(of_slots([*held[:lost], *held[lost + 1 :]]), tmp_path / "none", "dcp")
    assert not (tmp_path / "none").exists()
    for slot in held:
        slot.close()
