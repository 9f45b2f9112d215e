"""`resilientctl rollback` on real daemons and whole jobs, and what it refuses."""

import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gated
import pytest
from click.testing import CliRunner
from cluster import Cluster, wait_until
from etcd_process import below
from gated import Gate, on_etcd
from hosts import PAYLOAD_BYTES, Hosts, payload, restored_bytes

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.run.life import Life
from resilient_run.daemon.run.records import Requirements
from resilient_run.daemon.tier.manifest import Persisted, RankFile
from resilient_run.daemon.tier.tier import Tier
from resilient_run.launcher.rendezvous.agreement import look

pytestmark = pytest.mark.jobs


@pytest.fixture
def hosts(hosts: Hosts, tmp_path: Path) -> Hosts:
    hosts.policy = {"persist": {"target": str(tmp_path / "tier"), "every_steps": 2, "every_s": 0, "keep": 9}}
    return hosts


def rollback(
    run_id: str, endpoint: str | None, step: int, *options: str, run_dir: Path | None = None
) -> tuple[int, str]:
    """Return exit code and output of the command; without `endpoint`, the daemon below `run_dir` knows it."""
    where = [] if endpoint is None else ["--etcd-endpoint", endpoint]
    command = ["rollback", run_id, "--to", str(step), *where, *options]
    environ = None if run_dir is None else {"RESILIENT_RUN_DIR": str(run_dir)}
    done = CliRunner().invoke(resilientctl, command, env=environ)
    return done.exit_code, done.output


def run_to_6(hosts: Hosts) -> list[Any]:
    """Start ranks that commit six steps, of which every second is published before there are later ones."""
    trainers, published = hosts.run("ab"), list[list[int]]()
    for step in (2, 4, 6):
        hosts.commit(trainers, [step - 1, step])
        published.append([1, step])

        def is_published() -> bool:
            entry = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}state/persisted"))
            return entry is not None and entry.value == {"pairs": published}

        wait_until(is_published, timeout_s=60, what=f"step {step} to be published")
    return trainers


def test_all_go_back_and_nothing_later_counts(hosts: Hosts, etcd_config: EtcdConfig) -> None:
    """A capture that is complete when the order comes is not committed over it, nor is a later step restored again."""
    target = hosts.policy["persist"]["target"]
    tier, answers = Tier(target, hosts.run_id), list[tuple[int, str]]()

    def key(name: str) -> Any:
        entry = hosts.etcd(lambda etcd: etcd.get(hosts.prefix + name))
        return None if entry is None else entry.value

    trainers = run_to_6(hosts)
    # A storage that lets nothing be taken back.
    planted = Path(target) / hosts.run_id / "1-6" / "manifest.refused.json"
    (planted / "manifest.json").mkdir(parents=True)
    code, output = rollback(hosts.run_id, etcd_config.endpoints[0], 4, "--target", target)
    assert code == 1
    assert f"the run does not go back: {planted.parent} would still count" in output
    assert key("rdzv/failure/1") is None
    assert hosts.watermark() == (1, 6)
    shutil.rmtree(planted)
    trainers[0].capture(7)
    order = threading.Thread(
        target=lambda: answers.append(rollback(hosts.run_id, None, 4, run_dir=hosts["a"].run_dir)),
        daemon=True,
    )
    order.start()
    wait_until(lambda: key("rdzv/failure/1"), timeout_s=60, what="the order")
    trainers[1].capture(7)
    wait_until(lambda: (1, 7) in hosts["b"].held().get(1, ()), timeout_s=30, what="the capture of rank 1")
    assert tier.published() == [(1, 2), (1, 4)]
    assert hosts.watermark() == (1, 4)
    assert key("state/persisted") == {"pairs": [[1, 2], [1, 4]]}
    assert key("state/watermark/persist") is None
    assert key("rdzv/committed") == {"world_size": 2}
    trainers = hosts.run("ab", generation=2)
    for rank, trainer in enumerate(trainers):
        assert restored_bytes(trainer.request("restore")["path"]) == payload(hosts.run_id, rank, (1, 4))
    hosts.commit(trainers, [5, 6])
    order.join(60)
    assert answers == [(0, answers[0][1])]
    assert f"run {hosts.run_id!r} went back to step 4: generation 2 has committed step " in answers[0][1]
    wait_until(
        lambda: key("state/persisted") == {"pairs": [[1, 2], [1, 4], [2, 6]]},
        timeout_s=60,
        what="the next published step",
    )
    kinds = [failure["kind"] for failure in key("root/failures")["failures"]]
    assert kinds == ["rollback"]


