"""The root agent in real daemons over a real etcd: elected, lost, cut off; and every decision carried out."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import stop, wait_until
from etcd_process import EtcdProcess
from hosts import Hosts, Trainer, wait_for_watermark
from seats import member_value

from resilient_run.daemon.etcd.client import Entry, Etcd, EtcdConfig, Lease

LEASE_S = 5
WAIT_S = 30.0


def keys(hosts: Hosts, below: str = "") -> dict[str, Entry]:
    """Return the run's keys below `below` without their prefix."""
    found = hosts.etcd(lambda etcd: etcd.list(hosts.prefix + below))
    return {key.removeprefix(hosts.prefix): entry for key, entry in found.items()}


def put(hosts: Hosts, key: str, value: dict[str, Any]) -> None:
    hosts.etcd(lambda etcd: etcd.put(hosts.prefix + key, value))


def leader(hosts: Hosts) -> str | None:
    entry = keys(hosts, "root/").get("root/leader")
    return None if entry is None else str(entry.value["host"])


def decisions(hosts: Hosts) -> list[dict[str, Any]]:
    entry = keys(hosts, "root/").get("root/decisions")
    return [] if entry is None else list(entry.value["decisions"])


def decided(hosts: Hosts, kind: str) -> dict[str, Any]:
    """Return the first decision of this kind, waiting for it."""

    def find() -> dict[str, Any] | None:
        return next((entry for entry in decisions(hosts) if entry["kind"] == kind), None)

    def missing() -> str:
        logs = "".join(host.log for host in hosts.hosts.values() if host.log_path.exists())
        return f"decision {kind}: {decisions(hosts)}\n{logs}"

    found: dict[str, Any] = wait_until(find, timeout_s=WAIT_S, what=missing)
    return found


def members(hosts: Hosts, names: str, ready: int = 0, session: str = "s") -> None:
    """Let launchers of these hosts be there."""
    for name in names:
        put(hosts, f"rdzv/members/{name}", member_value(session, ready))


def fail(hosts: Hosts, generation: int, kind: str, host: str, **fields: Any) -> None:
    value = {"rank": None, "pid": None, "exitcode": None, "unix_s": time.time(), "message": f"{kind} on {host}"}
    put(hosts, f"rdzv/failure/{generation}", {**value, "host": host, "kind": kind, **fields})


def others(trainers: list[Trainer], name: str) -> list[Trainer]:
    return [trainer for trainer in trainers if trainer.host.name != name]


def test_members_elect_one_of_them_and_status_names_it(hosts: Hosts) -> None:
    hosts.commit(hosts.run("ab"), [1])
    hosts["c"].start()
    hosts["c"].open()
    assert leader(hosts) in {"a", "b"}
    for name in "abc":
        wait_until(
            lambda name=name: hosts[name].status()["jobs"][0]["root"]["host"] == leader(hosts),
            timeout_s=WAIT_S,
            what=f"{name} knows the root",
        )


def test_restarted_root_leads_again_at_once(hosts: Hosts) -> None:
    """It does not wait for the lease of its earlier life, and keeps the lead when that expires."""
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1, 2])
    root = leader(hosts)
    assert root is not None

    async def lend(etcd: Etcd) -> Lease:
        """Let the key be on a lease that expires when we say so, however long the daemon takes to come back."""
        lease = await etcd.lease(600, keep_alive=False)
        await etcd.put(f"{hosts.prefix}root/leader", {"host": root}, lease=lease)
        return lease

    lease = hosts.etcd(lend)
    before = keys(hosts, "root/")["root/leader"]
    hosts[root].kill()
    hosts[root].drop_clients()
    hosts[root].start()
    hosts[root].open()
    rank = "ab".index(root)
    trainers[rank] = hosts[root].trainer(rank, world_size=2, generation=1)
    trainers[rank].attach()
    for trainer in trainers:
        trainer.capture(3)
    wait_for_watermark(trainers, (1, 3))
    entry = wait_until(
        lambda: (entry := keys(hosts, "root/").get("root/leader")) and entry.revision > before.revision and entry,
        timeout_s=WAIT_S,
        what="the key is taken over",
    )
    assert (entry.value, entry.created) == ({"host": root}, before.created), "it was never free"
    hosts.etcd(lambda etcd: etcd.revoke(lease.id))
    assert leader(hosts) == root


