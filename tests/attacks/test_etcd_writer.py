"""Who writes etcd chooses what a keyed run restores: what its ranks captured together, or a refusal comes of it."""

from typing import Any

import pytest
from cluster import wait_until
from etcd_process import below
from hosts import Hosts, Trainer, payload, restored_bytes

from resilient_run.ckpt.errors import CheckpointError, DaemonError
from resilient_run.daemon.run.life import sweep

pytestmark = pytest.mark.jobs

KEY = "a run key of at least thirty-two characters"


def opened(hosts: Hosts, names: str, generation: int) -> list[Trainer]:
    """Let launchers open the job with a run key and form a round, and trainers attach."""
    for name in names:
        if hosts[name].process is None or hosts[name].process.poll() is not None:
            hosts[name].start()
        hosts[name].drop_clients()
        hosts[name].open(run_key=KEY)
    return hosts.run(names, generation=generation)


def write(hosts: Hosts, key: str, value: dict[str, Any]) -> None:
    hosts.etcd(lambda etcd: etcd.put(f"{hosts.prefix}{key}", value))


def restored(trainer: Trainer) -> bytes | str:
    """Return the state that a rank is given, or why it is given none."""
    try:
        return restored_bytes(trainer.request("restore")["path"])
    except CheckpointError as refusal:
        return str(refusal)


@pytest.mark.parametrize("forged", [(1, 1), (1, 4), (1, 5), (1, 99), (7, 4), (1, 0)])
def test_a_watermark_leads_nowhere_but_to_what_all_have_captured(hosts: Hosts, forged: tuple[int, int]) -> None:
    """Steps 1 to 3 are committed, step 4 has been captured by all ranks, step 5 by rank 0 alone."""
    hosts.create_job()
    trainers = opened(hosts, "ab", 1)
    hosts.commit(trainers, [1, 2, 3])
    trainers[0].capture(4, announce=False)
    trainers[1].capture(4, announce=False)
    trainers[0].capture(5, announce=False)
    for name in "ab":
        hosts[name].drop_clients()
    write(hosts, "state/watermark", {"generation": forged[0], "step": forged[1]})
    trainers = opened(hosts, "ab", 2)
    found = [restored(trainer) for trainer in trainers]
    expected = [payload(hosts.run_id, rank, forged) for rank in range(2)]
    for state, own in zip(found, expected, strict=True):
        assert state == own or "no verified copy" in state, (forged, state)
    # Nobody trains on before all ranks have their state.
    assert found == expected or not all(isinstance(state, bytes) for state in found)


def test_a_generation_does_not_come_twice(hosts: Hosts) -> None:
    """He leads the run back, and forms the generation again whose steps the hosts still hold.

    What they hold would count as captured in it: with what ranks capture anew that makes a step of two trainings.
    """
    hosts.create_job()
    hosts.commit(opened(hosts, "ab", 1), [1, 2])
    first = opened(hosts, "ab", 2)
    hosts.commit(first, [3, 4])
    for name in "ab":
        hosts[name].kill()
        hosts[name].drop_clients()
    write(hosts, "state/watermark", {"generation": 1, "step": 2})
    hosts.form_round(2, "ab")
    for name in "ab":
        hosts[name].start()
        hosts[name].open(run_key=KEY)
        trainer = hosts[name].trainer("ab".index(name), world_size=2, generation=2)
        with pytest.raises(
            DaemonError, match=r"rdzv/round in etcd is another generation 2, .* choose another --rdzv-id"
        ):
            trainer.attach()
    assert hosts.watermark() == (1, 2), "nothing of it is committed"


def test_nor_does_it_while_the_run_goes_on(hosts: Hosts) -> None:
    hosts.create_job()
    trainers = opened(hosts, "ab", 2)
    hosts.commit(trainers, [1, 2])
    hosts.form_round(1, "ab")
    wait_until(
        lambda: hosts["a"].status()["jobs"][0]["failure"], timeout_s=30, what=lambda: f"a refusal\n{hosts['a'].log}"
    )
    assert "rdzv/round in etcd is another generation 1" in hosts["a"].status()["jobs"][0]["failure"]


def test_a_new_life_begins_with_the_first_generation(hosts: Hosts) -> None:
    """And a daemon that is started again in a generation goes on with it."""
    hosts.create_job()
    hosts.commit(opened(hosts, "ab", 3), [1, 2])
    hosts["b"].kill()
    hosts["b"].start()
    hosts["b"].open(run_key=KEY)
    trainers = [hosts[name].trainer(rank, world_size=2, generation=3) for rank, name in enumerate("ab")]
    for trainer in trainers:
        trainer.attach()
    hosts.commit(trainers, [3, 4])
    for name in "ab":
        hosts[name].drop_clients()
    hosts.etcd(lambda etcd: etcd.delete(f"{hosts.prefix}rdzv/job"))
    assert hosts.etcd(lambda etcd: below(etcd, hosts.prefix).commit(*sweep()))
    hosts.create_job("second")
    for name in "ab":
        hosts[name].open(run_key=KEY)
    wait_until(
        lambda: all(hosts[name].status()["jobs"][0]["generation"] == 0 for name in "ab"),
        timeout_s=30,
        what="the earlier life is forgotten",
    )
    hosts.form_round(1, "ab")
    trainers = [hosts[name].trainer(rank, world_size=2, generation=1) for rank, name in enumerate("ab")]
    for trainer in trainers:
        trainer.attach()
    hosts.commit(trainers, [1, 2])


def test_reports_of_others_commit_nothing_that_is_restored_wrongly(hosts: Hosts) -> None:
    """He says in the name of b that it holds a step of both ranks that only a has captured."""
    hosts.create_job()
    trainers = opened(hosts, "ab", 1)
    hosts.commit(trainers, [1, 2])
    hosts["b"].kill()
    trainers[0].capture(3)
    held = {"0": [[1, 3]], "1": [[1, 3]]}
    write(hosts, "state/held/a", {"held": held, "digests": {}})
    write(hosts, "state/held/b", {"held": held, "digests": {}})
    for name in "ab":
        hosts[name].drop_clients()
    trainers = opened(hosts, "ab", 2)
    pair = hosts.watermark()
    assert pair is not None
    for rank, state in enumerate(map(restored, trainers)):
        assert state == payload(hosts.run_id, rank, pair) or "no verified copy" in state
