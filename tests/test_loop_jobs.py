"""Workers in `resilient_run.loop` keep their process when another one fails, and train as new ones would."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, Host, assert_same_training, has_ended, kill, recovered, wait_until
from gated import Gate
from loop_trainer import EVENT

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent / "loop_trainer.py"
STEPS = 40
LEASE_TTL_S = 3


class Job:
    """One run: its hosts, and the gate that says how many steps may be made."""

    def __init__(self, root: Path, way: str = "") -> None:
        self.cluster, self.root, self.gate = Cluster(root), root, Gate(root / "gate")
        self._script = [str(SCRIPT), str(self.gate.path), str(STEPS), *filter(None, [way])]

    def alone(self, ranks: int, *more: str) -> Host:
        """Start the run on one host."""
        host = self.cluster.host("solo")
        host.launch(["--standalone", "--nproc-per-node", str(ranks), *more], self._script)
        return host

    def launch(self, names: str, endpoint: str, nnodes: str, ranks: int = 1, *more: str) -> list[Host]:
        """Start launchers with so many ranks each."""
        conf = f"lease_ttl={LEASE_TTL_S},last_call_timeout={30 if len(names) > 1 else 0.1},join_timeout=100"
        arguments = ["--nnodes", nnodes, "--nproc-per-node", str(ranks), "--rdzv-backend", "etcd-v3", *more]
        arguments += ["--rdzv-endpoint", endpoint, "--rdzv-id", self.root.name, "--rdzv-conf", conf]
        hosts = [self.cluster.host(name) for name in names]
        for host in hosts:
            host.launch([*arguments, "--local-addr", "127.0.0.1"], self._script)
        return hosts


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    made: list[Job] = []

    def make(way: str = "") -> Job:
        made.append(Job(tmp_path, way))
        return made[-1]

    yield make
    for each in made:
        each.cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Host]]:
    """Gives the run of so many ranks that nothing happens to."""
    jobs: list[Job] = []

    @cache
    def run(ranks: int, way: str = "") -> Host:
        jobs.append(Job(tmp_path_factory.mktemp("undisturbed"), way))
        jobs[-1].gate.open(STEPS)
        host = jobs[-1].alone(ranks)
        assert host.wait() == 0, host.output
        assert not host.recoveries()
        return host

    yield run
    for each in jobs:
        each.cluster.close()


def committed(hosts: list[Host], step: int) -> None:
    """Wait until this step is committed."""
    wait_until(
        lambda: max(host.committed_step() for host in hosts) >= step,
        timeout_s=60,
        what=f"a commit of step {step}",
        host=hosts[0],
    )


def returned(host: Host) -> list[int]:
    """Return what `loop` returned in the workers of this host."""
    return sorted(line["returned"] for line in host.lines if "returned" in line)


@pytest.mark.parametrize("way", ["", "ddp", "fsdp"])
def test_survivor_of_five_kills_keeps_its_process(
    job: Callable[[str], Job], undisturbed: Callable[..., Host], way: str
) -> None:
    run = job(way)
    host = run.alone(2, "--tee", "3")
    kept = []
    for count, step in enumerate(range(5, 30, 5), start=1):
        run.gate.open(step)
        committed([host], step)
        # Then some are in the middle of a step whose peer is gone.
        run.gate.open(step + 5)
        victim = host.pids()[1]
        kill(victim)
        wait_until(lambda count=count: recovered(host) == count, timeout_s=60, what=f"recovery {count}", host=host)
        kept.append([line["kept"] for line in host.lines if "kept" in line and line["rank"] == 0][-1])
    run.gate.open(STEPS)
    assert host.wait() == 0, host.output
    pids = [[line["pid"] for line in host.lines if "pid" in line and line["rank"] == rank] for rank in (0, 1)]
    assert len(pids[0]) == len(pids[1]) == 6, host.output
    assert len(set(pids[0])) == 1
    assert len(set(pids[1])) == 6
    assert len(set(map(tuple, kept[1:]))) == 1, f"descriptors and threads grow: {kept}"
    assert_same_training([host], undisturbed(2, way))
    assert returned(host) == [0, 1]