def test_killed_root_is_followed_by_another_member(hosts: Hosts) -> None:
    trainers = hosts.run("abc")
    hosts.commit(trainers, [1])
    root = leader(hosts)
    assert root is not None
    hosts[root].kill()
    hosts[root].drop_clients()
    wait_until(lambda: leader(hosts) not in (None, root), timeout_s=WAIT_S, what="another root")
    hosts[root].start()
    hosts[root].open()
    rank = "abc".index(root)
    trainers[rank] = hosts[root].trainer(rank, world_size=3, generation=1)
    trainers[rank].attach()
    hosts.commit(trainers, [2])
    assert leader(hosts) != root


def test_root_that_is_replaced_in_the_round_is_no_root_any_more(hosts: Hosts) -> None:
    """Nobody waits for its lease; its successor re-creates replicas, and nothing is committed without them."""
    hosts.commit(hosts.run("abc"), [1])
    root = leader(hosts)
    assert root is not None
    hosts[root].kill()
    hosts[root].drop_clients()
    names = "abc".replace(root, "d")
    trainers = hosts.run(names, generation=2)
    wait_until(lambda: leader(hosts) in set(names), timeout_s=WAIT_S, what="a new root")
    assert leader(hosts) != root
    hosts.wait_for_replicas(names, (1, 1), 6)
    for trainer in trainers:
        trainer.allocate()
    newcomer = hosts["d"].process
    assert newcomer is not None
    stop(newcomer.pid)
    for trainer in trainers:
        trainer.capture(2)
    survivors = [name for name in names if name != "d"]
    hosts.wait_for_replicas(survivors, (2, 2), 3)
    assert hosts.watermark() == (1, 1), "committed without all replicas"
    newcomer.send_signal(signal.SIGCONT)
    wait_for_watermark(trainers, (2, 2))


def test_root_that_stands_still_steps_down_and_never_moves_the_watermark_back(hosts: Hosts) -> None:
    trainers = hosts.run("abc", replicas=1)
    hosts.commit(trainers, [1])
    root = leader(hosts)
    assert root is not None
    process = hosts[root].process
    assert process is not None
    stop(process.pid)
    wait_until(lambda: leader(hosts) not in (None, root), timeout_s=WAIT_S, what="another root")
    for trainer in others(trainers, root):
        trainer.capture(2)
    process.send_signal(signal.SIGCONT)
    next(trainer for trainer in trainers if trainer.host.name == root).capture(2)
    wait_for_watermark(trainers, (1, 2))
    hosts.commit(trainers, [3])
    assert leader(hosts) != root


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("root/decisions", {"decisions": 5}),
        ("root/decisions", {"decisions": [5]}),
        ("root/leader", {"host": 7}),
        ("ckpt/hosts/x", {"addr": "127.0.0.1", "port": "many"}),
    ],
)
def test_what_a_stranger_has_damaged_counts_as_nothing(hosts: Hosts, key: str, value: dict[str, Any]) -> None:
    trainers = hosts.run("ab", replicas=1)
    hosts.commit(trainers, [1])
    told = f"ignoring {key}"

    def is_told() -> bool:
        if not (heard := all(told in host.log for host in hosts.hosts.values())):
            put(hosts, key, value)  # again: what its owner soon puts right, a host that is late may not have seen
        return heard

    wait_until(is_told, timeout_s=WAIT_S, what=told, pause_s=0.2)
    hosts.commit(trainers, [2, 3])
    assert not any("Traceback" in host.log for host in hosts.hosts.values())


def test_outage_of_etcd_only_delays_commits(tmp_path: Path) -> None:
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    hosts = Hosts(tmp_path, run_id="run", config=EtcdConfig(endpoints=(server.endpoint,)))
    try:
        trainers = hosts.run("ab")
        hosts.commit(trainers, [1])
        before = keys(hosts, "ckpt/hosts/")
        server.pause()
        time.sleep(LEASE_S + 2)
        for trainer in trainers:
            trainer.capture(2)
        server.resume()
        wait_for_watermark(trainers, (1, 2))
        wait_until(
            lambda: (
                [entry.created > before[key].created for key, entry in keys(hosts, "ckpt/hosts/").items()]
                == [True, True]
            ),
            timeout_s=WAIT_S,
            what="both daemons are registered anew",
        )
        hosts.commit(trainers, [3])
        assert not keys(hosts, "rdzv/failure/")
        assert decisions(hosts) == []
    finally:
        server.resume()
        hosts.close()
        server.kill()


