"""Captures: they are what `step()` saw, whatever happens after it, and training never waits for a commit."""

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cluster import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from solo_daemon import RUN_ID, SoloDaemon, is_committed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from resilient_run.ckpt.capture import copying
from resilient_run.ckpt.capture.copying import CapturePlan, Copier
from resilient_run.ckpt.capture.slots import MappedSlot, RankSlots
from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.format.digests import Digester
from resilient_run.ckpt.format.manifest import parse
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot, plan_layout
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import Flattener, unflatten

W = tuple[int, int] | None


def _read(slot: Slot) -> Any:
    """Return the tree that a verified slot holds, in memory of its own."""
    header = slot.verify()
    manifest = parse(slot.manifest(), header.payload_bytes)

    def leaf(index: int) -> Any:
        spec, start = manifest.tensors[index], header.payload_offset + manifest.offsets[index]
        data = bytearray(slot.buffer[start : start + spec.nbytes])
        if spec.kind == "numpy":
            return np.ndarray(spec.shape, dtype=np.dtype(spec.dtype), buffer=bytes(data)).copy()
        if not data:
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, spec.dtype)).view(spec.shape)

    return unflatten(manifest.tree, leaf)


def _newest(daemon: SoloDaemon, rank: int = 0) -> tuple[int, Any]:
    slots = [slot for slot in daemon.slots(rank) if slot.state() == "COMPLETE"]
    slot = max(slots, key=lambda slot: (slot.header().generation, slot.header().step))
    return slot.header().step, _read(slot)


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # torch's copies of flags are 0 or 1
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


# Which slot may be overwritten.


def _pair(directory: Path, *, world_size: int) -> RankSlots:
    paths = [str(directory / f"{index}") for index in range(2)]
    for path in paths:
        Slot.create(path, capacity_bytes=12288, payload_offset=8192).close()
    made = RankSlots(SoloDaemon(directory).env(generation=2, world_size=world_size))
    made.use(made.map(paths, pin=False))
    return made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RankSlots]:
    made = _pair(tmp_path, world_size=2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("held", "watermark", "next_", "expected"),
    [
        ((None, None), None, 1, 0),
        (((2, 1), None), (2, 1), 2, 1),
        (((2, 1), (2, 2)), (2, 2), 3, 0),
        (((2, 3), (2, 2)), (2, 3), 4, 1),
        # What was captured for nothing, because another rank missed it, gives way; what is committed does not.
        (((2, 1), (2, 2)), (2, 1), 5, 1),
        (((2, 7), (2, 1)), (2, 1), 8, 0),
        (((2, 1), (2, 2)), None, 4, 0),
        # An earlier generation's timeline is dead, except for what is committed.
        (((1, 5), (1, 6)), (1, 5), 6, 1),
        (((1, 6), (1, 5)), (1, 5), 6, 0),
        (((1, 5), (2, 6)), (1, 5), 9, 1),
        (((1, 5), (1, 6)), None, 1, 0),
    ],
)
def test_the_slot_that_a_capture_overwrites(
    pair: RankSlots, held: tuple[W, W], watermark: W, next_: int, expected: int
) -> None:
    for mapped, version in zip(pair.slots, held, strict=True):
        mapped.held = version
    pair.hear(watermark, (2, next_))
    assert pair.take(next_ - 1) is None
    taken = pair.take(next_)
    assert taken is pair.slots[expected]
    taken.held = (2, next_)
    assert pair.take(next_ + 1) is None, "one capture is made each time"


def test_an_older_step_that_stays_is_not_overwritten(pair: RankSlots) -> None:
    for mapped, version in zip(pair.slots, ((1, 3), (2, 5)), strict=True):
        mapped.held = version
    pair.hear((2, 5), (2, 6), [(1, 3)])
    assert pair.take(6) is None
    pair.hear((2, 4), (2, 5), [])
    assert pair.take(6) is None, "older news do not count"
    pair.hear((2, 5), (2, 7), [])
    assert pair.take(7) is pair.slots[0]


