"""Workers in `resilient_run.loop` keep their process when another one fails, and train as new ones would."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Host, assert_same_training, has_ended, kill, recovered, wait_until
from gated import Gate
from torch.distributed import DistNetworkError

from resilient_run.launcher.loop import may_be_others

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent / "loop_trainer.py"
STEPS = 40
LEASE_TTL_S = 3


class Job:
    """One run: its hosts, and the gate that says how many steps may be made."""

    def __init__(self, root: Path, way: str = "") -> None:
        self.cluster, self.root, self.gate = Cluster(root), root, Gate(root / "gate")
        self._script = [str(SCRIPT), str(self.gate.path), str(STEPS), *filter(None, [way])]

    def alone(self, ranks: int, *more: str) -> Host:
        """Start the run on one host."""
        host = self.cluster.host("solo")
        host.launch(["--standalone", "--nproc-per-node", str(ranks), *more], self._script)
        return host

    def launch(self, names: str, endpoint: str, nnodes: str, ranks: int = 1, *more: str) -> list[Host]:
        """Start launchers with so many ranks each."""
        conf = f"lease_ttl={LEASE_TTL_S},last_call_timeout={30 if len(names) > 1 else 0.1},join_timeout=100"
        arguments = ["--nnodes", nnodes, "--nproc-per-node", str(ranks), "--rdzv-backend", "etcd-v3", *more]
        arguments += ["--rdzv-endpoint", endpoint, "--rdzv-id", self.root.name, "--rdzv-conf", conf]
        hosts = [self.cluster.host(name) for name in names]
        for host in hosts:
            host.launch([*arguments, "--local-addr", "127.0.0.1"], self._script)
        return hosts


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    made: list[Job] = []

    def make(way: str = "") -> Job:
        made.append(Job(tmp_path, way))
        return made[-1]

    yield make
    for each in made:
        each.cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Host]]:
    """Gives the run of so many ranks that nothing happens to."""
    jobs: list[Job] = []

    @cache
    def run(ranks: int, way: str = "") -> Host:
        jobs.append(Job(tmp_path_factory.mktemp("undisturbed"), way))
        jobs[-1].gate.open(STEPS)
        host = jobs[-1].alone(ranks)
        assert host.wait() == 0, host.output
        assert not host.recoveries()
        return host

    yield run
    for each in jobs:
        each.cluster.close()


def trained_until(run: Job, host: Host, condition: Callable[[], Any], what: str) -> None:
    """Wait while training goes on, however little the gate allows: one that waits there does not come out of `loop`."""
    newest = 0.0, 0  # when a step was seen, and which

    def is_so() -> bool:
        nonlocal newest
        trained = max((line["step"] for line in host.lines if "step" in line), default=0)
        if trained != newest[1]:
            newest = time.monotonic(), trained
        elif trained == run.gate.step < STEPS and time.monotonic() > newest[0] + 1:
            run.gate.open(trained + 1)
        return bool(condition())

    wait_until(is_so, timeout_s=90, what=what, host=host)


def committed(run: Job, host: Host, step: int) -> None:
    """Wait until this step is committed, or a later one: the last that the gate allows may have found no free slot."""
    trained_until(run, host, lambda: host.committed_step() >= step, f"a commit of step {step}")


def returned(host: Host) -> list[int]:
    """Return what `loop` returned in the workers of this host."""
    return sorted(line["returned"] for line in host.lines if "returned" in line)


@pytest.mark.parametrize("way", ["", "ddp", "fsdp"])
def test_survivor_of_five_kills_keeps_its_process(
    job: Callable[[str], Job], undisturbed: Callable[..., Host], way: str
) -> None:
    run = job(way)
    host = run.alone(2)
    kept = []
    for count, step in enumerate(range(5, 30, 5), start=1):
        run.gate.open(step)
        # The last steps that the gate allows may find no free slot.
        committed(run, host, step - 4)
        # Then some are in the middle of a step whose peer is gone.
        run.gate.open(step + 5)
        victim = host.pids()[1]
        kill(victim)
        # One that waits at the gate does not come out.
        run.gate.open(step + 9)
        wait_until(lambda count=count: recovered(host) == count, timeout_s=60, what=f"recovery {count}", host=host)
        kept.append([line["kept"] for line in host.lines if "kept" in line and line["rank"] == 0][-1])
    run.gate.open(STEPS)
    assert host.wait() == 0, host.output
    pids = [[line["pid"] for line in host.lines if "pid" in line and line["rank"] == rank] for rank in (0, 1)]
    assert len(pids[0]) == len(pids[1]) == 6, host.output
    assert len(set(pids[0])) == 1, host.output
    assert len(set(pids[1])) == 6
    assert all(line["training"] for line in host.lines if "training" in line), host.lines
    assert len(set(map(tuple, kept[1:]))) == 1, f"descriptors and threads grow: {kept}"
    assert_same_training([host], undisturbed(2, way))
    assert returned(host) == [0, 1]


def test_output_of_a_worker_that_stays_goes_to_the_files_of_each_life(
    job: Callable[[str], Job], tmp_path: Path
) -> None:
    run = job("")
    host = run.alone(2, "--tee", "3", "--log-dir", str(tmp_path / "logs"))
    run.gate.open(8)
    committed(run, host, 1)
    said = re.compile(r'\[default(\d)\]:.*"pid": (\d+), "started_at": (\d+)')
    wait_until(lambda: len(said.findall(host.output)) == 2, timeout_s=60, what="a line of each rank", host=host)
    before = {rank: int(pid) for rank, pid, _ in said.findall(host.output)}
    kill(before["1"])
    run.gate.open(STEPS)
    assert host.wait() == 0, host.output
    lives = [(int(pid), int(step)) for rank, pid, step in said.findall(host.output) if rank == "0"]
    assert len(lives) == 2
    assert lives[0][0] == lives[1][0] == before["0"]
    files = sorted((tmp_path / "logs").glob("*/attempt_*/0/stdout.log"))
    texts = [file.read_text() for file in files]
    assert [f'"started_at": {step}' in text for (_, step), text in zip(lives, texts, strict=True)] == [True, True]
    assert f'"step": {STEPS}' in texts[1]


def test_killed_rank_of_two_hosts(
    job: Callable[[str], Job], undisturbed: Callable[..., Host], etcd_endpoint: str
) -> None:
    run = job("")
    hosts = run.launch("ab", etcd_endpoint, "2", 2)
    run.gate.open(8)
    committed(run, hosts[0], 1)
    before = hosts[0].pids() | hosts[1].pids()
    victim = max(hosts[1].pids())
    run.gate.open(20)
    kill(before[victim])
    for host in hosts:
        wait_until(lambda host=host: recovered(host) == 1, timeout_s=60, what="a recovery", host=host)
    run.gate.open(STEPS)
    for host in hosts:
        assert host.wait() == 0, host.output
    after = hosts[0].pids() | hosts[1].pids()
    assert [rank for rank in before if before[rank] != after[rank]] == [victim]
    assert_same_training(hosts, undisturbed(4))


@pytest.mark.parametrize("way", ["raise", "leave"])
def test_error_of_its_own_replaces_a_worker_and_no_other(
    job: Callable[[str], Job], undisturbed: Callable[..., Host], way: str
) -> None:
    """Also where the collectives of others raise because of it."""
    run = job(way)
    host = run.alone(2)
    run.gate.open(STEPS)
    assert host.wait() == 0, host.output
    assert host.output.count("LookupError: an error of this rank's own") == 1
    (event,) = host.recoveries()
    assert event["kind"] == "worker_exit"
    pids = [{line["pid"] for line in host.lines if "pid" in line and line["rank"] == rank} for rank in (0, 1)]
    assert [len(each) for each in pids] == [2, 1]
    assert_same_training([host], undisturbed(2))


def test_error_of_its_own_is_shown_where_another_host_was_first(
    job: Callable[[str], Job], etcd_endpoint: str, undisturbed: Callable[..., Host]
) -> None:
    """What other hosts make of it breaks the generation before the launcher knows that it is the worker's own."""
    run = job("leave")
    hosts = run.launch("ab", etcd_endpoint, "2")
    run.gate.open(STEPS)
    for host in hosts:
        assert host.wait() == 0, host.output
    assert sum(host.output.count("LookupError: an error of this rank's own") for host in hosts) == 1
    assert_same_training(hosts, undisturbed(2))


