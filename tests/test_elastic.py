"""`--nnodes MIN:MAX`: a run keeps the size that can restore what is committed; with nothing committed it is elastic."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import elastic_trainer
import pytest
from cluster import Cluster, Host, assert_same_training, wait_until

pytestmark = pytest.mark.jobs

RESILIENTCTL = str(Path(sys.executable).with_name("resilientctl"))
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
        self.cluster, self.root = Cluster(root), root
        self._arguments = ["--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
        self._arguments += ["--rdzv-endpoint", endpoint, "--rdzv-id", root.name]

    def launch(
        self, names: str, nnodes: str, script: list[str], *more: str, join_timeout_s: int = 100, forked: bool = True
    ) -> list[Host]:
        """Start a launcher on each of these hosts; one that comes alone to a first round does not wait for others."""
        conf = f"lease_ttl=3,last_call_timeout={30 if len(names) > 1 else 0.1},join_timeout={join_timeout_s}"
        hosts = [self.cluster.host(name) for name in names]
        for host in hosts:
            host.forked = forked
            host.launch(["--nnodes", nnodes, *self._arguments, "--rdzv-conf", conf, *more], script)
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
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (second,) = run.launch("b", "1:2", script)
    wait_until(lambda: "this host waits as a standby" in second.output, timeout_s=90, what="the standby", host=second)
    assert "no number of ranks but 1 can restore what is committed" in second.output
    wait_until(lambda: "b waits as a standby" in first.output, timeout_s=90, what="word of it", host=first)
    gate.touch()
    assert [host.wait() for host in (first, second)] == [0, 0], first.output + second.output
    assert (first.starts(), second.starts(), first.recoveries()) == (1, 0, [])
    # torch makes a cache of its own where `torch._dynamo` is imported, which a process does when nobody waits for it.
    assert [path.name for path in (tmp_path / "scratch").iterdir() if not path.name.startswith("torchinductor_")] == []
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


class Elastic:
    """A run with --rr-elastic whose steps the test allows."""

    def __init__(self, run: Run, *more: str, steps: int = 20) -> None:
        self._run, self._more = run, ("--rr-elastic", "1", *more)
        self._gate = run.root / "gate"
        self._script = [str(Path(elastic_trainer.__file__)), str(steps), str(self._gate)]
        self.steps = steps
        self.open(0)

    def open(self, step: int) -> None:
        """Let every rank train up to `step`."""
        new = self._gate.with_suffix(".new")
        new.write_text(str(step))
        new.rename(self._gate)

    def launch(self, names: str, nnodes: str, *, forked: bool = True) -> list[Host]:
        return self._run.launch(names, nnodes, self._script, *self._more, forked=forked)

    def train(self, step: int, hosts: list[Host], ranks: int) -> None:
        """Wait until these hosts have made `step`, which is allowed now, in so many ranks."""
        for host in hosts:
            wait_until(lambda host=host: worlds(host)[-1:] == [ranks], timeout_s=90, what=f"{ranks} ranks", host=host)
        self.open(step)
        outputs = lambda: f"step {step}\n" + "\n".join(f"== {host.name}\n{host.output}" for host in hosts)  # noqa: E731
        for host in hosts:
            wait_until(lambda host=host: made(host).get(step) == ranks, timeout_s=90, what=outputs)

    def assert_trained(self, hosts: list[Host], worlds_of_steps: dict[int, int]) -> None:
        """Let all end, and compare with the same steps in one process."""
        self.open(self.steps)
        for host in hosts:
            assert host.wait() == 0, host.output
            assert made(host).items() <= worlds_of_steps.items()
            samples = {line["step"]: line["samples"] for line in host.lines if "of" in line}
            assert all(count == step * elastic_trainer.SAMPLES for step, count in samples.items())
        assert {host.params_sha256() for host in hosts} == {elastic_trainer.trained(worlds_of_steps)}


def test_elastic_run_goes_on_without_a_lost_host_and_grows_when_it_is_back(run: Run) -> None:
    elastic = Elastic(run)
    first, second, third = elastic.launch("abc", "1:3")
    elastic.train(8, [first, second, third], 3)
    third.lose()
    elastic.train(12, [first, second], 2)
    second.lose()
    elastic.train(14, [first], 1)
    for host in (second, third):
        host.shm_dir.mkdir(mode=0o700)
    back = elastic.launch("bc", "1:3")
    elastic.train(16, [first, *back], 3)
    sizes = {8: 3, 12: 2, 14: 1, elastic.steps: 3}
    of_steps = {step: next(sizes[end] for end in sizes if step <= end) for step in range(1, elastic.steps + 1)}
    elastic.assert_trained([first, *back], of_steps)
    assert "goes on with fewer after 1 s without a host; lost: c" in first.output


def test_a_step_of_another_number_of_ranks_is_not_kept_as_an_older_one(
    run: Run, etcd_endpoint: str, tmp_path: Path
) -> None:
    """All hosts hold it of all ranks that are left, but the rest of it is lost or given up."""
    (tmp_path / "rr.toml").write_text("[replication]\nkeep = 4\n")
    elastic = Elastic(run, "--rr-replicas", "3", "--rr-config", str(tmp_path / "rr.toml"))
    first, second, third = elastic.launch("abc", "2:3")
    elastic.train(6, [first, second, third], 3)
    third.lose()
    elastic.train(9, [first, second], 2)
    command = [RESILIENTCTL, "rollback", run.root.name, "--etcd-endpoint", etcd_endpoint, "--to", "0"]
    environ = {**os.environ, "RESILIENT_RUN_DIR": str(first.run_dir)}
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environ).stderr
    assert "; these are: 7" in told
    elastic.assert_trained([first, second], {step: 3 if step < 7 else 2 for step in range(1, elastic.steps + 1)})


@pytest.mark.parametrize("how", ["drain", "SIGTERM"])
def test_host_that_leaves_on_purpose_is_not_waited_for(run: Run, etcd_endpoint: str, how: str) -> None:
    elastic = Elastic(run, "--rr-elastic", "100", steps=300)
    first, second = elastic.launch("ab", "1:2")
    elastic.train(6, [first, second], 2)
    if how == "drain":
        options = ["--run-id", run.root.name, "--etcd-endpoint", etcd_endpoint]
        drained = subprocess.Popen([RESILIENTCTL, "drain", "b", *options], stdout=subprocess.PIPE, text=True)
        step = 6
        while worlds(first)[-1:] != [1]:  # it happens right after a commit
            elastic.open(step := step + 1)
            wait_until(lambda step=step: step in made(first) or worlds(first)[-1:] == [1], timeout_s=60, what="a step")
            time.sleep(0.1)
    else:
        assert second.launcher is not None
        second.launcher.terminate()
        assert second.wait() != 0
    elastic.train(max(made(first)) + 2, [first], 1)
    if how == "drain":
        out, _ = drained.communicate(timeout=30)
        assert out.startswith("host b is drained: generation 2 runs on a and has committed step "), out
        assert second.launcher is not None
        second.launcher.terminate()
    elastic.open(elastic.steps)
    assert first.wait() == 0, first.output
    # A worker that is drained right after a commit may not have said any more that it made the step.
    begun = {line["begun"]: line["by"] for line in first.lines if "begun" in line}
    elastic.assert_trained([first], begun)
    assert set(begun) == set(range(1, elastic.steps + 1))
    (event,) = first.recoveries()
    assert (event["kind"], event["resized"]) == ("membership", [2, 1])
    assert event["steps_lost"] <= 1
    assert ("host b is drained" if how == "drain" else "host b leaves: its launcher got SIGTERM") in event["cause"]


def made(host: Host) -> dict[int, int]:
    """Return in how many ranks each step was made last."""
    return {line["step"]: line["of"] for line in list(host.lines) if "of" in line}


def wait_for_commit(*hosts: Host) -> None:
    """Wait until the step that all hosts wait after is committed, and printed."""
    wait_until(lambda: hosts[0].committed_step() == HELD, timeout_s=120, what="a commit", host=hosts[0])
    for host in hosts:
        wait_until(lambda host=host: host.reached(HELD), timeout_s=30, what="the last step", host=host)


def worlds(host: Host) -> list[str | int]:
    return [line["world"] for line in list(host.lines) if "world" in line]
