"""`resilient-inject` on real jobs: each kind of fault strikes what it names, nothing else, and only where it may."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result
from cluster import ENDLESS, Cluster, Host, wait_until

from resilient_run.launcher.inject.cli import resilient_inject

pytestmark = pytest.mark.jobs


def inject(*arguments: str, endpoint: str, run_id: str) -> Result:
    """Run the command and return how it ended."""
    return CliRunner().invoke(resilient_inject, [*arguments, "--run-id", run_id, "--rdzv-endpoint", endpoint])


class Job:
    """A job of single-worker hosts, and the command on it."""

    def __init__(self, cluster: Cluster, endpoint: str, names: str, *options: str) -> None:
        self.cluster, self.endpoint = cluster, endpoint
        self.arguments = ["--nnodes", str(len(names)), "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
        self.arguments += ["--rdzv-endpoint", endpoint, "--rdzv-id", cluster.name, "--rdzv-conf", "lease_ttl=3"]
        self.arguments += ["--local-addr", "127.0.0.1", *options]
        self.hosts = {name: self.launch(name) for name in names}
        self.kept = 0

    def launch(self, name: str) -> Host:
        host = self.cluster.host(name)
        host.launch(self.arguments, ENDLESS)
        return host

    def step(self) -> int:
        """Return the newest step that any rank completed."""
        return max((step for host in self.cluster.hosts.values() for _, step, _ in host.steps()), default=0)

    def trains_on(self, steps: int = 3) -> None:
        """Wait until some more steps are completed."""
        wanted = self.step() + steps
        wait_until(lambda: self.step() >= wanted, timeout_s=60, what=f"step {wanted}", host=self.hosts["a"])

    def host_of(self, rank: int) -> Host:
        """Return the host on which `rank` announced itself last."""
        hosts = [host for host in self.cluster.hosts.values() if rank in host.pids()]
        return max(hosts, key=lambda host: max((step for _, step, _ in host.steps()), default=0))

    def fault(self, kind: str, *options: str) -> dict[str, Any]:
        """Let a fault strike and return its outcome."""
        self.kept = max(host.committed_step() for host in self.cluster.hosts.values())
        done = inject("fault", kind, *options, "--json", endpoint=self.endpoint, run_id=self.cluster.name)
        assert done.exit_code == 0, done.output
        outcome: dict[str, Any] = json.loads(done.stdout)
        return outcome

    def refused(self, kind: str, *options: str) -> str:
        """Return why a fault is refused."""
        done = inject("fault", kind, *options, endpoint=self.endpoint, run_id=self.cluster.name)
        assert done.exit_code == 1, done.output
        return done.output

    def generation(self) -> int:
        """Return the newest generation that a host has recovered to."""
        events = [event for host in self.cluster.hosts.values() for event in host.recoveries()]
        return max((event["generation"] for event in events), default=1)

    def recovers(self, generation: int, *kinds: str) -> dict[str, Any]:
        """Wait for the recovery that follows `generation`, check it, and return it."""

        def found() -> dict[str, Any] | None:
            events = [event for host in self.cluster.hosts.values() for event in host.recoveries()]
            return next((event for event in events if event["generation"] > generation and event["complete"]), None)

        event: dict[str, Any] = wait_until(found, timeout_s=60, what=f"recovery from {kinds}", host=self.hosts["a"])
        assert event["kind"] in kinds, event
        assert event["restored_step"] >= self.kept, event
        self.trains_on()
        return event


def test_faults_of_ranks_and_replicas(cluster: Cluster, etcd_endpoint: str) -> None:
    job = Job(cluster, etcd_endpoint, "ab", "--rr-allow-injection")
    wait_until(lambda: job.step() >= 5, timeout_s=60, what="step 5", host=job.hosts["a"])

    victim = job.host_of(1).pids()[1]
    outcome = job.fault("kill-rank", "--rank", "1", "--at-step", "8")
    assert outcome["step"] >= 8
    assert outcome["what"] == f"SIGKILL to rank 1 (pid {victim})"
    assert "SIGKILL" in job.recovers(1, "worker_exit")["cause"]

    job.fault("raise", "--rank", "0")
    job.recovers(2, "worker_exit")
    assert "resilient-inject ordered this step to fail" in job.host_of(0).output

    job.fault("hang-rank", "--rank", "0", "-p", "duration_s=0.5")
    job.fault("stop-rank", "--rank", "1", "-p", "duration_s=0.5")
    job.trains_on()
    assert job.generation() == 3

    outcome = job.fault("corrupt-replica", "--rank", "0", "-p", "kill=true")
    assert outcome["what"].startswith("bit-flip in the replica of rank 0, generation 3")
    job.recovers(3, "worker_exit")
    assert "no process" in job.refused("kill-etcd", "--host", "a", "-p", "pid=999999999")
    assert "no host runs rank 9" in job.refused("kill-rank", "--rank", "9")


@pytest.mark.nightly
def test_faults_of_hosts(cluster: Cluster, etcd_endpoint: str) -> None:
    """A standby comes in for each host that goes; a host that was only silent comes back as one."""
    job = Job(cluster, etcd_endpoint, "ab", "--rr-allow-injection")
    wait_until(lambda: job.step() >= 5, timeout_s=60, what="step 5", host=job.hosts["a"])
    daemon = job.hosts["b"].daemon_pid()
    job.fault("kill-daemon", "--host", "b")
    wait_until(lambda: job.hosts["b"].daemon_pid() not in (None, daemon), timeout_s=60, what="a new daemon")
    job.fault("fill-memory", "--host", "b", "-p", "size_bytes=1000000", "-p", "duration_s=0.2")
    job.trains_on()
    assert job.generation() == 1

    standby = job.launch("c")
    lost, gone = job.host_of(1), job.host_of(1).daemon_pid()
    wait_until(lambda: standby.daemon_pid() is not None, timeout_s=60, what="the standby")
    outcome = job.fault("lose-host", "--host", lost.name)
    assert "SIGKILL to the launcher and all its workers and to the daemon" in outcome["what"]
    # Its peer may see the broken connection before etcd sees the expired lease.
    job.recovers(1, "host_lost", "worker_exit")
    assert lost.launcher is not None
    assert lost.launcher.wait(30) != 0
    assert gone is not None
    assert not psutil.pid_exists(gone)
    assert not list(lost.shm_dir.glob("*/"))
    assert not any(psutil.pid_exists(pid) for pid in lost.pids().values())

    job.launch(lost.name)
    generation = job.generation()
    job.fault("delay-heartbeats", "--rank", "0", "-p", "duration_s=7")
    job.recovers(generation, "host_lost")


def test_only_hosts_that_allow_faults_are_struck(cluster: Cluster, etcd_endpoint: str, tmp_path: Path) -> None:
    job = Job(cluster, etcd_endpoint, "a")
    wait_until(lambda: job.step() >= 2, timeout_s=60, what="step 2", host=job.hosts["a"])
    refusal = "does not allow faults on a: start the launchers there with --rr-allow-injection"
    assert refusal in job.refused("kill-rank", "--rank", "0")
    plan = tmp_path / "campaign.toml"
    plan.write_text('faults = 1\nmtbf_steps = 1\n[[kinds]]\nkind = "kill-rank"\n')
    campaign = inject("campaign", str(plan), endpoint=etcd_endpoint, run_id=cluster.name)
    assert (campaign.exit_code, refusal in campaign.output) == (1, True), campaign.output
    other = inject("fault", "kill-rank", "--rank", "0", endpoint=etcd_endpoint, run_id="nobody")
    assert (other.exit_code, "there is no run 'nobody'" in other.output) == (1, True)
    standby = cluster.host("b")
    standby.launch([*job.arguments, "--rr-allow-injection"], ENDLESS, LOGLEVEL="INFO")
    wait_until(lambda: "this host waits as a standby" in standby.output, timeout_s=60, what="a standby", host=standby)
    daemon = wait_until(standby.daemon_pid, timeout_s=60, what="its daemon", host=standby)
    job.fault("kill-daemon", "--host", "b")
    wait_until(lambda: standby.daemon_pid() not in (None, daemon), timeout_s=60, what="a new daemon", host=standby)
    job.trains_on()
    assert job.generation() == 1
