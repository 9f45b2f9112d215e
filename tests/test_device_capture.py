"""Leaves on devices: what is committed is what `step()` saw in the order of the stream, and nobody waits for a copy.

Devices that are threads stand for GPUs where there is none; the tests at the end are for hardware.
"""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from solo_daemon import RUN_ID, SoloDaemon, is_committed
from test_capture import _bytes, _newest, hold, tensors
from thread_device import Stream, ThreadDevice

from resilient_run.ckpt import reentry
from resilient_run.ckpt.capture import copying, device
from resilient_run.ckpt.capture.copying import CapturePlan, Copier
from resilient_run.ckpt.capture.fingerprint import fingerprint_cuda
from resilient_run.ckpt.capture.slots import MappedSlot
from resilient_run.ckpt.capture.stopped import stopped
from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.errors import StoppedError
from resilient_run.ckpt.format.digests import Digester
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot, plan_layout
from resilient_run.ckpt.state.tree import Flattener

# Optimizers here only move what is captured; their own state does not matter.
pytestmark = pytest.mark.filterwarnings("ignore:.*no registered object keeps its state")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    """A device that holds every tensor."""
    made = ThreadDevice()
    monkeypatch.setattr(copying, "device_of", lambda leaf: made)
    yield made
    made.close()


def _slot(directory: Path, plan: CapturePlan) -> MappedSlot:
    path = directory / "slot"
    payload_offset, capacity_bytes = plan_layout(10_000, plan.layout.payload_bytes)
    Slot.create(path, capacity_bytes=max(capacity_bytes, payload_offset), payload_offset=payload_offset).close()
    target = MappedSlot(str(path), SoloDaemon(directory).env(), pin=False)
    target.payload.fill_(0xAB)
    return target


def _stage(plan: CapturePlan, flat: Flattener, target: MappedSlot) -> copying.Staged:
    target.zero_gaps(plan.specs, plan.layout)
    return Copier().stage(plan, flat.leaves, target.payload)


def _copy(plan: CapturePlan, staged: copying.Staged, target: MappedSlot, **options: Any) -> str | None:
    """Return the leaf that has not arrived as it was, if any."""
    Copier().finish(plan, staged, target, **{"on_released": lambda: None, "on_copied": lambda: None} | options)
    return Copier().prove(plan, staged, target)


@given(tree=st.lists(tensors(), max_size=5), big=st.integers(0, 3), devices=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_any_tensors_on_any_devices_are_copied_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tree: list[torch.Tensor], big: int, devices: int
) -> None:
    """Large ones in turn on each device and on the host, with ends anywhere in a word, a fragment and a chunk."""
    sizes = (CHUNK_BYTES // 2 - big, 65_537, 100_001 + big, CHUNK_BYTES + big, 3 * CHUNK_BYTES + 5, 200_002)
    large = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    tree = [*large[:3], *tree, *large[3:], torch.randn(700, 601).t()]
    owners = {leaf.data_ptr(): index % (devices + 1) for index, leaf in enumerate(large)}
    made = [ThreadDevice() for _ in range(devices)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "device_of", lambda leaf: [None, *made][owners.get(leaf.data_ptr(), 0)])
        flat = Flattener(tree)
        plan = CapturePlan(flat)
        assert sum(len(each.places) for each in plan.on_devices) == sum(owner > 0 for owner in owners.values())
        target = _slot(tmp_path_factory.mktemp("slot"), plan)
        for _ in range(2):
            assert _copy(plan, _stage(plan, flat, target), target) is None
        assert [each.uploads for each in made] == [2] * devices, "what stays where it is is described once"
        fields: dict[str, Any] = {"run_id": RUN_ID, "topology": 0, "rank": 0, "world_size": 1}
        digester = Digester(plan.specs, plan.layout, flat.node, rank=0, trained=())
        payload = target.payload.numpy().data[: plan.layout.payload_bytes]
        fields |= {
            "generation": 1,
            "step": 1,
            "manifest": b"",
            "checksums": digester.extend(b"{}", digester.hashes(payload))[1],
        }
        del payload
        target.slot.publish(**fields, payload_bytes=plan.layout.payload_bytes)
        target.slot.verify()
    expected = bytearray(plan.layout.payload_bytes)
    for leaf, offset in zip(flat.leaves, plan.layout.offsets, strict=True):
        assert isinstance(leaf, torch.Tensor)
        data = _bytes(leaf)
        expected[offset : offset + len(data)] = data
    assert target.payload[: len(expected)].numpy().tobytes() == expected
    target.close()
    for each in made:
        each.close()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU numba has no simulator")
@pytest.mark.parametrize("flip", [False, True])
def test_what_the_cuda_kernel_hashed_is_proven_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flip: bool
) -> None:
    gpu = ThreadDevice(kernel=fingerprint_cuda)
    monkeypatch.setattr(copying, "device_of", lambda leaf: gpu)
    leaf = torch.randint(0, 256, (66_001,), dtype=torch.uint8)
    flat = Flattener([leaf])
    plan = CapturePlan(flat)
    target = _slot(tmp_path, plan)
    gpu.side.gate.clear()
    staged = _stage(plan, flat, target)
    gpu.record().synchronize()
    if flip:
        leaf[-1] ^= 1
    gpu.side.gate.set()
    assert _copy(plan, staged, target) == ("0" if flip else None)
    target.close()
    gpu.close()


