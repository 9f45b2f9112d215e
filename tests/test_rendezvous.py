"""The etcd-v3 rendezvous on a real etcd: handlers in threads, and in processes where they get killed."""

import asyncio
import gc
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import cluster
import pytest
from cluster import stop
from etcd_process import EtcdProcess, ask, below
from launchers import start_python
from proxy import Proxy
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from resilient_run.daemon.etcd.client import Entry, Etcd
from resilient_run.daemon.run.records import Agreement, Closed, Failure, Fingerprint
from resilient_run.daemon.run.rounds import Round, Seat
from resilient_run.launcher.rendezvous import claim, membership, rendezvous
from resilient_run.launcher.rendezvous.agreement import Terms, agree
from resilient_run.launcher.rendezvous.loop import LoopThread
from resilient_run.launcher.rendezvous.membership import Membership
from resilient_run.launcher.rendezvous.rendezvous import EtcdRendezvous

pytestmark = pytest.mark.jobs

WAIT_S = 60.0
OUTAGE_S = 4.5
"""Longer than twice the leases of these tests."""


wait_until = partial(cluster.wait_until, timeout_s=WAIT_S, what="what is waited for")


class Launchers:
    """The launchers of one run: handlers of this process by host name, and processes."""

    def __init__(self, endpoint: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.endpoint = endpoint
        self.run_id = run_id
        self.prefix = f"/resilient-run/{run_id}/"
        self.handlers: dict[str, EtcdRendezvous] = {}
        self._monkeypatch = monkeypatch
        self._threads = ThreadPoolExecutor(max_workers=8)
        self._processes: list[subprocess.Popen[str]] = []
        self._made: list[EtcdRendezvous] = []

    def make(self, host: str, nnodes: tuple[int, int], **options: Any) -> EtcdRendezvous:
        """Return a new handler that runs as `host`."""
        self._monkeypatch.setenv("RESILIENT_HOST_ID", host)
        params = RendezvousParameters("etcd-v3", self.endpoint, self.run_id, *nnodes, **{"lease_ttl": "10", **options})
        handler = get_rendezvous_handler(params)
        assert isinstance(handler, EtcdRendezvous)
        self.handlers[host] = handler
        self._made.append(handler)
        return handler

    def join(self, hosts: str) -> dict[str, "Future[RendezvousInfo]"]:
        """Start `next_rendezvous` on each of these hosts, in this order of arrival."""
        futures = {}
        for host in hosts:
            futures[host] = self._threads.submit(self.handlers[host].next_rendezvous)
            wait_until(lambda host=host: futures[host].done() or host in self.members())
        return futures

    def joined(self, hosts: str) -> dict[str, RendezvousInfo]:
        """Return what `next_rendezvous` gives these hosts."""
        return {host: future.result(WAIT_S) for host, future in self.join(hosts).items()}

    def launch(self, host: str, nnodes: tuple[int, int], **options: str) -> subprocess.Popen[str]:
        """Start a process that joins every generation as `host`."""
        script = Path(__file__).parent / "rendezvous_host.py"
        settings = [f"{name}={value}" for name, value in {"lease_ttl": "2", **options}.items()]
        process = start_python(
            [str(script), self.endpoint, self.run_id, *map(str, nnodes), *settings],
            {**os.environ, "RESILIENT_HOST_ID": host},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def keys(self) -> dict[str, Entry]:
        """Return the run's keys without their common prefix."""

        async def read(etcd: Etcd) -> dict[str, Entry]:
            return await etcd.list(self.prefix)

        return {key.removeprefix(self.prefix): entry for key, entry in self.ask(read).items()}

    def members(self) -> set[str]:
        """Return the hosts that are registered now."""
        return {key.rpartition("/")[2] for key in self.keys() if key.startswith("rdzv/members/")}

    def ask(self, request: Callable[[Etcd], Awaitable[Any]]) -> Any:
        """Return what `request` gives on a client of its own."""
        return ask(self.endpoint, request)

    def close(self) -> None:
        """Leave nothing behind."""
        for handler in self._made:
            handler.leave()
        self._threads.shutdown()
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def launchers(
    etcd_endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launchers]:
    run = Launchers(etcd_endpoint, request.node.name, monkeypatch)
    yield run
    run.close()


class Alone(Launchers):
    """The launchers of a run on an etcd of its own.

    Attributes:
        etcd: The server.
        proxy: A way to it that can be cut.
    """

    def __init__(self, etcd: EtcdProcess, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(etcd.endpoint, "run", monkeypatch)
        self.etcd, self.proxy = etcd, proxy

    @contextmanager
    def through_proxy(self) -> Iterator[None]:
        """Let launchers that are made meanwhile reach etcd by the proxy."""
        direct, self.endpoint = self.endpoint, f"127.0.0.1:{self.proxy.port}"
        yield
        self.endpoint = direct


@pytest.fixture
def alone(etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Alone]:
    with (
        closing(Proxy(("127.0.0.1", 0), ("127.0.0.1", etcd.port))) as proxy,
        closing(Alone(etcd, proxy, monkeypatch)) as run,
    ):
        yield run
        if etcd.is_running:
            etcd.resume()
        proxy.release()


def place(process: subprocess.Popen[str]) -> tuple[int, int, int]:
    """Return (generation, rank, world size) of the process's next generation."""
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    return line["generation"], line["rank"], line["world_size"]


def ranks(infos: dict[str, RendezvousInfo]) -> dict[str, int]:
    return {host: info.rank for host, info in infos.items()}


def test_hosts_form_a_round(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (3, 3)).describe(nproc=2, role="trainer")
    assert launchers.handlers["a"].num_nodes_waiting() == 0
    infos = launchers.joined("bca")
    assert ranks(infos) == {"b": 0, "c": 1, "a": 2}
    assert {info.world_size for info in infos.values()} == {3}
    assert len({(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos.values()}) == 1
    infos["a"].store.set("key", "value")
    assert infos["c"].store.get("key") == b"value"
    for host, handler in launchers.handlers.items():
        assert (handler.generation, handler.failure, handler.num_nodes_waiting()) == (1, None, 0)
        assert handler.host == host
        assert handler.use_agent_store
        assert handler.round is not None
        assert [(seat.host, seat.nproc, seat.role) for seat in handler.round.seats] == [
            (name, 2, "trainer") for name in "bca"
        ]
    assert len({handler.view.job for handler in launchers.handlers.values()}) == 1


def test_labels_reach_the_round(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launchers write the round and daemons read it; two racks of two hosts."""
    for host, label in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y")):
        monkeypatch.setenv("RESILIENT_LABEL", label)
        launchers.make(host, (4, 4))
    launchers.joined("abcd")
    keys = launchers.keys()
    assert keys["rdzv/members/c"].value["label"] == "y"
    formed = Round.parse(keys["rdzv/round"].value, revision=keys["rdzv/round"].revision)
    assert tuple(seat.label for seat in formed.seats) == ("x", "x", "y", "y")
    assert [formed.holders(rank, 2) for rank in range(4)] == [("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")]


def test_failure_reaches_all_hosts_and_each_generation_has_a_fresh_store(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (3, 3))
    first = launchers.joined("abc")
    first["a"].store.set("stale", "1")
    other = launchers.handlers["c"]
    other.clear_changed()
    launchers.handlers["b"].report_failure(kind="worker_exit", rank=1, pid=7, exitcode=-9, message="rank 1 died")
    assert select.select([other.changed_fd], [], [], WAIT_S)[0]
    for handler in launchers.handlers.values():
        wait_until(lambda handler=handler: handler.num_nodes_waiting() > 0)
        failure = handler.failure
        assert failure is not None
        assert (failure.host, failure.kind, failure.rank, failure.pid, failure.exitcode) == (
            "b",
            "worker_exit",
            1,
            7,
            -9,
        )
    launchers.handlers["a"].report_failure(kind="late", message="second")
    second = launchers.joined("cba")
    assert ranks(second) == {"a": 0, "b": 1, "c": 2}
    assert {handler.generation for handler in launchers.handlers.values()} == {2}
    assert {handler.failure for handler in launchers.handlers.values()} == {None}
    assert not second["b"].store.check(["stale"])
    ports = {info.bootstrap_store_info.master_port for info in (*first.values(), *second.values())}
    assert len(ports) == 2


def test_a_host_that_only_comes_back_breaks_the_generation_for_all(launchers: Launchers) -> None:
    """torch's own agent reports nothing when its worker failed: it just joins again."""
    for host in "ab":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    again = launchers.join("b")
    wait_until(lambda: launchers.handlers["a"].num_nodes_waiting() > 0)
    failure = launchers.handlers["a"].failure
    assert failure is not None
    assert (failure.kind, failure.host) == ("restart", "b")
    assert ranks(launchers.joined("a")) == {"a": 0}
    assert again["b"].result(WAIT_S).rank == 1


def test_killed_host_is_replaced_and_the_others_keep_their_ranks(launchers: Launchers) -> None:
    processes = {}
    for host in "abc":
        processes[host] = launchers.launch(host, (3, 3), lease_ttl="2" if host == "a" else "10")
        wait_until(lambda host=host: host in launchers.members())
    assert {host: place(process) for host, process in processes.items()} == {
        "a": (1, 0, 3),
        "b": (1, 1, 3),
        "c": (1, 2, 3),
    }
    processes["a"].kill()
    processes["d"] = launchers.launch("d", (3, 3))
    assert {host: place(processes[host]) for host in "bcd"} == {"b": (2, 1, 3), "c": (2, 2, 3), "d": (2, 0, 3)}


def test_all_killed_hosts_start_again_with_their_ranks(launchers: Launchers) -> None:
    """Same run id, long leases: each launcher replaces its dead predecessor at once and the generation goes on."""
    hosts = {host: launchers.launch(host, (2, 2), lease_ttl="600") for host in "ab"}
    before = {host: place(process) for host, process in hosts.items()}
    for process in hosts.values():
        process.kill()
        process.wait()
    again = {host: launchers.launch(host, (2, 2), lease_ttl="600") for host in "ba"}
    assert {host: place(process) for host, process in again.items()} == {
        host: (2, rank, 2) for host, (_, rank, _) in before.items()
    }


def test_launcher_that_is_told_to_end_leaves_at_once(launchers: Launchers) -> None:
    process = launchers.launch("a", (1, 1), lease_ttl="600")
    assert place(process) == (1, 0, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert launchers.members() == set()


def test_exit_because_of_a_lost_host_is_told_as_its_loss_to_who_was_not_there(launchers: Launchers) -> None:
    """The standby becomes a member, and the next root may be one: neither saw who was in the generation before."""
    for host in "abc":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    standby = launchers.join("c")["c"]
    launchers.handlers["a"].report_failure(kind="worker_exit", message="rank 0 exited with code 1", exitcode=1)
    launchers.handlers["b"].leave()
    launchers.joined("a")
    standby.result(WAIT_S)
    failure = launchers.handlers["c"].view.failures[1]
    assert (failure.kind, failure.host) == ("host_lost", "b")
    assert failure.message == "host b is lost, and rank 0 exited with code 1"


def test_standby_waits_without_disturbing_and_takes_a_vacated_rank(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (2, 2), join_timeout="2")
    infos = launchers.joined("ab")
    standby = launchers.join("c")["c"]
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        # A standby's patience does not run out while the round is whole.
        assert not standby.done()
        assert launchers.handlers["a"].num_nodes_waiting() == 0
        time.sleep(0.05)
    launchers.handlers["b"].leave()
    wait_until(lambda: launchers.handlers["a"].num_nodes_waiting() > 0)
    assert ranks(launchers.joined("a")) == {"a": infos["a"].rank}
    assert standby.result(WAIT_S).rank == infos["b"].rank


def test_round_grows(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (2, 3), last_call_timeout="0.1")
    assert ranks(launchers.joined("ab")) == {"a": 0, "b": 1}
    newcomer = launchers.join("c")["c"]
    for host in "ab":
        wait_until(lambda host=host: launchers.handlers[host].num_nodes_waiting() > 0)
        assert launchers.handlers[host].failure is None
    again = launchers.join("b")
    wait_until(lambda: launchers.handlers["a"].failure)
    assert launchers.handlers["a"].failure is not None
    assert launchers.handlers["a"].failure.kind == "membership"
    assert ranks(launchers.joined("a")) == {"a": 0}
    assert again["b"].result(WAIT_S).rank == 1
    assert newcomer.result(WAIT_S).rank == 2


def test_round_shrinks_to_the_minimum(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (2, 3))
    launchers.joined("abc")
    launchers.handlers["a"].leave()
    infos = launchers.joined("bc")
    assert ranks(infos) == {"b": 0, "c": 1}
    assert infos["b"].world_size == 2


def quarantine(launchers: Launchers, host: str, for_s: float) -> None:
    value = {"since_unix_s": time.time(), "until_unix_s": time.time() + for_s, "reason": "it failed three times"}
    launchers.ask(lambda etcd: etcd.put(f"{launchers.prefix}rdzv/quarantine/{host}", value))


def elastic(launchers: Launchers, hosts: str) -> None:
    for host in hosts:
        launchers.make(host, (1, 3), lease_ttl="600").describe(1, "default", elastic_s=0.0)


def test_elastic_run_does_not_wait_for_the_lease_of_a_silent_host(launchers: Launchers) -> None:
    """When it wakes up, the run grows by it."""
    elastic(launchers, "ab")
    process = launchers.launch("c", (1, 3), lease_ttl="600", elastic="0")
    joining = launchers.join("ab")
    assert place(process)[::2] == (1, 3)
    for future in joining.values():
        future.result(WAIT_S)
    put_watermark(launchers, 1, 5)
    process.send_signal(signal.SIGSTOP)
    launchers.handlers["a"].report_failure(kind="worker_exit", message="a collective failed", exitcode=1)
    infos = launchers.joined("ab")
    assert {info.world_size for info in infos.values()} == {2}
    round_ = launchers.handlers["b"].round
    assert round_ is not None
    assert (set(round_.hosts), round_.restore) == ({"a", "b"}, (1, 5))
    failure = launchers.handlers["b"].view.failures[1]
    assert (failure.kind, failure.host) == ("host_lost", "c")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(launchers.handlers[host].num_nodes_waiting() for host in "ab"))
    joining = launchers.join("ab")
    assert place(process)[2] == 3
    assert {future.result(WAIT_S).world_size for future in joining.values()} == {3}


def test_elastic_run_waits_for_a_host_that_is_slow_to_stop_its_workers(launchers: Launchers) -> None:
    elastic(launchers, "abc")
    launchers.joined("abc")
    put_watermark(launchers, 1, 5)
    launchers.handlers["a"].report_failure(kind="worker_exit", message="a collective failed", exitcode=1)
    joining = launchers.join("ab")
    time.sleep(2 * membership._SILENT_S)
    assert not any(future.done() for future in joining.values())
    joining |= launchers.join("c")
    assert {future.result(WAIT_S).world_size for future in joining.values()} == {3}
    assert {handler.generation for handler in launchers.handlers.values()} == {2}


def test_round_without_a_silent_host_is_not_formed_once_that_gives_a_sign(launchers: Launchers) -> None:
    """Also not by a launcher that stood still itself, and has not seen the sign."""
    elastic(launchers, "a")
    handler = launchers.handlers["a"]
    process = launchers.launch("c", (1, 3), lease_ttl="600", last_call_timeout="1", elastic="0")
    joining = launchers.join("a")
    wait_until(lambda: launchers.members() == {"a", "c"})
    assert place(process)[::2] == (1, 2)
    joining["a"].result(WAIT_S)
    process.send_signal(signal.SIGSTOP)
    handler.report_failure(kind="worker_exit", message="a collective failed", exitcode=1)
    wait_until(lambda: "c" not in handler.view.members)
    view = handler.view
    assert view.round is not None
    alone = tuple(seat for seat in view.round.seats if seat.host == "a")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "c" in handler.view.members)
    assert not handler._link.request(lambda: handler._link.membership.form(view, alone), time.monotonic() + WAIT_S)
    again = launchers.join("a")
    assert place(process)[::2] == (2, 2)
    assert again["a"].result(WAIT_S).world_size == 2


def test_launcher_gives_no_sign_before_it_is_in_the_run(launchers: Launchers, caplog: pytest.LogCaptureFixture) -> None:
    """One that is started again where etcd still has the dead one."""
    elastic(launchers, "a")
    process = launchers.launch("c", (1, 3), lease_ttl="600", last_call_timeout="1", elastic="0")
    joining = launchers.join("a")
    assert place(process)[::2] == (1, 2)
    joining["a"].result(WAIT_S)
    process.kill()
    process.wait()
    launchers.handlers["a"].report_failure(kind="worker_exit", message="a collective failed", exitcode=1)
    again = launchers.make("c", (1, 3), lease_ttl="600")
    again.describe(1, "default", elastic_s=0.0)
    time.sleep(2 * membership._SIGN_S)
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert {info.world_size for info in launchers.joined("ca").values()} == {2}


def test_generation_that_is_over_does_not_break(launchers: Launchers) -> None:
    """Nobody would ever remove what says so."""
    handler = launchers.make("a", (1, 1))
    for _ in range(3):
        launchers.joined("a")
    handler.generation = 1
    handler.report_failure(kind="membership", message="host a leaves late")
    assert "rdzv/failure/1" not in launchers.keys()  # noqa: SIM118
    handler.generation = 3
    handler.report_failure(kind="membership", message="host a leaves")
    assert "rdzv/failure/3" in launchers.keys()  # noqa: SIM118


def test_host_in_quarantine_makes_room_for_a_standby(launchers: Launchers, caplog: pytest.LogCaptureFixture) -> None:
    for host in "abc":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    standby = launchers.join("c")["c"]
    quarantine(launchers, "b", 600)
    launchers.handlers["b"].report_failure(kind="worker_exit", message="rank 1 died")
    avoided = launchers.join("b")["b"]
    assert ranks(launchers.joined("a")) == {"a": 0}
    assert standby.result(WAIT_S).rank == 1
    assert not avoided.done()
    wait_until(lambda: "host b is in quarantine for another" in caplog.text)
    launchers.handlers["c"].leave()
    wait_until(lambda: launchers.handlers["a"].num_nodes_waiting() > 0)
    assert ranks(launchers.joined("a")) == {"a": 0}
    assert avoided.result(WAIT_S).rank == 1, "there is no other"


def test_round_grows_when_a_cool_down_ends(launchers: Launchers) -> None:
    """Nothing in etcd changes then: every launcher looks at its clock."""
    begun(launchers, 1, 2)
    for host in "ab":
        launchers.make(host, (1, 2), last_call_timeout="0.1")
    quarantine(launchers, "b", 3)
    assert ranks(launchers.joined("a")) == {"a": 0}
    waiting = launchers.join("b")["b"]
    wait_until(lambda: launchers.handlers["a"].num_nodes_waiting() > 0)
    assert ranks(launchers.joined("a")) == {"a": 0}
    assert waiting.result(WAIT_S).rank == 1


@pytest.mark.parametrize("published", [False, True])
def test_host_that_dies_while_a_round_is_formed(launchers: Launchers, published: bool) -> None:
    """Group rank 0 never serves its store, or stands still when it should: its generation ends with its lease."""

    async def register(etcd: Etcd) -> Any:
        await agree(below(etcd, launchers.prefix), launchers.run_id, Terms(min_nodes=2, max_nodes=3), abandoned=False)
        lease = await etcd.lease(600, keep_alive=False)
        value = {"session": "x.1", "nproc": 1, "role": "", "addr": "127.0.0.1", "pid": 1, "ready": 1}
        await etcd.put(f"{launchers.prefix}rdzv/members/x", value, lease=lease)
        return lease.id

    lease_id = launchers.ask(register)
    for host in "ab":
        launchers.make(host, (2, 3), last_call_timeout="0.5")
    joining = launchers.join("ab")
    wait_until(lambda: launchers.handlers["a"]._link.membership.view.round)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if published:
            address = {"addr": "127.0.0.1", "port": silent.getsockname()[1]}
            launchers.ask(lambda etcd: etcd.put(f"{launchers.prefix}rdzv/store/1", address))
            wait_until(lambda: len(threads_named("store")) == 2)
        assert not any(future.done() for future in joining.values())
        launchers.ask(lambda etcd: etcd.revoke(lease_id))
        assert {future.result(WAIT_S).world_size for future in joining.values()} == {2}
        assert {handler.generation for handler in launchers.handlers.values()} == {2}
    wait_until(lambda: not threads_named("store"))


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_restart_without_etcd_is_given_up_in_time(alone: Alone) -> None:
    alone.make("a", (1, 1), join_timeout="3")
    alone.joined("a")
    alone.etcd.kill()
    with pytest.raises(RendezvousConnectionError, match="cannot reach etcd"):
        alone.handlers["a"].next_rendezvous()


def test_lost_lease(launchers: Launchers) -> None:
    """Nobody waits for a host that was cut off; when it is back, it takes part in the next generation."""
    for host in "ab":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    lease = launchers.handlers["b"]._link.membership._lease
    assert lease is not None
    launchers.ask(lambda etcd: etcd.revoke(lease.id))
    for handler in launchers.handlers.values():
        wait_until(lambda handler=handler: handler.num_nodes_waiting() > 0)
        failure = handler.failure
        assert failure is not None
        assert (failure.kind, failure.host) == ("host_lost", "b")
    assert ranks(launchers.joined("ab")) == {"a": 0, "b": 1}


def test_outage_of_etcd(alone: Alone) -> None:
    for host in "ab":
        alone.make(host, (2, 2))
    alone.joined("ab")
    alone.etcd.kill()
    handler = alone.handlers["a"]
    assert handler.num_nodes_waiting() == 0
    handler.report_failure(kind="worker_exit", message="rank 0 died in the outage")
    again = {host: alone._threads.submit(alone.handlers[host].next_rendezvous) for host in "ab"}
    alone.etcd.start()
    assert ranks({host: future.result(WAIT_S) for host, future in again.items()}) == {"a": 0, "b": 1}


def test_etcd_that_comes_back_without_its_data_is_named_as_the_reason(alone: Alone) -> None:
    alone.make("a", (1, 1), lease_ttl="2")
    alone.joined("a")
    alone.etcd.kill()
    alone.etcd.forget()
    alone.etcd.start()
    handler = alone.handlers["a"]
    assert "without its data" in wait_until(lambda: handler.closed).reason


def test_a_registration_that_etcd_lost_is_made_again(launchers: Launchers) -> None:
    """The lease that it was made with lives."""
    launchers.make("a", (1, 1))
    launchers.joined("a")
    launchers.ask(lambda etcd: etcd.delete(f"{launchers.prefix}rdzv/members/a"))
    wait_until(lambda: launchers.members() == {"a"})


def test_outage_that_outlasts_every_lease_breaks_nothing(alone: Alone) -> None:
    """All alone register again; only the host that died meanwhile is lost, and that is noticed then."""
    for host in "ab":
        alone.make(host, (3, 3), lease_ttl="2")
    joining = alone.join("ab")
    process = alone.launch("c", (3, 3))
    assert place(process)[0] == 1
    for future in joining.values():
        future.result(WAIT_S)
    before = created(alone)
    alone.etcd.pause()
    time.sleep(OUTAGE_S)
    alone.etcd.resume()
    wait_until(lambda: len(after := created(alone)) == 3 and all(after[host] > before[host] for host in "abc"))
    assert not any(key.startswith("rdzv/failure/") for key in alone.keys())  # noqa: SIM118
    assert {handler.failure for handler in alone.handlers.values()} == {None}
    alone.etcd.pause()
    process.kill()
    time.sleep(OUTAGE_S)
    alone.etcd.resume()
    failure = wait_until(lambda: alone.handlers["a"].failure)
    assert (failure.kind, failure.host) == ("host_lost", "c")
    wait_until(lambda: alone.members() == {"a", "b"})


def created(launchers: Launchers) -> dict[str, int]:
    """Return host → the revision at which its member key was made."""
    keys = launchers.keys().items()
    return {key.rpartition("/")[2]: entry.created for key, entry in keys if key.startswith("rdzv/members/")}


def put_watermark(launchers: Launchers, generation: int, step: int) -> None:
    key = f"{launchers.prefix}state/watermark"
    launchers.ask(lambda etcd: etcd.put(key, {"generation": generation, "step": step}))


def test_round_restores_the_watermark(launchers: Launchers) -> None:
    handler = launchers.make("a", (1, 1))
    launchers.joined("a")
    assert handler.round is not None
    assert handler.round.restore is None
    put_watermark(launchers, 1, 41)
    launchers.joined("a")
    assert handler.round.restore == (1, 41)
    entry = launchers.keys()["rdzv/round"]
    assert Round.parse(entry.value, revision=entry.revision) == handler.round


def begun(launchers: Launchers, min_nodes: int, max_nodes: int) -> None:
    """Let the run begin without a launcher."""
    terms = Terms(min_nodes=min_nodes, max_nodes=max_nodes)
    launchers.ask(lambda etcd: agree(below(etcd, launchers.prefix), launchers.run_id, terms, abandoned=False))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state/watermark", {"step": "x"}),
        ("state/watermark/older", {"pairs": [[1, "x"]]}),
        ("state/watermark/older", {}),
    ],
    ids=["newest", "older", "none"],
)
def test_damaged_watermark_is_named(launchers: Launchers, key: str, value: dict[str, Any]) -> None:
    """Whoever deletes what is damaged loses nothing else."""
    begun(launchers, 1, 1)
    launchers.make("a", (1, 1))
    launchers.ask(lambda etcd: etcd.put(launchers.prefix + key, value))
    with pytest.raises(RendezvousStateError, match=rf"{key} is damaged .*; delete it"):
        launchers.handlers["a"].next_rendezvous()


def test_watermark_that_moves_while_a_round_is_formed(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = launchers.make("a", (1, 1))
    launchers.joined("a")
    put_watermark(launchers, 1, 41)
    listed = Etcd.list
    moved = []

    async def list_then_move(self: Etcd, prefix: str) -> dict[str, Entry]:
        entries = await listed(self, prefix)
        if prefix.endswith("state/watermark") and not moved:
            moved.append(prefix)
            await self.put(prefix, {"generation": 1, "step": 42})
        return entries

    monkeypatch.setattr(Etcd, "list", list_then_move)
    launchers.joined("a")
    assert moved
    assert handler.round is not None
    assert handler.round.restore == (1, 42)


def commit(launchers: Launchers, generation: int, step: int, world_size: int) -> None:
    put_watermark(launchers, generation, step)
    key = f"{launchers.prefix}rdzv/committed"
    launchers.ask(lambda etcd: etcd.put(key, {"world_size": world_size}))


def test_round_with_something_to_restore_does_not_grow(launchers: Launchers, caplog: pytest.LogCaptureFixture) -> None:
    for host in "ab":
        launchers.make(host, (1, 2), last_call_timeout="0.1", join_timeout="1")
    handler = launchers.handlers["a"]
    launchers.joined("a")
    commit(launchers, 1, 41, world_size=1)
    wait_until(lambda: handler._link.membership.view.bound == 1)
    newcomer = launchers.join("b")["b"]
    wait_until(lambda: "so generation 1 does not grow: this host waits as a standby" in caplog.text)
    wait_until(lambda: "no number of ranks but 1 can restore what is committed: b waits as a standby" in caplog.text)
    assert (handler.num_nodes_waiting(), handler.failure, newcomer.done()) == (0, None, False)
    handler.report_failure(kind="worker_exit", message="rank 0 died")
    assert launchers.joined("a")["a"].world_size == 1
    assert handler.round is not None
    assert handler.round.restore == (1, 41)
    handler.leave()
    assert newcomer.result(WAIT_S).world_size == 1
    assert launchers.handlers["b"].generation == 3


def test_round_with_something_to_restore_does_not_shrink(
    launchers: Launchers, caplog: pytest.LogCaptureFixture
) -> None:
    for host in "abc":
        launchers.make(host, (1, 2))
    launchers.joined("ab")
    commit(launchers, 1, 41, world_size=2)
    launchers.handlers["b"].leave()
    waiting = launchers.join("a")["a"]
    wait_until(lambda: "1 of 2 ranks are ready, and no other number can restore what is committed" in caplog.text)
    assert not waiting.done()
    late = launchers.join("c")["c"]
    assert (waiting.result(WAIT_S).world_size, late.result(WAIT_S).rank) == (2, 1)


def test_what_is_committed_while_a_round_would_grow_is_kept(launchers: Launchers) -> None:
    """Its launchers have not heard of it, but the transaction that forms the round finds out."""
    for host in "ab":
        launchers.make(host, (1, 2), last_call_timeout="0.1")
    launchers.joined("a")
    newcomer = launchers.join("b")["b"]
    wait_until(lambda: launchers.handlers["a"].num_nodes_waiting() > 0)
    put_watermark(launchers, 1, 41)
    assert launchers.joined("a")["a"].world_size == 1
    assert launchers.keys()["rdzv/committed"].value == {"world_size": 1}
    wait_until(lambda: launchers.handlers["a"].num_nodes_waiting() == 0)
    assert not newcomer.done()


def test_nobody_comes_for_a_lost_host(launchers: Launchers) -> None:
    for host in "ab":
        launchers.make(host, (1, 2), join_timeout="3")
    launchers.joined("ab")
    commit(launchers, 1, 41, world_size=2)
    launchers.handlers["b"].leave()
    message = (
        r"1 of 2 ranks are ready, and no other number can .*: waiting for a host; lost: b\. Ready hosts: a\. Start"
    )
    with pytest.raises(RendezvousTimeoutError, match=message):
        launchers.handlers["a"].next_rendezvous()


def test_success_ends_the_run_for_a_standby_and_frees_its_id(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    put_watermark(launchers, 1, 41)
    standby = launchers.join("c")["c"]
    assert not launchers.handlers["a"].all_done()
    for host in "ab":
        launchers.handlers[host].report_done()
    wait_until(launchers.handlers["a"].all_done)
    launchers.handlers["a"].close("the training script succeeded", failed=False)
    with pytest.raises(RendezvousGracefulExitError, match="the training script succeeded"):
        standby.result(WAIT_S)
    wait_until(lambda: launchers.handlers["b"].is_closed())
    assert launchers.handlers["b"].num_nodes_waiting() > 0
    assert all(handler.shutdown() for handler in launchers.handlers.values())
    assert launchers.keys() == {}
    launchers.make("a", (1, 1))
    assert launchers.joined("a")["a"].world_size == 1
    assert launchers.handlers["a"].generation == 1


def left(launchers: Launchers, *more: str) -> set[str]:
    """Return the keys that a run has in any case once something is committed, and `more`."""
    job = Agreement.parse(launchers.keys()["rdzv/job"].value)
    return {"rdzv/job", f"rdzv/job/{job.name}", "rdzv/round", "state/watermark", *more}


def test_failure_ends_the_run_and_leaves_what_a_new_start_needs(launchers: Launchers) -> None:
    for host in "abc":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    standby = launchers.join("c")["c"]
    put_watermark(launchers, 1, 41)
    launchers.handlers["b"].close("rank 1 failed", failed=True)
    launchers.handlers["a"].close("too late", failed=False)
    for end in (standby, launchers._threads.submit(launchers.handlers["a"].next_rendezvous)):
        with pytest.raises(RendezvousClosedError, match="rank 1 failed"):
            end.result(WAIT_S)
    assert all(handler.shutdown() for handler in launchers.handlers.values())
    assert set(launchers.keys()) == left(launchers, "rdzv/store/1")
    for name in ("rdzv/failure/1", "root/failures", "inject/orders/x"):
        launchers.ask(lambda etcd, name=name: etcd.put(f"{launchers.prefix}{name}", {}))
    for host in "ab":
        launchers.make(host, (2, 2))
    assert ranks(launchers.joined("ba")) == {"a": 0, "b": 1}
    handler = launchers.handlers["a"]
    assert handler.round is not None
    assert (handler.generation, handler.round.restore) == (2, (1, 41))
    now = left(launchers, "rdzv/store/2", "rdzv/members/a", "rdzv/members/b", "rdzv/committed")
    assert set(launchers.keys()) == now, "the failures of the life before count no more"
    assert launchers.keys()["rdzv/job"].value["life"] == 2


def test_of_two_ends_at_once_the_one_that_etcd_took_is_the_runs(launchers: Launchers) -> None:
    for host in "ab":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    ends = [
        launchers._threads.submit(launchers.handlers[host].close, f"{host} ended", failed)
        for host, failed in (("a", False), ("b", True))
    ]
    for end in ends:
        end.result(WAIT_S)
    taken = launchers.keys()["rdzv/job"].value["closed"]
    for host in "ab":
        closed = launchers.handlers[host].closed
        assert closed is not None
        assert closed.to_value() == taken


def test_end_that_etcd_did_not_take_removes_nothing(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network of a host stands still while another one ends the run with a failure."""
    monkeypatch.setattr(rendezvous, "_CLOSE_S", 0.5)
    alone.make("b", (2, 2))
    with alone.through_proxy():
        late = alone.make("a", (2, 2))
    alone.joined("ab")
    put_watermark(alone, 1, 41)
    alone.proxy.hold_from = 0
    alone.handlers["b"].close("rank 1 failed", failed=True)
    assert alone.handlers["b"].leave()
    late.close("all ranks succeeded", failed=False)
    assert late.ended is None
    alone.proxy.release()
    assert late.leave()
    assert late.ended is not None
    assert late.ended.reason == "rank 1 failed"
    assert set(alone.keys()) == left(alone, "rdzv/store/1")


def with_standby_cut_off(
    launchers: Alone, *, outlasting: bool = False
) -> tuple[EtcdRendezvous, "Future[RendezvousInfo]"]:
    """Return the launcher of a run, and what its standby waits for, whose connection to etcd is gone.

    The standby's lease has expired, or is `outlasting` the outage.
    """
    running = launchers.make("a", (1, 1))
    launchers.joined("a")
    with launchers.through_proxy():
        standby = launchers.make("b", (1, 1), lease_ttl="60" if outlasting else "2")
    waiting = launchers.join("b")["b"]
    wait_until(lambda: standby.stood_by)  # Its key may be there before it knows.
    launchers.proxy.cut()
    wait_until(lambda: launchers.members() == ({"a", "b"} if outlasting else {"a"}))
    return running, waiting


@pytest.mark.parametrize("anew", [False, True])
def test_standby_that_is_cut_off_ends_with_the_run(alone: Alone, anew: bool) -> None:
    """Also if another run has begun under its id, with terms that it did not agree to."""
    running, waiting = with_standby_cut_off(alone)
    running.close("all ranks succeeded", failed=False)
    assert running.leave()
    assert alone.keys() == {}
    if anew:
        alone.make("c", (2, 2), join_timeout="5")
        other = alone.join("c")["c"]
    alone.proxy.mend()
    with pytest.raises(RendezvousClosedError, match="again while" if anew else "ended it while"):
        waiting.result(WAIT_S)
    if anew:
        with pytest.raises(RendezvousTimeoutError):
            other.result(WAIT_S)


def test_launcher_of_a_run_that_is_gone_changes_nothing_of_the_next_one(alone: Alone) -> None:
    """Whatever it does before it has seen that the run is another one."""
    running, waiting = with_standby_cut_off(alone)
    standby = alone.handlers["b"]
    running.close("all ranks succeeded", failed=False)
    assert running.leave()
    alone.make("c", (2, 2))
    other = alone.join("c")["c"]
    wait_until(lambda: [member.ready for member in alone.handlers["c"].view.members.values()] == [1])
    before = alone.keys()
    alone.proxy.mend()
    wait_until(lambda: "c" in standby.view.members)
    view = replace(standby.view, round=None)
    old, seat = standby._link.membership, view.members["c"]
    failure = Failure(generation=1, host="b", kind="restart", began_step=None, unix_s=time.time(), message="m")
    asking: list[Callable[[], Awaitable[Any]]] = [
        lambda: old.form(view, (Seat(host="c", session=seat.session, nproc=1),)),
        lambda: old.fail(failure),
        lambda: old.done(1),
        lambda: old.publish_store(1, "127.0.0.1", 1),
        lambda: old.close(Closed(reason="it is over", failed=True)),
    ]
    answers = [standby._link.request(ask, time.monotonic() + WAIT_S) for ask in asking]
    assert not any(answers)
    assert alone.keys() == before
    with pytest.raises(RendezvousClosedError):
        waiting.result(WAIT_S)
    assert not other.done()
    alone.make("d", (2, 2))
    assert alone.joined("d")["d"].world_size == 2
    assert other.result(WAIT_S).world_size == 2


def test_job_that_is_written_again_holds_nobody_up(alone: Alone) -> None:
    """It has another revision, as the job of another life would, and is the same one."""
    key = f"{alone.prefix}rdzv/job"

    def write_again(**changes: Any) -> None:
        entry = alone.ask(lambda client: client.get(key))
        assert entry is not None
        alone.ask(lambda client: client.put(key, {**entry.value, **changes}))

    running = alone.make("a", (1, 2), last_call_timeout="1")
    alone.joined("a")
    write_again(note="of somebody")
    alone.make("b", (1, 2))
    waiting = alone.join("b")["b"]
    wait_until(lambda: running.num_nodes_waiting() == 1)
    write_again()
    alone.joined("a")
    assert (running.generation, waiting.result(WAIT_S).world_size) == (2, 2)
    for host in "ab":
        alone.handlers[host].report_done()
    wait_until(running.all_done)
    write_again(token=None)
    wait_until(lambda: running.closed is not None)
    assert running.closed is not None
    assert "somebody changed its etcd keys" in running.closed.reason


def test_run_whose_job_is_removed_ends_for_all(launchers: Launchers) -> None:
    """Whoever comes next waits until those who were in it are gone, and begins from nothing."""
    for host in "ab":
        launchers.make(host, (2, 2))
    launchers.joined("ab")
    put_watermark(launchers, 1, 41)
    launchers.ask(lambda client: client.delete(f"{launchers.prefix}rdzv/job"))
    for host in "ab":
        closed = wait_until(lambda host=host: launchers.handlers[host].closed)
        assert "somebody changed its etcd keys" in closed.reason
    anew = launchers.make("c", (1, 1))
    waiting = launchers._threads.submit(anew.next_rendezvous)
    time.sleep(0.5)
    assert not waiting.done()
    for host in "ab":
        assert launchers.handlers[host].leave()
    assert waiting.result(WAIT_S).world_size == 1
    assert anew.round is not None
    assert (anew.generation, anew.round.restore) == (1, None)


def test_job_that_is_written_again_all_the_time_holds_nobody_up(alone: Alone) -> None:
    ended = threading.Event()

    async def write_again(client: Etcd) -> int:
        times = 0
        while not ended.is_set():
            entry = await client.get(f"{alone.prefix}rdzv/job")
            assert entry is not None
            await client.put(f"{alone.prefix}rdzv/job", entry.value)
            times += 1
            await asyncio.sleep(0.02)
        return times

    try:
        for host in "ab":
            alone.make(host, (2, 2))
        alone.joined("ab")
        writing = alone._threads.submit(alone.ask, write_again)
        for generation in range(2, 6):
            alone.handlers["a"].report_failure(kind="worker", message="it is started again")
            alone.joined("ab")
            assert alone.handlers["b"].generation == generation
        for host in "ab":
            alone.handlers[host].report_done()
        wait_until(alone.handlers["a"].all_done)
        ended.set()
        assert writing.result(WAIT_S) > 1
    finally:
        ended.set()


@pytest.mark.parametrize("outlasting", [False, True])
def test_standby_that_is_cut_off_does_not_go_on_alone_with_a_failed_run(alone: Alone, outlasting: bool) -> None:
    """What such a run left behind is for a new start."""
    running, waiting = with_standby_cut_off(alone, outlasting=outlasting)
    put_watermark(alone, 1, 41)
    running.close("rank 0 failed for good", failed=True)
    assert running.leave()
    alone.proxy.mend()
    with pytest.raises(RendezvousClosedError, match="rank 0 failed for good"):
        waiting.result(WAIT_S)
    assert alone.handlers["b"].leave()
    assert set(alone.keys()) >= {"rdzv/job", "rdzv/round", "state/watermark"}
    again = alone.make("a", (1, 1))
    alone.joined("a")
    assert again.round is not None
    assert again.round.restore == (1, 41)


def test_other_terms_take_over_no_run_that_is_only_cut_off(alone: Alone) -> None:
    with alone.through_proxy():
        for host in "ab":
            alone.make(host, (2, 2), lease_ttl="2")
        alone.joined("ab")
    alone.proxy.cut()
    wait_until(lambda: alone.members() == set())
    other = alone._threads.submit(alone.make("c", (1, 1), lease_ttl="2").next_rendezvous)
    time.sleep(1)
    assert not other.done()
    alone.proxy.mend()
    with pytest.raises(RendezvousStateError, match="nnodes=2:2, but this launcher has --nnodes=1:1"):
        other.result(WAIT_S)
    wait_until(lambda: alone.members() == {"a", "b"})
    running = [alone.handlers[host] for host in "ab"]
    assert [(each.failure, each.closed, each.num_nodes_waiting()) for each in running] == [(None, None, 0)] * 2


def test_launcher_that_leaves_late_spares_what_has_begun_anew(launchers: Launchers) -> None:
    late = launchers.make("a", (1, 1))
    launchers.joined("a")
    late.close("all ranks succeeded", failed=False)
    ended = late._link.membership._ended
    assert ended is not None
    following = ended.follow(ended.job)._replace(guards={})
    launchers.ask(lambda etcd: below(etcd, launchers.prefix).commit(*following))
    put_watermark(launchers, 2, 99)
    assert late.leave()
    assert launchers.keys()["state/watermark"].value == {"generation": 2, "step": 99}


def test_success_whose_last_launcher_was_killed_is_cleared_by_a_new_start(launchers: Launchers) -> None:
    launchers.make("a", (2, 2))
    joining = launchers.join("a")
    last = launchers.launch("b", (2, 2), lease_ttl="6")
    assert place(last)[0] == 1
    joining["a"].result(WAIT_S)
    put_watermark(launchers, 1, 41)
    stop(last.pid)
    launchers.handlers["a"].close("all ranks succeeded", failed=False)
    last.kill()
    assert launchers.handlers["a"].leave()
    assert "state/watermark" in set(launchers.keys())
    handler = launchers.make("a", (1, 1))
    launchers.joined("a")
    assert handler.round is not None
    assert (handler.generation, handler.round.restore) == (1, None)


def test_launcher_ends_no_round_that_others_are_in_without_it(launchers: Launchers) -> None:
    """Among them its own successor: another session under its host id."""
    replaced = launchers.make("a", (1, 1))
    launchers.joined("a")
    formed = replaced.round
    assert formed is not None
    others = replace(formed, generation=2, seats=(replace(formed.seats[0], session="another"),)).to_value()
    launchers.ask(lambda etcd: etcd.put(f"{launchers.prefix}rdzv/round", others))
    put_watermark(launchers, 1, 41)
    replaced.close("rank 0 failed", failed=True)
    assert launchers.keys()["rdzv/job"].value["closed"] is None
    assert replaced.leave()
    assert replaced.ended is None
    assert {"rdzv/round", "state/watermark"} <= set(launchers.keys())


def test_failure_without_a_commit_leaves_nothing(launchers: Launchers) -> None:
    launchers.make("a", (1, 1))
    launchers.joined("a")
    launchers.handlers["a"].close("rank 0 failed", failed=True)
    assert launchers.handlers["a"].shutdown()
    assert launchers.keys() == {}


def test_new_start_waits_until_the_end_of_the_last_one_has_passed(launchers: Launchers) -> None:
    """While launchers of it are there."""
    last = launchers.make("a", (1, 1))
    launchers.joined("a")
    last.close("rank 0 failed", failed=True)
    anew = launchers.make("b", (1, 1))
    waiting = launchers._threads.submit(anew.next_rendezvous)
    time.sleep(0.5)
    assert not waiting.done()
    assert last.leave()
    assert waiting.result(WAIT_S).world_size == 1


def test_end_that_its_launchers_do_not_leave_is_named(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_STAYS_CLOSED_S", 0.5)
    launchers.make("a", (1, 1))
    launchers.joined("a")
    launchers.handlers["a"].close("rank 0 failed", failed=True)
    launchers.make("b", (1, 1), lease_ttl="1")
    with pytest.raises(RendezvousClosedError, match="stays closed: wait until its launchers on a are gone"):
        launchers.handlers["b"].next_rendezvous()


def test_standby_that_ends_does_not_end_the_run(launchers: Launchers) -> None:
    handler = launchers.make("a", (1, 1))
    launchers.joined("a")
    standby = launchers.launch("b", (1, 1), lease_ttl="600")
    wait_until(lambda: launchers.members() == {"a", "b"})
    standby.send_signal(signal.SIGTERM)
    assert standby.wait(WAIT_S) == 0
    assert launchers.members() == {"a"}
    assert (handler.closed, handler.failure) == (None, None)


def test_exception_under_way_makes_a_shutdown_a_failure(launchers: Launchers) -> None:
    for host in "ab":
        launchers.make(host, (2, 2))
    launchers.joined("ab")

    def run_agent() -> None:
        try:
            raise KeyError("worker")
        finally:
            launchers.handlers["a"].shutdown()

    with pytest.raises(KeyError):
        run_agent()
    closed = wait_until(lambda: launchers.handlers["b"].closed)
    assert closed.failed
    assert closed.reason == "the launcher on host a failed with KeyError"


def test_launchers_on_one_host_have_names_of_their_own(launchers: Launchers) -> None:
    """Whoever comes back gets the name that is free, the round's first."""

    def join(*handlers: EtcdRendezvous) -> set[str]:
        with ThreadPoolExecutor(len(handlers)) as pool:
            infos = [pool.submit(handler.next_rendezvous) for handler in handlers]
            assert {info.result(WAIT_S).world_size for info in infos} == {len(handlers)}
        assert handlers[0].round is not None
        return set(handlers[0].round.hosts)

    first, second, third = (launchers.make("a", (2, 2)) for _ in range(3))
    assert [handler.host for handler in (first, second, third)] == ["a", "a#1", "a#2"]
    assert join(first, third) == {"a", "a#2"}
    second.leave()
    third.leave()
    again = launchers.make("a", (2, 2))
    assert again.host == "a#2"
    assert join(first, again) == {"a", "a#2"}
    assert first.generation == 2


def test_the_name_of_a_launcher_in_another_namespace_is_refused(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where names cannot be claimed, as between containers of one host name, etcd still has each only once."""
    first = launchers.make("a", (1, 2), last_call_timeout="0.1")
    launchers.joined("a")
    monkeypatch.setattr(claim, "own_directory", lambda uid: tmp_path / "another /dev/shm")
    launchers.make("a", (1, 2), lease_ttl="1")
    message = (
        rf"run id '{launchers.run_id}' already has a live launcher on host a \(pid {os.getpid()} .*RESILIENT_HOST_ID"
    )
    with pytest.raises(RendezvousStateError, match=message.replace("[", r"\[").replace("]", r"\]")):
        launchers.handlers["a"].next_rendezvous()
    assert launchers.handlers["a"].shutdown()
    assert (first.failure, first.closed) == (None, None)


def test_other_nnodes_than_the_run_has(launchers: Launchers) -> None:
    launchers.make("a", (1, 2), last_call_timeout="0.1")
    launchers.joined("a")
    launchers.make("b", (3, 3), lease_ttl="1")
    with pytest.raises(RendezvousStateError, match=r"--nnodes=1:2, but this launcher has --nnodes=3:3"):
        launchers.handlers["b"].next_rendezvous()
    assert launchers.handlers["b"].shutdown()
    launchers.handlers["a"].leave()
    launchers.make("c", (1, 1), lease_ttl="2")
    assert launchers.joined("c")["c"].world_size == 1


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("one", "two", "with the run key with proof one, but this launcher has the run key with proof two"),
        ("one", "", "with the run key with proof one, but this launcher has no run key"),
        ("", "two", "with no run key, but this launcher has the run key with proof two"),
    ],
)
def test_another_run_key_than_the_run_has(launchers: Launchers, first: str, second: str, told: str) -> None:
    """A host whose daemon the others would not let in is no host; a run that nobody runs may get another key.

    With it the hash of the same arguments is another one, of which nothing is said.
    """
    marks = [replace(MARK, arguments=key) for key in (first, second)]
    launchers.make("a", (1, 2), last_call_timeout="0.1").describe(1, "", key_proof=first, fingerprint=marks[0])
    launchers.joined("a")
    launchers.make("b", (1, 2), lease_ttl="1").describe(1, "", key_proof=second, fingerprint=marks[1])
    with pytest.raises(
        RendezvousStateError,
        match=f"goes on {told}: start every launcher of a run with the same values, or choose another --rdzv-id$",
    ):
        launchers.handlers["b"].next_rendezvous()
    assert launchers.handlers["b"].shutdown()
    launchers.handlers["a"].leave()
    launchers.make("c", (1, 2), last_call_timeout="0.1", lease_ttl="2").describe(1, "", key_proof=second)
    assert launchers.joined("c")["c"].world_size == 1


MARK = Fingerprint(user="ann", script="train.py", content="1" * 64, arguments="2" * 64, torch="2.0", formats="wire 1")


def described(
    launchers: Launchers, host: str, nnodes: tuple[int, int] = (1, 1), *, lease_ttl: str = "10", **terms: Any
) -> EtcdRendezvous:
    """Return a new handler that runs as `host` and starts what `terms` say."""
    handler = launchers.make(host, nnodes, lease_ttl=lease_ttl)
    handler.describe(1, "default", **terms)
    return handler


@pytest.mark.parametrize(
    ("changes", "theirs", "ours"),
    [
        ({"user": "bob"}, "user ann", "user bob"),
        ({"script": "eval.py"}, "script train.py (sha256 111111111111)", "script eval.py (sha256 111111111111)"),
        ({"content": "3" * 64}, "script train.py (sha256 111111111111)", "script train.py (sha256 333333333333)"),
        ({"arguments": "4" * 64}, "arguments of sha256 222222222222", "arguments of sha256 444444444444"),
        ({"torch": "2.1", "user": "bob"}, "user ann, torch 2.0", "user bob, torch 2.1"),
        ({"script": "", "content": ""}, "script train.py (sha256 1", "script unknown (sha256 unknown)"),
    ],
)
def test_another_script_than_the_run_has(launchers: Launchers, changes: dict[str, str], theirs: str, ours: str) -> None:
    described(launchers, "a", fingerprint=MARK)
    launchers.joined("a")
    other = replace(MARK, **changes)
    message = f"goes on with {theirs}.*, but this launcher has {ours}.*--rr-allow-different-script"
    with pytest.raises(RendezvousStateError, match=message.replace("(", r"\(").replace(")", r"\)")):
        described(launchers, "b", lease_ttl="1", fingerprint=other).next_rendezvous()
    assert launchers.keys()["rdzv/job"].value["fingerprint"] == asdict(MARK)
    # Whoever means it gets in, and changes nothing for the others.
    described(launchers, "c", fingerprint=other, allow_different=True)
    launchers.join("c")
    assert launchers.members() == {"a", "c"}
    assert launchers.keys()["rdzv/job"].value["fingerprint"] == asdict(MARK)
    described(launchers, "d", fingerprint=MARK)
    launchers.join("d")
    assert launchers.handlers["a"].failure is None


def test_a_launcher_that_leaves_waits_no_more(launchers: Launchers) -> None:
    for host in "ab":
        launchers.make(host, (1, 1))
    launchers.joined("a")
    waiting = launchers.join("b")["b"]
    launchers.handlers["b"].leave()
    with pytest.raises((RendezvousConnectionError, RuntimeError)):
        waiting.result(WAIT_S)


def test_what_a_stopped_loop_was_running_is_told() -> None:
    loop, begun = LoopThread("loop"), threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: loop.run(wait()))
        assert begun.wait(WAIT_S)
        loop.stop()
        with pytest.raises(RuntimeError, match="thread loop was stopped"):
            waiting.result(WAIT_S)


def test_other_formats_are_never_let_in(launchers: Launchers) -> None:
    described(launchers, "a", fingerprint=MARK)
    launchers.joined("a")
    other = replace(MARK, formats="wire 2", user="bob")
    with pytest.raises(RendezvousStateError, match=r"user ann, formats of resilient-run wire 1, but .*--rdzv-id$"):
        described(launchers, "b", lease_ttl="1", fingerprint=other, allow_different=True).next_rendezvous()
    with pytest.raises(RendezvousStateError, match=r"--nnodes=1:1, but this launcher has --nnodes=1:2: .*--rdzv-id$"):
        described(launchers, "c", (1, 2), lease_ttl="1", fingerprint=MARK, allow_different=True).next_rendezvous()


def test_terms_bind_as_long_as_a_launcher_lives(launchers: Launchers) -> None:
    described(launchers, "a", fingerprint=MARK)
    launchers.joined("a")
    before = launchers.keys()["rdzv/job"].value
    launchers.handlers["a"].leave()
    edited = replace(MARK, content="5" * 64, formats="wire 2")
    described(launchers, "b", lease_ttl="2", fingerprint=edited)
    launchers.joined("b")
    after = launchers.keys()["rdzv/job"].value
    assert after == {**before, "fingerprint": asdict(edited), "life": 2}
    with pytest.raises(RendezvousStateError, match=r"script train\.py"):
        described(launchers, "a", lease_ttl="1", fingerprint=MARK).next_rendezvous()


def test_run_that_becomes_abandoned_while_its_terms_are_read_binds_nobody(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers.make("a", (1, 2), last_call_timeout="0.1")
    launchers.joined("a")
    asking = launchers.make("b", (1, 1), lease_ttl="2")._link.membership
    enter, agree = Membership._enter, membership.agree
    asked = []

    async def enter_late(self: Membership, terms: Terms, *, waited_s: float) -> bool:
        return await enter(self, terms, waited_s=waited_s + WAIT_S)

    async def answer_late(etcd: Etcd, run_id: str, terms: Terms, *, abandoned: bool) -> Entry:
        asked.append(abandoned)
        try:
            return await agree(etcd, run_id, terms, abandoned=abandoned)
        except RendezvousStateError:
            while not asking._abandoned:
                await asyncio.sleep(0.01)
            raise

    monkeypatch.setattr(Membership, "_enter", enter_late)
    monkeypatch.setattr(membership, "agree", answer_late)
    waiting = launchers._threads.submit(launchers.handlers["b"].next_rendezvous)
    wait_until(lambda: asked)
    launchers.handlers["a"].leave()
    assert waiting.result(WAIT_S).world_size == 1
    assert asked[:2] == [False, True]


def test_run_that_another_version_began_is_refused(launchers: Launchers) -> None:
    """It has no key of its life; nobody guesses what the launchers of that version do."""
    begun(launchers, 1, 1)
    job = Agreement.parse(launchers.keys()["rdzv/job"].value)
    launchers.ask(lambda etcd: etcd.delete(f"{launchers.prefix}rdzv/job/{job.name}"))
    launchers.make("a", (1, 1), lease_ttl="1")
    with pytest.raises(RendezvousStateError, match="was started by another version, or one of its keys"):
        launchers.handlers["a"].next_rendezvous()


def test_too_few_hosts(launchers: Launchers) -> None:
    launchers.make("a", (3, 3), join_timeout="2")
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 3 hosts are ready\. Ready hosts: a\. Start the"):
        launchers.handlers["a"].next_rendezvous()


def test_unreachable_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RendezvousConnectionError, match=r"cannot reach etcd at 127\.0\.0\.1:1"):
        get_rendezvous_handler(RendezvousParameters("etcd-v3", "127.0.0.1:1", "run", 1, 1))


@pytest.mark.parametrize(
    ("run_id", "endpoint", "options", "message"),
    [
        ("a/b", "127.0.0.1:1", {}, "--rdzv-id"),
        ("a", "", {}, "--rdzv-endpoint"),
        ("a", "127.0.0.1:1", {"lease_ttl": "soon"}, "lease_ttl=soon"),
        ("a", "127.0.0.1:1", {"join_timeout": "-1"}, "join_timeout=-1"),
        ("a", "127.0.0.1:1", {"user": "trainer"}, "RESILIENT_ETCD_PASSWORD"),
        ("a", "127.0.0.1:1", {"user": "trainer", "password": "x"}, "passwordfile="),
        ("a", "unix:etcd.sock", {}, "unix:/path"),
    ],
)
def test_unusable_options_are_named(run_id: str, endpoint: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_rendezvous_handler(RendezvousParameters("etcd-v3", endpoint, run_id, 1, 1, **options))


def test_loopback_address_beside_others_names_the_remedy(launchers: Launchers) -> None:
    async def register(etcd: Etcd) -> None:
        value = {"session": "x.1", "nproc": 1, "role": "", "addr": "10.0.0.9", "pid": 1, "ready": 1}
        await etcd.put(f"{launchers.prefix}rdzv/members/x", value, lease=await etcd.lease(600, keep_alive=False))

    launchers.make("a", (2, 2))
    future = launchers.join("a")["a"]
    launchers.ask(register)
    with pytest.raises(RendezvousStateError, match="give --local-addr on host a"):
        future.result(WAIT_S)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if sys.argv[1] == "crash" and dist.get_rank() == 1 and not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "x").close()
    os._exit(3)
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}", flush=True)
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.parametrize("mode", ["succeed", "crash"])
def test_plain_torchrun(launchers: Launchers, tmp_path: Path, mode: str) -> None:
    """The handler alone, under torch's own launcher and agent."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={launchers.endpoint}", "--rdzv-id", launchers.run_id]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(script), mode, str(tmp_path / "crashed")]
    processes = [
        start_python(
            command,
            {**os.environ, "RESILIENT_HOST_ID": host},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in "ab"
    ]
    outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("rank ")]
    assert sorted(lines) == ["rank 0 of 2: 3", "rank 1 of 2: 3"], "\n".join(outputs)
    assert launchers.keys() == {}
