"""Whole jobs with stopped workers: recovered in restart mode, only reported in log mode."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from cluster import ENDLESS, Cluster, Host, stop, wait_until
from etcd_process import ask
from hosts import Client

from resilient_run.daemon.etcd.client import Etcd
from resilient_run.daemon.run.observation import Observation, parse_observations

pytestmark = pytest.mark.jobs

T = TypeVar("T")
STEPS = 24
# With a pause after each step: a test that reaches one late finds the run under way all the same.
SCRIPT = [*ENDLESS, "--steps", str(STEPS)]


class Job:
    """One two-worker job on one host, and its keys in etcd."""

    def __init__(self, host: Host, run_id: str, endpoint: str, config: Path) -> None:
        self.host, self.run_id, self.endpoint, self.config = host, run_id, endpoint, config

    def launch(self, settings: str, **env: str) -> None:
        self.config.write_text(settings)
        arguments = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
        arguments += ["--rdzv-endpoint", self.endpoint, "--rdzv-id", self.run_id, "--rr-config", str(self.config)]
        self.host.launch(arguments, SCRIPT, **env)

    def etcd(self, work: Callable[[Etcd], Awaitable[T]]) -> T:
        return ask(self.endpoint, work)

    def key(self, name: str) -> str:
        return f"/resilient-run/{self.run_id}/{name}"

    def hang(self) -> Observation | None:
        """Return the hang in etcd, if it is more than an excuse of ranks that give signs of life."""
        entry = self.etcd(lambda etcd: etcd.get(self.key(f"state/observations/{self.host.name}")))
        seen = () if entry is None else parse_observations(entry.value)
        return next((item for item in seen if item.kind == "hang" and item.severity != "info"), None)

    def shown_hang(self) -> dict[str, Any] | None:
        """Return the same as `resilientctl status` would show it."""
        client = Client(self.host.run_dir / "resilientd.sock")
        try:
            (job,) = client.request("status")["jobs"]
        finally:
            client.close()
        found = (item for item in job["observations"] if item["kind"] == "hang" and item["severity"] != "info")
        return next(found, None)

    def break_generation(self, kind: str, message: str, unix_s: float) -> None:
        failure = {"host": self.host.name, "kind": kind, "unix_s": unix_s, "message": message}
        key = self.key("rdzv/failure/1")
        assert self.etcd(lambda etcd: etcd.commit({key: 0}, {key: failure}))


@pytest.fixture
def job(tmp_path: Path, etcd_endpoint: str) -> Iterator[Job]:
    cluster = Cluster(tmp_path)
    yield Job(cluster.host("solo"), tmp_path.name, etcd_endpoint, tmp_path / "rr.toml")
    cluster.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The undisturbed run."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    host = cluster.host("solo")
    host.launch(["--standalone", "--nproc-per-node", "2"], SCRIPT)
    assert host.wait() == 0, host.output
    yield host
    cluster.close()


def same_training(host: Host, reference: Host) -> None:
    expected = {(rank, step): loss for rank, step, loss in reference.steps()}
    assert {(rank, step): loss for rank, step, loss in host.steps()} == expected
    assert host.params_sha256() == reference.params_sha256()


def status_text(host: Host) -> str:
    code = "from resilient_run.daemon.ctl.cli import resilientctl; resilientctl()"
    command = [sys.executable, "-P", "-c", code, "--run-dir", str(host.run_dir), "status"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_stopped_worker_is_replaced(job: Job, reference: Host) -> None:
    """SIGTERM would not end a stopped process: it is killed at once, and so is the one that waits for it."""
    host = job.host
    job.launch("[detect]\nhang_floor_s = 3.0\nhang_min_steps = 3\n", RESILIENT_STOP_TIMEOUT="60")
    wait_until(lambda: host.reached(8), timeout_s=60, what="step 8", host=host)
    before, kept = host.pids(), host.committed_step()
    stop(before[1])
    assert host.wait() == 0, host.output
    assert set(host.pids().values()).isdisjoint(before.values())
    assert host.starts() == 4
    same_training(host, reference)
    (event,) = host.recoveries()
    assert event["complete"]
    assert event["kind"] == "hang"
    assert event["restored_step"] >= kept
    assert event["cause"].startswith("generation 1 hangs: no progress for ")
    assert ": rank 1 did not get past step " in event["cause"]
    assert 0.0 < event["detect_s"] < event["total_s"]
    assert event["stop_s"] < 60.0, "the grace was spent on a process that cannot hear"


def test_log_only_lets_a_stopped_worker_go_on(job: Job, reference: Host) -> None:
    host = job.host
    job.launch('[detect]\nhang_action = "log"\nhang_floor_s = 1.0\nhang_min_steps = 3\n')
    wait_until(lambda: host.reached(8), timeout_s=60, what="step 8", host=host)
    before = host.pids()
    stop(before[1])
    shown = wait_until(job.shown_hang, timeout_s=60, what="the hang", host=host)
    seen = wait_until(job.hang, timeout_s=60, what="the hang in etcd", host=host)
    assert (seen.severity, seen.rank) == ("warn", 1)
    assert seen.to_value() == shown
    assert f"  warn: hang: {seen.message}\n" in status_text(host)
    os.kill(before[1], signal.SIGCONT)
    wait_until(lambda: job.shown_hang() is None, timeout_s=60, what="the end of the hang", host=host)
    assert host.wait() == 0, host.output
    assert host.pids() == before
    assert host.recoveries() == []
    same_training(host, reference)


@pytest.mark.nightly
def test_orders_and_exits_leave_a_short_grace(job: Job, reference: Host) -> None:
    """An order from outside costs no attempt; a worker that cannot hear SIGTERM does not cost 30 s."""
    host = job.host
    job.launch("", RESILIENT_STOP_TIMEOUT="1")
    wait_until(lambda: host.reached(6), timeout_s=60, what="step 6", host=host)
    stop(host.pids()[0])
    job.break_generation("unhealthy", "host solo is sick", time.time())
    wait_until(lambda: any(event["complete"] for event in host.recoveries()), timeout_s=60, what="recovery", host=host)
    stop(host.pids()[0])
    os.kill(host.pids()[1], signal.SIGKILL)
    assert host.wait() == 0, host.output
    assert host.starts() == 6
    same_training(host, reference)
    order, exit_ = host.recoveries()
    assert (order["kind"], order["cause"], exit_["kind"]) == ("unhealthy", "host solo is sick", "worker_exit")
    for event in (order, exit_):
        assert 1.0 <= event["stop_s"] < 20.0, host.recoveries()


def test_order_without_a_checkpointer_uses_an_attempt(job: Job, tmp_path: Path) -> None:
    """Nothing in memory can undo it, so it counts as torchrun counts an exit: with no attempt left the run ends."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import json, os, time\nprint(json.dumps({'rank': 0, 'pid': os.getpid()}), flush=True)\ntime.sleep(600)\n"
    )
    host = job.host
    arguments = ["--nnodes", "1", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", job.endpoint, "--rdzv-id", job.run_id]
    host.launch([*arguments, "--local-addr", "127.0.0.1"], [str(script)])
    wait_until(host.starts, timeout_s=60, what="the worker", host=host)
    pid = host.pids()[0]
    job.break_generation("unhealthy", "somebody wanted it", time.time())
    assert host.wait() == 1
    assert not psutil.pid_exists(pid)
    assert "somebody wanted it" in host.output
    assert "Signal 9 (SIGKILL)" in host.output


@pytest.mark.nightly
def test_stopped_worker_and_stopped_launcher_among_hosts(tmp_path: Path, etcd_endpoint: str, reference: Host) -> None:
    """The rank that stands still is blamed, not those that wait; a launcher that wakes up late stops what it left."""
    cluster = Cluster(tmp_path)
    config = tmp_path / "rr.toml"
    config.write_text("[detect]\nhang_floor_s = 3.0\nhang_min_steps = 3\n")
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", tmp_path.name, "--rdzv-conf", "lease_ttl=3"]
    arguments += ["--rr-config", str(config)]
    try:
        hosts = [cluster.host(name) for name in "ab"]
        for host in hosts:
            host.launch(arguments, SCRIPT)
        wait_until(lambda: hosts[0].reached(8), timeout_s=90, what="step 8", host=hosts[0])
        standby = cluster.host("c")
        standby.launch(arguments, SCRIPT)
        kept = hosts[0].committed_step()
        stop(next(iter(hosts[1].pids().values())))
        for host in hosts:
            wait_until(lambda host=host: len(host.recoveries()) == 1, timeout_s=60, what="a recovery", host=host)
        for host in hosts:
            (event,) = host.recoveries()
            assert (event["kind"], event["complete"], event["restored_step"] >= kept) == ("hang", True, True)
        stale = next(iter(hosts[1].pids().values()))
        assert hosts[1].launcher is not None
        stop(hosts[1].launcher.pid)
        wait_until(lambda: standby.starts(), timeout_s=60, what="the standby's start", host=hosts[0])
        hosts[1].launcher.send_signal(signal.SIGCONT)
        wait_until(lambda: not psutil.pid_exists(stale), timeout_s=60, what="the end of the stale worker")
        for host in [*hosts, standby]:
            assert host.wait() == 0, host.output
        assert {host.params_sha256() for host in [*hosts, standby]} - {None} == {reference.params_sha256()}
        assert [event["kind"] for event in hosts[0].recoveries()] == ["hang", "host_lost"]
    finally:
        cluster.close()