@pytest.mark.parametrize("at", [0, 4095, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 4])
def test_a_byte_that_changed_anywhere_behind_the_hash_is_found(gpu: ThreadDevice, tmp_path: Path, at: int) -> None:
    tree = [torch.randint(0, 256, (70_000,), dtype=torch.uint8), torch.zeros(3 * CHUNK_BYTES + 5, dtype=torch.uint8)]
    flat = Flattener(tree)
    plan = CapturePlan(flat)
    target = _slot(tmp_path, plan)
    staged = _stage(plan, flat, target)
    gpu.record().synchronize()
    tree[1][at] = 1
    assert _copy(plan, staged, target) == "1"
    tree[1][at] = 0
    assert _copy(plan, _stage(plan, flat, target), target) is None
    target.close()


def test_a_leaf_that_moved_is_not_read(gpu: ThreadDevice, tmp_path: Path) -> None:
    leaf = torch.zeros(100_000)
    flat = Flattener([leaf])
    plan = CapturePlan(flat)
    target = _slot(tmp_path, plan)
    staged = _stage(plan, flat, target)
    gpu.record().synchronize()
    leaf.untyped_storage().resize_(leaf.nbytes * 64)
    assert _copy(plan, staged, target) == "0"
    assert plan.matches(flat), "and where it is now it is read in the next step"
    assert _copy(plan, _stage(plan, flat, target), target) is None
    assert gpu.uploads == 4
    target.close()


def test_a_leaf_between_words_is_staged(gpu: ThreadDevice) -> None:
    class Elsewhere(torch.Tensor):
        is_cpu = False  # type: ignore[assignment]

    buffer = torch.zeros(200_000, dtype=torch.uint8)
    for start, plain in ((0, True), (1, False), (2, False), (4, True)):
        assert copying._is_readable(buffer[start : start + 100_000].as_subclass(Elsewhere)) == plain


def test_nothing_arrives_in_a_slot_after_its_capture_has_failed(gpu: ThreadDevice, tmp_path: Path) -> None:
    flat = Flattener([torch.ones(100_000)])
    plan = CapturePlan(flat)
    target = _slot(tmp_path, plan)
    gpu.side.gate.clear()
    staged = _stage(plan, flat, target)

    def fail() -> None:
        threading.Timer(0.05, gpu.side.gate.set).start()
        raise RuntimeError("anything")

    with pytest.raises(RuntimeError, match="anything"):
        _copy(plan, staged, target, on_released=fail)
    assert target.payload[: 4 * 100_000].view(torch.float32).eq(1).all(), "the copy has ended, not begun"
    target.close()


# Captures of a training loop. What a kernel does to a leaf is put on the device's stream.


