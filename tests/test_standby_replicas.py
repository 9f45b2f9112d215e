"""Standbys keep the replicas that the hosts of a small round cannot, and what a launcher leaves behind is served."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Host, wait_until

pytestmark = pytest.mark.jobs

HELD = 8
SCRIPT = [str(Path(__file__).parent / "held_trainer.py"), "16"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The undisturbed run."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    host = cluster.host("w")
    host.launch(["--standalone", "--nproc-per-node", "1"], SCRIPT)
    assert host.wait() == 0, host.output
    yield host
    cluster.close()


class Run:
    """A run of `--nnodes 1:3` that one host trains until it is held."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.cluster, self.gate = Cluster(root), root / "gate"
        self._arguments = ["--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
        self._arguments += ["--local-addr", "127.0.0.1", "--rdzv-endpoint", endpoint, "--rdzv-id", root.name]
        self._arguments += ["--rdzv-conf", "lease_ttl=3,last_call_timeout=0.1"]

    def launch(self, name: str, *more: str) -> Host:
        host = self.cluster.host(name)
        host.launch([*self._arguments, *more], [*SCRIPT, str(HELD), str(self.gate)])
        return host

    def train(self) -> Host:
        """Return the host that has trained alone until the script waits for the gate."""
        host = self.launch("a")
        wait_until(lambda: host.committed_step() == HELD and host.reached(HELD), timeout_s=120, what="step", host=host)
        return host

    def stand_by(self, name: str) -> Host:
        """Return another host once it holds what is committed."""
        host = self.launch(name)
        wait_until(lambda: host.holds(HELD), timeout_s=60, what=f"the replica on {name}", host=host)
        return host


@pytest.fixture
def run(tmp_path: Path, etcd_endpoint: str) -> Iterator[Run]:
    run = Run(tmp_path, etcd_endpoint)
    yield run
    run.cluster.close()


def end(host: Host) -> None:
    """SIGTERM the launcher alone."""
    assert host.launcher is not None
    host.launcher.terminate()


def end_all(host: Host) -> None:
    """SIGTERM launcher, daemon and worker together, as a batch system does."""
    assert host.launcher is not None
    for pid in (host.launcher.pid, host.daemon_pid(), *host.pids().values()):
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # one that has ended because of those before it
            os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("away", [Host.lose, end, end_all])
def test_the_only_host_that_trains_leaves_and_a_standby_goes_on(
    run: Run, reference: Host, away: Callable[[Host], None]
) -> None:
    first = run.train()
    second = run.stand_by("b")
    run.gate.touch()
    wait_until(lambda: first.reached(HELD + 2), timeout_s=60, what="two more steps", host=first)
    away(first)
    assert second.wait() == 0, second.output
    assert "protected: every step, 2 replicas on hosts a, b" in first.output
    assert_goes_on(second, reference, after=HELD + 1)


def test_standby_that_holds_the_replica_is_lost_and_another_keeps_the_next_ones(run: Run, reference: Host) -> None:
    first, second = run.train(), run.stand_by("b")
    third = run.launch("c")
    wait_until(lambda: "waits as a standby" in third.output, timeout_s=60, what="another standby", host=third)
    assert not third.holds(HELD)
    second.lose()
    wait_until(lambda: third.holds(HELD), timeout_s=60, what="the replica on c", host=third)
    run.gate.touch()
    wait_until(lambda: first.reached(HELD + 2), timeout_s=60, what="two more steps", host=first)
    first.lose()
    assert third.wait() == 0, third.output
    assert_goes_on(third, reference, after=HELD + 1)


def test_host_that_comes_late_gets_the_state_of_a_launcher_that_has_left(run: Run, reference: Host) -> None:
    first = run.train()
    end(first)
    first.wait()
    run.gate.touch()
    second = run.launch("b")
    assert second.wait() == 0, second.output
    assert_goes_on(second, reference, after=HELD)


def assert_goes_on(host: Host, reference: Host, *, after: int) -> None:
    """It has restored step `after` or a later one, and goes on from there to the end of the undisturbed run."""
    expected = {step: loss for _, step, loss in reference.steps()}
    seen = {step: loss for _, step, loss in host.steps()}
    assert min(seen) > after
    assert seen == {step: expected[step] for step in range(min(seen), max(expected) + 1)}
    assert host.params_sha256() == reference.params_sha256() is not None
