"""Ends of a run that another launcher sees otherwise, or etcd does not hear of: its id can go on from memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import EXAMPLE, TINY, Cluster, Host
from etcd_process import EtcdProcess

pytestmark = pytest.mark.jobs

STEPS = 12
OTHER_END = """
from resilient_run.daemon.run import keys
from resilient_run.launcher.rendezvous.membership import Membership

close = Membership.close

async def close_second(self, closed):
    await self._etcd.create(self._prefix + keys.CLOSED, {"reason": "another launcher gave up", "failed": True})
    await close(self, closed)

Membership.close = close_second
"""
"""Has the end of another launcher in etcd a moment before this one's."""

NO_ETCD = """
import os, signal
from resilient_run.launcher.rendezvous.membership import Membership

close = Membership.close

async def close_alone(self, closed):
    os.kill(int(os.environ["ETCD_PID"]), signal.SIGKILL)
    await close(self, closed)

Membership.close = close_alone
"""
"""Has etcd gone a moment before the end of this launcher is written."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Cluster(tmp_path)
    yield made.host("a")
    made.close()


def run(host: Host, etcd: EtcdProcess, steps: int, before: str = "") -> tuple[int, str, list[int]]:
    """Return the exit status of a launcher, what it says, and the steps that its worker completes."""
    code = f"{before}\nimport sys\nfrom resilient_run.__main__ import main\nsys.argv[0] = 'resilient-run'\nmain()"
    run_id = host.run_dir.parent.parent.name
    arguments = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-id", run_id]
    arguments += ["--rdzv-endpoint", etcd.endpoint, "--rdzv-conf", "lease_ttl=3,last_call_timeout=1"]
    arguments += ["--local-addr", "127.0.0.1", "--rr-allow-different-script"]
    script = [str(EXAMPLE), "--steps", str(steps), "--seed", "7", "--json", *TINY]
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments, *script],
        env=host.environ(ETCD_PID=str(etcd.pid)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return found.returncode, found.stderr, [line["step"] for line in lines if "loss" in line]


def test_failure_elsewhere_keeps_what_a_success_would_throw_away(host: Host, etcd: EtcdProcess) -> None:
    code, said, steps = run(host, etcd, STEPS, OTHER_END)
    assert (code, steps[-1]) == (0, STEPS), said
    assert "the run ended with a failure elsewhere, and what it keeps in memory stays: another launcher gave up" in said
    code, said, steps = run(host, etcd, STEPS + 4)
    assert (code, steps) == (0, [*range(STEPS + 1, STEPS + 5)]), said
    assert etcd.ctl("get", "--prefix", "", "--keys-only").split() == []


def test_success_that_etcd_did_not_hear_keeps_what_it_holds(host: Host, etcd: EtcdProcess) -> None:
    code, said, steps = run(host, etcd, STEPS, NO_ETCD)
    assert (code, steps[-1]) == (0, STEPS), said
    assert "left without telling etcd" in said
    etcd.kill()
    etcd.start()
    code, said, steps = run(host, etcd, STEPS + 4)
    assert (code, steps) == (0, [*range(STEPS + 1, STEPS + 5)]), said