class _Fill(torch.optim.Optimizer):
    """Puts a kernel on a stream that fills every parameter with the number of the step."""

    def __init__(self, parameters: Any, gpu: ThreadDevice) -> None:
        super().__init__(parameters, {})
        self.gpu = gpu
        self.count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            self.gpu.compute.put(lambda data=parameter.data, count=self.count: data.fill_(count))


def _held_weight(daemon: SoloDaemon, step: int) -> None:
    assert _newest(daemon)[0] == step
    assert _newest(daemon)[1]["objects"]["model"]["weight"].eq(step).all()


def test_optimizers_are_put_behind_the_copy_and_nobody_waits(daemon: SoloDaemon, gpu: ThreadDevice) -> None:
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Fill(model.parameters(), gpu)
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            optimizer.step()
            ckpt.step(step)
            assert is_committed(ckpt)
            _held_weight(daemon, step)
        gpu.side.gate.clear()
        optimizer.step()
        ckpt.step()
        # The copy stands still; training is two steps further, on its stream and in its thread.
        optimizer.step()
        ckpt.step()
        optimizer.step()
        assert ckpt.stats.captures == 5
        assert model.weight.ne(7).all(), "a kernel overtook the copy"
        done = gpu.record()
        gpu.side.gate.set()
        done.synchronize()
        assert model.weight.eq(8).all()
        wait_until(lambda: ckpt.watermark == (1, 6), timeout_s=30, what="the commit of step 6")
        ckpt.step()
        assert is_committed(ckpt)
        _held_weight(daemon, 8)
        assert ckpt.stats.discarded == 0
        assert ckpt.stats.captures == 7, "6 and 8 are captured; 7 was given up, because its turn had not come"
        assert ckpt.stats.skipped == 1


def test_what_a_device_has_not_made_when_the_generation_ends_is_not_captured(
    daemon: SoloDaemon, gpu: ThreadDevice
) -> None:
    """Collectives that are aborted end without a result, and the kernels behind them run all the same."""
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Fill(model.parameters(), gpu)
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        optimizer.step()
        ckpt.step()
        assert is_committed(ckpt)
        gpu.compute.gate.clear()
        optimizer.step()
        ckpt.step()
        reentry.stop()
        try:
            gpu.compute.gate.set()
            assert not ckpt.wait(30)
            with pytest.raises(StoppedError, match="another worker has failed"):
                ckpt.step()
        finally:
            stopped.clear()
        assert (ckpt.stats.captures, ckpt.stats.skipped) == (1, 1)
        _held_weight(daemon, 1)


def test_a_step_that_ends_before_the_device_began_is_what_its_stream_sees_then(
    daemon: SoloDaemon, gpu: ThreadDevice
) -> None:
    """Training's thread runs ahead: at `step(1)` no kernel of it has run yet."""
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Fill(model.parameters(), gpu)
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        gpu.compute.gate.clear()
        optimizer.step()
        ckpt.step()
        optimizer.step()
        gpu.compute.gate.set()
        assert is_committed(ckpt)
        _held_weight(daemon, 1)


def test_the_kernel_waits_for_tables_that_another_stream_uploads(gpu: ThreadDevice, tmp_path: Path) -> None:
    flat = Flattener([torch.ones(100_000)])
    plan = CapturePlan(flat)
    target = _slot(tmp_path, plan)
    assert _copy(plan, _stage(plan, flat, target), target) is None, "and what is compiled at its first call is compiled"
    first, second = gpu.compute, Stream()
    first.gate.clear()
    plan = CapturePlan(flat)
    _stage(plan, flat, target)
    gpu.compute = second
    staged = _stage(plan, flat, target)
    assert not second.record().come.wait(0.2), "the kernel ran before its tables were there"
    first.gate.set()
    assert _copy(plan, staged, target) is None
    gpu.compute = first
    second.close()
    target.close()


def test_a_plan_of_leaves_on_devices_is_made_where_another_device_is_the_default(gpu: ThreadDevice) -> None:
    leaf = torch.ones(100_000)
    with torch.device("meta"):
        plan = CapturePlan(Flattener([leaf]))
        plan.on_devices[0].fingerprint({0: leaf})
    assert gpu.uploads == 2


