"""Whole jobs with an evaluation that takes longer than the hang limit: none is restarted for it again and again."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Host, assert_same_training, kill, stop, wait_until
from hosts import Client

pytestmark = pytest.mark.jobs

HELD = 8
SCRIPT = [str(Path(__file__).parent / "held_trainer.py"), "12"]


class Job:
    """One job of two ranks, on one host or on two."""

    def __init__(self, root: Path, endpoint: str, names: str, floor_s: float, start_s: float) -> None:
        self.cluster = Cluster(root)
        self.hosts = [self.cluster.host(name) for name in names]
        self._gate = root / "gate"
        self._config = root / "rr.toml"
        self._config.write_text(f"[detect]\nhang_floor_s = {floor_s}\nhang_start_s = {start_s}\nhang_min_steps = 3\n")
        self._arguments = ["--nnodes", str(len(names)), "--nproc-per-node", str(2 // len(names))]
        self._arguments += ["--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1", "--rdzv-endpoint", endpoint]
        self._arguments += ["--rdzv-id", root.name, "--rr-config", str(self._config)]

    def launch(self, how: str) -> None:
        """Start the job, which evaluates once `HELD` steps are done."""
        for host in self.hosts:
            host.launch(self._arguments, [*SCRIPT, str(HELD), str(self._gate), how])

    def end(self, reference: Host) -> None:
        """Let the evaluation end, and expect the same training as undisturbed."""
        self._gate.touch()
        for host in self.hosts:
            assert host.wait() == 0, host.output
        assert_same_training(self.hosts, reference)

    def status(self, host: Host) -> dict[str, Any]:
        """Return what the daemon of a host shows of the job."""
        client = Client(host.run_dir / "resilientd.sock")
        try:
            (job,) = client.request("status")["jobs"]
        finally:
            client.close()
        return job

    def wait_for_hang(self, severity: str, host: Host) -> str:
        """Return the message of a hang of that severity once the daemon of a host sees it."""

        def find() -> str | None:
            seen = self.status(host)["observations"]
            found = (item["message"] for item in seen if (item["kind"], item["severity"]) == ("hang", severity))
            return next(found, None)

        message: str = wait_until(find, timeout_s=240, what=f"a hang ({severity})", host=host, pause_s=0.1)
        return message


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The undisturbed run."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    host = cluster.host("solo")
    host.launch(["--standalone", "--nproc-per-node", "2"], SCRIPT)
    assert host.wait() == 0, host.output
    yield host
    cluster.close()


@pytest.fixture
def job(tmp_path: Path, etcd_endpoint: str, request: pytest.FixtureRequest) -> Iterator[Job]:
    names, floor_s, start_s = getattr(request, "param", ("a", 3.0, 20.0))
    job = Job(tmp_path, etcd_endpoint, names, floor_s, start_s)
    yield job
    job.cluster.close()


@pytest.mark.parametrize(
    ("job", "how", "why"),
    [
        (("a", 3.0, 60.0), "pause", "pauses"),
        (("a", 3.0, 60.0), "burn", "processes take CPU time"),
        (("a", 8.0, 60.0), "sum", "collectives go on"),
        (("ab", 3.0, 60.0), "zero", "a rank of another host pauses"),
    ],
    indirect=["job"],
)
def test_long_evaluation_is_no_hang(job: Job, reference: Host, how: str, why: str) -> None:
    job.launch(how)
    for host in job.hosts:
        wait_until(lambda host=host: host.reached(HELD), timeout_s=240, what="the evaluation", host=host)
    by_rank = sorted(job.hosts, key=lambda host: min(host.pids()))
    assert why in job.wait_for_hang("info", by_rank[-1])
    job.end(reference)
    assert [host.recoveries() for host in job.hosts] == [[] for _ in job.hosts]


def test_pause_survives_a_daemon(job: Job, reference: Host) -> None:
    (host,) = job.hosts
    job.launch("pause")
    wait_until(lambda: host.committed_step() == HELD, timeout_s=240, what="the evaluation", host=host)
    daemon_pid = host.daemon_pid()
    assert daemon_pid is not None
    kill(daemon_pid)
    wait_until(lambda: host.daemon_pid() not in (None, daemon_pid), timeout_s=60, what="another daemon", host=host)
    # It answers, and has more of the job than its slots.
    wait_until(lambda: host.committed_step() == HELD, timeout_s=60, what="the job", host=host)
    assert "pauses" in job.wait_for_hang("info", host)
    job.end(reference)
    assert host.recoveries() == []


def test_process_that_is_stopped_in_a_pause_is_replaced(job: Job, reference: Host) -> None:
    (host,) = job.hosts
    job.launch("pause")
    wait_until(lambda: host.committed_step() == HELD, timeout_s=240, what="the evaluation", host=host)
    wait_until(lambda: [done for _, done, _ in host.steps()].count(HELD) == 2, timeout_s=30, what="both", host=host)
    before = host.pids()
    stop(before[1])
    wait_until(lambda: set(host.pids().values()).isdisjoint(before.values()), timeout_s=240, what="others", host=host)
    job.end(reference)
    (event,) = host.recoveries()
    assert (event["kind"], event["complete"]) == ("hang", True)


@pytest.mark.parametrize("job", [("a", 3.0, 6.0)], indirect=True)
def test_what_looks_like_a_hang_twice_is_let_be(job: Job, reference: Host) -> None:
    """It sleeps for longer than the limit, without a word: a restart is tried, but only one.

    On a busy machine its start may take so long, too, and is tried again.
    """
    (host,) = job.hosts
    job.launch("sleep")
    wait_until(lambda: host.reached(HELD), timeout_s=240, what="the evaluation", host=host)

    def overlooked() -> list[dict[str, Any]]:
        return [entry for entry in job.status(host)["root"]["decisions"] if entry["kind"] == "overlook"]

    (entry,) = wait_until(overlooked, timeout_s=240, what="the decision", host=host, pause_s=0.1)
    found = re.search(rf"generation (\d+) stands still at step {HELD} as generation (\d+) did", entry["reason"])
    assert found, entry
    assert int(found[1]) == int(found[2]) + 1
    assert "Checkpointer.pause()" in entry["reason"]
    job.wait_for_hang("fail", host)
    assert os.path.exists(f"/proc/{host.pids()[0]}")
    job.end(reference)
    (event,) = [event for event in host.recoveries() if event["restored_step"] == HELD]
    assert (event["kind"], event["complete"]) == ("hang", True)
