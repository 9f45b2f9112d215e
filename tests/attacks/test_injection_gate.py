"""Somebody writes to etcd and orders faults in a run whose launchers allow none: he strikes nobody."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, wait_until
from gated import STEPS, Gate, on_etcd
from hosts import Hosts, Trainer

from resilient_run.daemon.run.faults import KINDS, Scope

pytestmark = pytest.mark.jobs


class Attacker:
    """Writes what he wants to the keys of a run."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def write(self, name: str, value: dict[str, Any]) -> None:
        self._hosts.etcd(lambda etcd: etcd.put(f"{self._hosts.prefix}{name}", value))

    def change(self, name: str, **changes: Any) -> None:
        """Put fields into a key of others, once it is there."""
        key = f"{self._hosts.prefix}{name}"
        entry = wait_until(lambda: self._hosts.etcd(lambda etcd: etcd.get(key)), timeout_s=30, what=key)
        self.write(name, {**entry.value, **changes})

    def order_everything(self, host: str) -> None:
        """Order every kind of fault."""
        for kind in KINDS.values():
            rank = 0 if kind.scope in (Scope.RANK, Scope.REPLICA) else None
            parameters = {"corrupt-replica": {"kill": True}, "delay-heartbeats": {"of": "both"}}.get(kind.name, {})
            order = {"kind": kind.name, "host": host, "rank": rank, "after_s": 0.0, "parameters": parameters}
            self.write(f"inject/orders/{secrets.token_hex(4)}", order)

    def outcomes(self) -> list[dict[str, Any]]:
        entries = self._hosts.etcd(lambda etcd: etcd.list(f"{self._hosts.prefix}inject/outcomes/"))
        return [entry.value for entry in entries.values()]


@pytest.mark.parametrize("value", [True, "true", 1, {"a": True, "b": True}])
def test_nothing_in_etcd_allows_faults(hosts: Hosts, value: Any) -> None:
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1])
    attacker = Attacker(hosts)
    attacker.change("rdzv/job", injection=value, allow_injection=value)
    # Not in the round: who writes that ends the run (`test_etcd_writer.py`).
    for name in "ab":
        attacker.change(f"ckpt/hosts/{name}", injection=value)
    attacker.write("inject/allowed", {"injection": value})
    for name in "ab":
        attacker.order_everything(name)
    hosts.commit(trainers, [2, 3])
    # Also not in a daemon that comes to know of it at its start, nor in the next generation.
    lost = hosts["b"]
    lost.kill()
    lost.drop_clients()
    lost.start()
    trainers = hosts.run("ab", generation=2)
    hosts.commit(trainers, [4, 5])
    attacker.order_everything("b")
    hosts.commit(trainers, [6])
    assert attacker.outcomes() == []
    assert all(map(is_unharmed, trainers))


def is_unharmed(trainer: Trainer) -> bool:
    """Tell whether the daemon of a trainer runs, and has told it to do no harm."""
    process, told = trainer.host.process, {message["op"] for message in trainer.poll()}
    return process is not None and process.poll() is None and "inject" not in told


def test_a_run_that_allows_nothing_trains_to_its_end(tmp_path: Path, etcd_endpoint: str, hosts: Hosts) -> None:
    """The same against real launchers and workers."""
    gate = Gate(tmp_path / "gate")
    cluster = Cluster(tmp_path / "cluster")
    try:
        victims = [cluster.host(name) for name in "ab"]
        for victim in victims:
            victim.launch(on_etcd(etcd_endpoint, hosts.run_id, nnodes=2, nproc=1), gate.script)
        gate.open(20)
        attacker = Attacker(hosts)
        for victim in victims:
            wait_until(lambda victim=victim: victim.reached(20), timeout_s=60, what="20", host=victim)
        before = victims[0].committed_step()
        attacker.change("rdzv/job", injection=True)
        for victim in victims:
            attacker.change(f"ckpt/hosts/{victim.name}", injection=True)
            attacker.order_everything(victim.name)
        gate.open(60)
        for victim in victims:
            wait_until(lambda victim=victim: victim.reached(60), timeout_s=60, what="60", host=victim)
        wait_until(lambda: victims[0].committed_step() > before, timeout_s=60, what="a commit", host=victims[0])
        assert attacker.outcomes() == []
        gate.open(STEPS)
        assert [victim.wait() for victim in victims] == [0, 0], victims[0].output + victims[1].output
        assert [(victim.starts(), victim.recoveries()) for victim in victims] == [(1, []), (1, [])]
    finally:
        cluster.close()