def test_the_stream_that_is_current_waits_for_the_copy(daemon: SoloDaemon, gpu: ThreadDevice) -> None:
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Fill(model.parameters(), gpu)
    first, second = gpu.compute, Stream()
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        ckpt.step(7)
        assert is_committed(ckpt)
        gpu.side.gate.clear()
        optimizer.count = 7
        optimizer.step()
        ckpt.step()
        gpu.compute = second
        optimizer.step()
        gpu.side.gate.set()
        assert is_committed(ckpt)
        _held_weight(daemon, 8)
    second.close()
    gpu.compute = first


def _by_a_kernel(gpu: ThreadDevice, weight: torch.Tensor) -> None:
    gpu.compute.put(lambda: weight.data.fill_(-1))


def _by_a_kernel_on_another_stream(gpu: ThreadDevice, weight: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: weight.data[-1, -1:].fill_(-1))
    thread.start()
    thread.join()


def _by_the_host(gpu: ThreadDevice, weight: torch.Tensor) -> None:
    weight.detach().numpy()[0, 0] = -1


@pytest.mark.parametrize("write", [_by_a_kernel, _by_a_kernel_on_another_stream, _by_the_host])
def test_whatever_overtakes_the_copy_is_found_out(
    daemon: SoloDaemon,
    gpu: ThreadDevice,
    caplog: pytest.LogCaptureFixture,
    write: Callable[[ThreadDevice, torch.Tensor], None],
) -> None:
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Fill(model.parameters(), gpu)
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        optimizer.step()
        ckpt.step()
        assert is_committed(ckpt)
        gpu.side.gate.clear()
        optimizer.step()
        ckpt.step()
        gpu.record().synchronize()
        write(gpu, model.weight)
        gpu.record().synchronize()
        gpu.side.gate.set()
        assert not ckpt.wait(30)
        assert "model.weight changed" in caplog.text
        assert (ckpt.stats.captures, ckpt.stats.discarded) == (1, 1)
        _held_weight(daemon, 1)


def test_what_changed_behind_a_capture_is_copied_at_once_also_by_whoever_comes_after(
    daemon: SoloDaemon, gpu: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_known in (False, True):
        model = torch.nn.Linear(300, 300, bias=False)
        with Checkpointer(model=model) as ckpt:
            ckpt.restore()
            ckpt.step()
            held = hold(ckpt)
            ckpt.step()
            gpu.record().synchronize()
            model.weight.data.zero_()
            held.go.set()
            assert ckpt.wait(30) == is_known
        daemon.wait_for("eager", name="model")
        daemon.restart(monkeypatch)


class _Filling(_Fill):
    """Evaluates its closure before it puts its kernel on the stream."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        super().step()


@pytest.mark.parametrize("how", ["plain", "wrapped", "closure", "keyword"])
def test_optimizers_wait_until_a_copy_is_on_its_stream(daemon: SoloDaemon, gpu: ThreadDevice, how: str) -> None:
    """Also one that is known only to an object around it; a closure runs forward and backward before that."""
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Filling(model.parameters(), gpu)
    registered = Around(optimizer) if how == "wrapped" else optimizer
    with Checkpointer(model=model, optimizer=registered) as ckpt:
        ckpt.restore()
        optimizer.step()
        ckpt.step()
        held = hold(ckpt)
        ckpt.step()
        assert held.began.wait(30)

        def closure() -> None:
            assert not held.go.is_set(), "it waited before the closure"
            threading.Timer(0.05, held.go.set).start()

        if how == "closure":
            optimizer.step(closure)
        elif how == "keyword":
            optimizer.step(closure=closure)
        else:
            threading.Timer(0.05, held.go.set).start()
            optimizer.step()
        assert held.go.is_set(), "the optimizer ran into the copy"
        assert ckpt.wait(30)
        assert ckpt.stats.discarded == 0
        assert _newest(daemon)[1]["objects"]["model"]["weight"].eq(1).all()


class Around:
    """An optimizer in another object, as frameworks have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inside = optimizer

    def state_dict(self) -> Any:
        return self._inside.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._inside.load_state_dict(state)


class _Forgetful(set[str]):
    """Lets every capture run the risk anew."""

    def add(self, name: str) -> None:
        """Do nothing."""


def test_random_writers_never_get_anything_wrong_committed(daemon: SoloDaemon, gpu: ThreadDevice) -> None:
    """Streams stop and go, writers write when they like; whatever is committed has the number of its step."""
    torch.manual_seed(5)
    model = torch.nn.Linear(300, 300, bias=False)
    optimizer = _Fill(model.parameters(), gpu)
    stop = threading.Event()

    def hold_up() -> None:
        while not stop.is_set():
            for stream in (gpu.side, gpu.compute):
                stream.gate.clear()
                stop.wait(float(torch.rand(())) * 0.004)
                stream.gate.set()

    disturber = threading.Thread(target=hold_up)
    disturber.start()
    committed = 0
    try:
        with Checkpointer(model=model) as ckpt:
            ckpt.restore()
            assert ckpt._capturer is not None
            ckpt._capturer._eager = _Forgetful()
            for step in range(1, 2001):
                if step > 100 and committed >= 5:
                    break
                optimizer.step()
                ckpt.step(step)
                if torch.rand(()) < 0.5:
                    _by_a_kernel(gpu, model.weight)
                if torch.rand(()) < 0.5 and is_committed(ckpt):
                    _held_weight(daemon, step)
                    committed += 1
    finally:
        stop.set()
        disturber.join()
    assert committed >= 5
    assert ckpt.stats.discarded > 0


# What is imported, and what happens where there is no kernel.


def test_a_trainer_without_a_gpu_never_imports_numba() -> None:
    check = (
        "import sys, torch\n"
        "from resilient_run.ckpt.checkpointer import Checkpointer\n"
        "from resilient_run.ckpt.capture.copying import CapturePlan\n"
        "from resilient_run.ckpt.state.tree import Flattener\n"
        "flat = Flattener([torch.ones(100_000)])\n"
        "CapturePlan(flat)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", check], check=True)


