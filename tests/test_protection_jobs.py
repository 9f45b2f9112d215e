"""A whole job that is not protected for a while: everybody who looks is told, and training goes on."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, kill, recovered, wait_until
from hosts import Client
from patient import patient_of

from resilient_run.daemon.ctl.status import _status_text

pytestmark = pytest.mark.jobs

SCRIPT = """
import os, time
from resilient_run import Checkpointer

with Checkpointer(x=0) as checkpointer:
    print(f'{{"rank": {os.environ["RANK"]}, "pid": {os.getpid()}}}', flush=True)
    for step in range(checkpointer.restore(), 100_000):
        time.sleep(1.0)
        checkpointer.step(step + 1)
"""


def test_commits_that_stand_still_reach_log_events_and_status(cluster: Cluster, tmp_path: Path) -> None:
    host = cluster.host("solo")
    (tmp_path / "script.py").write_text(SCRIPT)
    host.launch(["--standalone", "--nproc-per-node", "2"], [str(tmp_path / "script.py")])
    wait_until(lambda: host.committed_step() >= 2, timeout_s=60, what="a commit", host=host)
    assert host.launcher is not None
    (etcd,) = [found for found in psutil.Process(host.launcher.pid).children() if found.name() == "etcd"]

    def job() -> dict[str, object]:
        client = Client(host.run_dir / "resilientd.sock")
        answer = client.request("status")
        client.close()
        assert all(
            f"{found['protection']['steps_at_risk']} step(s)" in _status_text(answer) for found in answer["jobs"]
        )
        (found,) = answer["jobs"]
        return dict(found["protection"])

    # Commits may be late while the job begins on a busy machine; then it says so too.
    wait_until(lambda: job()["protected"], timeout_s=150, what="protection", host=host)
    before = host.output.count("protected again at step")
    os.kill(etcd.pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: "nothing has been committed for" in host.output,
            timeout_s=60,
            what="a line that says why",
            host=host,
        )
        wait_until(
            lambda: "nothing has been committed for" in str(job()["reason"]), timeout_s=60, what="the status", host=host
        )
    finally:
        os.kill(etcd.pid, signal.SIGCONT)
    wait_until(
        lambda: host.output.count("protected again at step") > before, timeout_s=120, what="the end of it", host=host
    )
    wait_until(lambda: job()["protected"], timeout_s=60, what="the end of it in the status", host=host)
    wait_until(lambda: host.events()[-1]["event"] == "protected", timeout_s=60, what="the event of its end", host=host)
    assert host.events()[0]["event"] == "unprotected"
    assert host.events()[0].keys() == {
        "event",
        "unix_s",
        "run_id",
        "host",
        "generation",
        "step",
        "steps_at_risk",
        "reason",
    }
    assert host.output.count("protected again at step") == before + 1, "one rank tells"
    assert host.output.count("protected: every step, 1 replica on host solo, and none elsewhere") == 1
    assert not host.recoveries()


def test_what_protects_a_run_is_said_once_and_the_doctor_agrees(
    cluster: Cluster, tmp_path: Path, etcd_endpoint: str
) -> None:
    hosts = [cluster.host("a"), cluster.host("b")]
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-id", cluster.name]
    for host in hosts:
        host.launch([*options, "--rdzv-endpoint", etcd_endpoint], [str(tmp_path / "script.py")])
    line = "protected: every step, 2 replicas on hosts "

    def told() -> int:
        return sum(host.output.count(line) for host in hosts)

    wait_until(told, timeout_s=60, what="the line", host=hosts[0])
    assert f"{line}a, b\n" in hosts[0].output + hosts[1].output or f"{line}b, a\n" in hosts[0].output + hosts[1].output
    report = patient_of(hosts[0], tmp_path).doctor()
    report.says("commits", "ok", found="is committed")
    report.says("replicas", "ok", found="2 of step ")
    assert not [found for found in report.findings if found["level"] == "fail"]
    (pid,) = hosts[0].pids().values()
    before = hosts[0].committed_step()
    kill(pid)
    wait_until(lambda: all(map(recovered, hosts)), timeout_s=60, what="the recovery", host=hosts[0])
    wait_until(lambda: hosts[0].committed_step() > before + 1, timeout_s=60, what="commits after it", host=hosts[0])
    assert told() == 1, "the same hosts protect it"
