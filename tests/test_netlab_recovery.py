"""Whole jobs on a laboratory network whose links and etcd members fail."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import PACED, Cluster, Host, assert_same_training, kill, recovered, stop, wait_until
from lab import LabCluster, NetHost
from netlab import NetLab

pytestmark = pytest.mark.lab

STEPS = 50
SCRIPT = [*PACED, "--steps", str(STEPS)]


@pytest.fixture
def lab(netlab: Callable[..., NetLab], tmp_path: Path) -> Iterator[Callable[..., LabCluster]]:
    """Builds a cluster of three training hosts and a standby; arguments as for `LabCluster`."""
    made: list[LabCluster] = []

    def build(**options: Any) -> LabCluster:
        made.append(LabCluster(netlab, tmp_path, "abcd", **options))
        return made[-1]

    yield build
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The host that printed everything of an undisturbed run of three ranks."""
    runs = Cluster(tmp_path_factory.mktemp("undisturbed"))
    host = runs.host("w3")
    host.launch(["--standalone", "--nproc-per-node", "3"], SCRIPT)
    assert host.wait() == 0, host.output
    yield host
    runs.close()


def reach(hosts: Sequence[Host], step: int) -> None:
    """Wait until every one of `hosts` has completed `step`."""
    for host in hosts:
        wait_until(lambda host=host: host.reached(step), timeout_s=90, what=f"step {step} of {host.name}", host=host)


def committed(cluster: LabCluster) -> int:
    """Return the newest committed step, 0 for none."""
    return (cluster.get("state/watermark") or {"step": 0})["step"]


def wait_for_etcd(condition: Callable[[], Any], *, what: str, host: Host) -> None:
    """Wait for something to be seen in etcd; each look takes a process."""
    wait_until(condition, timeout_s=90, what=what, host=host, pause_s=0.2)


def stands_by(cluster: LabCluster, host: NetHost) -> bool:
    """Tell whether the launcher on `host` is a member of the run that is ready for the next generation."""
    round_, member = cluster.get("rdzv/round"), cluster.get(f"rdzv/members/{host.name}")
    return round_ is not None and member is not None and member["ready"] == round_["generation"] + 1


def test_partitioned_host_is_replaced_and_comes_back_as_a_standby(
    lab: Callable[..., LabCluster], undisturbed: Host
) -> None:
    """The cut host is out: its stale worker stops once it is healed. Then it takes the place of the next lost host."""
    # So slow that the steps, which take their time from the network, last until the healed host is back.
    cluster = lab(rate="100mbit")
    a, b, c = cluster.launch("abc", SCRIPT, nodes=3)
    wait_for_etcd(lambda: cluster.get("rdzv/round"), what="a round", host=a)
    (d,) = cluster.launch("d", SCRIPT, nodes=3)
    wait_for_etcd(lambda: stands_by(cluster, d), what="a standby", host=d)
    reach([a], 5)
    (stale_pid,) = b.pids().values()
    b.net.cut()
    reach([d], 1)
    assert Path("/proc", str(stale_pid)).exists(), "the cut host cannot know yet that it is out"
    b.net.heal()
    wait_for_etcd(lambda: stands_by(cluster, b), what="the healed host to stand by", host=b)
    assert not Path("/proc", str(stale_pid)).exists()
    assert b.starts() == 1
    c.lose()
    for host in (a, b, d):
        assert host.wait() == 0, host.output
    assert b.starts() == 2
    assert recovered(a) == 2
    assert_same_training([a, b, c, d], undisturbed)


@pytest.mark.nightly
def test_lost_etcd_member_changes_nothing(lab: Callable[..., LabCluster], undisturbed: Host) -> None:
    """The leader dies, the member that everybody talks to: training and commits go on, and so do recoveries."""
    cluster = lab(rate="1gbit", etcd_members=3)
    cluster.lead(cluster.etcd[0])
    hosts = cluster.launch("abc", SCRIPT, nodes=3)
    reach(hosts, 5)
    cluster.etcd[0].kill()
    reach(hosts, 8)
    # Held back, so that there are steps left once the others have elected a leader.
    worker = next(iter(hosts[0].pids().values()))
    stop(worker)
    wait_for_etcd(cluster.etcd[1].answers, what="the next leader", host=hosts[0])
    before = committed(cluster)
    os.kill(worker, signal.SIGCONT)
    wait_for_etcd(lambda: committed(cluster) > before, what=f"a commit after step {before}", host=hosts[0])
    # The first one passes over captures that were skipped meanwhile, the others follow each other.
    first = committed(cluster)
    wait_for_etcd(lambda: committed(cluster) >= first + 8, what=f"commits after step {first}", host=hosts[0])
    assert [host.starts() for host in hosts] == [1, 1, 1], "a worker was restarted because of an etcd member"
    kept = committed(cluster)
    kill(hosts[1].pids()[next(iter(hosts[1].pids()))])
    for host in hosts:
        wait_until(lambda host=host: recovered(host) == 1, timeout_s=60, what=f"recovery of {host.name}", host=host)
    cluster.etcd[0].start()
    for host in hosts:
        assert host.wait() == 0, host.output
        (event,) = host.recoveries()
        assert event["restored_step"] >= kept, event
    assert_same_training(hosts, undisturbed)