def test_a_host_that_allows_faults_does_not_open_the_others(hosts: Hosts) -> None:
    hosts["b"].injection = True
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1])
    attacker = Attacker(hosts)
    attacker.order_everything("a")
    order = {"kind": "raise", "host": "b", "rank": 1, "parameters": {}}
    attacker.write("inject/orders/one", order)
    (outcome,) = wait_until(attacker.outcomes, timeout_s=30, what="the order on b")
    assert (outcome["host"], outcome["ok"]) == ("b", True)
    # Who was allowed to strike b can make b strike nobody else's rank.
    attacker.write("inject/orders/two", {**order, "rank": 0})
    outcomes = wait_until(lambda: len(found := attacker.outcomes()) == 2 and found, timeout_s=30, what="the second")
    assert [outcome["what"] for outcome in outcomes if not outcome["ok"]] == [
        "rank 0 is not attached on host b, which runs ranks [1]"
    ]
    hosts.commit(trainers, [2, 3])
    assert is_unharmed(trainers[0])


def test_no_other_connection_allows_faults(hosts: Hosts) -> None:
    """A launcher says it for its own job only; a trainer cannot, nor can a second launcher of a job that is open."""
    trainers = hosts.run("a")
    stranger = hosts["a"].client()
    other = {"run_id": f"{hosts.run_id}-other", "host": "a", "replicas": 1, "nproc": 1, "etcd": hosts.config.to_dict()}
    other |= {"addr": "127.0.0.1", "memory_limit_bytes": None, "policy": {}, "pid": os.getpid()}
    stranger.request("open_job", **other, injection=True)
    trainers[0].notify("progress", step=1, injection=True)
    attacker = Attacker(hosts)
    attacker.order_everything("a")
    hosts.commit(trainers, [1, 2])
    assert attacker.outcomes() == []
    assert is_unharmed(trainers[0])


def test_wrong_orders_hold_nobody_up(hosts: Hosts) -> None:
    hosts.injection = True
    trainers = hosts.run("a")
    attacker = Attacker(hosts)
    for number, order in enumerate(
        (
            {"kind": "kill-daemon\n" * 500, "host": "a"},
            {"kind": ["x"] * 500, "host": "a"},
            {"kind": "fill-disk", "host": "a", "parameters": {"directory": "/proc/self\n"}},
            {"kind": "raise", "host": "a", "rank": 0, "at_step": 1 << 70},
            {"kind": "raise", "host": "a", "rank": 0, "after_s": "1e9", "padding": ["x"] * 100_000},
        )
    ):
        attacker.write(f"inject/orders/{number}", order)
    for number in ("a/b", "x" * 500, "new\nline", "../../rdzv/closed"):
        attacker.write(f"inject/orders/{number}", {"kind": "kill-daemon", "host": "a"})
    outcomes = wait_until(lambda: len(found := attacker.outcomes()) == 5 and found, timeout_s=60, what="refusals")
    assert not any(outcome["ok"] for outcome in outcomes)
    assert max(len(json.dumps(outcome)) for outcome in outcomes) < 2000
    hosts.commit(trainers, [1, 2])
    assert "\nline" not in hosts["a"].log
    # The same words from somebody who does it right strike.
    attacker.write("inject/orders/right", {"kind": "raise", "host": "a", "rank": 0, "parameters": {}})
    wait_until(lambda: any(outcome["ok"] for outcome in attacker.outcomes()), timeout_s=30, what="the fault")
