"""Whole jobs whose losses stop being finite: such steps are never committed, and the run goes back and round them."""

import re
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from cluster import Cluster, Host, kill, wait_until
from gated import Gate, on_etcd, trained

pytestmark = pytest.mark.jobs

SCRIPT = str(Path(__file__).with_name("unhealthy_trainer.py"))
STEPS = 40
POISONED = range(21, 24)


def starts(hosts: Collection[Host]) -> dict[int, list[tuple[int, list[int]]]]:
    """Return by rank where its workers began, and what they skipped."""
    found: dict[int, list[tuple[int, list[int]]]] = {}
    for line in (line for host in hosts for line in list(host.lines)):
        if "started_at" in line:
            found.setdefault(line["rank"], []).append((line["started_at"], line["skips"]))
    return found


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_run_goes_back_and_round_what_made_it_unhealthy(
    cluster: Cluster, tmp_path: Path, etcd_endpoint: str, nnodes: int
) -> None:
    """One rank's loss is not finite, which makes all parameters so. What is skipped stays so when a worker is killed.

    A step that one rank doubts is not committed, the next one is.
    """
    gate, hosts = Gate(tmp_path / "gate"), [cluster.host(name) for name in "ab"[:nnodes]]
    script = [SCRIPT, str(gate.path), str(STEPS), "--poison", "21:1", "--doubt", "10:1"]
    for host in hosts:
        host.launch(on_etcd(etcd_endpoint, tmp_path.name, nnodes=nnodes, nproc=2 // nnodes), script)

    def committed() -> int:
        return max(host.committed_step() for host in hosts)

    seen = set()
    for step in range(1, 21):
        gate.open(step)
        wait_until(lambda step=step: all(host.reached(step) for host in hosts), timeout_s=60, what=f"step {step}")
        late_s = time.monotonic() + 1
        while committed() < step and time.monotonic() < late_s:
            time.sleep(0.005)
        seen.add(committed())
    kept = committed()
    assert 10 not in seen
    assert len(seen) > 15, seen
    gate.open(23)
    wait_until(lambda: hosts[0].starts() == 4 // nnodes, timeout_s=60, what="the way back", host=hosts[0])
    wait_until(lambda: len(starts(hosts)[1]) == 2, timeout_s=60, what="the way back", host=hosts[-1])
    kill(hosts[-1].pids()[1])
    wait_until(
        lambda: all(len(begun) == 3 for begun in starts(hosts).values()), timeout_s=60, what="again", host=hosts[0]
    )
    begun = [(0, []), (kept, [*POISONED]), (kept, [*POISONED])]
    assert starts(hosts) == {0: begun, 1: begun}
    gate.open(STEPS)
    assert [host.wait() for host in hosts] == [0] * nnodes, "".join(host.output for host in hosts)
    for host in hosts:
        assert [(event["kind"], event["restored_step"], event["complete"]) for event in host.recoveries()] == [
            ("unhealthy_steps", kept, False),
            ("worker_exit", kept, True),
        ]
        assert "steps 21 to 23 (3 in a row) are unhealthy, first on rank 1" in host.output
    losses, sha256 = trained(STEPS, POISONED)
    last = {(rank, step): loss for host in hosts for rank, step, loss in host.steps() if step not in POISONED}
    assert last == losses
    assert hosts[0].params_sha256() == sha256


def test_a_run_that_nothing_makes_healthy_ends_with_one_line(cluster: Cluster, tmp_path: Path) -> None:
    gate, host = Gate(tmp_path / "gate"), cluster.host("a")
    gate.open(3)
    host.launch(
        ["--standalone", "--nproc-per-node", "2"],
        [SCRIPT, str(gate.path), str(STEPS), "--stubborn", "--poison", "1:0"],
    )
    assert host.wait() == 1, host.output
    # The root counts failures alike, each launcher recoveries without a commit: whichever is first ends the run.
    assert len(starts([host])[0]) in {5, 6}, host.output
    assert "steps 1 to 3 (3 in a row) are unhealthy, first on rank 0" in host.output
    lines = r"failed \d times at step 0 in the same way; the last time: |after step 0: a restart does not help"
    assert len(re.findall(lines, host.output)) == 1, host.output