def test_a_gpu_without_a_kernel_is_staged_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Any, place: torch.device) -> None:
        raise ImportError("no CUDA toolkit")

    class OnGpu(torch.Tensor):
        is_cuda, is_cpu = True, False  # type: ignore[assignment]

    monkeypatch.setattr(device.CudaDevice, "__init__", missing)
    device._cuda_device.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert device.device_of(torch.zeros(100_000).as_subclass(OnGpu)) is None
    device._cuda_device.cache_clear()
    assert len(caplog.messages) == 1
    assert "no CUDA toolkit" in caplog.messages[0]
    assert "pip install 'numba-cuda>=0.20' 'numpy<2.5'" in caplog.messages[0]


# On hardware.

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _on_gpu(function: Any) -> Any:
    for mark in GPU:
        function = mark(function)
    return function


@pytest.fixture
def busy() -> Iterator[Callable[[], None]]:
    """Keeps the current stream of the GPU busy for about 0.2 s, so that training's thread is far ahead of it."""
    matrix = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(60):
            torch.mm(matrix, matrix)

    work()
    torch.cuda.synchronize()
    yield work
    torch.cuda.synchronize()


@_on_gpu
def test_cuda_leaves_are_hashed_and_not_staged() -> None:
    leaf = torch.zeros(1 << 20, device="cuda")
    plan = CapturePlan(Flattener([leaf, torch.zeros(1 << 20)]))
    assert [list(each.places) for each in plan.on_devices] == [[0]]
    assert isinstance(plan.on_devices[0].device, device.CudaDevice)
    assert not plan._staging


