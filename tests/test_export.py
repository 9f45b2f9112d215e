"""`resilientctl export`: what it writes is loaded by plain torch, with whole tensors and nothing lost."""

import base64
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from click.testing import CliRunner, Result
from cluster import wait_until
from hosts import TOPOLOGY, Host, Hosts, Trainer

from resilient_run.ckpt.convert.assembly import read
from resilient_run.ckpt.convert.captures import of_slots
from resilient_run.ckpt.convert.export import RANKS, export, gather, unite
from resilient_run.ckpt.errors import SlotError, StateError
from resilient_run.ckpt.format.manifest import ShardSpec, encode, encode_tensors, plan_payload
from resilient_run.ckpt.format.slot import CHUNK_BYTES, HEADER_BYTES, Slot, plan_layout
from resilient_run.ckpt.state.tree import Flattener
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import EtcdConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_slot(path: Path, tree: Any, *, rank: int, world_size: int, shards: dict[int, ShardSpec] | None = None) -> Slot:
    """Write a slot with `tree`; `shards` says of which DTensors some leaves are shards."""
    flat = Flattener(tree)
    specs = [replace(spec, shard=(shards or {}).get(index, spec.shard)) for index, spec in enumerate(flat.specs())]
    layout = plan_payload(specs)
    manifest = encode(encode_tensors(specs, layout), flat.node)
    payload_offset, capacity_bytes = plan_layout(len(manifest), layout.payload_bytes)
    slot = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    payload = slot.buffer[payload_offset : payload_offset + layout.payload_bytes]
    for leaf, spec, offset in zip(flat.leaves, specs, layout.offsets, strict=True):
        if isinstance(leaf, torch.Tensor):
            payload[offset : offset + spec.nbytes] = leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        else:
            payload[offset : offset + spec.nbytes] = leaf if isinstance(leaf, bytes) else leaf.tobytes()
    checksums = [xxhash.xxh3_64_intdigest(payload[i : i + CHUNK_BYTES]) for i in range(0, len(payload), CHUNK_BYTES)]
    slot.publish(
        run_id="run", topology=TOPOLOGY, rank=rank, world_size=world_size, generation=1, step=3,
        payload_bytes=layout.payload_bytes, manifest=manifest, checksums=np.array(checksums, dtype=np.uint64),
    )  # fmt: skip
    return slot


