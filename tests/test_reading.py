"""What a daemon gives a trainer of the slots that another number of ranks made: bounded ranges, from who has them."""

from typing import Any

import pytest
from cluster import wait_until
from hosts import PAYLOAD_BYTES, Hosts, Trainer, payload

from resilient_run.ckpt.errors import DaemonError, MemoryBudgetError, RestoreError
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot, parse_header, plan_layout

pytestmark = pytest.mark.jobs

BEGIN = plan_layout(len(b'{"made":"by a test"}'), PAYLOAD_BYTES)[0]


def shrunk(hosts: Hosts, **changes: Any) -> Trainer:
    """Return the only rank that goes on with what two have committed."""
    hosts.commit(hosts.run("ab", **changes), [1])
    hosts.wait_for_replicas("ab", (1, 1), 4)
    hosts.form_round(2, "a", made_by=2)
    trainer = hosts["a"].trainer(0, world_size=1, generation=2)
    assert trainer.attach()["made_by"] == 2
    return trainer


def given(answer: dict[str, Any]) -> bytes:
    slot = Slot.open(answer["path"])
    data = bytes(slot.buffer[slot.payload_offset :])
    slot.close()
    return data


def test_ranges_come_from_who_has_them(hosts: Hosts) -> None:
    hosts.policy = {"persist": {"target": str(hosts["a"].run_dir.parent / "tier"), "every_steps": 1}}
    hosts.hosts.clear()
    trainer = shrunk(hosts)
    manifest = hosts["a"].run_dir.parent / "tier" / hosts.run_id / "1-1" / "manifest.json"
    wait_until(manifest.exists, timeout_s=60, what="a published step")
    expected = [payload(hosts.run_id, rank, (1, 1)) for rank in range(2)]
    for avoid, sources in (([], ["a", "a"]), (["a"], ["a", "b"]), (["a", "b"], ["a", "persistent tier"])):
        wanted = [
            {"rank": 0, "ranges": [BEGIN + 5, 3, 0, HEADER_BYTES]},
            {"rank": 1, "ranges": [BEGIN + 2**20 - 7, 2**20 + 100, BEGIN + PAYLOAD_BYTES - 9, 9], "avoid": avoid},
        ]
        answer = trainer.request("read", wanted=wanted)
        assert (answer["sources"], answer["host"]) == (sources, "a")
        data = given(answer)
        assert data[:3] == expected[0][5:8]
        assert parse_header(data[3 : 3 + HEADER_BYTES], 1 << 40).pair == (1, 1)
        rest = expected[1][2**20 - 7 : 2**21 + 93] + expected[1][-9:]
        assert data[3 + HEADER_BYTES :][: len(rest)] == rest
    with pytest.raises(RestoreError, match="no verified copy of rank 1 at step 1"):
        trainer.request("read", wanted=[{"rank": 1, "ranges": [0, 9], "avoid": ["a", "b", "persistent tier"]}])
    trainer.request("read", wanted=[{"rank": 1, "ranges": [0, 9]}])
    trainer.close()
    wait_until(lambda: not list(hosts["a"].shm_dir.glob("*/read*")), timeout_s=30, what="the file to be gone")


def test_what_cannot_be_read_is_refused(hosts: Hosts) -> None:
    trainer = shrunk(hosts)
    for wanted, message in (
        ([{"rank": 2, "ranges": [0, 9]}], "field 'rank' must be an integer from 0 to 1"),
        ([{"rank": 0, "ranges": [0, 9, 1]}], "field 'ranges' must have an offset and a size"),
        ([{"rank": 0, "ranges": [BEGIN + PAYLOAD_BYTES - 1, 2]}], "none at"),
        ([{"rank": 0, "ranges": [0, 1 << 40]}], "ask for 1 to"),
        ([], "ask for 1 to"),
    ):
        with pytest.raises(DaemonError, match=message):
            trainer.request("read", wanted=wanted)
    assert not list(hosts["a"].shm_dir.glob("*/read*"))
    hosts.form_round(3, "ab")
    trainer = hosts["a"].trainer(0, world_size=2, generation=3)
    trainer.attach()
    with pytest.raises(DaemonError, match="by as many ranks as it has"):
        trainer.request("read", wanted=[{"rank": 0, "ranges": [0, 9]}])


def test_what_is_read_counts_against_the_budget(hosts: Hosts) -> None:
    trainer = shrunk(hosts, memory_limit_bytes=20 * 2**20)
    with pytest.raises(MemoryBudgetError):
        trainer.request("read", wanted=[{"rank": 0, "ranges": [0, 1 << 20] * 64}])
    trainer.request("read", wanted=[{"rank": 0, "ranges": [0, 9]}])
