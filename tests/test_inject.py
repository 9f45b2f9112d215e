"""Faults on real daemons: orders come through etcd, whoever wrote them, and strike only what they name."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import wait_until
from etcd_process import EtcdProcess
from hosts import Hosts, payload, restored_bytes

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.slot import Slot
from resilient_run.daemon.inject.acts import DETACHED, LOCAL
from resilient_run.daemon.inject.helper import MODULE
from resilient_run.daemon.inject.victim import Victim
from resilient_run.daemon.run.faults import KINDS, Order

pytestmark = pytest.mark.jobs


class Site:
    """The hosts of a job that allows faults."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def order(self, value: dict[str, Any]) -> str:
        """Write an order as it is and return its id."""
        number = secrets.token_hex(4)
        self.hosts.etcd(lambda etcd: etcd.put(f"{self.hosts.prefix}inject/orders/{number}", value))
        return number

    def outcome(self, number: str) -> dict[str, Any] | None:
        entry = self.hosts.etcd(lambda etcd: etcd.get(f"{self.hosts.prefix}inject/outcomes/{number}"))
        return None if entry is None else entry.value

    def strike(self, kind: str, host: str = "a", **fields: Any) -> dict[str, Any]:
        """Give an order and return its outcome."""
        number = self.order({"kind": kind, "host": host, "parameters": {}, **fields})
        outcome: dict[str, Any] = wait_until(
            lambda: self.outcome(number), timeout_s=30, what=lambda: f"{kind}\n{self.hosts[host].log}"
        )
        return outcome


@pytest.fixture
def site(hosts: Hosts) -> Site:
    hosts.injection = True
    return Site(hosts)


def test_every_kind_has_one_way_to_be_carried_out() -> None:
    assert sorted([*LOCAL, *DETACHED]) == sorted(KINDS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "field 'kind' must be"),
        ({"kind": "kill-everything", "host": "a"}, "no kind 'kill-everything'; there are: kill-rank"),
        ({"kind": "kill-rank", "host": "a"}, "strikes a rank: say which"),
        ({"kind": "kill-daemon", "host": "a", "rank": 1}, "strikes a host, not rank 1"),
        ({"kind": "kill-rank", "host": "a", "rank": "0"}, "field 'rank' must be an integer"),
        ({"kind": "kill-daemon", "host": ["a"]}, "field 'host' must be printable text"),
        ({"kind": "kill-daemon", "host": "a", "at_step": -1}, "field 'at_step'"),
        ({"kind": "kill-daemon", "host": "a", "after_s": 1e9}, "field 'after_s'"),
        ({"kind": "fill-disk", "host": "a", "parameters": []}, "field 'parameters' must be an object"),
        ({"kind": "fill-disk", "host": "a", "parameters": {"duration": 1}}, "did you mean 'duration_s'"),
        ({"kind": "fill-disk", "host": "a", "parameters": {"duration_s": -1}}, "must be a number from"),
        ({"kind": "fill-disk", "host": "a", "parameters": {"directory": "a\0b"}}, "must be printable text"),
        ({"kind": "corrupt-replica", "host": "a", "parameters": {"how": "nicely"}}, "one of bit-flip"),
    ],
)
def test_wrong_orders_are_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(DaemonError, match=message):
        Order.parse(value, "order")


def test_orders_read_what_they_wrote() -> None:
    for kind in KINDS.values():
        rank = 3 if kind.scope.value in ("rank", "replica") else None
        order = Order(kind=kind.name, host="h", rank=rank, at_step=4, after_s=0.5, parameters=kind.parameters())
        assert Order.parse(json.loads(json.dumps(order.to_value())), "order") == order


def test_no_process_is_mistaken_for_its_successor() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = Victim.find(process.pid)
        assert not Victim(pid=found.pid, created_s=found.created_s - 1).signal(signal.SIGKILL)
        assert process.poll() is None
        assert found.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not found.signal(signal.SIGKILL)


def test_orders_are_carried_out_once_and_only_while_they_are_allowed(site: Site) -> None:
    (trainer,) = site.hosts.run("a")
    host = site.hosts["a"]
    assert host.process is not None
    waits = site.order({"kind": "kill-daemon", "host": "a", "at_step": 5})
    taken_back = site.order({"kind": "kill-daemon", "host": "a", "at_step": 3})
    elsewhere = site.order({"kind": "kill-daemon", "host": "b"})
    refused = site.strike("kill-rank", rank=7)
    assert not refused["ok"]
    assert "rank 7 is not attached on host a" in refused["what"]
    broken = site.strike("kill-rank")
    assert (broken["ok"], broken["host"]) == (False, "a")
    site.hosts.etcd(lambda etcd: etcd.delete(f"{site.hosts.prefix}inject/orders/{taken_back}"))
    trainer.notify("progress", step=4)
    wait_until(lambda: f"order {taken_back}" in host.log or site.outcome(taken_back) is None, timeout_s=30, what="4")
    assert host.process.poll() is None
    assert site.outcome(waits) is None
    trainer.notify("progress", step=5)
    assert host.process.wait(30) == -signal.SIGKILL
    outcome = site.outcome(waits)
    assert outcome is not None
    assert (outcome["ok"], outcome["step"], outcome["generation"]) == (True, 5, 1)
    # The next daemon finds the order carried out.
    host.start()
    host.open()
    host.trainer(0, world_size=1, generation=1).attach()
    site.strike("fill-memory", parameters={"size_bytes": 1, "duration_s": 0.1})
    assert host.process.poll() is None
    assert site.outcome(elsewhere) is None


