"""Two launchers of one run on one host: each has an identity of its own, and both are one failure domain."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Host, kill, recovered, wait_until
from gated import STEPS, Gate, Vault, assert_undisturbed, on_etcd, train_to
from launchers import start_python
from seats import seats

from resilient_run.daemon.run.rounds import Round

pytestmark = pytest.mark.jobs


class Half(Host):
    """One of two launchers on a machine, which share its name, its daemon and its vault."""

    vault: Vault

    def _directories(self, root: Path) -> tuple[Path, Path]:
        return self.vault.path, self.vault.path

    def daemon_pid(self) -> int | None:
        return self.vault.owner


@pytest.fixture
def halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Half]]:
    vault = Vault(tmp_path.name)
    monkeypatch.setattr(Half, "vault", vault, raising=False)
    made = [Half(name, tmp_path) for name in ("left", "right")]
    yield made
    for half in made:
        half.close()
    vault.close()


def round_of(*hosts: str, labels: tuple[str, ...] = ()) -> Round:
    return Round(generation=1, seats=seats(hosts, [2] * len(hosts), labels), restore=None, revision=1)


def test_replicas_go_to_another_machine() -> None:
    assert round_of("h", "h#1", "g").holders_by_host(2) == (("h", "g"), ("h#1", "g"), ("g", "h"))
    assert round_of("h", "g", "h#1", "g#1").holders_by_host(2) == (
        ("h", "g"),
        ("g", "h"),
        ("h#1", "g#1"),
        ("g#1", "h#1"),
    )
    assert round_of("h", "h#1").holders_by_host(2) == (("h",), ("h#1",))
    assert round_of("h", "h#1", "g", "g#1").kept("g#1", 2) == (6, 7, 2, 3)


def test_standbys_keep_replicas_where_machines_are_lacking() -> None:
    arrivals, daemons = {"h#2": 1, "f": 2, "e": 5, "g#1": 3, "g": 4}, ["h#2", "e", "g", "g#1"]
    assert round_of("h", "h#1").spares(arrivals, daemons, 2) == ("g#1",)
    assert round_of("h", "h#1").spares(arrivals, daemons, 3) == ("g#1", "e")
    assert round_of("h", "d").spares(arrivals, daemons, 2) == ()
    assert round_of("h").spares({}, daemons, 2) == ()


def test_labels_are_of_machines() -> None:
    labelled = round_of("a", "a#1", "b", "c", "c#1", "d", labels=("x", "x", "x", "y", "y", "y"))
    racks = {seat.host: seat.label for seat in labelled.seats}
    for holders in labelled.holders_by_host(2):
        assert len({racks[host] for host in holders}) == 2


@pytest.mark.timeout(900)
def test_two_launchers_of_one_run_on_one_host(halves: list[Half], tmp_path: Path, etcd_endpoint: str) -> None:
    """A worker of each is killed, then one launcher, which comes back as who it was and finds its slots."""
    gate = Gate(tmp_path / "gate")
    run_id, left, right = tmp_path.name, *halves
    vault, options = left.vault, on_etcd(etcd_endpoint, run_id, nnodes=2, nproc=1)
    for half in halves:
        half.launch(options, gate.script, RESILIENT_HOST_ID="h")
    sock = vault.path / "resilientd.sock"
    wait_until(lambda: len(vault.jobs()) == 2, timeout_s=180, what="both jobs at one daemon")
    train_to(4, gate, halves, sock)
    jobs = vault.jobs()
    assert set(jobs) == {(run_id, "h"), (run_id, "h#1")}
    assert sorted(slot["rank"] for job in jobs.values() for slot in job["slots"]) == [0, 0, 1, 1]

    for count, half in enumerate(halves, start=1):
        kill(next(iter(half.pids().values())))
        train_to(gate.step + 4, gate, halves, sock)
        for other in halves:
            wait_until(lambda other=other, count=count: recovered(other) == count, timeout_s=180, what="recovery")

    assert right.launcher is not None
    right_name = next(name for _, name in jobs if vault.jobs()[run_id, name]["launcher_pid"] == right.launcher.pid)
    kill(right.launcher.pid)
    right.launch(options, gate.script, RESILIENT_HOST_ID="h")
    train_to(gate.step + 4, gate, halves, sock)
    assert right.launcher is not None
    assert vault.jobs()[run_id, right_name]["launcher_pid"] == right.launcher.pid
    gate.open(STEPS)
    assert [half.wait(300) for half in halves] == [0, 0], left.output + right.output
    assert_undisturbed(halves)
    sources = {source for half in halves for event in half.recoveries() for source in event["sources"]}
    assert sources == {"local"}


TORCHRUN = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
line = {"rank": dist.get_rank(), "size": dist.get_world_size(), "pid": os.getpid()}
os.write(1, (json.dumps(line) + "\\n").encode())
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.timeout(900)
def test_plain_torchrun_twice_on_one_host(tmp_path: Path, etcd_endpoint: str) -> None:
    """A killed worker restarts both; a killed launcher that comes back is taken in again."""
    script, end = tmp_path / "train.py", tmp_path / "end"
    script.write_text(TORCHRUN)
    command = ["-m", "torch.distributed.run", "--max-restarts=5", "--monitor-interval=0.1"]
    command += [*on_etcd(etcd_endpoint, tmp_path.name, nnodes=2, nproc=1), str(script), str(end)]
    said = tmp_path / "said"
    launchers: list[subprocess.Popen[bytes]] = []

    def launch() -> subprocess.Popen[bytes]:
        env = {**os.environ, "RESILIENT_HOST_ID": "h"}
        with said.open("ab") as output:
            launchers.append(start_python(command, env, stdout=output))
        return launchers[-1]

    def seen() -> list[dict[str, int]]:
        return [json.loads(line) for line in said.read_text().splitlines() if line.startswith("{")]

    def both(starts: int) -> None:
        def begun() -> bool:
            newest = {(line["rank"], line["size"]) for line in seen()[-2:]}
            return len(seen()) >= starts and newest == {(0, 2), (1, 2)}

        wait_until(begun, timeout_s=180, what=lambda: f"{starts} starts, seen {seen()}")

    try:
        first, second = launch(), launch()
        both(2)
        kill(seen()[0]["pid"])
        both(4)
        second.send_signal(signal.SIGKILL)
        second.wait()
        second = launch()
        both(6)
        end.touch()
        assert [first.wait(120), second.wait(120)] == [0, 0]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        for line in seen():
            kill(line["pid"])
