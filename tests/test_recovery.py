"""Whole jobs that lose workers, daemons and hosts, and must end bit-identical to the undisturbed run."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import gated
import psutil
import pytest
from cluster import (
    ENDLESS,
    PACED,
    Cluster,
    Host,
    assert_same_training,
    has_ended,
    kill,
    recovered,
    stop,
    wait_until,
)
from etcd_process import EtcdProcess, entries

from resilient_run.daemon.base.goodput import PHASES

pytestmark = pytest.mark.jobs

STEPS = 30
LEASE_TTL_S = 3
SCRIPT = [*PACED, "--steps", str(STEPS)]
STANDALONE = ["--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Host]]:
    """World size → the host that printed everything of an undisturbed run (losses and hash are the reference)."""
    runs = Cluster(tmp_path_factory.mktemp("undisturbed"))
    hosts = {}
    for world_size in (2, 3):
        host = hosts[world_size] = runs.host(f"w{world_size}")
        host.launch(["--standalone", "--nproc-per-node", str(world_size)], SCRIPT)
        assert host.wait() == 0, host.output
        assert host.params_sha256() is not None
        assert not host.recoveries()
    yield hosts
    runs.close()


def newest_commit(hosts: list[Host]) -> int:
    """Return the newest committed step that a daemon knows of."""
    return max(host.committed_step() for host in hosts)


def assert_nothing_committed_lost(hosts: list[Host], kept: list[int]) -> None:
    """Every host that was there from start to end reports a recovery for each of `kept`, committed before the kill."""
    for host in hosts:
        events = [event for event in host.recoveries() if event["complete"]]
        assert len(events) == len(kept), host.recoveries()
        assert all(event["restored_step"] >= step for event, step in zip(events, kept, strict=True)), (kept, events)


def test_what_a_killed_worker_was_starting_ends_too(cluster: Cluster, tmp_path: Path) -> None:
    """A DataLoader's worker that begins when its trainer is gone would wait for ever, and keep the output open."""
    host, gate = cluster.host("solo"), tmp_path / "gate"
    host.launch(["--standalone"], [str(Path(__file__).parent / "forking_trainer.py"), str(gate)])
    assert host.wait() == 0, host.output
    assert recovered(host) == 1
    left = int(gate.with_suffix(".pid").read_text())
    try:
        wait_until(lambda: has_ended(left), timeout_s=30, what="the end of what was starting", host=host)
    finally:
        gate.touch()