def test_orders_are_bounded_in_number_and_size(site: Site) -> None:
    (trainer,) = site.hosts.run("a")
    waiting = [site.order({"kind": "raise", "host": "a", "rank": 0, "at_step": 5}) for _ in range(16)]
    refused = site.strike("kill-daemon")
    assert (refused["ok"], refused["what"]) == (False, "16 orders are under way on host a: take one back")
    # One that is taken back leaves its place to another.
    site.hosts.etcd(lambda etcd: etcd.delete(f"{site.hosts.prefix}inject/orders/{waiting.pop()}"))
    refused = site.strike("kill-" * 1000, padding="x" * 20_000)
    assert (refused["ok"], "is longer than 16384 letters" in refused["what"]) == (False, True)
    assert refused["kind"] == ("kill-" * 13)[:64]
    trainer.notify("progress", step=5)
    for number in waiting:
        outcome = wait_until(lambda number=number: site.outcome(number), timeout_s=60, what=site.hosts["a"].log)
        assert outcome["ok"], outcome


def test_nobody_strikes_once_the_launcher_is_gone(site: Site) -> None:
    (trainer,) = site.hosts.run("a")
    host = site.hosts["a"]
    number = site.order({"kind": "kill-daemon", "host": "a", "at_step": 5})
    assert host.launcher is not None
    host.launcher.close()
    wait_until(lambda: host.status()["jobs"][0]["launcher_pid"] is None, timeout_s=30, what=host.log)
    trainer.notify("progress", step=5)
    outcome = wait_until(lambda: site.outcome(number), timeout_s=30, what=lambda: host.log)
    assert (outcome["ok"], outcome["what"]) == (False, "no launcher holds the job open on host a")
    assert host.process is not None
    assert host.process.poll() is None


@pytest.mark.parametrize("how", ["bit-flip", "truncation", "stale"])
def test_a_corrupt_replica_is_never_restored(site: Site, how: str) -> None:
    hosts = site.hosts
    hosts.commit(hosts.run("ab"), [1, 2, 3])
    outcome = site.strike("corrupt-replica", rank=0, parameters={"how": how})
    assert outcome["what"] == f"{how} in the replica of rank 0, generation 1, step 3"

    def damaged(path: Path) -> bool:
        slot = Slot.open(path)
        try:
            return (slot.verify().step, how) == (2, "stale")
        except SlotError:
            return True
        finally:
            slot.close()

    # The outcome is written before the blow.
    replicas = list(hosts["a"].shm_dir.glob("*/rank0.*.slot"))
    wait_until(lambda: any(map(damaged, replicas)), timeout_s=30, what=f"{how} in one of {replicas}")
    for rank, trainer in enumerate(hosts.run("ab", generation=2)):
        answer = trainer.request("restore")
        assert answer["source"] == ("peer" if rank == 0 else "local")
        assert restored_bytes(answer["path"]) == payload(hosts.run_id, rank, (1, 3))


def test_memory_fills_for_a_while(site: Site) -> None:
    site.hosts.run("a")
    host = site.hosts["a"]
    parameters = {"size_bytes": 1 << 20, "duration_s": 3.0}
    outcome = site.strike("fill-memory", parameters=parameters)
    assert outcome["ok"]
    (file,) = wait_until(lambda: list(host.shm_dir.glob("resilient-inject-*")), timeout_s=30, what="the file")
    # The one who takes the room gives it back, also when the daemon is gone.
    host.kill()
    wait_until(lambda: not file.exists(), timeout_s=30, what="the end of the file")


def test_disk_fills_where_it_may(site: Site, tmp_path: Path) -> None:
    site.hosts.run("a")
    refused = site.strike("fill-disk", parameters={"directory": str(tmp_path / "missing")})
    assert (refused["ok"], "is not a directory" in refused["what"]) == (False, True)
    outcome = site.strike("fill-disk", parameters={"directory": str(tmp_path), "size_bytes": 4096, "duration_s": 0.3})
    assert outcome["ok"]
    assert "4096 bytes" in outcome["what"]


