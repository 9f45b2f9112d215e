"""The profiler on real collectives: two Gloo processes, DDP and FSDP2, and beside a profiler of the script's own."""

import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launchers import start_python
from torch.profiler import ProfilerActivity, profile

from resilient_run.ckpt.transport.profile import Profiler

pytestmark = pytest.mark.jobs

STEPS = 8
WORKER = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from resilient_run.ckpt.transport.profile import Profiler

kind, steps, rank, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
if kind == "fsdp":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    trained = model
else:
    trained = DistributedDataParallel(model)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
profiler = Profiler(steps)
while not profiler.done:
    profiler.iteration_begins()
    time.sleep(0.1)  # no traffic; longer than what a busy machine adds
    trained(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    profiler.iteration_ends()
found = profiler.result
print(json.dumps({"reason": profiler.reason, "collectives": found and found.collectives,
                  "iteration_s": found and found.iteration_s,
                  "spans": found and [[span.start_s, span.end_s] for span in found.spans]}), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # not Python's own end: docs/api.md
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_collectives_of_real_training_are_seen(kind: str, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    workers = [
        start_python(
            [str(worker), kind, str(STEPS), str(rank), str(tmp_path / "store")],
            os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [worker.communicate(timeout=90) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    for output, messages in ended:
        found: dict[str, Any] = json.loads(output)
        assert found["collectives"] is not None, found["reason"]
        # DDP has one bucket here; FSDP2 gathers and reduces layer by layer.
        assert found["collectives"] == 1 if kind == "ddp" else found["collectives"] >= 6, found
        assert found["iteration_s"] >= 0.1
        begin, end = found["spans"][0]
        assert begin == 0.0
        assert 0.1 <= end < found["iteration_s"]
        assert "profiler_start" not in messages


def iterate(profiler: Profiler) -> None:
    profiler.iteration_begins()
    torch.ones(2) + 1
    profiler.iteration_ends()


def test_process_without_collectives_is_always_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    regular = SimpleNamespace(
        monotonic=lambda: next(ticks) * 0.01, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns
    )
    monkeypatch.setattr("resilient_run.ckpt.transport.profile.time", regular)
    profiler = Profiler(STEPS)
    while not profiler.done:
        iterate(profiler)
    assert profiler.result is not None
    assert profiler.result.collectives == 0


def test_profiler_of_the_script_has_precedence() -> None:
    """Whether it begins before ours or after, it records what it would without us; ours looks later."""
    ours = Profiler(STEPS)
    for _ in range(3):
        iterate(ours)
    ours.iteration_begins()
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(2) + 1
        ours.iteration_ends()
        assert not ours.done
        iterate(ours)
        torch.ones(2) + 2
    assert sum(event.name == "aten::add" for event in theirs.events()) == 3
    while not ours.done:
        iterate(ours)
    # Iterations of microseconds may well be found too irregular; what counts is that they were looked at.
    assert ours.result is not None or ours.reason.startswith("iterations take")


def test_profiler_gives_up_when_there_is_always_another() -> None:
    ours = Profiler(STEPS)
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        while not ours.done:
            iterate(ours)
    assert ours.result is None
    assert ours.reason.startswith("another profiler was active")
    assert any(event.name == "aten::add" for event in theirs.events())


def test_only_iterations_that_count_make_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    lengths_s = SimpleNamespace(now_s=0.0, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
    lengths_s.monotonic = lambda: lengths_s.now_s
    monkeypatch.setattr("resilient_run.ckpt.transport.profile.time", lengths_s)
    ours = Profiler(STEPS)
    lengths_s.now_s = 1.0
    while not ours.done:
        counts = next(clock) % 3 == 0
        ours.iteration_begins()
        lengths_s.now_s += 0.5 if counts else 7.0
        ours.iteration_ends(counts=counts)
    assert ours.result is not None
    assert ours.result.iteration_s == 0.5


def test_what_was_seen_is_enough_when_few_iterations_count() -> None:
    ours = Profiler(STEPS)
    for _ in range(4):
        iterate(ours)
    while not ours.done:
        ours.iteration_begins()
        ours.iteration_ends(counts=False)
    # See above.
    assert ours.result is not None or ours.reason.startswith("iterations take")


def test_closed_profiler_leaves_nothing_behind() -> None:
    ours = Profiler(STEPS)
    iterate(ours)
    ours.close()
    assert ours.done
    assert not torch.autograd._profiler_enabled()