def test_error_before_anything_is_committed_ends_the_run(tmp_path: Path) -> None:
    script, cluster = tmp_path / "fails.py", Cluster(tmp_path)
    script.write_text(
        "import resilient_run\nfrom resilient_run import Checkpointer\n\n\ndef train():\n"
        "    with Checkpointer(seen=0) as checkpointer:\n        checkpointer.restore()\n        {}['missing']\n\n\n"
        "resilient_run.loop(train)\n"
    )
    try:
        host = cluster.host("solo")
        host.launch(["--standalone", "--nproc-per-node", "1"], [str(script)])
        assert host.wait() == 1
        assert host.output.count("KeyError: 'missing'") == 1
        assert recovered(host) == 0
    finally:
        cluster.close()


def test_without_a_step_to_restore_all_are_new(job: Callable[[str], Job], undisturbed: Callable[..., Host]) -> None:
    """The survivor's model has been trained, and nothing would make it what it was at the start."""
    run = job("")
    host = run.alone(2, "--max-restarts", "1")
    wait_until(lambda: host.starts() == 2, timeout_s=60, what="two workers", host=host)
    before = host.pids()
    kill(before[1])
    wait_until(lambda: host.starts() == 4, timeout_s=60, what="two more workers", host=host)
    assert before[0] != host.pids()[0]
    assert has_ended(before[0])
    run.gate.open(STEPS)
    assert host.wait() == 0, host.output
    assert_same_training([host], undisturbed(2))


def test_worker_that_does_not_come_out_is_replaced(job: Callable[[str], Job], undisturbed: Callable[..., Host]) -> None:
    run = job("stuck")
    host = run.alone(2, "--rr-stop-timeout", "2")
    run.gate.open(STEPS)
    wait_until(lambda: run.gate.path.with_suffix(".stuck").exists(), timeout_s=60, what="the long sleep", host=host)
    committed(run, host, 1)
    before = host.pids()
    kill(before[1])
    assert host.wait() == 0, host.output
    assert before[0] != host.pids()[0]
    assert_same_training([host], undisturbed(2))