def test_only_etcd_members_are_killed_as_such(site: Site, tmp_path: Path) -> None:
    site.hosts.run("a")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        refused = site.strike("kill-etcd", parameters={"pid": process.pid})
        assert (refused["ok"], "not etcd" in refused["what"]) == (False, True)
        assert process.poll() is None
        process.kill()
    for secret in (tmp_path / "secret", tmp_path / "fifo"):
        if secret.name == "fifo":
            os.mkfifo(secret)
        else:
            secret.write_text("my password")
        refused = site.strike("kill-etcd", parameters={"pid_file": str(secret)})
        assert (refused["ok"], refused["what"]) == (False, f"{secret} does not hold the pid of an etcd member")
    member = EtcdProcess(tmp_path / "member")
    member.start()
    try:
        (tmp_path / "pid").write_text(f"{member.pid}\n")
        assert site.strike("kill-etcd", parameters={"pid_file": str(tmp_path / "pid")})["ok"]
        wait_until(lambda: not member.is_running, timeout_s=30, what="the member's end")
    finally:
        member.kill()


def helper(task: dict[str, Any], *, prefix: tuple[str, ...] = (), go: bool = True) -> dict[str, Any]:
    """Let a helper carry out a task and return what it said; it goes on by itself."""
    command = [*prefix, sys.executable, "-P", "-m", MODULE]
    text = f"{json.dumps(task)}\n{'go' if go else ''}\n"
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_helper_does_nothing_without_the_word(tmp_path: Path) -> None:
    task = {"do": "fill", "directory": str(tmp_path), "size_bytes": 1, "leave_bytes": 0, "duration_s": 60}
    assert "1 bytes" in helper(task, go=False)["what"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "task", [{}, {"do": "shutdown"}, {"do": "stop", "victims": [{"pid": 1, "created_s": 0}], "duration_s": 1}, []]
)
def test_helper_refuses_what_it_does_not_know(task: Any) -> None:
    assert "error" in helper(task)


@pytest.fixture
def wire() -> Iterator[tuple[str, ...]]:
    """A network namespace with the veth "wire"; returns the words that run a command in it."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"rr-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr.decode()}")
    words = ("ip", "netns", "exec", name)
    try:
        for command in (
            "ip link add wire type veth peer name other",
            "ip addr add 10.9.9.1/24 dev wire",
            "ip link set wire up",
            "ip link set other up",
        ):
            subprocess.run([*words, *command.split()], check=True)
        yield words
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def show(wire: tuple[str, ...], *command: str) -> str:
    return subprocess.run([*wire, *command], check=True, capture_output=True, text=True).stdout


def test_network_is_cut_and_comes_back(wire: tuple[str, ...]) -> None:
    subprocess.run([*wire, *["ip", "route", "add", "10.8.0.0/16", "via", "10.9.9.2", "dev", "wire"]], check=True)
    task = {"do": "cut", "interface": "wire", "duration_s": 3.0, "force": False}
    assert helper(task, prefix=wire)["what"] == "interface wire down for 3 s"
    wait_until(lambda: "state DOWN" in show(wire, "ip", "link", "show", "wire"), timeout_s=30, what="down")
    wait_until(lambda: "10.8.0.0/16 via 10.9.9.2" in show(wire, "ip", "route"), timeout_s=30, what="the route")
    wait_until(lambda: "state UP" in show(wire, "ip", "link", "show", "wire"), timeout_s=30, what="up")


@pytest.mark.parametrize("shaped", [False, True])
def test_network_is_slowed_and_gets_its_shape_back(wire: tuple[str, ...], shaped: bool) -> None:
    if shaped:
        shape = "tc qdisc replace dev wire root tbf rate 100mbit burst 64k latency 50ms"
        subprocess.run([*wire, *shape.split()], check=True)
    task = {"do": "slow", "interface": "wire", "duration_s": 3.0, "force": False, "rate_mbit": 1.5}
    assert "sends 1.5 Mbit/s" in helper(task, prefix=wire)["what"]
    wait_until(lambda: "rate 1500Kbit" in show(wire, "tc", "qdisc", "show", "dev", "wire"), timeout_s=30, what="slow")
    shape = "rate 100Mbit" if shaped else "noqueue"
    wait_until(lambda: shape in show(wire, "tc", "qdisc", "show", "dev", "wire"), timeout_s=30, what="the old shape")


def test_no_main_interface_is_struck_without_force(wire: tuple[str, ...]) -> None:
    task = {"do": "cut", "interface": "lo", "duration_s": 0.1, "force": False}
    assert "not a veth" in helper(task, prefix=wire)["error"]
    subprocess.run([*wire, *["ip", "route", "add", "default", "via", "10.9.9.2", "dev", "wire"]], check=True)
    assert "has the default route" in helper({**task, "interface": "wire"}, prefix=wire)["error"]
    assert "does not exist" in helper({**task, "interface": "none"}, prefix=wire)["error"]
    assert "down" in helper({**task, "interface": "wire", "force": True}, prefix=wire, go=False)["what"]