@pytest.mark.parametrize("to", [4, 6])
def test_a_daemon_that_outlives_the_run_commits_nothing_over_it(hosts: Hosts, etcd_config: EtcdConfig, to: int) -> None:
    """Launchers that come later have put something right: failures so far count no more, and the round is the same."""
    target = hosts.policy["persist"]["target"]
    trainers = run_to_6(hosts)
    trainers[0].capture(7)

    async def decided(etcd: Etcd) -> dict[str, int]:
        found = await etcd.list(hosts.prefix)
        return {
            key: found[hosts.prefix + key].revision
            for key in ("rdzv/round", "state/watermark", "state/watermark/next", "rdzv/job/first.1")
        }

    guards = {hosts.prefix + key: revision for key, revision in hosts.etcd(decided).items()}
    code, output = rollback(hosts.run_id, etcd_config.endpoints[0], to, "--target", target, "--timeout", "2")
    assert code == 1
    assert "has committed nothing" in output
    late = {f"{hosts.prefix}state/watermark": {"generation": 1, "step": 7}}
    assert not hosts.etcd(lambda etcd: etcd.commit(guards, late)), "a commit that was on its way"

    async def follow(etcd: Etcd) -> int:
        etcd = below(etcd, hosts.prefix)
        life = Life.of(await look(etcd))
        assert life is not None
        return await etcd.commit(*life.follow(Requirements(min_nodes=1, max_nodes=2)))

    assert hosts.etcd(follow)
    trainers[1].capture(7)
    wait_until(lambda: (1, 7) in hosts["b"].held().get(1, ()), timeout_s=30, what="the capture of rank 1")
    time.sleep(1)  # a root that would commit it needs a moment
    assert hosts.watermark() == (1, to)
    trainers = hosts.run("ab", generation=2)
    hosts.commit(trainers, [to + 1, to + 2])


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize("is_persisted", [True, False], ids=["tier", "memory"])
def test_a_run_goes_back_and_ends_as_if_nothing_had_been(
    tmp_path: Path, etcd_endpoint: str, nnodes: int, is_persisted: bool
) -> None:
    cluster, gate, target = Cluster(tmp_path), Gate(tmp_path / "gate"), tmp_path / "tier"
    tables = f'[persist]\ntarget = "{target}"\nevery_steps = 4\nevery_s = 0\nkeep = 9\n'
    (tmp_path / "rr.toml").write_text(tables if is_persisted else "[replication]\nkeep = 4\nkeep_every = 2\n")
    arguments = on_etcd(etcd_endpoint, cluster.name, nnodes=nnodes, nproc=2 // nnodes)
    hosts, tier = [cluster.host(name) for name in "ab"[:nnodes]], Tier(str(target), cluster.name)
    try:
        for host in hosts:
            host.launch([*arguments, "--rr-config", str(tmp_path / "rr.toml")], gate.script)
        run_dir = hosts[0].run_dir
        gated.train_to(12, gate, hosts, run_dir / "resilientd.sock")
        if is_persisted:
            wait_until(lambda: len(tier.published()) > 1, timeout_s=60, what="published steps", host=hosts[0])
            _, step = tier.published()[-2]
        else:
            _, listed = rollback(cluster.name, etcd_endpoint, 999, run_dir=run_dir)
            found = re.search(r"these are: (.*) in memory, none in the persistent tier", listed)
            assert found is not None, listed
            step, *between, newest = map(int, found[1].split(", "))
            assert len(between) == 2, listed
            assert newest - step > 4
        options = ["--target", str(target)] if is_persisted else []
        code, output = rollback(cluster.name, etcd_endpoint, step, *options, "--timeout", "100", run_dir=run_dir)
        assert code == 0, output
        assert all(generation == 2 or other <= step for generation, other in tier.published())
        gate.open(gated.STEPS)
        assert [host.wait() for host in hosts] == [0] * nnodes, hosts[0].output
        gated.assert_undisturbed(hosts)
        for host in hosts:
            (event,) = host.recoveries()
            assert (event["kind"], event["restored_step"], event["complete"]) == ("rollback", step, True)
            assert f"`resilientctl rollback` to step {step}" in host.output
    finally:
        cluster.close()


def test_older_steps_in_memory_are_at_hand_again_once_a_generation_commits(
    hosts: Hosts, etcd_config: EtcdConfig
) -> None:
    """Until then nobody knows whether all hosts still have them: an order waits, and changes nothing."""
    answers = list[tuple[int, str]]()

    def order(step: int, *options: str) -> tuple[int, str]:
        return rollback(
            hosts.run_id, etcd_config.endpoints[0], step, "--target", hosts.policy["persist"]["target"], *options
        )

    def put(values: Mapping[str, Any], *deleted: str) -> None:
        puts = {hosts.prefix + key: value for key, value in values.items()}
        hosts.etcd(lambda etcd: etcd.commit({}, puts, [hosts.prefix + key for key in deleted]))

    def broken() -> Any:
        return hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}rdzv/failure/2"))

    seats = [{"host": name, "session": "s", "nproc": 1} for name in "ab"]
    restored, older = {"generation": 1, "step": 9}, [[1, 5], [1, 7]]
    put(
        {
            "rdzv/job": {"incarnation": "i", "min_nodes": 1, "max_nodes": 2, "token": "t"},
            "rdzv/round": {"generation": 2, "members": seats, "restore": restored, "older": older},
            "state/watermark": restored,
            "state/watermark/older": {"pairs": older},
        }
    )
    for told, message in (
        (order(5, "--timeout", "1"), "has committed nothing"),
        (order(6), "step 6 is not at hand; these are: 9 in memory"),
    ):
        assert (told[0], broken()) == (1, None)
        assert message in told[1]
    waiting = threading.Thread(target=lambda: answers.append(order(5)), daemon=True)
    waiting.start()
    # A replica of step 7 was lost.
    put({"state/watermark": {"generation": 2, "step": 10}, "state/watermark/older": {"pairs": [[1, 5], [1, 9]]}})
    wait_until(broken, timeout_s=30, what="the order")
    assert hosts.watermark() == (1, 5)
    put({}, "rdzv/round")
    waiting.join(30)
    assert [code for code, _ in answers] == [1]
    assert "etcd has no running run" in answers[0][1]


