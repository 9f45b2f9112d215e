"""`resilientctl import`: what a plain DCP checkpoint has reaches the registered objects, and nothing damaged does."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from etcd_process import ask
from test_export import make_slot, state
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from resilient_run.ckpt.convert.captures import Captures, of_slots, only
from resilient_run.ckpt.convert.export import export
from resilient_run.ckpt.convert.import_loader import take_over
from resilient_run.ckpt.errors import CheckpointError, SlotError, StateError
from resilient_run.ckpt.format.slot import CHUNK_BYTES
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import unflatten
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.tier.manifest import Persisted, RankFile
from resilient_run.daemon.tier.tier import Tier

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STEP = 7
RUN = "begun"


class Sampler:
    """State that a rank has for itself."""

    def __init__(self, at: Any = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def training() -> dict[str, Any]:
    """Return a model, its optimizer and its schedule before the first step, with other numbers each time."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(objects: dict[str, Any], steps: int = 3) -> None:
    for _ in range(steps):
        objects["optimizer"].zero_grad()
        objects["model"](torch.ones(4, 3)).sum().backward()
        objects["optimizer"].step()
        objects["scheduler"].step()


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name, item in left.items():
        torch.testing.assert_close(item.state_dict(), right[name].state_dict(), rtol=0, atol=0)