def test_a_capture_that_is_heard_of_too_late_is_missed(pair: RankSlots) -> None:
    pair.hear(None, (2, 3))
    assert [pair.wants(step) for step in (1, 2, 3)] == [False, False, True]
    pair.give_up(2)
    assert pair.missed is None
    assert pair.take(4) is pair.slots[0], "steps need not be consecutive"
    pair.slots[0].held = (2, 4)
    assert pair.wants(5), "the news of the commit may come in time"
    pair.give_up(5)
    assert not pair.wants(6)
    pair.hear((2, 4), (2, 5))
    assert pair.missed == {"next": 5, "step": 5, "late": True}
    assert not pair.wants(6)
    pair.hear((2, 4), (2, 4))
    pair.hear((1, 9), (1, 10))
    assert (pair.watermark, pair.next) == ((2, 4), 5), "neither older news nor those of another generation count"
    pair.hear((2, 4), (2, 8))
    assert pair.missed is None
    assert pair.take(8) is pair.slots[1]
    pair.give_up(8)
    assert pair.missed == {"next": 8, "step": 8, "late": False}, "its bytes changed"
    assert pair.take(9) is None


@pytest.mark.parametrize("lost", [False, True])
def test_a_capture_whose_slot_is_lost_is_missed(pair: RankSlots, tmp_path: Path, lost: bool) -> None:
    """Slots of another size take the place of those that hold it; the daemon keeps these until it is decided."""
    taken = pair.take(1)
    assert taken is not None
    taken.held = (2, 1)
    pair.use(list(pair.slots))
    assert pair.missed is None
    (tmp_path / "other").mkdir()
    if lost:
        taken.slot.path.unlink()
    pair.use(_pair(tmp_path / "other", world_size=2).slots)
    assert pair.missed == ({"next": 1, "step": 1, "late": False} if lost else None)


def test_a_single_rank_captures_the_first_step_that_it_can(tmp_path: Path) -> None:
    pair = _pair(tmp_path, world_size=1)
    pair.give_up(5)
    pair.hear((2, 1), (2, 2))
    assert pair.missed is None
    assert pair.take(6) is not None
    pair.give_up(6)
    assert pair.take(7) is not None
    pair.close()


# What is copied.

SHAPES = st.lists(st.integers(0, 40), max_size=3)
TENSOR_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(SHAPES)
    made = torch.randint(0, 256, [*shape, dtype.itemsize], dtype=torch.uint8).view(dtype).view(shape)
    if draw(st.booleans()) and made.dim() > 1:
        made = made.transpose(0, -1)
    if draw(st.booleans()) and made.dim():
        made = made[::2]
    return made.conj() if dtype.is_complex and draw(st.booleans()) else made


