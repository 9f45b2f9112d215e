"""`--nnodes MIN:MAX`: a run keeps the size that can restore what is committed; with nothing committed it is elastic."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from cluster import Cluster, Host, assert_same_training, wait_until

pytestmark = pytest.mark.jobs

HELD = 8
SCRIPT = [str(Path(__file__).parent / "held_trainer.py"), "16"]
WAITING = "waiting for a host; lost: "

ELASTIC_SCRIPT = """
import json, os, sys, time
from resilient_run import Checkpointer

print(json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), "world": os.environ["WORLD_SIZE"]}), flush=True)
values = Checkpointer(epoch=0) if sys.argv[1] == "attached" else None
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Host]]:
    """Gives the undisturbed run of so many ranks."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))

    @cache
    def undisturbed(world_size: int) -> Host:
        host = cluster.host(f"w{world_size}")
        host.launch(["--standalone", "--nproc-per-node", str(world_size)], SCRIPT)
        assert host.wait() == 0, host.output
        return host

    yield undisturbed
    cluster.close()


class Run:
    """One elastic run whose hosts have a rank each."""

    def __init__(self, root: Path, endpoint: str) -> None:
        self.cluster = Cluster(root)
        self._arguments = ["--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
        self._arguments += ["--rdzv-endpoint", endpoint, "--rdzv-id", root.name]

    def launch(self, names: str, nnodes: str, script: list[str], *, join_timeout_s: int = 100) -> list[Host]:
        """Start a launcher on each of these hosts; one that comes alone to a first round does not wait for others."""
        conf = f"lease_ttl=3,last_call_timeout={30 if len(names) > 1 else 0.1},join_timeout={join_timeout_s}"
        hosts = [self.cluster.host(name) for name in names]
        for host in hosts:
            host.launch(["--nnodes", nnodes, *self._arguments, "--rdzv-conf", conf], script)
        return hosts


@pytest.fixture
def run(tmp_path: Path, etcd_endpoint: str) -> Iterator[Run]:
    run = Run(tmp_path, etcd_endpoint)
    yield run
    run.cluster.close()


def test_second_host_does_not_disturb_what_it_cannot_join(
    run: Run, reference: Callable[[int], Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    script = [*SCRIPT, str(HELD), str(gate)]
    (first,) = run.launch("a", "1:2", script)
    wait_for_commit(first)
    # Only a launcher that starts as a user's does reads this.
    monkeypatch.setattr(Host, "forked", False)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (second,) = run.launch("b", "1:2", script)
    wait_until(lambda: "this host waits as a standby" in second.output, timeout_s=90, what="the standby", host=second)
    assert "no number of ranks but 1 can restore what is committed" in second.output
    wait_until(lambda: "b waits as a standby" in first.output, timeout_s=90, what="word of it", host=first)
    gate.touch()
    assert [host.wait() for host in (first, second)] == [0, 0], first.output + second.output
    assert (first.starts(), second.starts(), first.recoveries()) == (1, 0, [])
    assert not list((tmp_path / "scratch").iterdir())
    assert_same_training([first, second], reference(1))


@pytest.mark.parametrize(("names", "nnodes"), [("ab", "1:2"), pytest.param("abc", "2:3", marks=pytest.mark.nightly)])
def test_lost_host_is_waited_for(
    run: Run, reference: Callable[[int], Host], tmp_path: Path, names: str, nnodes: str
) -> None:
    gate = tmp_path / "gate"
    script = [*SCRIPT, str(HELD), str(gate)]
    hosts = run.launch(names, nnodes, script)
    wait_for_commit(*hosts)
    hosts[-1].lose()
    for host in hosts[:-1]:
        wait_until(lambda host=host: WAITING + names[-1] in host.output, timeout_s=60, what="the wait", host=host)
    gate.touch()
    late = run.launch("x", nnodes, script)
    for host in [*hosts[:-1], *late]:
        assert host.wait() == 0, host.output
    for host in hosts[:-1]:
        assert host.starts() == 2
        (event,) = host.recoveries()
        assert (event["kind"], event["restored_step"], event["complete"]) == ("host_lost", HELD, True)
    assert_same_training([*hosts, *late], reference(len(names)))


def test_run_that_nobody_joins_ends_with_the_cause_and_goes_on_later(
    run: Run, reference: Callable[[int], Host], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = [*SCRIPT, str(HELD), str(gate)]
    first, second = run.launch("ab", "1:2", script, join_timeout_s=10)
    wait_for_commit(first, second)
    second.lose()
    assert first.wait() == 1
    assert "1 of 2 ranks are ready, and no other number can restore what is committed" in first.output
    gate.touch()
    second.shm_dir.mkdir(mode=0o700)
    for host in run.launch("ab", "1:2", script):
        assert host.wait() == 0, host.output
    assert_same_training([first, second], reference(2))


@pytest.mark.parametrize("attached", ["attached", pytest.param("plain", marks=pytest.mark.nightly)])
def test_nothing_committed_is_as_elastic_as_torchrun(run: Run, tmp_path: Path, attached: str) -> None:
    """Also where a Checkpointer is attached, as long as there is nothing to lose."""
    (tmp_path / "script.py").write_text(ELASTIC_SCRIPT)
    end = tmp_path / "end"
    script = [str(tmp_path / "script.py"), attached, str(end)]
    (first,) = run.launch("a", "1:2", script)
    wait_until(lambda: worlds(first) == ["1"], timeout_s=60, what="a world of 1", host=first)
    (second,) = run.launch("b", "1:2", script)
    for host, seen in ((first, ["1", "2"]), (second, ["2"])):
        wait_until(lambda host=host, seen=seen: worlds(host) == seen, timeout_s=60, what="a world of 2", host=host)
    second.lose()
    wait_until(lambda: worlds(first) == ["1", "2", "1"], timeout_s=60, what="a world of 1 again", host=first)
    end.touch()
    assert first.wait() == 0, first.output


def wait_for_commit(*hosts: Host) -> None:
    """Wait until the step that all hosts wait after is committed, and printed."""
    wait_until(lambda: hosts[0].committed_step() == HELD, timeout_s=120, what="a commit", host=hosts[0])
    for host in hosts:
        wait_until(lambda host=host: host.reached(HELD), timeout_s=30, what="the last step", host=host)


def worlds(host: Host) -> list[str]:
    return [line["world"] for line in list(host.lines) if "world" in line]
