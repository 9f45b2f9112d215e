"""Floods, and tables of files and processes that are full: real daemons with real jobs, which go on and recover after.

Every job ends bit-identical to the undisturbed run although a worker is killed after, or in the middle of, the stress.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, Host, kill, recovered, wait_until
from flood import Flood
from gated import STEPS, Gate, assert_undisturbed, train_to
from hosts import Client, Hosts
from netlab import unavailable
from peer_talk import dial, hello, identity_of, peer_address, was_closed

from resilient_run.ckpt.format import wire
from resilient_run.daemon.base.crowd import Crowd
from resilient_run.daemon.base.logs import RepeatFilter
from resilient_run.daemon.base.supervise import Supervisor

pytestmark = pytest.mark.jobs

MIB = 1 << 20
PIDS = Path("/sys/fs/cgroup/pids")
FEW_FILES = ("prlimit", "--nofile=1024:4096")
"""What most systems give a process."""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open thousands of connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 8000:
        pytest.skip(f"needs 8000 open files, the hard limit is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def launch_pair(cluster: Cluster, gate: Gate, endpoint: str, *extra: str, prefix: tuple[str, ...] = ()) -> list[Host]:
    """Start a job of two hosts with a rank each, and let it make the first steps."""
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint]
    arguments += ["--rdzv-id", cluster.name, "--local-addr", "127.0.0.1", *extra]
    pair = [cluster.host(name) for name in "ab"]
    for host in pair:
        host.prefix = prefix
        host.launch(arguments, gate.script)
    for host in pair:
        wait_until(lambda host=host: host.starts(), timeout_s=120, what="a trainer", host=host)
    train_to(3, gate, pair, pair[0].run_dir / "resilientd.sock")
    return pair


def daemon_of(host: Host) -> psutil.Process:
    pid = host.daemon_pid()
    assert pid is not None
    return psutil.Process(pid)


def peer_port(daemon: psutil.Process) -> int:
    return next(
        found.laddr.port
        for found in daemon.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.ip == "127.0.0.1"
    )


def watermark(client: Client) -> int:
    (job,) = client.request("status")["jobs"]
    assert job["failure"] is None
    return int((job["watermark"] or {"step": 0})["step"])


def advance(gate: Gate) -> None:
    """Let the job make a step more, but leave some for what follows."""
    gate.open(min(gate.step + 1, STEPS - 20))


def wait_for_commits(client: Client, gate: Gate, *, more: int = 5) -> None:
    """Let the job train until commits have moved on by `more` steps; ask through a connection that is open already."""
    wanted = watermark(client) + more

    def committed() -> bool:
        advance(gate)
        return watermark(client) >= wanted

    wait_until(committed, timeout_s=60, what=lambda: f"commit {wanted}, at step {gate.step}", pause_s=0.1)


def status_text(host: Host) -> str:
    code = "from resilient_run.daemon.ctl.cli import resilientctl; resilientctl()"
    command = [sys.executable, "-P", "-c", code, "--run-dir", str(host.run_dir), "status"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def kill_and_end(pair: list[Host], gate: Gate) -> None:
    """Kill a worker; the run recovers from what was committed and ends as if nothing had happened."""
    before, kept = recovered(pair[0]), pair[0].committed_step()
    kill(next(iter(pair[1].pids().values())))
    gate.open(STEPS - 10)
    wait_until(lambda: recovered(pair[0]) > before, timeout_s=60, what="the recovery", host=pair[0])
    gate.open(STEPS)
    for host in pair:
        assert host.wait(200) == 0, host.output
    assert_undisturbed(pair)
    for event in itertools.chain.from_iterable(host.recoveries() for host in pair):
        assert event["restored_step"] >= kept, event


@pytest.mark.usefixtures("many_files")
def test_silent_connections_keep_nobody_out(cluster: Cluster, gate: Gate, etcd_endpoint: str) -> None:
    """2000 that say nothing at the peers' port of each host, ever new ones: commits and a recovery meanwhile."""
    pair = launch_pair(cluster, gate, etcd_endpoint, prefix=FEW_FILES)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(Client(pair[0].run_dir / "resilientd.sock")))
        client.request("status")
        for host in pair:
            stack.enter_context(Flood(socket.AF_INET, ("127.0.0.1", peer_port(daemon_of(host))), count=2000))
        wait_for_commits(client, gate)
        kill_and_end(pair, gate)
    for host in pair:
        assert (host.run_dir / "resilientd.log").stat().st_size < 400_000


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("tls", [False, True], ids=["silent", "handshakes"])
def test_a_flood_from_everywhere_holds_no_recovery_up(
    cluster: Cluster, gate: Gate, etcd_endpoint: str, tls: bool
) -> None:
    """500 at the peers' port of each host, each from an address of its own; 500 at its socket ask and never read."""
    pair = launch_pair(cluster, gate, etcd_endpoint, prefix=FEW_FILES)
    everywhere = [f"127.1.{high}.{low}" for high in range(2) for low in range(1, 251)]
    named = wire.encode(hello(cluster.name)) if tls else b""
    with contextlib.ExitStack() as stack:
        for host in pair:
            address = ("127.0.0.1", peer_port(daemon_of(host)))
            stack.enter_context(Flood(socket.AF_INET, address, count=500, data=named, sources=everywhere))
            asking = wire.encode({"id": 1, "op": "status"}) * 20
            path = str(host.run_dir / "resilientd.sock")
            stack.enter_context(Flood(socket.AF_UNIX, path, count=500, data=asking))
        kill_and_end(pair, gate)