def test_survivor_does_not_wait_for_what_the_killed_worker_has_forked(
    job: Callable[[str], Job], undisturbed: Callable[..., Host]
) -> None:
    """A worker of a DataLoader has copies of its trainer's sockets, and looks every 5 s whether that is still there."""
    run = job("loader")
    host = run.alone(2, "--rr-stop-timeout", "3")
    run.gate.open(8)
    committed(run, host, 1)
    before = host.pids()
    run.gate.open(STEPS)
    kill(before[1])
    assert host.wait() == 0, host.output
    assert before[0] == host.pids()[0], host.output
    assert_same_training([host], undisturbed(2))


def test_worker_is_killed_beside_a_restore(job: Callable[[str], Job], undisturbed: Callable[..., Host]) -> None:
    run = job("restore")
    host = run.alone(2)
    run.gate.open(8)
    committed(run, host, 1)
    before = host.pids()
    run.gate.open(STEPS)
    kill(before[1])
    assert host.wait() == 0, host.output
    assert run.gate.path.with_suffix(".restore").exists()
    assert before[0] == host.pids()[0], host.output
    assert_same_training([host], undisturbed(2))


def test_hosts_that_go_and_come_leave_the_others_their_processes(job: Callable[[str], Job], etcd_endpoint: str) -> None:
    """The survivor of a lost host goes on alone, and leaves its loop at a step when another host joins."""
    run = job("")
    elastic = ("--rr-elastic", "1")
    first, second = run.launch("ab", etcd_endpoint, "1:2", 1, *elastic)
    run.gate.open(8)
    committed(run, first, 1)
    pid = first.pids()[next(iter(first.pids()))]
    run.gate.open(16)
    second.lose()
    run.gate.open(20)
    trained_until(run, first, lambda: worlds(first) == [2, 1], "the survivor alone")
    committed(run, first, 9)
    (third,) = run.launch("c", etcd_endpoint, "1:2", 1, *elastic)
    wait_until(lambda: "this host waits" in third.output, timeout_s=90, what="a third host", host=third)
    run.gate.open(30)
    trained_until(run, first, lambda: worlds(first) == [2, 1, 2], "two ranks again")
    run.gate.open(STEPS)
    for host in (first, third):
        assert host.wait() == 0, host.output
    assert {line["pid"] for line in first.lines if "pid" in line} == {pid}, first.output
    assert {line["step"] for line in first.lines if "step" in line} == set(range(1, STEPS + 1))


def worlds(host: Host) -> list[int]:
    """Return in how many ranks each life of this host's worker was."""
    return [line["world"] for line in host.lines if "world" in line]


def threads(pid: int) -> set[str]:
    """Return the names of the threads of a process."""
    return {name.read_text().strip() for name in Path(f"/proc/{pid}/task").glob("*/comm")}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_kept_ends_with_its_launcher(
    job: Callable[[str], Job], etcd_endpoint: str, sent: signal.Signals
) -> None:
    """Its launcher waits for a place of the lost host when the signal comes."""
    run = job("")
    first, second = run.launch("ab", etcd_endpoint, "2")
    run.gate.open(8)
    committed(run, first, 1)
    worker = next(iter(first.pids().values()))
    assert "pt_gloo_runloop" in threads(worker)
    run.gate.open(STEPS)
    second.lose()
    wait_until(lambda: "restarting workers" in first.output, timeout_s=60, what="the end of the round", host=first)
    wait_until(
        lambda: "pt_gloo_runloop" not in threads(worker), timeout_s=60, what="a worker without groups", host=first
    )
    assert first.launcher is not None
    os.kill(first.launcher.pid, sent)
    assert first.wait() != 0
    wait_until(lambda: has_ended(worker), timeout_s=30, what="the end of the worker", host=first)


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (DistNetworkError("recvValue failed: Broken pipe"), True),
        (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
        (RuntimeError("no process group for expert 3"), False),
    ],
)
def test_what_a_script_reads_from_elsewhere_is_not_taken_for_another_worker(error: Exception, may_be: bool) -> None:
    assert may_be_others(error) == may_be


def test_second_loop_of_a_process_keeps_nobody(job: Callable[[str], Job], undisturbed: Callable[..., Host]) -> None:
    """A worker that is replaced begins with the first one, and would not meet those that went on in the second."""
    run = job("second")
    host = run.alone(2)
    run.gate.open(8)
    committed(run, host, 1)
    before = host.pids()
    kill(before[1])
    run.gate.open(STEPS)
    assert host.wait() == 0, host.output
    assert set(before.values()).isdisjoint(host.pids().values())
    assert_same_training([host], undisturbed(2))


def test_outside_it_is_the_function_itself() -> None:
    from resilient_run import loop

    assert "RESILIENT_LINE" not in os.environ
    assert loop(lambda: loop(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        loop(lambda: 1 // 0)
