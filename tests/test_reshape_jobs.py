"""Real daemons and trainers: another number of ranks, on other hosts, goes on with a step as DCP loads it."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cluster import wait_until
from hosts import Host, Hosts
from launchers import start_python

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import EtcdConfig

pytestmark = pytest.mark.jobs

TRAINER = Path(__file__).with_name("reshape_trainer.py")


class Ranks:
    """The trainers of one generation, as processes."""

    def __init__(self, hosts: Hosts, root: Path, generation: int, places: Sequence[str], *arguments: str) -> None:
        self.processes = []
        for rank, name in enumerate(places):
            env = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(list(places[:rank]).count(name)),
                "WORLD_SIZE": str(len(places)),
                "RESILIENT_SOCKET": str(hosts[name].socket_path),
                "RESILIENT_RUN_ID": hosts.run_id,
                "RESILIENT_HOST": name,
                "RESILIENT_GENERATION": str(generation),
                "TEST_STORE": f"file://{root}/store-{generation}",
            }
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.processes.append(start_python([str(TRAINER), *arguments], env, **streams))

    def heard(self) -> list[dict[str, Any]]:
        """Return the next line of each rank."""
        found = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "a rank ended"
            found.append(json.loads(line))
        return found

    def train(self, steps: int) -> None:
        for step in range(steps):
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(f"{step}\n")
                process.stdin.flush()
            assert all(said["captured"] for said in self.heard())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


class Run:
    """One job whose generations have different numbers of ranks."""

    def __init__(self, root: Path, config: EtcdConfig) -> None:
        self.root, self.generation = root, 0
        self.hosts = Hosts(root, run_id=root.name, config=config)
        self.ranks: Ranks | None = None

    def form(self, places: Sequence[str], *arguments: str, made_by: int | None = None) -> Ranks:
        """Begin the next generation with a rank at each of `places`."""
        if self.ranks is not None:
            self.ranks.close()
        if not self.generation:
            self.hosts.create_job()
        names = list(dict.fromkeys(places))
        for name in names:
            if self.hosts[name].process is None:
                self.hosts[name].start()
                self.hosts[name].open(replicas=1)
        self.generation += 1
        self.hosts.form_round(self.generation, names, nproc=len(places) // len(names), made_by=made_by)
        self.ranks = Ranks(self.hosts, self.root, self.generation, places, *arguments)
        return self.ranks

    def committed(self, step: int) -> None:
        wait_until(lambda: (self.hosts.watermark() or (0, 0))[1] == step, timeout_s=60, what=f"step {step} committed")

    def export(self, host: Host) -> str:
        to = self.root / "exported"
        directories = ["--run-dir", str(host.run_dir), "--shm-dir", str(host.shm_dir)]
        command = [*directories, "export", "--run-id", self.hosts.run_id, "--to", str(to)]
        done = CliRunner().invoke(resilientctl, command)
        assert done.exit_code == 0, done.output
        return str(to)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        self.hosts.close()


@pytest.fixture
def run(tmp_path: Path, etcd_config: EtcdConfig) -> Iterator[Run]:
    made = Run(tmp_path, etcd_config)
    yield made
    made.close()


def test_another_number_of_ranks_goes_on_elsewhere(run: Run) -> None:
    """Two ranks of one host, then one on each of three, two of which have none of it."""
    ranks = run.form("aa")
    assert {said["planned"][1] for said in ranks.heard()} == {0}
    ranks.train(3)
    run.committed(3)
    exported = run.export(run.hosts["a"])
    ranks = run.form("abc", "--exported", exported, made_by=2)
    said = ranks.heard()
    assert [each["different"] for each in said] == [[]] * 3
    assert [each["restored"] for each in said] == [3] * 3
    assert [each["planned"] for each in said] == [[3, 2]] * 3
    assert [bool(each["told"]) for each in said] == [True, False, False]
    ranks.train(1)
    run.committed(4)
    wait_until(
        lambda: all((2, 4) in run.hosts[name].held().get(rank, ()) for rank, name in enumerate("abc")),
        timeout_s=30,
        what=lambda: str([run.hosts[name].held() for name in "abc"]),
    )
    assert not [path for name in "abc" for path in run.hosts[name].shm_dir.glob("*/read*")]
