"""Wrong input to whole jobs: each gets a clear message and a non-zero exit, and nothing is restored wrongly."""

import json
import os
from pathlib import Path

import pytest
from cluster import Cluster, Host, kill, wait_until
from launchers import run_python

pytestmark = pytest.mark.jobs

TRAIN = """
import os, sys, time
import torch
from resilient_run import Checkpointer

width, steps, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(width, width)
optimizer = torch.optim.Adam(model.parameters())
checkpointer = Checkpointer(model=model, optimizer=optimizer)
start = checkpointer.restore()
print(f'{{"started_at": {start}, "rank": {os.environ["RANK"]}, "pid": {os.getpid()}}}', flush=True)
for step in range(start + 1, steps + 1):
    model(torch.ones(width)).sum().backward()
    optimizer.step()
    checkpointer.step(step)
    print(f'{{"rank": 0, "step": {step}, "loss": 0}}', flush=True)
    if os.path.exists(os.environ.get("END", "")):
        break
    time.sleep(pause_s)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def on_etcd(cluster: Cluster, endpoint: str, *, nnodes: int = 1, nproc: int = 1) -> list[str]:
    return [
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc}",
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={cluster.name}",
        "--rdzv-conf=lease_ttl=2",
        "--local-addr=127.0.0.1",
    ]


def started_at(host: Host) -> list[int]:
    return [line["started_at"] for line in host.lines if "started_at" in line]


def interrupt_at(host: Host, step: int) -> None:
    """Kill the launcher once `step` is committed."""
    wait_until(lambda: host.committed_step() >= step, timeout_s=60, what=f"commit of step {step}", host=host)
    assert host.launcher is not None
    kill(host.launcher.pid)
    host.wait()


def test_unreachable_etcd(cluster: Cluster, script: Path) -> None:
    host = cluster.host("a")
    host.launch(on_etcd(cluster, "127.0.0.1:1"), [str(script), "4", "5", "0"])
    assert host.wait() == 1
    assert "cannot reach etcd at 127.0.0.1:1" in host.output
    assert not host.lines


def test_no_room_is_refused_before_the_first_step(cluster: Cluster, script: Path) -> None:
    host = cluster.host("a")
    host.launch(["--standalone", "--rr-memory=1MiB"], [str(script), "1024", "5", "0"])
    assert host.wait() == 1
    assert "MemoryBudgetError" in host.output
    assert "1 own rank, 1 replica)" in host.output
    assert "--rr-memory" in host.output
    assert not host.steps()


def test_slots_that_can_never_be_made_end_the_run_at_once(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    host, other = cluster.host("a"), cluster.host("b")
    host.prefix = ["prlimit", f"--fsize={1 << 20}"]
    for each in (host, other):
        each.launch(on_etcd(cluster, etcd_endpoint, nnodes=2), [str(script), "1024", "500", "0.1"])
    assert (host.wait(), other.wait()) == (1, 1)
    assert "SlotSizeError" in host.output
    assert f"at most {1 << 20} bytes: raise that (`ulimit -f unlimited`" in host.output
    assert host.starts() == other.starts() == 1
    for each in (host, other):
        assert "SlotSizeError: cannot allocate a slot" in each.output, each.output


def test_two_runs_with_one_id(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    first = cluster.host("a")
    first.launch(on_etcd(cluster, etcd_endpoint), [str(script), "4", "100000", "0.05"])
    wait_until(lambda: first.reached(3), timeout_s=60, what="step 3", host=first)
    second = cluster.host("same host, second run")
    second.launch(on_etcd(cluster, etcd_endpoint), [str(script), "4", "100000", "0.05"], RESILIENT_HOST_ID="a")
    told = "has another launcher on a; this one is host a#1"
    wait_until(lambda: told in second.output, timeout_s=60, what=told, host=second)
    reached = max(step for _, step, _ in first.steps())
    wait_until(lambda: first.reached(reached + 5), timeout_s=30, what="the first run going on")
    assert first.starts() == 1
    assert not second.lines
    wait_until(lambda: second.daemon_pid(), timeout_s=60, what="the second daemon, for the end to find")


def test_another_script_with_the_id_of_a_run(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    """It is refused, unless somebody means it; the run goes on to its end."""
    end = cluster.host("a").run_dir / "end"
    first = cluster.host("a")
    first.launch(on_etcd(cluster, etcd_endpoint), [str(script), "4", "1000000", "0.05"], END=str(end))
    wait_until(lambda: first.reached(3), timeout_s=60, what="step 3", host=first)
    other = script.with_name("other.py")
    other.write_text(TRAIN)
    second = cluster.host("b")
    second.launch(on_etcd(cluster, etcd_endpoint), [str(other), "4", "1000000", "0.05"])
    assert second.wait() == 1
    assert "goes on with script train.py (sha256 " in second.output
    assert "but this launcher has script other.py (sha256 " in second.output
    assert "or give this one --rr-allow-different-script" in second.output
    options = [*on_etcd(cluster, etcd_endpoint), "--rr-allow-different-script"]
    second.launch(options, [str(other), "4", "1000000", "0.05"])
    wait_until(lambda: "this host waits as a standby" in second.output, timeout_s=60, what="a standby", host=second)
    end.touch()
    assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
    assert (first.starts(), second.starts()) == (1, 0)


def test_an_edited_script_goes_on_once_nobody_runs_the_old_one(
    cluster: Cluster, script: Path, etcd_endpoint: str
) -> None:
    host = cluster.host("a")
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "4", "400", "0.05"])
    interrupt_at(host, 5)
    script.write_text(TRAIN + "print('edited', flush=True)\n")
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "4", "12", "0"])
    assert host.wait() == 0, host.output
    assert started_at(host)[-1] >= 5
    assert "edited" in host.output


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_corrupt_slots_are_never_restored(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    host = cluster.host("a")
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "64", "400", "0.05"])
    interrupt_at(host, 5)
    slots = sorted(host.shm_dir.rglob("rank0.*.slot"))
    assert len(slots) == 2
    for slot in slots:
        flip_byte(slot, slot.stat().st_size - 5000)
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "64", "10", "0"])
    assert host.wait() == 1
    assert "RestoreError" in host.output
    assert "checksum" in host.output
    assert len(started_at(host)) == 1


def test_changed_shapes_are_refused_and_nothing_is_lost(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    host = cluster.host("a")
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "64", "400", "0.05"])
    interrupt_at(host, 5)
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "32", "10", "0"])
    assert host.wait() == 1
    assert "StateError" in host.output
    assert "weight" in host.output
    assert len(started_at(host)) == 1
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "64", "10", "0"])
    assert host.wait() == 0, host.output
    assert started_at(host)[-1] >= 5


def test_another_world_size_is_refused(cluster: Cluster, script: Path, etcd_endpoint: str) -> None:
    host = cluster.host("a")
    host.launch(on_etcd(cluster, etcd_endpoint), [str(script), "64", "400", "0.05"])
    interrupt_at(host, 5)
    host.launch(on_etcd(cluster, etcd_endpoint, nproc=2), [str(script), "64", "10", "0"])
    assert host.wait() == 1
    assert "TopologyError" in host.output
    assert "world size" in host.output
    assert len(started_at(host)) == 1


def test_without_a_daemon_it_warns_once_and_trains(script: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENT_")}
    done = run_python([str(script), "4", "3", "0"], {**environment, "RANK": "0", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["step"] for line in done.stdout.splitlines() if "step" in line] == [1, 2, 3]
    assert done.stderr.count("RuntimeWarning") == 1, done.stderr
