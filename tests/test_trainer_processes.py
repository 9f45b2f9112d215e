"""Real trainer processes: they end, fork, are killed, run sharded, and run on real daemons of several hosts."""

import os
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cluster import wait_until
from hosts import Hosts
from launchers import start_python
from solo_daemon import SoloDaemon

pytestmark = pytest.mark.jobs

Process = subprocess.Popen[str]
StartRanks = Callable[..., list[Process]]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SoloDaemon]:
    made = SoloDaemon(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def start_ranks() -> Iterator[StartRanks]:
    """Starts one process of a script per environment, with a store to meet at; none outlives the test."""
    stores, processes = [], []

    def start(script: str, environs: list[dict[str, str]], *arguments: str) -> list[Process]:
        store = torch.distributed.TCPStore("127.0.0.1", 0, len(environs), is_master=True, wait_for_workers=False)
        stores.append(store)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        started = [_start_script(script, {**environ, **shared}, *arguments) for environ in environs]
        processes.extend(started)
        return started

    yield start
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _start_script(script: str, environ: dict[str, str], *arguments: str) -> Process:
    env = {**os.environ, **environ}
    return start_python(["-c", script, *arguments], env, stdout=subprocess.PIPE, text=True)


def _finish(processes: list[Process]) -> list[str]:
    """Return what each process printed, once all have succeeded."""
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return printed


SCRIPT_HEAD = """
import os, sys, time
import torch
from resilient_run.ckpt.checkpointer import Checkpointer
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(50, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 1))
optimizer = torch.optim.Adam(model.parameters())
def train():
    optimizer.zero_grad()
    model(torch.randn(16, 50)).square().mean().backward()
    optimizer.step()
"""

ATTACH = """
ckpt = Checkpointer(model=model, optimizer=optimizer)
def committed():  # so that the next step is captured, too
    assert ckpt.wait() and ckpt._capturer.wait_decided(30)
"""


def _start(daemon: SoloDaemon, body: str, **options: int) -> Process:
    return _start_script(SCRIPT_HEAD + ATTACH + textwrap.dedent(body), daemon.environ(**options))


def test_a_script_that_just_ends_has_its_last_step(daemon: SoloDaemon) -> None:
    process = _start(daemon, "ckpt.restore(); train(); ckpt.step(1)\ncommitted(); train(); ckpt.step(2)")
    assert process.communicate(timeout=60) == ("", None)
    assert process.returncode == 0
    assert max(slot.verify().step for slot in daemon.slots() if slot.state() == "COMPLETE") == 2


def test_a_forked_child_has_no_checkpointer(daemon: SoloDaemon) -> None:
    body = """
    ckpt.restore(); train(); ckpt.step(); committed()
    child = os.fork()
    if not child:
        train(); ckpt.step(); ckpt.wait(); ckpt.close()
        os.write(1, f"child {ckpt.stats.captures}\\n".encode())  # print() writes word by word: two processes would mix
        time.sleep(60)
    train(); ckpt.step(); os.write(1, f"parent {ckpt.wait()}\\n".encode())
    ckpt.close()
    os.write(1, f"{child}\\n".encode())
    os._exit(0)
    """
    process = _start(daemon, body)
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().split() for _ in range(3))
    child = int(lines[0][0])
    assert lines[1:] == [["child", "1"], ["parent", "True"]]
    with daemon.changed:
        assert daemon.changed.wait_for(lambda: not daemon._connections, 30), "the child keeps the connection open"
    os.kill(child, signal.SIGKILL)
    process.wait(60)
    process.stdout.close()


def test_a_trainer_killed_at_any_moment_continues_bit_by_bit(daemon: SoloDaemon) -> None:
    body = """
    for n in range(ckpt.restore(), 60):
        train()
        ckpt.step(n + 1)
        if n + 1 == 60: ckpt.wait()
        print(n + 1, flush=True)
    import hashlib
    print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest())
    """
    undisturbed = _start(daemon, body)
    expected = undisturbed.communicate(timeout=60)[0].splitlines()[-1]
    for slot in daemon.slots():
        slot.path.unlink()
    daemon.watermark = None
    daemon._complete.clear()
    for generation, kill_after in enumerate((7, 11, 17), start=2):
        daemon.plan = daemon.watermark
        process = _start(daemon, body, generation=generation)
        assert process.stdout is not None
        for _ in range(kill_after):
            process.stdout.readline()
        process.kill()
        process.communicate()
        with daemon.changed:
            assert daemon.changed.wait_for(lambda: not daemon._connections, 30)
        assert daemon.watermark is not None
    daemon.plan = daemon.watermark
    process = _start(daemon, body, generation=9)
    output = process.communicate(timeout=60)[0].splitlines()
    assert daemon.plan is not None
    assert int(output[0]) == daemon.plan[1] + 1 > 4
    assert output[-1] == expected


FSDP_BODY = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
dist.init_process_group("gloo")
def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)
def run(model, optimizer, step):
    torch.manual_seed(1000 + step)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5)).square().sum()
    loss.backward()
    optimizer.step()
def fingerprint(model, optimizer):
    states = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in [*model.state_dict().values(), *states]]
    return torch.cat([t.reshape(-1) for t in tensors])
