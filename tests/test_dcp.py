"""`torch.distributed.checkpoint` over slots: saved and loaded by its own calls, also into another world size."""

import gc
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cluster import Cluster, wait_until
from launchers import run_trainers
from test_export import make_slot, shard, state

from resilient_run import Checkpointer, MemoryTier, PersistedReader
from resilient_run.ckpt.convert.captures import Captures, in_memory, of_slots
from resilient_run.ckpt.convert.export import export
from resilient_run.ckpt.dcp import ItemReader
from resilient_run.ckpt.errors import DaemonError, SlotError, StateError

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "dcp_fsdp.py")

pytestmark = [pytest.mark.jobs, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def reader_of(tmp_path: Path) -> Callable[..., ItemReader]:
    """Return a function that makes a reader of parts, one for each rank of a mesh of four."""

    def make(parts: dict[int, torch.Tensor]) -> ItemReader:
        slots = {}
        for rank, part in parts.items():
            tree = {"objects": {"model": {"weight": part.clone()}, "epochs": [3, "x"]}, "values": {}, "rng": None}
            spec = shard((("S", 0),), (4,))
            slots[rank] = make_slot(tmp_path / str(rank), tree, rank=rank, world_size=4, shards={0: spec})
        held = {rank: slot.buffer for rank, slot in slots.items()}
        return ItemReader(lambda: in_memory(held, slots[min(slots)].header()), is_partial=True)

    return make


WHOLE = torch.arange(20, dtype=torch.float32).view(5, 4)


def test_parts_of_all_ranks_load_as_one(reader_of: Callable[..., ItemReader]) -> None:
    target: dict[str, Any] = {"model": {"weight": torch.zeros(5, 4)}, "epochs": None}
    dcp.load(target, storage_reader=reader_of(dict(enumerate([*WHOLE.chunk(4), WHOLE[:0]]))), no_dist=True)
    assert torch.equal(target["model"]["weight"], WHOLE)
    assert target["epochs"] == [3, "x"]


def test_tensors_in_tuples_are_loaded(tmp_path: Path) -> None:
    tree = {"objects": {"pair": (1, [{"at": torch.arange(3)}])}, "values": {}, "rng": None}
    slot = make_slot(tmp_path / "slot", tree, rank=0, world_size=1)
    target: dict[str, Any] = {"pair": None}
    dcp.load(target, storage_reader=ItemReader(lambda: of_slots([slot])), no_dist=True)
    torch.testing.assert_close(target, {"pair": (1, [{"at": torch.arange(3)}])})


def test_a_reader_does_not_keep_what_it_has_read(tmp_path: Path) -> None:
    read = []

    def open_() -> Captures:
        captures = of_slots([make_slot(tmp_path / "slot", state(0), rank=0, world_size=1)])
        read.append(weakref.ref(captures))
        return captures

    reader = ItemReader(open_)
    dcp.load({"model": dict(torch.nn.Linear(3, 2).state_dict())}, storage_reader=reader, no_dist=True)
    gc.collect()
    assert [captures() for captures in read] == [None]


def test_missing_parts_are_refused_and_nothing_is_loaded(reader_of: Callable[..., ItemReader]) -> None:
    target = {"model": {"weight": torch.zeros(5, 4)}}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(target, storage_reader=reader_of({1: WHOLE.chunk(4)[1]}), no_dist=True)
    (failure,) = [error for error, _ in caught.value.failures.values()]
    assert isinstance(failure, StateError)
    assert "model.weight: this rank holds 8 of the 20 elements" in str(failure)
    assert not target["model"]["weight"].any()


def test_errors_name_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RESILIENT_SOCKET", raising=False)
    with pytest.raises(DaemonError, match="start this script with `resilient-run`"):
        MemoryTier()
    with pytest.raises(SlotError, match="not step 7 of this run; published: nothing"):
        PersistedReader(str(tmp_path), "run", step=7).read_metadata()


def test_documented_way_from_an_exported_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet of docs/operations/persistent-tier.md, as it stands there."""
    text = (ROOT / "docs/operations/persistent-tier.md").read_text()
    (snippet,) = re.findall(r"```python\n(from torch.distributed.checkpoint.state_dict .*?)```", text, re.S)
    slot = make_slot(tmp_path / "slot", state(0), rank=0, world_size=1)
    export(of_slots([slot]), tmp_path / "exported", "dcp")
    slot.close()
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
    with pytest.warns(RuntimeWarning, match="no checkpoints are kept"):
        checkpointer = Checkpointer(model=model, optimizer=optimizer)
    scope = {"torch": torch, "model": model, "optimizer": optimizer, "checkpointer": checkpointer}
    exec(snippet, scope)
    assert scope["done"] == 1000
    expected = state(0)["objects"]
    torch.testing.assert_close(dict(model.state_dict()), expected["model"], rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), expected["optimizer"], rtol=0, atol=0)


def digests(lines: list[dict[str, Any]]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for line in lines:
        if "sha256" in line:
            found.setdefault(line["step"], set()).add(line["sha256"])
    return found


def test_saved_by_four_ranks_loads_into_two(cluster: Cluster, tmp_path: Path) -> None:
    tier, config = tmp_path / "tier", tmp_path / "run.toml"
    config.write_text(f'[persist]\ntarget = "{tier}"\nevery_steps = 1\nevery_s = 0\n')
    host = cluster.host("a")
    arguments = ["--standalone", "--nproc-per-node", "4", "--rr-config", str(config)]
    host.launch(arguments, [EXAMPLE, "--steps", "100000", "--sync"])
    wait_until(lambda: list(tier.glob("*/*/manifest.json")), timeout_s=120, what="a published step", host=host)
    assert host.launcher is not None
    host.launcher.terminate()
    host.wait()
    (run,) = tier.iterdir()
    loaded = run_trainers([EXAMPLE, "--load", str(tier), run.name], 2)
    ((step, found),) = digests([json.loads(line) for line in loaded.splitlines()]).items()
    assert found == digests(host.lines)[step]


def test_asynchronous_saves_survive_a_kill(cluster: Cluster) -> None:
    host = cluster.host("a")
    host.launch(["--standalone", "--nproc-per-node", "2"], [EXAMPLE, "--steps", "4", "--demo-kill", "3"])
    assert host.wait() == 0, host.output
    assert len(host.recoveries()) == 1, host.output
    saved = digests(host.lines)
    assert saved.keys() == {1, 2, 3, 4}
    # What was loaded from memory is what was saved: the steps that both generations print are equal.
    assert all(len(found) == 1 for found in saved.values()), saved
    assert sum("sha256" in line for line in host.lines) > len(saved)


GATHERING = """
import os
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.state.state import TrainingState

dist.init_process_group("gloo")
alone, _ = dist.new_subgroups(group_size=1)
plain, sharded = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
fully_shard(sharded)


class Own:
    def __init__(self, state_dict):
        self.state_dict = state_dict

    def load_state_dict(self, state):
        pass


def of(model, **options):
    return lambda: get_model_state_dict(model, options=StateDictOptions(**options))


def caught():
    try:
        dist.barrier()
    except StateError:
        return {}


def one():
    dist.all_reduce(torch.ones(1), group=alone)
    return {}


for name, give in {
    "full": of(sharded, full_state_dict=True),
    "offloaded": of(sharded, full_state_dict=True, cpu_offload=True),
    "rank0": of(plain, full_state_dict=True, cpu_offload=True),
    "caught": caught,
    "same": of(plain, full_state_dict=True),
    "shards": of(sharded, cpu_offload=True),
    "alone": one,
}.items():
    try:
        TrainingState({name: Own(give)}, rng=False).flatten()
        text = f"{name}: taken"
    except StateError as error:
        text = str(error)
    os.write(1, f"{text}\\n".encode())
os._exit(0)
"""


def test_a_state_dict_that_gathers_from_other_ranks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gathering.py").write_text(GATHERING)
    lines = run_trainers([str(tmp_path / "gathering.py")], 2).splitlines()
    for name, said in {
        "full": "its state_dict() talks to other ranks (_c10d_functional.all_gather_into_tensor.default)",
        "offloaded": "its state_dict() talks to other ranks",
        "rank0": "its state_dict() gives all to rank 0 and nothing to the others",
        "caught": "its state_dict() talks to other ranks (c10d.barrier.default)",
        "same": "taken",
        "shards": "taken",
        "alone": "taken",
    }.items():
        assert sum(line.startswith(f"{name}: {said}") for line in lines) == 2, lines