def test_hang_breaks_the_generation_once(hosts: Hosts) -> None:
    hosts.run("ab")
    seen = {"kind": "hang", "severity": "fail", "rank": 1, "generation": 1, "value": 9.0, "limit": 5.0, "unix_s": 1.0}
    put(hosts, "state/observations/x", {"observations": [{**seen, "message": "rank 1 made no step for 9 s"}]})
    decided(hosts, "software failure")
    failure = keys(hosts, "rdzv/failure/")["rdzv/failure/1"].value
    assert (failure["kind"], failure["host"], failure["rank"]) == ("hang", "x", 1)
    assert failure["message"] == "generation 1 hangs: rank 1 made no step for 9 s"
    assert [entry["kind"] for entry in decisions(hosts)] == ["break", "software failure"]
    root = leader(hosts)
    assert root is not None
    hosts[root].kill()
    hosts[root].drop_clients()
    wait_until(lambda: leader(hosts) not in (None, root), timeout_s=WAIT_S, what="another root")
    assert [entry["kind"] for entry in decisions(hosts)] == ["break", "software failure"], "a new root did it again"


def test_lost_memory_falls_back_to_the_persistent_tier(hosts: Hosts) -> None:
    """Case 2: both hosts of a placement group are lost, so everybody goes back to what was published."""
    trainers = hosts.run("abcd")
    hosts.commit(trainers, [1, 2])
    put(hosts, "state/persisted", {"pairs": [[1, 1]]})
    for name in "cd":
        hosts[name].close()
    hosts.run("abef", generation=2)
    assert decided(hosts, "fall_back")["root"] in set("abef")
    assert hosts.watermark() == (1, 1)
    failure = keys(hosts, "rdzv/failure/")["rdzv/failure/2"].value
    assert failure["kind"] == "memory_lost"
    assert "no live host holds step 2 of rank(s) 2, 3: every rank falls back to step 1" in failure["message"]
    assert hosts.form_round(3, "abef") == (1, 1)


def test_quarantine_and_the_operator(hosts: Hosts, tmp_path: Path) -> None:
    """A host that failed too often is avoided; for a lost one without a standby the command runs, once."""
    script, asked = tmp_path / "asks.py", tmp_path / "asked"
    script.write_text(
        "import json, os, sys\n"
        "request = json.loads(os.environ['RESILIENT_OPERATOR_REQUEST'])\n"
        "assert request == json.load(sys.stdin)\n"
        f"print(json.dumps(request), file=open({str(asked)!r}, 'a'))\n"
        "print('ordered one')\n"
        "sys.exit(3)\n"
    )
    policy = {"root": {"operator_command": f"{sys.executable} {script}", "quarantine_failures": 1}}
    for name in "ab":
        hosts[name].start()
        hosts[name].open(policy=policy)
    hosts.run("ab")
    members(hosts, "a")
    fail(hosts, 1, "host_lost", "b")
    outcome = decided(hosts, "operator")
    assert (outcome["hosts"], outcome["reason"]) == (["b"], "operator command for host b exited with code 3")
    (line,) = asked.read_text().splitlines()
    assert json.loads(line) == {
        "run_id": hosts.run_id,
        "host": "b",
        "generation": 1,
        "reason": "no standby is ready for host(s) b",
    }
    assert keys(hosts, "rdzv/quarantine/")["rdzv/quarantine/b"].value["reason"] == "host b failed 1 times within 1800 s"
    assert decided(hosts, "replace")["hosts"] == decided(hosts, "quarantine")["hosts"] == ["b"]
    root = leader(hosts)
    assert root is not None
    assert "operator command for host b printed: ordered one" in hosts[root].log

    def shown() -> tuple[list[str], list[str]]:
        status = hosts["a"].status()["jobs"][0]["root"]
        return [entry["kind"] for entry in status["decisions"]], list(status["quarantines"])

    expected = (["hardware failure", "quarantine", "replace", "operator"], ["b"])
    wait_until(lambda: shown() == expected, timeout_s=WAIT_S, what=lambda: f"{expected}: {shown()}")