@pytest.mark.parametrize("victims", ["one worker", "all workers"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_killed_workers_on_one_host(cluster: Cluster, undisturbed: dict[int, Host], victims: str, seed: int) -> None:
    """Kills at seeded moments of a step fall into capture, commit, forward or backward."""
    moments = random.Random(seed)
    host = cluster.host("solo")
    host.launch(STANDALONE, SCRIPT)
    kills, kept = sorted(moments.sample(range(2, STEPS - 6), 3)), list[int]()
    for count, step in enumerate(kills, start=1):
        wait_until(lambda step=step: host.reached(step), timeout_s=60, what=f"step {step}", host=host)
        time.sleep(moments.uniform(0, 0.1))
        kept.append(newest_commit([host]))
        pids = host.pids()
        for pid in list(pids.values()) if victims == "all workers" else [pids[moments.randrange(2)]]:
            kill(pid)
        wait_until(lambda count=count: recovered(host) == count, timeout_s=60, what=f"recovery {count}", host=host)
    assert host.wait() == 0, host.output
    assert_same_training([host], undisturbed[2])
    assert_nothing_committed_lost([host], kept)


def test_killed_etcd_of_a_run_on_one_host(cluster: Cluster, undisturbed: dict[int, Host]) -> None:
    host = cluster.host("solo")
    host.launch(STANDALONE, SCRIPT)
    wait_until(lambda: host.reached(5), timeout_s=60, what="step 5", host=host)
    assert host.launcher is not None
    children = psutil.Process(host.launcher.pid).children()
    (etcd,) = [child for child in children if "--name=embedded" in child.cmdline()]
    kill(etcd.pid)
    step = host.committed_step()
    wait_until(lambda: host.committed_step() > step + 1, timeout_s=60, what="a commit after it", host=host)
    kept = host.committed_step()
    kill(host.pids()[1])
    assert host.wait() == 0, host.output
    assert "is started again" in host.output
    assert_same_training([host], undisturbed[2])
    assert_nothing_committed_lost([host], [kept])


def test_an_installation_of_another_version_meanwhile_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Whatever a recovery needs is in memory: here each file of the other version is one that nobody can import."""
    installed = tmp_path / "site" / "resilient_run"
    for package in ("", "ckpt", "comm", "daemon", "launcher"):
        source = import_module(f"resilient_run.{package}".rstrip(".")).__path__[0]
        shutil.copytree(source, installed / package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    host, gate = cluster.host("solo"), gated.Gate(tmp_path / "gate")
    host.forked = False
    host.launch(STANDALONE, gate.script, PYTHONPATH=str(installed.parent), PYTHONDONTWRITEBYTECODE="1")
    gate.open(1)
    wait_until(lambda: host.committed_step() == 1, timeout_s=60, what="the commit of step 1", host=host)
    for file in installed.rglob("*.py"):
        file.write_text(f"of another version: {file}")
    for count in (1, 2):
        kill(host.pids()[count % 2])
        gate.open(1 + count)
        wait_until(lambda count=count: recovered(host) == count, timeout_s=60, what=f"recovery {count}", host=host)
    gate.open(gated.STEPS)
    assert host.wait() == 0, host.output
    gated.assert_undisturbed([host])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_killed_while_restoring(cluster: Cluster, undisturbed: dict[int, Host], seed: int) -> None:
    """A worker that dies again just after its restart, before it has its state back, costs nothing more."""
    moments = random.Random(seed)
    host = cluster.host("solo")
    host.launch(STANDALONE, SCRIPT)
    wait_until(lambda: host.reached(10), timeout_s=60, what="step 10")
    for restart in range(1, 4):
        kill(host.pids()[moments.randrange(2)])
        wait_until(
            lambda restart=restart: host.starts() == 2 * (restart + 1),
            timeout_s=60,
            what=f"restart {restart}",
            host=host,
        )
        time.sleep(moments.uniform(0, 0.15))
    assert host.wait() == 0, host.output
    assert_same_training([host], undisturbed[2])


def launch_hosts(cluster: Cluster, names: str, endpoint: str, *extra: str, steps: int = STEPS) -> list[Host]:
    """Start one single-worker launcher per name on its own loopback host, with `extra` arguments."""
    hosts = [cluster.host(name) for name in names]
    arguments = ["--nnodes", "3", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
    arguments += ["--rdzv-endpoint", endpoint, "--rdzv-id", cluster.name, "--rdzv-conf", f"lease_ttl={LEASE_TTL_S}"]
    arguments += ["--local-addr", "127.0.0.1", *extra]
    for host in hosts:
        host.launch(arguments, [*SCRIPT, "--steps", str(steps)])
    return hosts


def ranks(hosts: list[Host]) -> dict[str, set[int]]:
    """Return host name → the ranks that ever announced themselves there."""
    return {host.name: {line["rank"] for line in host.lines if "pid" in line} for host in hosts}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_killed_workers_on_three_hosts(
    cluster: Cluster, undisturbed: dict[int, Host], etcd_endpoint: str, seed: int
) -> None:
    moments = random.Random(seed)
    hosts, kept = launch_hosts(cluster, "abc", etcd_endpoint), list[int]()
    for count, step in enumerate(sorted(moments.sample(range(3, STEPS - 6), 2)), start=1):
        wait_until(lambda step=step: hosts[0].reached(step), timeout_s=60, what=f"step {step}", host=hosts[0])
        time.sleep(moments.uniform(0, 0.1))
        kept.append(newest_commit(hosts))
        for victim in hosts if seed % 2 else [moments.choice(hosts)]:
            kill(next(iter(victim.pids().values())))
        for host in hosts:
            wait_until(
                lambda host=host, count=count: recovered(host) == count,
                timeout_s=60,
                what=f"recovery {count} of {host.name}",
                host=host,
            )
    for host in hosts:
        assert host.wait() == 0, host.output
    assert_same_training(hosts, undisturbed[3])
    assert_nothing_committed_lost(hosts, kept)
    assert sorted(rank for held in ranks(hosts).values() for rank in held) == [0, 1, 2], "a host changed its rank"


@pytest.mark.parametrize("lost_rank", [0, *(pytest.param(rank, marks=pytest.mark.nightly) for rank in (1, 2))])
def test_lost_host_is_replaced_from_peer_memory(
    cluster: Cluster, undisturbed: dict[int, Host], etcd_endpoint: str, lost_rank: int
) -> None:
    """Launcher, workers and daemon of a host die and its memory is gone; a waiting fourth host takes its rank."""
    hosts = launch_hosts(cluster, "abc", etcd_endpoint)
    wait_until(lambda: hosts[0].reached(2), timeout_s=60, what="step 2", host=hosts[0])
    (standby,) = launch_hosts(cluster, "d", etcd_endpoint)
    wait_until(lambda: hosts[0].reached(8), timeout_s=60, what="step 8")
    assert not standby.starts(), "the standby trains though nobody was lost"
    before = ranks(hosts)
    (lost,) = [host for host in hosts if lost_rank in before[host.name]]
    kept = [newest_commit(hosts)]
    lost.lose()
    survivors = [host for host in hosts if host is not lost]
    for host in [*survivors, standby]:
        assert host.wait() == 0, host.output
    assert_same_training([*hosts, standby], undisturbed[3])
    assert_nothing_committed_lost(survivors, kept)
    assert ranks(survivors) == {host.name: before[host.name] for host in survivors}
    assert ranks([standby]) == {"d": before[lost.name]}
    assert any("from peer memory" in line for line in standby.text) or lost_rank in ranks([standby])["d"]
    (newcomer,) = standby.recoveries()
    assert newcomer["complete"]
    assert newcomer["kind"] in ("host_lost", "worker_exit"), "neighbours may see its connections end before its lease"
    assert newcomer["ranks"] == {str(*before[lost.name]): "peer"}
    assert newcomer["steps_lost"] is None, "it did not train before"
    (summary,) = [event for host in [*survivors, standby] for event in host.summaries()]
    events = {host.name: host.recoveries()[-1] for host in [*survivors, standby]}
    for event in events.values():
        assert sum(event.get(f"{phase}_s", 0.0) for phase in PHASES) == pytest.approx(event["total_s"], abs=1e-3)
    assert all(events[host.name]["detect_s"] > 0.0 for host in survivors), "nobody sees a host vanish"
    told = {name: event["total_s"] for name, event in events.items()}
    assert summary["hosts"] == told
    assert summary["kind"] == "host_lost", "whose worker exited because of it is not to blame"
    assert (summary["total_s"], told[summary["slowest"]]) == (max(told.values()), max(told.values()))
    assert sorted(summary["ranks"].values()) == ["local", "local", "peer"]
    assert summary["steps_lost"] in [events[host.name]["steps_lost"] for host in survivors]


@pytest.fixture
def by_trainers(tmp_path: Path) -> str:
    """The option that lets trainers move replicas."""
    file = tmp_path / "run.toml"
    file.write_text('[replication]\ntransport = "trainer"\n')
    return f"--rr-config={file}"


def brought_by_trainers(host: Host) -> bool:
    """Tell whether the trainer of this host had connections to others."""
    return any("brings its captures itself to hosts ['" in log.read_text() for log in host.run_dir.glob("*.log"))


def test_killed_workers_that_replicate_themselves(
    cluster: Cluster, undisturbed: dict[int, Host], etcd_endpoint: str, by_trainers: str
) -> None:
    hosts, kept = launch_hosts(cluster, "abc", etcd_endpoint, by_trainers), list[int]()
    for count, (step, victims) in enumerate([(8, hosts[1:2]), (20, hosts)], start=1):
        wait_until(lambda step=step: hosts[0].reached(step), timeout_s=60, what=f"step {step}", host=hosts[0])
        kept.append(newest_commit(hosts))
        for victim in victims:
            kill(next(iter(victim.pids().values())))
        for host in hosts:
            wait_until(
                lambda host=host, count=count: recovered(host) == count,
                timeout_s=60,
                what=f"recovery {count} of {host.name}",
                host=host,
            )
    for host in hosts:
        assert host.wait() == 0, host.output
        assert brought_by_trainers(host)
    assert_same_training(hosts, undisturbed[3])
    assert_nothing_committed_lost(hosts, kept)


def test_lost_host_whose_trainer_replicated_itself(
    cluster: Cluster, undisturbed: dict[int, Host], etcd_endpoint: str, by_trainers: str
) -> None:
    hosts = launch_hosts(cluster, "abc", etcd_endpoint, by_trainers)
    wait_until(lambda: hosts[0].reached(2), timeout_s=60, what="step 2", host=hosts[0])
    (standby,) = launch_hosts(cluster, "d", etcd_endpoint, by_trainers)
    wait_until(lambda: hosts[0].reached(8), timeout_s=60, what="step 8")
    kept = [newest_commit(hosts)]
    hosts[1].lose()
    survivors = [hosts[0], hosts[2]]
    for host in [*survivors, standby]:
        assert host.wait() == 0, host.output
        assert brought_by_trainers(host)
    assert_same_training([*hosts, standby], undisturbed[3])
    assert_nothing_committed_lost(survivors, kept)


def test_standby_is_as_warm_as_the_host_that_it_replaces(cluster: Cluster, etcd_endpoint: str, tmp_path: Path) -> None:
    """It prepares its workers' start while it waits; a cold one would cost the import of torch on top."""
    script, done = tmp_path / "waits.py", tmp_path / "done"
    script.write_text(
        f"import os, time\nprint('works')\nwhile not os.path.exists({str(done)!r}):\n    time.sleep(0.05)\n"
    )
    lost, standby = cluster.host("a"), cluster.host("b")
    arguments = ["--nnodes", "1", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", cluster.name, "--rdzv-conf", "lease_ttl=3"]
    lost.launch(arguments, [str(script)])
    wait_until(lambda: "works" in lost.output, timeout_s=60, what="the script", host=lost)
    standby.launch(arguments, [str(script)], LOGLEVEL="INFO")
    wait_until(lambda: "the zygote is ready" in standby.output, timeout_s=60, what="a warm standby", host=standby)
    lost.lose()
    wait_until(lambda: "works" in standby.output, timeout_s=60, what="the script on the standby", host=standby)
    done.touch()
    assert standby.wait() == 0, standby.output
    assert "cold start" not in standby.output, standby.output


def test_outage_of_etcd_is_not_noticed(cluster: Cluster, undisturbed: dict[int, Host], tmp_path: Path) -> None:
    """Every lease expires while etcd stands still; nobody is lost, no worker restarts, and commits go on."""
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    try:
        hosts = launch_hosts(cluster, "abc", server.endpoint)
        wait_until(lambda: hosts[0].reached(5), timeout_s=60, what="step 5", host=hosts[0])
        server.pause()
        wait_until(lambda: hosts[0].reached(9), timeout_s=60, what="step 9 without etcd", host=hosts[0])
        # Held back, so that there are steps left for after the outage.
        worker = next(iter(hosts[0].pids().values()))
        stop(worker)
        time.sleep(2 * LEASE_TTL_S)
        server.resume()
        below = f"/resilient-run/{cluster.name}/"
        wait_until(lambda: len(entries(server.endpoint, f"{below}ckpt/hosts/")) == 3, timeout_s=60, what="all daemons")
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: committed(server.endpoint, below) > 10, timeout_s=60, what="a commit after the outage")
        for host in hosts:
            assert host.wait() == 0, host.output
            assert host.starts() == 1, host.output
            assert "had lost its lease and has registered again" in host.output, "the outage was not long enough"
    finally:
        server.resume()
        cluster.close()
        server.kill()
    assert_same_training(hosts, undisturbed[3])


def test_credentials_that_are_refused_for_a_while_are_waited_for(cluster: Cluster, etcd: EtcdProcess) -> None:
    etcd.enable_auth("secret")
    host = cluster.host("a")
    arguments = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "etcd-v3", "--rdzv-id", cluster.name]
    arguments += ["--rdzv-endpoint", etcd.endpoint, "--local-addr", "127.0.0.1"]
    script = [*ENDLESS, "--steps", "60"]
    host.launch(arguments, script, RESILIENT_ETCD_USER="trainer", RESILIENT_ETCD_PASSWORD="secret")
    wait_until(lambda: host.reached(5), timeout_s=60, what="step 5", host=host)
    etcd.ctl("user", "passwd", "trainer", "--interactive=false", user="root:top", stdin="other\n")
    wait_until(lambda: host.reached(10), timeout_s=60, what="step 10", host=host)
    worker = next(iter(host.pids().values()))
    stop(worker)
    time.sleep(3)
    step = host.committed_step()
    etcd.ctl("user", "passwd", "trainer", "--interactive=false", user="root:top", stdin="secret\n")
    os.kill(worker, signal.SIGCONT)
    wait_until(lambda: host.committed_step() > step, timeout_s=60, what="a commit with the password", host=host)
    assert host.wait() == 0, host.output
    assert (host.starts(), host.recoveries()) == (2, []), host.output


def test_etcd_that_is_full_is_waited_for(cluster: Cluster, undisturbed: dict[int, Host], tmp_path: Path) -> None:
    """Training goes on, commits do when there is space again, and a run that ends meanwhile ends for all then."""
    server = EtcdProcess(tmp_path / "etcd", "--quota-backend-bytes=2000000")
    server.start()
    below = f"/resilient-run/{cluster.name}/"
    try:
        hosts = launch_hosts(cluster, "abc", server.endpoint)
        wait_until(lambda: hosts[0].reached(5), timeout_s=60, what="step 5", host=hosts[0])
        server.fill()
        step = committed(server.endpoint, below)
        wait_until(lambda: hosts[0].reached(step + 5), timeout_s=60, what="five more steps", host=hosts[0])
        assert committed(server.endpoint, below) == step
        worker = next(iter(hosts[0].pids().values()))
        stop(worker)
        server.make_space()
        wait_until(lambda: committed(server.endpoint, below) > step, timeout_s=60, what="a commit with space again")
        server.fill()
        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: any(host.params_sha256() for host in hosts), timeout_s=60, what="the last step")
        time.sleep(1)
        assert all(host.launcher is not None and host.launcher.poll() is None for host in hosts)
        server.make_space()
        for host in hosts:
            assert host.wait() == 0, host.output
            assert (host.starts(), host.recoveries()) == (1, []), host.output
        assert entries(server.endpoint, below) == {}
    finally:
        cluster.close()
        server.kill()
    assert_same_training(hosts, undisturbed[3])