@pytest.mark.parametrize(
    ("step", "elastic_s", "message"),
    [
        (5, None, "step 5 is not at hand; these are: 9 in memory, 4, 6, 8 in the persistent tier"),
        (4, None, "1 ranks made step 4, and the run has 2: without --rr-elastic only as many can restore it"),
        (6, 1.0, "rank0.zst has 0 bytes, not "),
        (8, 1.0, "generation 1 step 8 is not published in "),
        (4, 1.0, "has committed nothing after step 4 within 1 s: see `resilientctl status`"),
        (9, None, "has committed nothing after step 9 within 1 s: see `resilientctl status`"),
    ],
)
def test_what_not_all_ranks_can_restore_is_refused(
    hosts: Hosts, etcd_config: EtcdConfig, step: int, elastic_s: float | None, message: str
) -> None:
    """Nothing is interrupted then."""
    target = hosts.policy["persist"]["target"]
    tier = Tier(target, hosts.run_id)
    for found in (4, 6):
        writer = tier.write((1, found), 0)
        file = RankFile(capacity_bytes=PAYLOAD_BYTES, payload_offset=8192, stored_bytes=writer.finish())
        tier.publish(Persisted(run_id=hosts.run_id, pair=(1, found), world_size=1, ranks={0: file}))
    (Path(target) / hosts.run_id / "1-6" / "rank0.zst").unlink()
    options = ["--target", target, "--timeout", "1"]
    code, output = rollback(hosts.run_id, etcd_config.endpoints[0], step, *options)
    assert code == 1
    assert "etcd has no running run" in output

    async def write(etcd: Etcd) -> None:
        agreed = {"incarnation": "i", "min_nodes": 1, "max_nodes": 2, "token": "t", "elastic_s": elastic_s}
        seats = [{"host": name, "session": "s", "nproc": 1} for name in "ab"]
        for key, value in {
            "rdzv/job": agreed,
            "rdzv/round": {"generation": 1, "members": seats, "restore": None},
            "state/watermark": {"generation": 1, "step": 9},
            "state/persisted": {"pairs": [[1, 4], [1, 6], [1, 8]]},
        }.items():
            await etcd.put(hosts.prefix + key, value)

    hosts.etcd(write)
    code, output = rollback(hosts.run_id, etcd_config.endpoints[0], step, *options)
    assert code == 1
    assert message in output
    broken = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}rdzv/failure/1"))
    assert (broken is not None) == ("has committed nothing" in message)
    assert hosts.watermark() == ((1, 4) if broken is not None and step == 4 else (1, 9))