def test_standbys_are_ordered_and_given_back(hosts: Hosts, tmp_path: Path) -> None:
    """One is ordered when none stands by; of two that came, the operator gets back the one that it provided."""
    script, asked = tmp_path / "asks.py", tmp_path / "asked"
    script.write_text(
        "import json, sys\n"
        f"print(json.dumps([sys.argv[1], json.load(sys.stdin)['host']]), file=open({str(asked)!r}, 'a'))\n"
    )
    command = f"{sys.executable} {script}"
    policy = {"root": {"standbys": 1, "operator_command": f"{command} order", "release_command": f"{command} back"}}
    for name in "ab":
        hosts[name].start()
        hosts[name].open(policy=policy)
    hosts.run("ab")
    members(hosts, "ab")
    assert decided(hosts, "add_standbys")["reason"] == "1 of 1 standby(s) missing"
    assert decided(hosts, "operator")["reason"] == "operator command for a standby exited with code 0"
    members(hosts, "c", ready=2)
    assert decided(hosts, "answered")["hosts"] == ["c"]
    members(hosts, "d", ready=2)
    assert decided(hosts, "release")["hosts"] == ["c"]
    wait_until(
        lambda: decisions(hosts)[-1]["reason"] == "release command for host c exited with code 0",
        timeout_s=WAIT_S,
        what=lambda: f"the end of the command: {decisions(hosts)}",
    )
    assert [json.loads(line) for line in asked.read_text().splitlines()] == [["order", ""], ["back", "c"]]
    assert list(keys(hosts, "rdzv/quarantine/")) == ["rdzv/quarantine/c"]
    assert keys(hosts, "root/requests")["root/requests"].value == {"requests": []}


def test_survivor_is_not_blamed_for_a_lost_host(hosts: Hosts) -> None:
    """The worker on b exits at once, a counts as lost when its lease expires: again and again."""
    policy = {"root": {"quarantine_failures": 3}}
    for name in "ab":
        hosts[name].start()
        hosts[name].open(policy=policy)
    hosts.create_job()
    for generation in (1, 2, 3):
        members(hosts, "b")
        members(hosts, "a", session=f"s{generation}")
        hosts.form_round(generation, "ab", sessions={"a": f"s{generation}"})
        fail(hosts, generation, "worker_exit", "b", rank=1, exitcode=1, message="rank 1 exited with code 1")
        wait_until(
            lambda generation=generation: sum(e["kind"] == "software failure" for e in decisions(hosts)) == generation,
            timeout_s=WAIT_S,
            what=f"exit {generation} is noted",
        )
        hosts.etcd(lambda etcd: etcd.delete(hosts.prefix + "rdzv/members/a"))
        wait_until(
            lambda generation=generation: sum(e["kind"] == "hardware failure" for e in decisions(hosts)) == generation,
            timeout_s=WAIT_S,
            what=f"loss {generation} is noted",
        )
    noted = keys(hosts, "root/")["root/failures"].value["failures"]
    assert [(item["host"], item["kind"]) for item in noted] == [("a", "host_lost")] * 3
    assert noted[-1]["message"] == "host a is lost, and rank 1 exited with code 1"
    assert decided(hosts, "quarantine")["hosts"] == ["a"]


def test_crash_loop_closes_the_run(hosts: Hosts) -> None:
    hosts.create_job()
    hosts["a"].start()
    hosts["a"].open(policy={"root": {"crash_loop_failures": 2, "quarantine_failures": 9}})
    for generation in (1, 2):
        hosts.form_round(generation, "a")
        fail(hosts, generation, "worker_exit", "a", rank=0, exitcode=1, message="rank 0 exited with code 1")
        wait_until(
            lambda generation=generation: sum(e["kind"] == "software failure" for e in decisions(hosts)) == generation,
            timeout_s=WAIT_S,
            what=f"failure {generation} is noted",
        )
    assert keys(hosts, "rdzv/job")["rdzv/job"].value.get("closed") is None
    hosts.form_round(3, "a")
    closed = wait_until(
        lambda: keys(hosts, "rdzv/job")["rdzv/job"].value.get("closed"),
        timeout_s=WAIT_S,
        what=lambda: f"the end\n{hosts['a'].log}",
    )
    assert closed == {
        "reason": "training failed 2 times at step 0 in the same way, so a restart does not help; the last time: "
        "rank 0 exited with code 1",
        "failed": True,
    }
    assert decided(hosts, "stop")["reason"] == closed["reason"]