def test_etcd_without_its_data_ends_the_run_and_is_no_lost_host(cluster: Cluster, tmp_path: Path) -> None:
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    try:
        hosts = launch_hosts(cluster, "abc", server.endpoint)
        wait_until(lambda: hosts[0].reached(5), timeout_s=60, what="step 5", host=hosts[0])
        server.kill()
        server.forget()
        server.start()
        for host in hosts:
            assert host.wait() == 1, host.output
            assert "is over: etcd came back without its data: keep its data directory" in host.output
            assert "is broken: " not in host.output
            assert (host.starts(), host.recoveries()) == (1, []), host.output
    finally:
        cluster.close()
        server.kill()


def committed(endpoint: str, below: str) -> int:
    """Return the step of the watermark, 0 when there is none."""
    return max((entry.value["step"] for entry in entries(endpoint, f"{below}state/watermark").values()), default=0)


def test_standby_that_is_not_needed_ends_with_the_run(cluster: Cluster, etcd_endpoint: str) -> None:
    hosts = launch_hosts(cluster, "abcd", etcd_endpoint, steps=10)
    for host in hosts:
        assert host.wait() == 0, host.output
    assert sorted(len(held) for held in ranks(hosts).values()) == [0, 1, 1, 1]


def test_killed_daemon_is_not_noticed_and_recovers(cluster: Cluster, undisturbed: dict[int, Host]) -> None:
    """Training goes on while the daemon is gone; the restarted one adopts the slots and the next failure uses them."""
    host = cluster.host("solo")
    host.launch(STANDALONE, SCRIPT)
    wait_until(lambda: host.reached(5), timeout_s=60, what="step 5")
    first = host.daemon_pid()
    assert first is not None
    kill(first)
    wait_until(lambda: host.reached(8), timeout_s=60, what="step 8 without a daemon", host=host)
    # Held back, so that there are steps left for the new daemon.
    stop(host.pids()[0])
    wait_until(lambda: host.daemon_pid() not in (None, first), timeout_s=30, what="a new daemon", host=host)
    assert host.starts() == 2, "a worker was restarted because of the daemon"
    reached = max(step for _, step, _ in host.steps())
    os.kill(host.pids()[0], signal.SIGCONT)
    wait_until(lambda: host.committed_step() > reached, timeout_s=60, what="a commit by the new daemon", host=host)
    kept = [newest_commit([host])]
    kill(host.pids()[1])
    assert host.wait() == 0, host.output
    assert_same_training([host], undisturbed[2])
    assert_nothing_committed_lost([host], kept)