@pytest.fixture
def ctl(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs `resilientctl import` where no daemon runs."""

    def run(directory: Path, *arguments: str) -> Result:
        here = ["--run-dir", str(tmp_path / "run"), "--shm-dir", str(tmp_path / "shm")]
        command = ["import", str(directory), "--run-id", RUN, "--target", str(tmp_path / "tier"), *arguments]
        return CliRunner().invoke(resilientctl, [*here, *command])

    return run


@pytest.fixture
def imported(tmp_path: Path, ctl: Callable[..., Result]) -> Callable[..., Captures]:
    """Return a function that saves a state with plain DCP, imports it, and opens that."""

    def run(saved: dict[str, Any], *arguments: str) -> Captures:
        dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
        done = ctl(tmp_path / "saved", "--step", str(STEP), *arguments)
        assert done.exit_code == 0, done.output
        assert f"will begin with step {STEP}" in done.output
        return open_import(tmp_path)

    return run


def open_import(tmp_path: Path) -> Captures:
    return opened(str(tmp_path / "tier"), STEP)


def opened(target: str, step: int) -> Captures:
    tier = Tier(target, RUN)
    return Captures(
        only(partial(tier.read_ranges, (0, step)), "it is damaged"), run_id=RUN, pair=(0, step), world_size=1
    )


def load_import(state: TrainingState, imported: Captures, *, rank: int, world_size: int) -> str:
    made = take_over(state, imported, rank=rank, world_size=world_size)
    assert not state.load(made.manifest, made.payload, made.untouched)
    return "; ".join(made.told)


def load(imported: Captures, rank: int = 0, world_size: int = 1, rng: bool = False, **registered: Any) -> str:
    return load_import(TrainingState(registered, rng=rng), imported, rank=rank, world_size=world_size)


def test_plain_checkpoint_is_taken_over(tmp_path: Path, imported: Callable[..., Captures]) -> None:
    before, after = training(), training()
    train(before)
    saved = {name: item.state_dict() for name, item in before.items()}
    values = {"epoch": 4, "weights": np.arange(3), "stages": {1: "a", 2: ["b"]}}
    fresh = {"epoch": 0, "weights": None, "stages": {1: "", 3: "c"}}
    found = imported({**saved, **values})
    state = TrainingState({**after, **fresh}, rng=False)
    assert load_import(state, found, rank=0, world_size=1) == (
        f"the import of step {STEP} from {tmp_path / 'saved'}: it does not have stages.3, which begin as the script "
        "made them"
    )
    assert state.values["stages"] == {1: "a", 2: ["b"], 3: "c"}
    assert state.values["epoch"] == 4
    assert state.values["weights"].tolist() == [0, 1, 2]
    assert_equal(before, after)
    train(before)
    train(after)
    assert_equal(before, after)


def test_a_default_device_of_the_script_changes_nothing(imported: Callable[..., Captures]) -> None:
    before, after = training(), training()
    train(before)
    found = imported({name: before[name].state_dict() for name in ("model", "optimizer")})
    with torch.device("meta"):  # as torch.set_default_device("cuda") on a GPU
        load(found, model=after["model"], optimizer=after["optimizer"])
    torch.testing.assert_close(after["model"].state_dict(), before["model"].state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"].state_dict(), before["optimizer"].state_dict(), rtol=0, atol=0)


def test_objects_in_lists_are_found_by_their_places(imported: Callable[..., Captures]) -> None:
    before, after = training(), training()
    train(before)
    models = {"models": {"one": before["model"].state_dict()}, "optimizers": [before["optimizer"].state_dict()]}
    found = imported(models)
    text = load(
        found, models={"one": after["model"]}, optimizers=[after["optimizer"], None], others=[training()["model"]]
    )
    assert text.endswith("it does not have others.0, which begin as the script made them")
    for name in ("model", "optimizer"):
        assert_equal({name: before[name]}, {name: after[name]})


def test_names_of_torchs_own_helpers_are_understood(imported: Callable[..., Captures]) -> None:
    """The optimizer by parameter names, and a model still inside of DistributedDataParallel."""
    before, after = training(), training()
    train(before)
    model = {f"module.{name}": tensor for name, tensor in before["model"].state_dict().items()}
    optimizer = get_optimizer_state_dict(before["model"], before["optimizer"])
    found = imported({"model": model, "optimizer": optimizer, "scheduler": before["scheduler"].state_dict()})
    assert load(found, **after) == ""
    assert_equal(before, after)


def test_what_is_absent_keeps_its_value_and_is_named(imported: Callable[..., Captures]) -> None:
    before, after = training(), training()
    train(before)
    kept = {name: tensor for name, tensor in before["model"].state_dict().items() if name != "2.bias"}
    bias = after["model"].state_dict()["2.bias"].clone()
    text = load(imported({"model": kept, "ema": torch.ones(2)}), epoch=3, rng=True, **after)
    assert "it does not have model.2.bias, optimizer, scheduler, epoch, which begin as the script made them" in text
    assert "random number generators go on as the script seeded them" in text
    assert "nothing is registered for ema" in text
    assert torch.equal(after["model"].state_dict()["2.bias"], bias)
    assert torch.equal(after["model"].state_dict()["2.weight"], kept["2.weight"])


@pytest.mark.parametrize(
    ("saved", "arguments", "message"),
    [
        (
            lambda model: {"model": {"0.weight": model["0.weight"]}},
            ["--strict"],
            r"does not have model\.0\.bias, .*--strict",
        ),
        (lambda model: {"model": {**model, "0.bias": torch.ones(4)}}, [], r"model\.0\.bias is float32 \[4\] there, fl"),
        (lambda model: {"network": model}, [], "does not have model, optimizer, scheduler; it has network.*new run id"),
        (lambda model: {"model": model, "resilient_ranks": {"0": 1}}, [], "below resilient_ranks was not written by"),
        (
            lambda model: {"model": model, "resilient_ranks": {"0": {"rng": 1}, "2": {"rng": 1}}},
            [],
            "by `resilientctl export` of all",
        ),
        (lambda model: {"model": model, "optimizer": {"lr": 1}}, [], "optimizer is not an optimizer state there"),
        (
            lambda model: {"model": model, "optimizer": {"param_groups": [{"params": [0, 1]}]}},
            [],
            r"parameter groups of \[2\] tensors there, of \[6\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_as_a_whole(
    imported: Callable[..., Captures], saved: Callable[..., dict[str, Any]], arguments: list[str], message: str
) -> None:
    other, after = training(), training()
    before = {name: tensor.clone() for name, tensor in after["model"].state_dict().items()}
    with pytest.raises(StateError, match=message):
        load(imported(saved(other["model"].state_dict()), *arguments), **after)
    torch.testing.assert_close(dict(after["model"].state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("damaged", [["x", 9], ["d", ["values"], [["x", 9]]], ["l", 1, 2], None])
def test_a_tree_that_names_what_is_not_there_is_refused(imported: Callable[..., Captures], damaged: Any) -> None:
    after = training()
    found = imported({"model": after["model"].state_dict()})
    whole = found.ranks[0]
    assert len(whole.manifest.tensors) <= 9
    found.ranks[0] = replace(whole, manifest=replace(whole.manifest, tree=damaged))
    with pytest.raises(SlotError, match=r"malformed|no objects"):
        load(found, **after)


def exported(tmp_path: Path) -> Path:
    slots = [make_slot(tmp_path / f"{rank}.slot", state(rank), rank=rank, world_size=2) for rank in range(2)]
    export(of_slots(slots), tmp_path / "exported", "dcp")
    for slot in slots:
        slot.close()
    return tmp_path / "exported"


def test_export_comes_back_to_each_of_its_ranks(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    done = ctl(exported(tmp_path), "--json")
    assert json.loads(done.output).items() >= {"run_id": RUN, "step": 3, "left_out": {}}.items()
    found = opened(str(tmp_path / "tier"), 3)
    expected = state(0)["objects"]["model"]
    for rank, at in ((0, 5), (1, 6)):
        sampler, model = Sampler(), torch.nn.Linear(3, 2)
        held = TrainingState({"sampler": sampler, "model": model, "epoch": 0}, rng=False)
        load_import(held, found, rank=rank, world_size=2)
        assert (sampler.at, held.values) == (at, {"epoch": 4})
        torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    sampler = Sampler(at=99)
    held = TrainingState({"sampler": sampler, "model": torch.nn.Linear(3, 2), "epoch": 0}, rng=False)
    assert "does not have sampler.at, which" in load_import(held, found, rank=0, world_size=3)
    assert (sampler.at, held.values) == (99, {"epoch": 4})


class Reader(Sampler):
    """A loader, whose ranks have all had as many batches."""

    def __iter__(self) -> Iterator[int]:
        yield self.at


def test_a_loader_begins_anew_in_another_world(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    tree = {"objects": {"loader": {"at": 5}, "model": {}}, "values": {"epoch": 4}, "rng": None}
    slots = [make_slot(tmp_path / f"{rank}.slot", tree, rank=rank, world_size=2) for rank in range(2)]
    export(of_slots(slots), tmp_path / "exported", "dcp")
    for slot in slots:
        slot.close()
    assert ctl(tmp_path / "exported").exit_code == 0
    found = opened(str(tmp_path / "tier"), 3)
    for world_size, at in ((2, 5), (1, 0)):
        loader = Reader()
        text = load(found, world_size=world_size, loader=loader, epoch=0)
        assert loader.at == at
        assert ("does not have loader" in text) == (world_size == 1)


def test_buffers_of_one_rank_serve_another_world(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    slots = []
    for rank in range(2):
        tree = {"objects": {"model": {"mean": torch.full((3,), rank + 1.0)}}, "values": {"epoch": rank}, "rng": None}
        slots.append(make_slot(tmp_path / f"{rank}.slot", tree, rank=rank, world_size=2))
    export(of_slots(slots), tmp_path / "exported", "dcp")
    assert ctl(tmp_path / "exported").exit_code == 0
    found = opened(str(tmp_path / "tier"), 3)
    for world_size, mean in ((2, 2.0), (3, 1.0)):
        model = torch.nn.Module()
        model.register_buffer("mean", torch.zeros(3))
        text = load(found, rank=1, world_size=world_size, model=model, epoch=7)
        assert model.get_buffer("mean").tolist() == [mean] * 3
        assert ("does not have epoch, which" in text) == (world_size == 3)
    for slot in slots:
        slot.close()


def test_generators_go_on_in_the_same_world_size(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    flat = TrainingState({"epoch": 1}, rng=True).flatten()
    tree = unflatten(flat.node, flat.leaves.__getitem__)
    slot = make_slot(tmp_path / "slot", tree, rank=0, world_size=1)
    export(of_slots([slot]), tmp_path / "exported", "dcp")
    slot.close()
    expected = torch.rand(3), np.random.rand(3)
    assert ctl(tmp_path / "exported").exit_code == 0
    found = opened(str(tmp_path / "tier"), 3)
    assert load(found, rng=True, epoch=0) == ""
    assert torch.equal(torch.rand(3), expected[0])
    assert np.random.rand(3).tolist() == expected[1].tolist()


class Scaled(torch.nn.Module):
    """A convolution whose weights lie in memory by channel, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = torch.nn.Conv2d(3, 4, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def train_with(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        data = torch.arange(192.0).view(1, 3, 8, 8).to(self.scale.dtype)
        (self.inner(data) * self.scale).square().sum().backward()
        optimizer.step()


def test_fused_optimizer_goes_on_with_the_same_bits(imported: Callable[..., Captures]) -> None:
    pairs = [(model := Scaled(), torch.optim.AdamW(model.parameters(), fused=True)) for _ in range(2)]
    (before, optimizer), (after, other) = pairs
    before.train_with(optimizer)
    load(imported({"model": before.state_dict(), "optimizer": optimizer.state_dict()}), model=after, optimizer=other)
    for model, its in pairs:
        model.train_with(its)
    torch.testing.assert_close(before.state_dict(), after.state_dict(), rtol=0, atol=0)


def test_states_of_parameters_are_not_rounded(imported: Callable[..., Captures]) -> None:
    before, after = Scaled(torch.bfloat16), Scaled(torch.bfloat16)
    optimizer, other = (torch.optim.AdamW(model.parameters(), fused=True) for model in (before, after))
    before.train_with(optimizer)
    for held in optimizer.state.values():
        held |= {"step": torch.tensor(1001.0), "exp_avg": torch.rand(held["exp_avg"].shape)}
    load(imported({"model": before.state_dict(), "optimizer": optimizer.state_dict()}), model=after, optimizer=other)
    torch.testing.assert_close(optimizer.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)


def test_model_of_another_dtype_trains_on(imported: Callable[..., Captures]) -> None:
    before, after = Scaled(), Scaled(torch.bfloat16)
    optimizer, other = (torch.optim.Adafactor(model.parameters()) for model in (before, after))
    before.train_with(optimizer)
    load(imported({"model": before.state_dict(), "optimizer": optimizer.state_dict()}), model=after, optimizer=other)
    assert {key: value.dtype for key, value in other.state[after.inner.weight].items()} == {
        "step": torch.float32, "row_var": torch.bfloat16, "col_var": torch.bfloat16
    }  # fmt: skip
    after.train_with(other)


class Filled(Sampler):
    """Takes no state from before it was used."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("it is empty")


def test_an_object_that_is_absent_loads_nothing(imported: Callable[..., Captures]) -> None:
    found = imported({"model": torch.nn.Linear(2, 2).state_dict()})
    assert "does not have sampler, which begin" in load(found, model=torch.nn.Linear(2, 2), sampler=Filled(at=3))


class Extra(torch.nn.Module):
    """What `get_extra_state()` returns has no fixed form."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (torch.arange(5), torch.zeros(2)),
        ({"scale": torch.tensor([1 / 3], dtype=torch.float64)}, {"scale": torch.zeros(1)}),
    ],
)
def test_extra_state_is_what_it_was(imported: Callable[..., Captures], saved: Any, now: Any) -> None:
    model = Extra(now)
    load(imported({"model": Extra(saved).state_dict()}), model=model)
    torch.testing.assert_close(model.state, saved, rtol=0, atol=0)


def test_values_keep_the_dtype_that_they_had(imported: Callable[..., Captures]) -> None:
    sampler, mean = Sampler(torch.zeros(1)), torch.tensor([1 / 3], dtype=torch.float64)
    state = TrainingState({"sampler": sampler, "mean": torch.zeros(1)}, rng=False)
    load_import(state, imported({"sampler": {"at": mean}, "mean": mean}), rank=0, world_size=1)
    for found in (sampler.at, state.values["mean"]):
        torch.testing.assert_close(found, mean, rtol=0, atol=0)


def test_what_ranks_had_under_one_name_goes_back_to_each(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    def stage(rank: int) -> dict[str, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(3 + rank, 3 + rank) for _ in range(1 + rank)))
        model.register_buffer("mean", torch.full((3,), rank))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank)
        model(torch.ones(1, 3 + rank)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    stages, slots = [stage(rank) for rank in range(2)], []
    for rank, held in enumerate(stages):
        objects = {"model": {"module": dict(held["model"].state_dict())}, "optimizer": held["optimizer"].state_dict()}
        tree = {"objects": objects, "values": {}, "rng": None}
        slots.append(make_slot(tmp_path / f"{rank}.slot", tree, rank=rank, world_size=2))
    export(of_slots(slots), tmp_path / "exported", "dcp")
    assert ctl(tmp_path / "exported").exit_code == 0
    for rank, held in enumerate(stages):
        restored = stage(rank)
        restored["optimizer"].param_groups[0]["lr"] = 9
        load(opened(str(tmp_path / "tier"), 3), rank=rank, world_size=2, **restored)
        assert_equal(held, restored)
        slots[rank].close()


def test_what_no_state_can_hold_is_left_out(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    dcp.save({"model": torch.ones(2), "config": Path("/x")}, checkpoint_id=tmp_path / "saved", no_dist=True)
    done = ctl(tmp_path / "saved", "--step", "1")
    assert done.exit_code == 0
    assert "left out: config" in done.output
    assert "are not supported" in done.output


def cut(directory: Path) -> None:
    path = directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "__0_0.distcp is cut short"),
        (lambda directory: (directory / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda directory: (directory / ".metadata").unlink(), "not a DCP checkpoint"),
        (lambda directory: (directory / ".metadata").write_bytes(b"\x80"), ".metadata cannot be read"),
        (
            lambda directory: (directory / "__0_0.distcp").write_bytes(
                bytes((directory / "__0_0.distcp").stat().st_size)
            ),
            "cannot load",
        ),
    ],
)
def test_damaged_checkpoint_is_not_imported(
    tmp_path: Path, ctl: Callable[..., Result], damage: Callable[[Path], Any], message: str
) -> None:
    dcp.save({"weight": torch.ones(100), "epoch": 3}, checkpoint_id=tmp_path / "saved", no_dist=True)
    damage(tmp_path / "saved")
    done = ctl(tmp_path / "saved", "--step", "1")
    assert (done.exit_code, message in done.output) == (1, True), done.output
    assert Tier(str(tmp_path / "tier"), RUN).published() == []


