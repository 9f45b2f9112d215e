"""Hosts of an elastic run come and go at random: it never stops, and its steps are those of one process."""

import os
import random
import time
from pathlib import Path

import elastic_trainer
import pytest
from cluster import Cluster, Host, kill, wait_until

pytestmark = [pytest.mark.jobs, pytest.mark.nightly]

HOSTS = "abcd"
FAULTS = int(os.environ.get("ELASTIC_FAULTS", "30"))


class Run:
    """A run of `--nnodes 1:4` in which a step is made as soon as the one before it is committed."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.cluster, self.gate = Cluster(root), root / "gate"
        self._arguments = ["--nnodes", "1:4", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
        self._arguments += ["--local-addr", "127.0.0.1", "--rdzv-endpoint", endpoint, "--rdzv-id", root.name]
        self._arguments += ["--rdzv-conf", "lease_ttl=3,last_call_timeout=0.5", "--rr-elastic", "0.5"]
        self._arguments += ["--rr-replicas", "2", "--max-restarts", "100"]
        self.end_at(1_000_000)

    def end_at(self, step: int) -> None:
        new = self.gate.with_suffix(".new")
        new.write_text(str(step))
        new.rename(self.gate)

    def launch(self, name: str) -> Host:
        host = self.cluster.host(name)
        host.shm_dir.mkdir(mode=0o700, exist_ok=True)
        host.launch(self._arguments, [str(Path(elastic_trainer.__file__)), "0", str(self.gate)])
        return host


def newest(hosts: list[Host]) -> int:
    return max((line["step"] for host in hosts for line in list(host.lines) if "of" in line), default=0)


@pytest.mark.parametrize("seed", [int(os.environ.get("ELASTIC_SEED", "1"))])
def test_hosts_come_and_go(tmp_path: Path, etcd_endpoint: str, seed: int) -> None:
    chance, run = random.Random(seed), Run(tmp_path, etcd_endpoint)
    try:
        hosts = {name: run.launch(name) for name in HOSTS}
        there = set(HOSTS)
        for number in range(FAULTS):
            before = newest(list(hosts.values()))
            wait_until(
                lambda before=before: newest(list(hosts.values())) > before + 2,
                timeout_s=90,
                what=lambda number=number: (
                    f"steps before fault {number}\n"
                    + "\n".join(f"== {name}\n{host.output[-3000:]}" for name, host in hosts.items())
                ),
            )
            time.sleep(chance.random())
            gone = sorted(set(HOSTS) - there)
            kind = chance.choice(["lose", "leave", "worker", "return"] if len(there) > 2 else ["worker", "return"])
            if kind == "return" and gone:
                name = chance.choice(gone)
                hosts[name] = run.launch(name)
                there.add(name)
            elif kind == "worker":
                started = [line["pid"] for line in list(hosts[chance.choice(sorted(there))].lines) if "pid" in line]
                kill(started[-1])
            elif kind in ("lose", "leave"):
                name = chance.choice(sorted(there))
                there.discard(name)
                launcher = hosts[name].launcher
                if kind == "lose" or launcher is None:
                    hosts[name].lose()
                else:
                    launcher.terminate()
                    launcher.wait(60)
        last = newest(list(hosts.values())) + 300
        run.end_at(last)
        for name in there:
            assert hosts[name].wait() == 0, hosts[name].output[-4000:]
        made: dict[int, tuple[float, int, int]] = {}
        for host in hosts.values():
            # A step is made again, maybe in another number of ranks, if it was not committed.
            for line in (line for line in host.lines if "begun" in line):
                found = (line["monotonic_s"], line["by"], line["samples"])
                made[line["begun"]] = max(made.get(line["begun"], found), found)
        assert sorted(made) == list(range(1, last + 1))
        assert all(samples == step * elastic_trainer.SAMPLES for step, (_, _, samples) in made.items())
        # A host that was back too late for the last round has trained nothing.
        assert {hosts[name].params_sha256() for name in there} - {None} == {
            elastic_trainer.trained({step: of for step, (_, of, _) in made.items()})
        }
    finally:
        run.cluster.close()