def test_daemon_and_worker_die_together(cluster: Cluster, undisturbed: dict[int, Host]) -> None:
    host = cluster.host("solo")
    host.launch(STANDALONE, SCRIPT)
    wait_until(lambda: host.reached(8), timeout_s=60, what="step 8")
    kept = [newest_commit([host])]
    daemon_pid = host.daemon_pid()
    assert daemon_pid is not None
    kill(daemon_pid)
    kill(host.pids()[0])
    assert host.wait() == 0, host.output
    assert_same_training([host], undisturbed[2])
    assert_nothing_committed_lost([host], kept)


def test_relaunch_after_every_launcher_was_killed(
    cluster: Cluster, undisturbed: dict[int, Host], etcd_endpoint: str
) -> None:
    """The same run id, started again on the same hosts, goes on from memory."""
    hosts = launch_hosts(cluster, "abc", etcd_endpoint)
    wait_until(lambda: newest_commit(hosts) >= 8, timeout_s=60, what="a commit of step 8", host=hosts[0])
    for host in hosts:
        assert host.launcher is not None
        kill(host.launcher.pid)
        host.wait()
    launch_hosts(cluster, "abc", etcd_endpoint)
    for host in hosts:
        assert host.wait() == 0, host.output
    assert_same_training(hosts, undisturbed[3])
    trained = [step for rank, step, _ in hosts[0].steps() if rank == hosts[0].steps()[0][0]]
    assert trained.count(3) == 1, "the relaunched run began again from the start"


def test_success_leaves_nothing_behind(undisturbed: dict[int, Host]) -> None:
    for host in undisturbed.values():
        assert not list(host.shm_dir.glob("*/"))