def test_a_full_table_of_files_is_survived(cluster: Cluster, gate: Gate, etcd_endpoint: str, tmp_path: Path) -> None:
    """No daemon can open anything any more, not even /proc; samplers fail, are shown, and run again afterwards."""
    config = tmp_path / "config.toml"
    config.write_text("[detect]\nsample_s = 0.2\n")
    pair = launch_pair(cluster, gate, etcd_endpoint, "--rr-config", str(config))
    clients = [Client(host.run_dir / "resilientd.sock") for host in pair]
    limits = {}
    for host, client in zip(pair, clients, strict=True):
        client.request("status")
        daemon = daemon_of(host)
        limits[daemon.pid] = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        # Up to the lowest number that is free: the limit is one of numbers, and some files are open for a moment only.
        kept = set(range(1000))
        for _ in range(20):
            kept &= {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}
            time.sleep(0.05)
        free = min(set(range(1000)) - kept)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (free, limits[daemon.pid][1]))

    def failed(client: Client) -> dict[str, dict[str, Any]]:
        (job,) = client.request("status")["jobs"]
        assert job["failure"] is None
        return {task["task"]: task for task in job["tasks"]}

    for client, host in zip(clients, pair, strict=True):
        wait_until(
            lambda client=client: "watch host" in failed(client), timeout_s=60, what="a failed sampler", host=host
        )
        assert "Too many open files" in failed(client)["watch host"]["error"]
    for pid, before in limits.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for client, host in zip(clients, pair, strict=True):
        assert "task watch host: failed" in status_text(host)
        wait_until(
            lambda client=client: failed(client)["watch host"]["running"], timeout_s=60, what="a sampler", host=host
        )
    wait_for_commits(clients[0], gate)
    assert "; it runs" in status_text(pair[0])
    for client in clients:
        client.close()
    kill_and_end(pair, gate)


def test_a_full_process_table_is_survived(cluster: Cluster, gate: Gate, etcd_endpoint: str, tmp_path: Path) -> None:
    """No daemon can start a thread any more, of which a persistent tier takes one for every call."""
    group = PIDS / f"rr-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").read_text()
    except OSError as error:
        pytest.skip(f"needs the right to limit processes below {PIDS}: {error}")
    opened = contextlib.ExitStack()
    try:
        config = tmp_path / "config.toml"
        config.write_text("[persist]\nevery_steps = 2\nevery_s = 0\n")
        pair = launch_pair(
            cluster, gate, etcd_endpoint, "--rr-persist", str(tmp_path / "tier"), "--rr-config", str(config)
        )
        clients = [opened.enter_context(contextlib.closing(Client(host.run_dir / "resilientd.sock"))) for host in pair]
        (group / "pids.max").write_text("1")
        for host in pair:
            (group / "cgroup.procs").write_text(str(host.daemon_pid()))

        def shown() -> list[Any]:
            return [client.request("status")["jobs"][0] for client in clients]

        def refused() -> bool:
            advance(gate)  # a tier is written to for a new step only
            return any("thread" in str(job["persist"]["error"]) for job in shown())

        wait_until(refused, timeout_s=60, what=lambda: f"a thread that cannot be started: {shown()}", pause_s=0.5)
        wait_for_commits(clients[0], gate)
        (group / "pids.max").write_text("max")
        published = set(published_steps(tmp_path / "tier"))

        def published_again() -> bool:
            advance(gate)
            return bool(set(published_steps(tmp_path / "tier")) - published)

        wait_until(published_again, timeout_s=60, what="a new publication", pause_s=0.1)
        opened.close()
        kill_and_end(pair, gate)
    finally:
        opened.close()
        cluster.close()
        wait_until(lambda: not (group / "cgroup.procs").read_text(), timeout_s=30, what="the daemons' end")
        group.rmdir()