def state(rank: int) -> dict[str, Any]:
    """Return the tree of a DDP rank: model and optimizer are equal, the sampler is not."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    objects = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "sampler": {"at": rank + 5}}
    return {"objects": objects, "values": {"epoch": 4}, "rng": {"numpy": np.arange(6, dtype=np.uint32)}}


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Slot]]:
    slots = [make_slot(tmp_path / f"{rank}.slot", state(rank), rank=rank, world_size=2) for rank in range(2)]
    yield slots
    for slot in slots:
        slot.close()


def test_dcp_loads_a_replicated_state(tmp_path: Path, replicas: list[Slot]) -> None:
    export(of_slots(replicas), tmp_path / "out", "dcp")
    expected = state(0)["objects"]
    model = torch.nn.Linear(3, 2)
    loaded = {"model": model.state_dict(), "sampler": {"at": 0}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert loaded["sampler"] == {"at": 5}
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in expected["model"].items())


def test_torch_loads_weights_only_and_what_differs_is_kept(tmp_path: Path, replicas: list[Slot]) -> None:
    export(of_slots(replicas), tmp_path / "out.pt", "torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = state(0)["objects"]
    torch.testing.assert_close(loaded["optimizer"], expected["optimizer"], rtol=0, atol=0)
    assert loaded["sampler"] == {"at": 5}
    assert loaded[RANKS]["0"]["objects"] == {}
    assert loaded[RANKS]["1"]["objects"] == {"sampler.at": 6}
    assert loaded[RANKS]["1"]["values"] == {"epoch": 4}
    assert os.path.getsize(tmp_path / "out.pt") < 20_000


def shard(placements: tuple[tuple[str | int, ...], ...], mesh_shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(
        shape=(5, 4), stride=(4, 1), mesh_shape=mesh_shape, mesh_ranks=tuple(range(4)),
        mesh_dim_names=None, placements=placements,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("placements", "mesh_shape", "parts"),
    [
        ((("S", 0),), (4,), lambda whole: [*whole.chunk(4), whole[:0]]),
        ((("R",), ("S", 0)), (2, 2), lambda whole: list(whole.chunk(2)) * 2),
        ((("S", 0), ("S", 1)), (2, 2), lambda whole: [p for row in whole.chunk(2) for p in row.chunk(2, dim=1)]),
    ],
)
def test_shards_become_whole_tensors(tmp_path: Path, placements: Any, mesh_shape: Any, parts: Any) -> None:
    whole = torch.arange(20, dtype=torch.bfloat16).view(5, 4)
    slots = []
    for rank, part in zip(range(4), parts(whole), strict=False):
        tree = {"objects": {"model": {"weight": part.clone()}}, "values": {}, "rng": None}
        spec = shard(placements, mesh_shape)
        slots.append(make_slot(tmp_path / f"{rank}", tree, rank=rank, world_size=4, shards={0: spec}))
    assert torch.equal(gather(of_slots(slots))["model"]["weight"], whole)
    export(of_slots(slots), tmp_path / "out", "dcp")
    loaded = {"model": {"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(loaded["model"]["weight"], whole)
    for slot in slots:
        slot.close()


def test_partial_shards_are_refused(tmp_path: Path) -> None:
    tree = {"objects": {"model": {"weight": torch.zeros(5, 4)}}, "values": {}, "rng": None}
    spec = shard((("P", "sum"),), (4,))
    slot = make_slot(tmp_path / "0", tree, rank=0, world_size=1, shards={0: spec})
    with pytest.raises(StateError, match=r"model\.weight: a shard placed as \('P', 'sum'\) cannot be put together"):
        gather(of_slots([slot]))
    slot.close()


@pytest.mark.parametrize("node", [[], ["x"], ["x", 99], ["x", "0"], ["l", ["x", -1]], ["d", [["l", 1]], [1]]])
def test_malformed_tree_is_refused(tmp_path: Path, node: Any) -> None:
    slot = with_manifest(tmp_path, lambda manifest: manifest["tree"][2][0][2].__setitem__(0, node))
    with pytest.raises(SlotError, match="manifest tree is malformed"):
        gather(of_slots([slot]))
    slot.close()


@pytest.mark.parametrize("compared", [[], 1, {"model": [1]}, {"model": 1}, {"other": [1, 0]}, {"model": [1, []]}])
def test_malformed_digests_are_no_digests(tmp_path: Path, compared: Any) -> None:
    values = f"{0:016x}{base64.b64encode(bytes(8)).decode()}"
    slot = with_manifest(tmp_path, lambda manifest: manifest.update(compared=compared, digests=values))
    assert gather(of_slots([slot]))["model"].keys() == {"weight", "bias"}
    slot.close()


def test_a_place_that_cannot_be_is_a_plain_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = ["export", "--run-id=run", "--from=persist", f"--target={tmp_path}", f"--to={tmp_path / 'file' / 'out'}"]
    result = CliRunner().invoke(resilientctl, line)
    assert result.exit_code == 1
    assert result.output == f"Error: [Errno 20] Not a directory: '{tmp_path / 'file' / 'out'}'\n"


def with_manifest(tmp_path: Path, change: Callable[[Any], object]) -> Slot:
    """Return a slot whose manifest is changed, with right checksums."""
    slot = make_slot(tmp_path / "slot", state(0), rank=0, world_size=1)
    header, table = slot.expect(slot.buffer[:HEADER_BYTES])
    manifest = json.loads(slot.manifest())
    change(manifest)
    slot.publish(
        run_id="run", topology=TOPOLOGY, rank=0, world_size=1, generation=1, step=3,
        payload_bytes=header.payload_bytes, manifest=json.dumps(manifest, separators=(",", ":")).encode(),
        checksums=table,
    )  # fmt: skip
    return slot


def test_large_arrays_are_compared_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_run.ckpt.convert.captures._KEPT_CHUNKS", 4)
    monkeypatch.setattr("resilient_run.ckpt.convert.assembly.BATCH_BYTES", 2 * CHUNK_BYTES)
    slots = []
    for rank in range(2):
        arrays = {"same": np.ones(16 << 17), "other": np.ones(16 << 17)}
        arrays["other"][-1] = rank
        tree = {"objects": {"buffer": arrays}, "values": {}, "rng": None}
        slots.append(make_slot(tmp_path / str(rank), tree, rank=rank, world_size=2))
    captures = of_slots(slots)
    tracemalloc.start()
    unite(captures)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 * CHUNK_BYTES
    captures = of_slots(slots)
    leaves = unite(captures)[0].made
    before = captures.read_bytes
    assert next(read(captures, leaves))[0] == 1
    assert captures.read_bytes - before < 17 * CHUNK_BYTES
    found = gather(captures)[RANKS]
    assert [list(found[rank]["objects"]) for rank in ("0", "1")] == [[], ["buffer.other"]]
    for slot in slots:
        slot.close()


def complete(trainer: Trainer, scratch: Path) -> None:
    """Capture the state of the trainer's rank as step 3."""
    trainer.allocate()
    made = make_slot(scratch / f"{trainer.rank}", state(trainer.rank), rank=trainer.rank, world_size=trainer.world_size)
    slot = Slot.open(trainer.paths[1], writable=True)
    header = made.header()
    slot.begin()
    payload = made.buffer[header.payload_offset : header.used_bytes]
    slot.buffer[slot.payload_offset : slot.payload_offset + len(payload)] = payload
    table = made.buffer[header.checksums_offset : header.checksums_offset + 8 * header.chunk_count]
    slot.publish(
        run_id=trainer.host.run_id, topology=TOPOLOGY, rank=trainer.rank, world_size=trainer.world_size, generation=1,
        step=3, payload_bytes=len(payload), manifest=made.manifest(), checksums=bytes(table),
    )  # fmt: skip
    slot.close()
    made.close()
    trainer.notify("complete", path=trainer.paths[1], generation=1, step=3)