@pytest.mark.parametrize(
    ("offset", "message"),
    [((0,), "overlaps with another one"), ((60,), "is not inside of"), (None, "has 50 of its 100")],
)
def test_chunks_that_are_no_whole_are_not_imported(
    tmp_path: Path, ctl: Callable[..., Result], offset: tuple[int, ...] | None, message: str
) -> None:
    """Whatever the sizes of the chunks add up to."""
    dcp.save({"weight": torch.ones(100)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    file = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["weight"].chunks = [
        ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size((50,))) for at in ((0,), offset) if at is not None
    ]
    file.write_bytes(pickle.dumps(metadata))
    done = ctl(tmp_path / "saved", "--step", "1")
    assert (done.exit_code, message in done.output) == (1, True), done.output


def test_run_begins_only_once(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    source = exported(tmp_path)
    shutil.copytree(source, tmp_path / "no step")
    assert ctl(source).exit_code == 0
    again = ctl(source, "--step", "9")
    assert (again.exit_code, "has an import of step 3 in" in again.output) == (1, True)
    tier = Tier(str(tmp_path / "tier"), RUN)
    file = RankFile(capacity_bytes=1 << 14, payload_offset=1 << 13, stored_bytes=4)
    tier.write((1, 8), 0).finish()
    tier.publish(Persisted(run_id=RUN, pair=(1, 8), world_size=1, ranks={0: file}))
    assert tier.published() == [(0, 3), (1, 8)]
    again = ctl(source, "--step", "9")
    assert (again.exit_code, "has published step 8 in" in again.output) == (1, True)
    assert tier.prune(1) == [(1, 8)]
    assert not (tmp_path / "tier" / RUN / "0-3").exists()


def test_run_that_etcd_knows_does_not_begin_anew(
    tmp_path: Path, ctl: Callable[..., Result], etcd_config: EtcdConfig
) -> None:
    source, where = exported(tmp_path), ["--etcd-endpoint", etcd_config.endpoints[0]]
    watermark = f"/resilient-run/{tmp_path.name}/state/watermark"
    ask(etcd_config, lambda etcd: etcd.put(watermark, {"generation": 2, "step": 11}))
    done = ctl(source, *where, "--run-id", tmp_path.name)
    assert (done.exit_code, "has begun already and goes on from its own step 11" in done.output) == (1, True)
    assert ctl(source, *where, "--run-id", f"{tmp_path.name}-new").exit_code == 0


def test_object_store_holds_imports_too(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    target = f"memory://{tmp_path.name}/tier"
    done = ctl(exported(tmp_path), "--target", target)
    assert done.exit_code == 0, done.output
    tier = Tier(target, RUN)
    assert tier.published() == [(0, 3)]
    sampler = Sampler()
    assert load(opened(target, 3), rank=1, world_size=2, sampler=sampler)
    assert sampler.at == 6


def test_step_must_be_known(tmp_path: Path, ctl: Callable[..., Result]) -> None:
    dcp.save({"weight": torch.ones(1)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    done = ctl(tmp_path / "saved")
    assert (done.exit_code, "give --step" in done.output) == (2, True)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda at: flip(at / "rank0.zst", 5000), SlotError, "rank 0 of .* does not match its checksums"),
        (lambda at: (at / "rank0.zst").write_bytes(b"short"), SlotError, "is not a file of this format"),
        (lambda at: (at / "manifest.json").write_text("[]"), SlotError, "is not a manifest that this release reads"),
        (
            lambda at: (at / "manifest.json").write_text('{"version": 1, "files": {}}'),
            SlotError,
            "an import that an earlier release made: delete it, and import again",
        ),
        (lambda at: (at / "rank0.zst").unlink(), SlotError, "rank 0 of .* is gone"),
        (shutil.rmtree, SlotError, "is not published"),
    ],
)
def test_damaged_import_is_not_taken(
    tmp_path: Path,
    imported: Callable[..., Captures],
    damage: Callable[[Path], Any],
    error: type[CheckpointError],
    message: str,
) -> None:
    imported({"big": torch.rand(CHUNK_BYTES)})
    damage(tmp_path / "tier" / RUN / f"0-{STEP}")
    with pytest.raises(error, match=message):
        load(open_import(tmp_path), big=None)


def test_run_with_a_truncated_import_does_not_start(tmp_path: Path, imported: Callable[..., Captures]) -> None:
    imported({"big": torch.ones(9)})
    tier = Tier(str(tmp_path / "tier"), RUN)
    tier.check_whole((0, STEP))
    (tmp_path / "tier" / RUN / f"0-{STEP}" / "rank0.zst").write_bytes(b"short")
    with pytest.raises(SlotError, match=r"rank0\.zst has 5 bytes, not "):
        tier.check_whole((0, STEP))