@_on_gpu
def test_training_goes_on_while_the_gpu_has_not_even_begun(daemon: SoloDaemon, busy: Callable[[], None]) -> None:
    """Fused optimizers that step right after `step()`: each capture is what its place in the stream says."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for step in range(1, 11):
            model(torch.randn(64, 2048, device="cuda")).square().sum().backward()
            busy()
            optimizer.step()
            saw = {name: value.clone() for name, value in model.state_dict().items()}
            moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
            ckpt.step(step)
            optimizer.step()
            # The first captures lock memory, which may wait for the GPU.
            assert step <= 2 or not torch.cuda.current_stream().query(), "training's thread waited for the GPU"
            assert is_committed(ckpt), f"step {step} was discarded"
            number, tree = _newest(daemon)
            assert number == step
            assert {name: _bytes(value) for name, value in tree["objects"]["model"].items()} == {
                name: _bytes(value) for name, value in saw.items()
            }
            states = tree["objects"]["optimizer"]["state"].values()
            assert [_bytes(value) for state in states for value in state.values()] == list(map(_bytes, moments))
        assert ckpt.stats.discarded == 0


def _cuda_data(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


def _cuda_one_bit(weight: torch.Tensor) -> None:
    weight.data.view(torch.int32).view(-1)[12345] ^= 1 << 31


def _cuda_side_stream(weight: torch.Tensor) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weight.data.fill_(-1)


def _cuda_fused(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    torch.optim.SGD.step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # past every hook


@_on_gpu
@pytest.mark.parametrize("write", [_cuda_data, _cuda_one_bit, _cuda_side_stream, _cuda_fused])
def test_kernels_that_overtake_the_copy_never_get_anything_wrong_committed(
    daemon: SoloDaemon, write: Callable[[torch.Tensor], None]
) -> None:
    """The copy is held up on its stream until the kernel has run: the capture must fail."""
    model = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
    gpu = device.device_of(model.weight.detach())
    assert isinstance(gpu, device.CudaDevice)
    matrix = torch.randn(4096, 4096, device="cuda")
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        before = _bytes(model.weight)
        torch.cuda.synchronize()
        with torch.cuda.stream(gpu._side):
            for _ in range(200):
                torch.mm(matrix, matrix)
        ckpt.step()
        torch.cuda.current_stream().synchronize()
        write(model.weight)
        assert not gpu._side.query(), "the copy was not held up"
        assert not ckpt.wait(30)
        assert ckpt.stats.discarded == 1
        assert _newest(daemon)[0] == 1
        assert _bytes(_newest(daemon)[1]["objects"]["model"]["weight"]) == before
        saw = _bytes(model.weight)
        ckpt.step()
        write(model.weight)
        assert is_committed(ckpt), "from now on it is copied inside step()"
        assert _bytes(_newest(daemon)[1]["objects"]["model"]["weight"]) == saw


@_on_gpu
def test_the_current_stream_counts_whichever_it_is(daemon: SoloDaemon, busy: Callable[[], None]) -> None:
    model = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model.weight.grad = torch.ones_like(model.weight)
    torch.cuda.synchronize()
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                busy()
                optimizer.step()
                saw = model.weight.detach().clone()
                ckpt.step(step)
                optimizer.step()
            assert is_committed(ckpt)
            stream.synchronize()
            assert _bytes(_newest(daemon)[1]["objects"]["model"]["weight"]) == _bytes(saw)
        assert ckpt.stats.discarded == 0


@_on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_leaves_on_several_devices_are_captured(daemon: SoloDaemon) -> None:
    values = {f"on{i}": torch.full((1 << 20,), float(i), device=f"cuda:{i}") for i in range(2)}
    with Checkpointer(**values) as ckpt:
        ckpt.restore()
        for step in range(1, 4):
            for value in values.values():
                value.add_(1)
            ckpt.step(step)
            assert is_committed(ckpt)
            tree = _newest(daemon)[1]
            assert all(tree["values"][f"on{i}"].eq(i + step).all() for i in range(2))


@_on_gpu
def test_a_restored_run_goes_on_bit_for_bit(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda().bfloat16()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()

    model, optimizer = build()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for _ in range(20):
            train(model, optimizer)
            ckpt.step()
        assert is_committed(ckpt)
        for _ in range(3):
            train(model, optimizer)
        after = [_bytes(value) for value in model.state_dict().values()]
    daemon.plan = (1, 20)
    for name, value in daemon.environ(generation=2).items():
        monkeypatch.setenv(name, value)
    model, optimizer = build()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        assert ckpt.restore() == 20
        for _ in range(3):
            train(model, optimizer)
    assert [_bytes(value) for value in model.state_dict().values()] == after