def published_steps(tier: Path) -> list[str]:
    return [manifest.parent.name for manifest in tier.glob("*/*/manifest.json")]


ASK = {"id": 7, "op": "have", "rank": 0, "generation": 1, "step": 1}


@pytest.mark.usefixtures("many_files")
def test_incomplete_frames_take_no_memory(hosts: Hosts) -> None:
    """600 that announce 1 MiB and send almost all of it, to each socket; whoever speaks well is answered meanwhile."""
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    host = hosts["a"]
    assert host.process is not None
    daemon = psutil.Process(host.process.pid)
    before_bytes = daemon.memory_info().rss
    announced = struct.pack(">I", MIB) + b'{"op":"' + b"x" * (MIB - 100)
    slow = struct.pack(">I", 4000) + b'{"op":"'
    with contextlib.ExitStack() as stack:
        for family, address in ((socket.AF_INET, peer_address(hosts, "a")), (socket.AF_UNIX, str(host.socket_path))):
            for data, count in ((announced, 600), (slow, 1500)):
                stack.enter_context(Flood(family, address, count=count, data=data))
        with dial(peer_address(hosts, "a"), identity_of(hosts), ASK) as peer:
            answer = wire.recv_message(peer)
        assert answer is not None
        assert answer["ok"]
        assert host.status()["jobs"][0]["failure"] is None
        assert daemon.memory_info().rss - before_bytes < 48 * MIB
        hosts.commit([trainer], [2, 3])
    assert "Traceback" not in host.log


@pytest.mark.usefixtures("many_files")
def test_guests_at_the_unix_socket_make_room(hosts: Hosts) -> None:
    """2000 connections that asked for something once and stay: the launcher's and the trainer's are not touched."""
    (trainer,) = hosts.run("a")
    host = hosts["a"]
    ask = wire.encode({"id": 1, "op": "status"})
    with Flood(socket.AF_UNIX, str(host.socket_path), count=2000, data=ask):
        hosts.commit([trainer], [1, 2])
        assert host.launcher is not None
        assert host.launcher.request("job_status", run_id=hosts.run_id)["attached"]
        assert host.process is not None
        assert psutil.Process(host.process.pid).num_fds() < 1000


def test_a_host_has_no_more_connections_than_it_needs(hosts: Hosts) -> None:
    """Whoever knows the secret opens one after the other: the oldest are closed, the newest are served."""
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    with ExitStack() as stack:
        socks = []
        for _ in range(20):  # each has its answer before the next comes: else the daemon may seat them in any order
            socks.append(stack.enter_context(dial(peer_address(hosts, "a"), identity_of(hosts), ASK)))
            assert wire.recv_message(socks[-1]) is not None
        assert all(map(was_closed, socks[:4]))
        for sock in socks[4:]:
            sock.sendall(wire.encode(ASK))
            assert wire.recv_message(sock) is not None