def ctl(host: Host, *arguments: str) -> Result:
    """Return what `resilientctl export` came to on a host."""
    directories = ["--run-dir", str(host.run_dir), "--shm-dir", str(host.shm_dir)]
    return CliRunner().invoke(resilientctl, [*directories, "export", "--run-id", host.run_id, *arguments])


@pytest.mark.jobs
@pytest.mark.parametrize("open_", [True, False])
def test_a_host_without_all_ranks_names_those_that_are_missing(
    tmp_path: Path, etcd_config: EtcdConfig, open_: bool
) -> None:
    """Also when no launcher is there any more, so that only the slots know of how many ranks they are."""
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=etcd_config)
    try:
        trainers = hosts.run("abc")
        for trainer in trainers:
            complete(trainer, tmp_path)
        hosts.wait_for_replicas("abc", (1, 3), 6)
        # What holds ranks 0 and 1, as if there were no other.
        (host,) = [hosts[name] for name in "abc" if hosts[name].held().keys() == {0, 1}]
        if not open_:
            host.drop_clients()
            host.kill()
            host.start()
            assert "world_size" not in host.status()["jobs"][0]
            wait_until(lambda: host.held().keys() == {0, 1}, timeout_s=30, what="verified slots")
        for format_ in ("dcp", "torch"):
            done = ctl(host, "--to", str(tmp_path / "out"), "--format", format_)
            assert done.exit_code == 1
            assert "this host does not hold rank(s) [2] of 3 at step 3; run this on a host that holds" in done.output
            assert "--from persist" in done.output
        assert not (tmp_path / "out").exists()
    finally:
        hosts.close()


def test_command_exports_from_memory_and_from_the_tier(tmp_path: Path, etcd_config: EtcdConfig) -> None:
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=etcd_config)
    hosts.policy = {"persist": {"target": str(tmp_path / "tier"), "every_steps": 1}}
    try:
        trainers = hosts.run("ab")
        for trainer in trainers:
            complete(trainer, tmp_path)
        manifest = tmp_path / "tier" / hosts.run_id / "1-3" / "manifest.json"
        wait_until(manifest.exists, timeout_s=60, what="a published step")

        for source in ("memory", "persist"):
            done = ctl(hosts["a"], "--from", source, "--to", str(tmp_path / source), "--format", "torch")
            assert done.exit_code == 0, done.output
            assert "wrote step 3 (generation 1) of 2 ranks" in done.output
            assert torch.load(tmp_path / source, weights_only=True)["sampler"] == {"at": 5}
        again = ctl(hosts["a"], "--from", "memory", "--to", str(tmp_path / "memory"), "--format", "torch")
        assert "exists already" in again.output
        absent = ctl(hosts["a"], "--step", "9", "--to", str(tmp_path / "none"))
        assert "has nothing of step 9 of run" in absent.output
        assert "but of steps [3]" in absent.output
        absent = ctl(hosts["a"], "--step", "9", "--from", "persist", "--to", str(tmp_path / "none"))
        assert "has not step 9 of this run; published: 3" in absent.output
    finally:
        hosts.close()