"""

FSDP_FIRST = (
    FSDP_BODY
    + """
model, optimizer = build(0)
ckpt = Checkpointer(model=model, optimizer=optimizer)
ckpt.restore()
for step in range(1, 4):
    run(model, optimizer, step)
    ckpt.step()
    assert ckpt.wait() and ckpt._capturer.wait_decided(30)
    dist.barrier()
for step in range(4, 6):
    run(model, optimizer, step)
if dist.get_rank() == 0:
    torch.save(fingerprint(model, optimizer), sys.argv[1])
else:
    fingerprint(model, optimizer)
ckpt.close()
dist.destroy_process_group()
os._exit(0)  # not Python's own end: docs/api.md
"""
)

FSDP_SECOND = (
    FSDP_BODY
    + """
model, optimizer = build(1)
ckpt = Checkpointer(model=model, optimizer=optimizer)
assert ckpt.restore() == 3
assert isinstance(optimizer.state[next(model.parameters())]["exp_avg"], DTensor)
for step in range(4, 6):
    run(model, optimizer, step)
assert torch.equal(fingerprint(model, optimizer), torch.load(sys.argv[1]))
ckpt.close()
dist.destroy_process_group()
os._exit(0)  # not Python's own end: docs/api.md
"""
)


def test_fsdp2_shards_continue_bit_by_bit(daemon: SoloDaemon, start_ranks: StartRanks, tmp_path: Path) -> None:
    def run(script: str, generation: int) -> None:
        environs = [daemon.environ(generation=generation, rank=rank, world_size=2) for rank in range(2)]
        _finish(start_ranks(SCRIPT_HEAD + script, environs, str(tmp_path / "reference")))

    run(FSDP_FIRST, 1)
    with daemon.changed:
        assert daemon.changed.wait_for(lambda: daemon.watermark == (1, 3), 30), daemon.watermark
    daemon.plan = daemon.watermark
    run(FSDP_SECOND, 2)


DDP_BODY = (
    SCRIPT_HEAD
    + """
import hashlib
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
wrapped = torch.nn.parallel.DistributedDataParallel(model)
ckpt = Checkpointer(model=wrapped, optimizer=optimizer)
for n in range(ckpt.restore(), int(sys.argv[1])):
    optimizer.zero_grad()
    wrapped(torch.randn(16, 50)).square().mean().backward()
    optimizer.step()
    ckpt.step(n + 1)
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values())).hexdigest(), flush=True)
ckpt.close()
dist.destroy_process_group()
os._exit(0)  # not Python's own end: docs/api.md
"""
)


def test_ranks_on_real_daemons_lose_a_host_and_continue_bit_by_bit(hosts: Hosts, start_ranks: StartRanks) -> None:
    plain = [{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"} for rank in range(2)]
    hosts.create_job()
    for name in "ab":
        hosts[name].start()
        hosts[name].open()
    assert hosts.form_round(1, "ab") is None
    endless = start_ranks(DDP_BODY, _environs(hosts, 1), "1000000000")
    wait_until(lambda: (hosts.watermark() or (0, 0)) >= (1, 20), timeout_s=60, what="commits of real trainers")
    for process in endless:
        process.kill()
        process.communicate()
    hosts["a"].close()  # with all its memory
    hosts["a"].start()
    hosts["a"].open()
    restored = hosts.form_round(2, "ab")
    assert restored is not None
    last_step = restored[1] + 5
    undisturbed = _finish(start_ranks(DDP_BODY, plain, str(last_step)))
    assert _finish(start_ranks(DDP_BODY, _environs(hosts, 2), str(last_step))) == undisturbed
    watermark = hosts.watermark()
    assert watermark is not None
    assert watermark >= restored


def _environs(hosts: Hosts, generation: int) -> list[dict[str, str]]:
    return [
        {
            "RESILIENT_SOCKET": str(hosts[name].socket_path),
            "RESILIENT_RUN_ID": hosts.run_id,
            "RESILIENT_GENERATION": str(generation),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
        }
        for rank, name in enumerate("ab")
    ]


MEET = """
import os, time
from resilient_run import Checkpointer

ckpt = Checkpointer(rng=False, x=0)
ckpt.restore()
ckpt.step(1)
while ckpt.watermark != (1, 1):
    time.sleep(0.01)
for step in [2, 4, 5] if os.environ["RANK"] == "0" else [3, 4, 6]:
    ckpt.step(step)
    ckpt.wait(1)
for step in range(7, 1000):
    ckpt.step(step)
    ckpt.wait(1)
    if ckpt.watermark > (1, 1):
        break
print(ckpt.watermark)
ckpt.close()
"""


def test_ranks_that_do_not_announce_the_same_steps_meet(hosts: Hosts, start_ranks: StartRanks) -> None:
    """As where a script skips `step()` on one rank: no step that one of them left out is committed, a later one is."""
    hosts.create_job()
    for name in "ab":
        hosts[name].start()
        hosts[name].open()
    hosts.form_round(1, "ab")
    for watermark in _finish(start_ranks(MEET, _environs(hosts, 1))):
        assert watermark.startswith("(1, ")
        assert watermark != "(1, 1)"