@given(tree=st.lists(tensors(), max_size=8), big=st.integers(0, 3), beside=st.booleans(), threads=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_any_tensors_are_copied_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tree: list[torch.Tensor], big: int, beside: bool, threads: int
) -> None:
    if big:
        tree = [*tree, torch.randn(CHUNK_BYTES // 3), torch.randn(700, 601).t(), torch.randn(3), torch.ones(1 << 18)]
    if big > 1:
        # Leaves that end or begin at the boundary of a chunk, or just beside it.
        tree = [torch.randn(CHUNK_BYTES // 2 - big + 2), torch.randn(CHUNK_BYTES // 4 + big), *tree]
    # A large object begins where a chunk does.
    objects = {"first": tree[0], "model": [*tree[1:], torch.ones(1 << 20)]} if big else {}
    flat = Flattener({"objects": objects} if objects else tree)
    plan = CapturePlan(flat)
    size = plan.layout.payload_bytes
    path = tmp_path_factory.mktemp("slot") / "slot"
    payload_offset, capacity_bytes = plan_layout(10_000, size)
    Slot.create(path, capacity_bytes=max(capacity_bytes, payload_offset), payload_offset=payload_offset).close()
    target = MappedSlot(str(path), SoloDaemon(path.parent).env(), pin=False)
    target.payload.fill_(0xAB)
    target.zero_gaps(plan.specs, plan.layout)
    memory = torch.zeros(size, dtype=torch.uint8) if beside else target.payload
    digester = Digester(plan.specs, plan.layout, flat.node, rank=0, trained={"model"})
    early = digester.hashes(memory.numpy().data[:size])
    copier, released = Copier(), list[str]()
    with patch.object(copying, "_SHARE_BYTES", 1 << 16), patch.object(copying, "_cores", lambda: threads):
        staged = copier.stage(plan, flat.leaves, memory, early)
    assert early.complete == (threads == 1 or not size), "with cores to spare the hashes are left for later"
    copier.finish(
        plan,
        staged,
        target,
        on_released=lambda: released.append("released"),
        on_copied=lambda: released.append("copied"),
    )
    assert released == ["released", "copied"]
    assert copier.prove(plan, staged, target) is None
    copier.close()
    late = digester.hashes(target.slot.buffer[payload_offset : payload_offset + size])
    manifest, checksums = digester.extend(b"{}", late)
    if early.complete:
        again, same = digester.extend(b"{}", early)
        assert (again, same.tolist()) == (manifest, checksums.tolist())
    fields: dict[str, Any] = {"run_id": RUN_ID, "topology": 0, "rank": 0, "world_size": 1, "generation": 1, "step": 1}
    target.slot.publish(**fields, payload_bytes=size, manifest=b"", checksums=checksums)
    target.slot.verify()
    expected = bytearray(size)
    for leaf, offset in zip(flat.leaves, plan.layout.offsets, strict=True):
        assert isinstance(leaf, torch.Tensor)
        data = _bytes(leaf)
        expected[offset : offset + len(data)] = data
    assert target.payload[:size].numpy().tobytes() == expected, "gaps are zero, the rest is exact"
    early, late = None, None  # what they refer to is unmapped now
    del staged, memory
    target.close()


def test_a_plan_serves_while_leaves_lie_as_they_did() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.BatchNorm1d(100))
    values = torch.ones(300, dtype=torch.complex64)
    state = TrainingState({"model": model, "x": np.ones(50_000), "values": values}, rng=True)
    plan = CapturePlan(state.flatten())
    assert plan.live == [], "nothing of the host is read behind training"
    assert {plan.paths[index] for index in plan.others} >= {"values.x"}
    assert plan.matches(state.flatten())
    state.values["values"] = values.conj()
    assert not plan.matches(state.flatten()), "it is not what lies in memory"
    state.values["values"] = values
    model[0].weight = torch.nn.Parameter(torch.zeros(200, 100).t())
    assert not plan.matches(state.flatten()), "it is strided now"


# Captures of a training loop.


class _Fill(torch.optim.Optimizer):
    """Sets every element of every parameter, and of one state tensor each, to the number of the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["copy"] = torch.zeros_like(parameter)
                for part in range(4):
                    parameter.view(4, -1)[part] = self.count
                    state["copy"].view(4, -1)[part] = self.count


def test_a_capture_is_the_state_at_its_step_though_training_went_on(daemon: SoloDaemon) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 1024))
    optimizer = _Fill(model.parameters())
    seen = set()
    with Checkpointer(model=model, optimizer=optimizer, note="") as ckpt:
        ckpt.restore()
        capturer = ckpt._capturer
        assert capturer is not None
        for step in range(1, 31):
            if step % 5 == 0:
                # Else it may not be captured: news of a commit may be late by more than a step.
                wait_until(lambda: capturer.uncommitted is None, timeout_s=30, what="a commit")
            model(torch.randn(64, 1024)).sum().backward()
            optimizer.step()
            model[1].num_batches_tracked.fill_(step)
            ckpt.values["note"] = f"after {step}"
            ckpt.step(step)
            # All of this changes at once, and the next optimizer step follows without a pause.
            model[1].num_batches_tracked.fill_(-1)
            ckpt.values["note"] = "later"
            if step % 5 == 0:
                assert ckpt.wait(30)
                seen.add(_check_filled(daemon))
    assert seen == {5, 10, 15, 20, 25, 30}
    _check_filled(daemon)


def _check_filled(daemon: SoloDaemon) -> int:
    step, tree = _newest(daemon)
    objects = tree["objects"]
    for name, tensor in objects["model"].items():
        if name.endswith(("weight", "bias")):
            assert (tensor == step).all(), f"{name} is torn"
    for state in objects["optimizer"]["state"].values():
        assert (state["copy"] == step).all()
    assert objects["model"]["1.num_batches_tracked"] == step
    assert tree["values"]["note"] == f"after {step}"
    return step


def test_the_capture_equals_a_synchronous_copy(daemon: SoloDaemon) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for step in range(1, 8):
            model(torch.randn(32, 300)).square().sum().backward()
            optimizer.step()
            expected = {name: _bytes(tensor) for name, tensor in model.state_dict().items()}
            moments = [_bytes(state[key]) for state in optimizer.state.values() for key in state]
            ckpt.step()
            model(torch.randn(32, 300)).square().sum().backward()
            assert ckpt.wait(30)
            number, tree = _newest(daemon)
            assert number == step
            assert {name: _bytes(tensor) for name, tensor in tree["objects"]["model"].items()} == expected
            states = tree["objects"]["optimizer"]["state"].values()
            assert [_bytes(state[key]) for state in states for key in state] == moments


def test_a_frozen_watermark_skips_captures_and_stops_nobody(daemon: SoloDaemon) -> None:
    daemon.frozen = True
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3, 5):
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            ckpt.step(step)
            if step == 1:
                assert ckpt.wait(30)
        assert (ckpt.stats.captures, ckpt.stats.skipped) == (1, 3)
        assert [slot.verify().step for slot in daemon.slots() if slot.state() == "COMPLETE"] == [1]
        daemon.commit(1, 1)
        _until_heard(ckpt, watermark=(1, 1))
        ckpt.step(9)
        assert ckpt.wait(30)
        ckpt.step(10)
        assert not ckpt.wait(0.01)
        daemon.commit(1, 9)
        assert ckpt.wait(30), "the commit lets a waiting capture begin"
        assert ckpt.watermark == (1, 9)
        assert sorted(slot.verify().step for slot in daemon.slots()) == [9, 10]


def _until_heard(ckpt: Checkpointer, *, watermark: tuple[int, int] | None = None, next_step: int = 0) -> None:
    """Return once the rank knows of this commit, or that this step is captured next."""
    capturer = ckpt._capturer
    assert capturer is not None
    with capturer._changed:
        assert capturer._changed.wait_for(
            lambda: watermark in (None, ckpt.watermark) and next_step in (0, capturer._slots.next), 30
        )


def test_a_step_that_will_not_be_captured_is_not_waited_for(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank of this run never captures, so that nothing is committed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        assert ckpt.wait(30)
        ckpt.step(2)
        daemon.call_for(1, 3)
        assert not ckpt.wait(30)
        assert ckpt.stats.skipped == 1, "it waited in vain"


def test_a_rank_says_what_it_misses_and_goes_on_where_all_do(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank of this run never captures, so that nothing is committed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        assert ckpt.wait(30)
        for step in (2, 3):
            ckpt.step(step)
            assert not ckpt.wait(0.01)
        daemon.call_for(1, 2)
        assert daemon.wait_for("missed")["late"]
        daemon.call_for(1, 6)
        _until_heard(ckpt, next_step=6)
        ckpt.step(4)
        assert not ckpt.wait(0)
        for step in (6, 7, 8):
            ckpt.step(step)
            assert ckpt.wait(30 if step == 6 else 0) == (step == 6)
        assert sorted(slot.verify().step for slot in daemon.slots() if slot.state() == "COMPLETE") == [6]
        daemon.stop()
        daemon.seen.clear()
        daemon.start()
        daemon.wait_for("complete", generation=1, step=6)
        daemon.call_for(1, 7)
        daemon.wait_for("missed", next=7, step=8, late=True)
        daemon.stop()
        daemon.seen.clear()
        daemon.start()
        daemon.wait_for("missed", next=7, step=8, late=True)
        assert daemon.watermark is None


def test_an_unhealthy_step_is_not_captured_and_not_late(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was asked for, and where what was asked for before it has not been captured yet."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        assert ckpt.wait(30)
        daemon.call_for(1, 2)
        _until_heard(ckpt, next_step=2)
        ckpt.step(2, healthy=torch.tensor(float("nan")).isfinite())
        assert not ckpt.wait(0)
        assert daemon.wait_for("progress", step=2)["unhealthy"]
        assert "unhealthy" not in daemon.wait_for("progress", step=1)
        assert not daemon.wait_for("missed", next=2, step=2)["late"]
        daemon.call_for(1, 3)
        _until_heard(ckpt, next_step=3)
        ckpt.step(3, healthy=torch.tensor(1.0).isfinite())
        daemon.wait_for("complete", step=3)
        assert sorted(message["step"] for message in daemon.seen if message["op"] == "complete") == [1, 3]


def test_what_is_no_single_bool_says_nothing_of_health(daemon: SoloDaemon) -> None:
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        for wrong in (None, 1, float("nan"), torch.tensor(float("nan")), torch.tensor([True, False]), "yes"):
            with pytest.raises(TypeError, match="give one bool, as in loss"):
                ckpt.step(1, healthy=wrong)
        assert "give one bool" in daemon.wait_for("refused")["message"]
        ckpt.step(1, healthy=np.isfinite(np.float32("nan")))
        assert daemon.wait_for("progress", step=1)["unhealthy"]
        for step, right in enumerate((True, np.True_, torch.tensor([True])), 2):
            ckpt.step(step, healthy=right)
            assert "unhealthy" not in daemon.wait_for("progress", step=step)


@pytest.mark.parametrize("heard", ["before", "after"])
def test_a_step_that_raises_is_missed_and_not_late(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, heard: str
) -> None:
    """The root would call for later and later steps, and could meet none but those at which it raises."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Checkpointer(x=0) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        assert ckpt.wait(30)
        if heard == "before":
            daemon.call_for(1, 2)
            _until_heard(ckpt, next_step=2)
        ckpt.values["x"] = {1}
        with pytest.raises(StateError, match=r"values\.x: values of type builtins\.set"):
            ckpt.step(2)
        daemon.call_for(1, 2)
        assert not daemon.wait_for("missed", next=2, step=2)["late"]
        ckpt.values["x"] = 3
        daemon.call_for(1, 3)
        _until_heard(ckpt, next_step=3)
        ckpt.step(3)
        assert ckpt.wait(30)


class HeldCopier(Copier):
    """Completes no capture before `go` is set; `began` says that it would."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = threading.Event(), threading.Event()

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._wait()
        super().finish(*args, **kwargs)

    def _wait(self) -> None:
        self.began.set()
        assert self.go.wait(30)


class _HeldProof(HeldCopier):
    """Publishes no capture before `go` is set."""

    def finish(self, *args: Any, **kwargs: Any) -> None:
        Copier.finish(self, *args, **kwargs)

    def prove(self, *args: Any, **kwargs: Any) -> str | None:
        self._wait()
        return super().prove(*args, **kwargs)


def hold(ckpt: Checkpointer) -> HeldCopier:
    """Let the captures of `ckpt` wait from now on; the one before is committed by then."""
    assert is_committed(ckpt)
    assert ckpt._capturer is not None
    held = ckpt._capturer._copier = HeldCopier()
    return held


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data.fill_(5)


def _by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[-1, -1] += 1


def _by_memory(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr() + tensor.nbytes - 1, 0x7F, 1)


def _by_a_flipped_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int32).view(-1)[12345] ^= 1 << 31


def _by_a_swap_of_two_values(tensor: torch.Tensor) -> None:
    tensor.detach()[[0, 1]] = tensor.detach()[[1, 0]]


def _by_a_fused_kernel(tensor: torch.Tensor) -> None:
    tensor.grad = torch.ones_like(tensor)
    optimizer = torch.optim.SGD([tensor], lr=0.1, fused=True)
    torch.optim.SGD.step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # past every hook


def _by_another_thread(tensor: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: tensor.data.mul_(2))
    thread.start()
    thread.join()


def _by_a_resized_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes * 8)


def _by_a_freed_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "write",
    [
        _by_data,
        _by_numpy,
        _by_memory,
        _by_a_flipped_bit,
        _by_a_swap_of_two_values,
        _by_a_fused_kernel,
        _by_another_thread,
        _by_a_resized_storage,
        _by_a_freed_storage,
    ],
)
def test_whatever_writes_after_a_step_changes_nothing_of_it(
    daemon: SoloDaemon, write: Callable[[torch.Tensor], None]
) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(1000, 1000)
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        ckpt.step()
        held = hold(ckpt)
        saw = _bytes(model.weight)
        ckpt.step()
        write(model.weight)
        assert held.began.wait(30)
        held.go.set()
        assert ckpt.wait(30)
        assert (ckpt.stats.skipped, ckpt.stats.discarded) == (0, 0)
        step, tree = _newest(daemon)
        assert (step, _bytes(tree["objects"]["model"]["weight"])) == (2, saw)


def test_name_that_no_message_has_room_for_is_kept_to_oneself(daemon: SoloDaemon) -> None:
    names = ["a" * 257, "line\nbreak", "\udc80", "told"]
    with Checkpointer(model=torch.nn.Linear(2, 2)) as ckpt:
        assert ckpt._capturer is not None
        for name in names:
            ckpt._capturer._tell_eager(name)
        daemon.wait_for("eager", name="told")
    assert daemon.eager == ["told"]


def test_memory_that_is_gone_after_a_step_is_captured_all_the_same(daemon: SoloDaemon, tmp_path: Path) -> None:
    """Whoever read there now would be killed."""
    table = torch.from_file(str(tmp_path / "table"), shared=True, size=1 << 20)
    table.fill_(3)
    with Checkpointer(table=table) as ckpt:
        ckpt.restore()
        ckpt.step()
        held = hold(ckpt)
        ckpt.step()
        os.truncate(tmp_path / "table", 0)
        held.go.set()
        assert ckpt.wait(30)
        step, tree = _newest(daemon)
        assert step == 2
        assert tree["values"]["table"].eq(3).all()


def test_a_capture_that_waits_for_its_slot_is_what_its_step_saw(daemon: SoloDaemon) -> None:
    """Weights are swapped for an evaluation; in the middle of it the commit comes that frees a slot."""
    daemon.frozen = True
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert ckpt.wait(30)
        saw = _bytes(model.weight)
        ckpt.step()
        optimizer.step()
        model.weight.data.fill_(7)
        assert not ckpt.wait(0.01)
        daemon.commit(1, 1)
        assert ckpt.wait(30)
        step, tree = _newest(daemon)
        assert (step, _bytes(tree["objects"]["model"]["weight"])) == (2, saw)
        assert (ckpt.stats.skipped, ckpt.stats.discarded) == (0, 0)


def test_a_step_that_is_interrupted_is_missed_and_its_slot_is_used_again(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the copy: what has arrived by then is announced to nobody."""
    with Checkpointer(x=torch.ones(1 << 20)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        copier = ckpt._capturer._copier  # type: ignore[union-attr]
        with monkeypatch.context() as patched:
            patched.setattr(copier, "_copy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                ckpt.step()
        assert _newest(daemon)[0] == 1
        ckpt.values["x"].fill_(3)
        ckpt.step()
        assert ckpt.wait(30)
        step, tree = _newest(daemon)
        assert step == 3
        assert tree["values"]["x"].eq(3).all()


def test_a_copy_ends_with_all_its_threads_however_often_it_is_interrupted(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in the middle of it, once more while it waits for the thread that helps."""
    helps, go, ended = threading.Event(), threading.Event(), threading.Event()
    main = threading.current_thread()
    copies = True

    def raise_in_time(*_: Any) -> None:
        if copies:  # Late, it would end whoever runs the tests.
            raise KeyboardInterrupt

    def interrupt() -> None:
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)
        threading.Timer(0.1, go.set).start()

    class Interrupted(Copier):
        def _copy(self, *args: Any) -> None:
            if threading.current_thread() is main:
                assert helps.wait(30)
                threading.Timer(0.1, interrupt).start()
                raise KeyboardInterrupt
            helps.set()
            assert go.wait(30)
            super()._copy(*args)
            ended.set()

    monkeypatch.setattr(copying, "_SHARE_BYTES", 1 << 16)
    monkeypatch.setattr(copying, "_cores", lambda: 2)
    with Checkpointer(rng=False, x=torch.ones(1 << 20)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        capturer = ckpt._capturer
        assert capturer is not None
        free = next(slot for slot in capturer._slots.slots if slot.held is None)
        before, capturer._copier = capturer._copier, Interrupted()
        handler = signal.signal(signal.SIGINT, raise_in_time)
        try:
            with pytest.raises(KeyboardInterrupt):
                ckpt.step()
            copies = False
            assert go.wait(30)
        finally:
            copies = False
            signal.signal(signal.SIGINT, handler)
        assert ended.is_set(), "somebody writes to a slot that was given up"
        assert free.payload.eq(0).all(), "a piece was begun after the interrupt"
        capturer._copier.close()
        capturer._copier = before
        ckpt.step()
        assert ckpt.wait(30)


def test_a_step_leaves_the_slot_alone_that_is_being_published(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has missed that step: it will never be committed, so its slot is free once it is complete."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Checkpointer(x=torch.ones(100_000)) as ckpt:
        ckpt.restore()
        capturer = ckpt._capturer
        assert capturer is not None
        held = capturer._copier = _HeldProof()
        ckpt.step(1)
        assert held.began.wait(30)
        capture = capturer._capture
        assert capture is not None
        assert capture.target is not None
        before = bytes(capture.target.slot.buffer)
        daemon.call_for(1, 2)
        _until_heard(ckpt, next_step=2)
        ckpt.values["x"].fill_(2)
        ckpt.step(2)
        assert bytes(capture.target.slot.buffer) == before
        ckpt.values["x"].fill_(3)
        held.go.set()
        assert ckpt.wait(30)
        daemon.wait_for("complete", step=1)
        step, tree = _newest(daemon)
        assert step == 2
        assert tree["values"]["x"].eq(2).all()


def test_the_handler_of_a_signal_may_close_in_the_middle_of_a_step(daemon: SoloDaemon) -> None:
    ckpt = Checkpointer(x=torch.ones(1 << 20))
    ckpt.restore()
    ckpt.step()
    assert is_committed(ckpt)
    assert ckpt._capturer is not None

    class Closing(Copier):
        def _copy(self, *args: Any) -> None:
            ckpt.close()
            super()._copy(*args)

    ckpt._capturer._copier = Closing()
    ckpt.step()
    assert [slot.verify().step for slot in daemon.slots() if slot.state() == "COMPLETE"] == [1]


def test_captures_wait_for_their_slot_in_any_mode_of_torch(daemon: SoloDaemon) -> None:
    """The memory in which one waits serves the next one that does."""
    daemon.frozen = True
    with Checkpointer(x=torch.randn(30, 40).t()) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        assert ckpt.wait(30)
        with torch.inference_mode():
            ckpt.step(2)
        daemon.commit(1, 1)
        assert ckpt.wait(30)
        ckpt.step(3)
        daemon.commit(1, 2)
        assert ckpt.wait(30)
        assert ckpt.stats.captures == 3


def test_a_state_that_grows_with_every_step_is_captured_at_every_step(daemon: SoloDaemon) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=30)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 300)) - 1).abs().pow(1.5).sum()
        loss.backward()
        return loss

    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for step in range(1, 25):
            optimizer.step(closure)
            ckpt.step()
            assert ckpt.wait(30), f"step {step} was not captured"
        assert ckpt.stats.skipped == 0
    asked = [message["capacity_bytes"] for message in daemon.seen if message["op"] == "allocate"]
    assert asked == sorted(set(asked))
    assert 2 <= len(asked) <= 12, "it is given more room each time"


def test_growing_state_gets_larger_slots(daemon: SoloDaemon) -> None:
    with Checkpointer(data=torch.zeros(10), note="") as ckpt:
        ckpt.restore()
        ckpt.step()
        assert ckpt.wait(30)
        ckpt.values["data"] = torch.ones(3 * CHUNK_BYTES)
        ckpt.step()
        assert ckpt.wait(30)
        assert _newest(daemon)[1]["values"]["data"].sum() == 3 * CHUNK_BYTES
        ckpt.values["note"] = "long" * 50_000
        ckpt.step()
        assert not ckpt.wait(30), "the manifest outgrew its room: this capture is skipped, larger slots are asked for"
        ckpt.step()
        assert ckpt.wait(30)
        assert _newest(daemon)[1]["values"]["note"] == "long" * 50_000


def test_larger_slots_are_asked_for_once_they_can_be_used(daemon: SoloDaemon) -> None:
    """While a capture is being committed its replicas may need the room, and it may never be without them."""
    with Checkpointer(data=torch.zeros(10)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        daemon.frozen = True
        ckpt.step()
        assert ckpt.wait(30)
        ckpt.values["data"] = torch.ones(CHUNK_BYTES)
        ckpt.step()
        assert sum(message["op"] == "allocate" for message in daemon.seen) == 1
        daemon.frozen = False
        daemon.commit(1, 2)
        assert ckpt.wait(30)
        assert _newest(daemon)[0] == 3


def test_growth_that_is_refused_is_skipped_and_logged(daemon: SoloDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(data=torch.zeros(10)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        daemon.refuse["allocate"] = ("MemoryBudgetError", "no room for 12 GiB")
        ckpt.values["data"] = torch.ones(CHUNK_BYTES)
        for _ in range(3):
            ckpt.step()
            assert not ckpt.wait(0.01) or pytest.fail("captured without room")
        wait_until(lambda: "no room for 12 GiB" in caplog.text, timeout_s=30, what="the refusal")
        assert ckpt._capturer is not None
        ckpt._capturer._beside = None
        ckpt.step()
        assert ckpt._capturer._beside is None, "what no slot will come for was copied"
        assert _newest(daemon)[0] == 1
        ckpt.values["data"] = torch.zeros(10)
        ckpt.step()
        assert ckpt.wait(30), "what fits again is captured again"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_state_is_captured_and_restored_bit_for_bit(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Dropout(0.5)).cuda()
        return model, torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for _ in range(20):
            train(model, optimizer)
            ckpt.step()
        assert ckpt.wait(30)
        expected = {name: _bytes(tensor) for name, tensor in model.state_dict().items()}
        train(model, optimizer)
        after = {name: _bytes(tensor) for name, tensor in model.state_dict().items()}
    step, tree = _newest(daemon)
    assert step == 20
    assert {name: _bytes(tensor) for name, tensor in tree["objects"]["model"].items()} == expected
    daemon.plan = (1, 20)
    for name, value in daemon.environ(generation=2).items():
        monkeypatch.setenv(name, value)
    model, optimizer = build()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        assert ckpt.restore() == 20
        train(model, optimizer)
    assert {name: _bytes(tensor) for name, tensor in model.state_dict().items()} == after


def test_shards_and_their_own_memory_are_told_apart(alone: None) -> None:
    """The same bytes, as they are and as the shard of two tensors, are three leaves; equal shards are one."""
    mesh = init_device_mesh("cpu", (1,))
    local = torch.arange(6.0)

    def shard(*placements: Placement) -> DTensor:
        return DTensor.from_local(local, mesh, placements)

    flat = Flattener([local, shard(Shard(0)), shard(Replicate()), shard(Shard(0)), shard(Replicate()), local])
    assert flat.node == ["l", *(["x", index] for index in (0, 1, 2, 1, 2, 0))]
    assert flat.shards.keys() == {1, 2}
    assert len(set(flat.keys)) == 3


def test_state_of_nothing_but_large_tensors(daemon: SoloDaemon) -> None:
    x = torch.arange(100_000)
    with Checkpointer(rng=False, x=x) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        assert is_committed(ckpt)
    step, tree = _newest(daemon)
    assert step == 1
    assert torch.equal(tree["values"]["x"], x)


def test_a_step_leaves_nothing_to_collect_for_each_tensor(daemon: SoloDaemon) -> None:
    """Of the tree that a step makes of a state nothing remains: the garbage collector would look at all of it."""
    values = {str(index): torch.zeros(1) for index in range(100)}
    with Checkpointer(rng=False, values=values) as ckpt:
        ckpt.restore()
        before = _references()
        ckpt.step(1)
        assert is_committed(ckpt)
        assert _references() == before


def _references() -> int:
    """Return how many nodes of leaves there are in this process."""
    gc.collect()
    return sum(type(each) is list and [*map(type, each)] == [str, int] and each[0] == "x" for each in gc.get_objects())