def test_the_largest_source_loses_its_oldest() -> None:
    crowd: Crowd[str] = Crowd(per_source=3, in_all=5, may_go=lambda name: name != "a1")
    assert [crowd.add(name, name[0]) for name in ("a1", "a2", "a3", "b1", "b2")] == [None] * 5
    assert crowd.add("c1", "c") == "a2"
    assert crowd.add("a4", "a") == "a3"
    assert crowd.add("a5", "a") == "a4"
    crowd.discard("b1")
    assert crowd.add("c2", "c") is None
    assert len(crowd) == 5
    only: Crowd[str] = Crowd(per_source=1, in_all=1, may_go=lambda name: False)
    assert only.add("x", 0) is None
    assert only.add("y", 0) == "y"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_run.daemon.base.supervise._PAUSE_S", (0.001, 0.002))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread"), MemoryError()]
)
def test_a_task_that_fails_is_logged_once_and_runs_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor("run 'x'")
    attempts = itertools.count(1)

    async def sample() -> None:
        if next(attempts) < 5:
            raise error

    asyncio.run(supervisor.keep("sampler", sample, essential=True))
    (told,) = supervisor.describe()
    assert (told["task"], told["failures"], told["running"]) == ("sampler", 4, True)
    assert type(error).__name__ in told["error"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "runs again" in caplog.messages[1]


def test_a_flood_of_messages_becomes_a_number(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    repeats, logger = RepeatFilter(clock=lambda: now_s[0]), logging.getLogger("resilient_run.daemon.test")
    caplog.handler.addFilter(repeats)
    try:
        for number in range(5000):
            logger.warning("closing the connection of peer %d", number)
        logger.warning("something else")
        assert len(caplog.messages) == 21
        repeats.report()
        assert len(caplog.messages) == 21
        now_s[0] = 11.0
        repeats.report()
        assert "4980 more messages like 'closing the connection of peer %d'" in caplog.messages[21]
        logger.warning("closing the connection of peer %d", 0)
        assert len(caplog.messages) == 23
    finally:
        caplog.handler.removeFilter(repeats)


CAPTURE_STALL = ("capture_stall.py", "--mb", "16", "--rounds", "10000", "--contender", "resilient-run, 2 hosts")
COLLECTIVES = ("collectives.py", "--ranks", "2", "--repeats", "100000")


@pytest.mark.parametrize(
    ("arguments", "number", "daemons", "workers"),
    [
        pytest.param(CAPTURE_STALL, signal.SIGTERM, 2, 4, id="while it trains", marks=pytest.mark.nightly),
        pytest.param(CAPTURE_STALL, signal.SIGHUP, 1, 0, id="while its first daemon starts"),
        pytest.param(
            COLLECTIVES,
            signal.SIGTERM,
            0,
            2,
            id="in a lab",
            marks=[pytest.mark.lab, pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))],
        ),
    ],
)
def test_a_benchmark_that_is_stopped_leaves_no_process(
    tmp_path: Path, arguments: tuple[str, ...], number: signal.Signals, daemons: int, workers: int
) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / arguments[0]
    command = [sys.executable, str(script), *arguments[1:]]
    with (tmp_path / "output").open("wb") as output:
        benchmark = psutil.Popen(command, stdout=output, stderr=output)
    started: dict[int, psutil.Process] = {}

    def has_come_so_far() -> bool:
        """At most two launchers, two daemons, two trainers and etcd; the rest comes and goes."""
        for process in benchmark.children(recursive=True):
            started.setdefault(process.pid, process)
        with contextlib.suppress(psutil.NoSuchProcess):
            lines = [" ".join(process.cmdline()) for process in started.values() if process.is_running()]
            return (
                sum("resilient_run.daemon" in line for line in lines) >= daemons
                and sum("--worker" in line or "_worker.py" in line for line in lines) >= workers
            )
        return False

    try:
        wait_until(has_come_so_far, timeout_s=120, what=lambda: (tmp_path / "output").read_text())
        benchmark.send_signal(number)
        try:
            ended = benchmark.wait(120)
        except psutil.TimeoutExpired:
            left = [
                (each.pid, each.status(), each.cmdline()) for each in (benchmark, *benchmark.children(recursive=True))
            ]
            stands = Path(f"/proc/{benchmark.pid}/stack").read_text()
            pytest.fail(f"it does not end, with {left}:\n{stands}{(tmp_path / 'output').read_text()}")
        assert ended == 128 + number
        _, left = psutil.wait_procs(started.values(), timeout=30)
        assert not left, [process.cmdline() for process in left]
    finally:
        for process in (benchmark, *started.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
