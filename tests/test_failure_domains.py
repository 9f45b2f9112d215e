"""Racks, with real daemons on a real etcd: replicas cross them, one may be lost whole, and replicas may move."""

import pytest
from cluster import wait_until
from hosts import MANIFEST, PAYLOAD_BYTES, Hosts, Trainer, payload, restored_bytes, wait_for_watermark

from resilient_run.ckpt.format.slot import plan_layout

pytestmark = pytest.mark.jobs

RACKS = {"a": "x", "b": "x", "c": "y", "d": "y"}


def restore(hosts: Hosts, trainers: list[Trainer], pair: tuple[int, int]) -> list[str]:
    """Let every rank restore, compare every byte, and return where each got it from."""
    answers = [trainer.request("restore") for trainer in trainers]
    for rank, answer in enumerate(answers):
        assert restored_bytes(answer["path"]) == payload(hosts.run_id, rank, pair)
    return [answer["source"] for answer in answers]


def test_a_whole_rack_may_be_lost(hosts: Hosts) -> None:
    """Two racks of two hosts: every rank has a replica in the other rack, so as many hosts as replicas may go."""
    trainers = hosts.run("abcd", labels=RACKS)
    hosts.commit(trainers, [1, 2])
    assert {name: set(hosts[name].held()) for name in "abcd"} == {"a": {0, 2}, "b": {1, 3}, "c": {0, 2}, "d": {1, 3}}
    hosts["a"].close()
    hosts["b"].close()
    again = hosts.run("efcd", generation=2, labels={"e": "x", "f": "x", "c": "y", "d": "y"})
    assert restore(hosts, again, (1, 2)) == ["peer", "peer", "local", "local"]
    hosts.commit(again, [3])


def test_replicas_move_when_a_newcomer_is_in_another_rack(hosts: Hosts) -> None:
    """All groups change, and each host has memory for just what it must keep: old replicas make room for new ones."""
    limit_bytes = 4 * plan_layout(len(MANIFEST), PAYLOAD_BYTES)[1]
    trainers = hosts.run("abcd", labels=RACKS, memory_limit_bytes=limit_bytes)
    hosts.commit(trainers, [1, 2])
    hosts["a"].close()
    labels = {"e": "y", "b": "x", "c": "y", "d": "y"}
    again = hosts.run("ebcd", generation=2, labels=labels, memory_limit_bytes=limit_bytes)
    assert restore(hosts, again, (1, 2)) == ["peer", "local", "local", "local"]
    moved = {"e": {0, 3}, "b": {1, 2}, "c": {1, 2}, "d": {0, 3}}
    wait_until(
        lambda: {name: set(hosts[name].held()) for name in "ebcd"} == moved,
        timeout_s=30,
        what=lambda: f"replicas at their new places\n{hosts['b'].log}",
    )
    hosts.commit(again, [3, 4])


def test_a_moved_replica_stays_until_its_new_holders_have_it(hosts: Hosts) -> None:
    """Host c has the only copy of rank 0 after a is lost; it is not to keep it, but the new keeper is not there yet."""
    trainers = hosts.run("abcd", labels=RACKS)
    hosts.commit(trainers, [1])
    hosts["a"].close()
    hosts["d"].close()
    labels = {"e": "y", "b": "x", "c": "y", "d": "y"}
    hosts["e"].start()
    hosts["e"].open()
    hosts.form_round(2, "ebcd", labels=labels)
    wait_until(lambda: (1, 1) in hosts["e"].held().get(0, ()), timeout_s=30, what="rank 0 at e")
    assert (1, 1) in hosts["c"].held()[0]
    hosts["d"].start()
    hosts["d"].open()
    again = [hosts[name].trainer(rank, world_size=4, generation=2) for rank, name in enumerate("ebcd")]
    for trainer in again:
        trainer.attach()
    wait_until(lambda: set(hosts["c"].held()) == {1, 2}, timeout_s=30, what="rank 0 gone from c")
    restore(hosts, again, (1, 1))


def test_without_labels_the_round_is_as_before(hosts: Hosts) -> None:
    trainers = hosts.run("abcd")
    for trainer in trainers:
        trainer.capture(1)
    wait_for_watermark(trainers, (1, 1))
    assert [set(hosts[name].held()) for name in "abcd"] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
