"""Whole jobs that lose all their memory, and go on bit-identical from the persistent tier."""

import os
import re
import signal
from pathlib import Path

import pytest
from cluster import PACED, Cluster, Host, stop, wait_until
from etcd_process import EtcdProcess

from resilient_run.daemon.tier.tier import Tier

pytestmark = pytest.mark.jobs

STEPS = 40
SCRIPT = [*PACED, "--steps", str(STEPS)]


def launch(
    cluster: Cluster, names: str, etcd: EtcdProcess, config: Path, *extra: str, script: list[str] = SCRIPT
) -> list[Host]:
    """Start one single-worker launcher per name for a run on two hosts, with the tier that `config` describes."""
    hosts = [cluster.host(name) for name in names]
    arguments = ["--nnodes", "2", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd.endpoint]
    arguments += ["--rdzv-id", cluster.name, "--rdzv-conf", "lease_ttl=3", "--local-addr", "127.0.0.1", *extra]
    for host in hosts:
        host.launch([*arguments, "--rr-config", str(config)], script)
    return hosts


def hold_back(host: Host, step: int) -> int:
    """Let the run stand still after `step`, so that there are steps left when it goes on; return whom to continue."""
    wait_until(lambda: host.reached(step), timeout_s=60, what=f"step {step}", host=host)
    pid = next(iter(host.pids().values()))
    stop(pid)
    return pid


def test_run_id_goes_on_after_all_hosts_and_etcd_are_lost(cluster: Cluster, etcd: EtcdProcess, tmp_path: Path) -> None:
    reference = cluster.host("reference")
    reference.launch(["--standalone", "--nproc-per-node", "2"], SCRIPT)
    config = tmp_path / "run.toml"
    config.write_text(f'[persist]\ntarget = "{tmp_path}/tier"\nevery_steps = 4\nevery_s = 0\n')
    assert reference.wait() == 0, reference.output
    hosts = launch(cluster, "ab", etcd, config)
    tier = Tier(str(tmp_path / "tier"), cluster.name)
    hold_back(hosts[0], 12)
    wait_until(tier.published, timeout_s=60, what="a published step", host=hosts[0])
    for host in hosts:
        host.lose()
        host.wait()
        host.shm_dir.mkdir(mode=0o700, exist_ok=True)
    etcd.kill()
    newest = tier.published()[-1]
    trained = len(hosts[0].steps())
    fresh = EtcdProcess(tmp_path / "fresh etcd")
    fresh.start()
    try:
        launch(cluster, "ab", fresh, config)
        for host in hosts:
            assert host.wait() == 0, host.output
    finally:
        fresh.kill()
    assert f"begins with the persisted step {newest[1]}" in hosts[0].output + hosts[1].output
    assert hosts[0].steps()[trained][1] == newest[1] + 1, "the relaunched run began at another step"
    expected = {(rank, step): loss for rank, step, loss in reference.steps()}
    for host in hosts:
        for rank, step, loss in host.steps():
            assert expected[rank, step] == loss, f"rank {rank} step {step}"
    assert {host.params_sha256() for host in hosts} - {None} == {reference.params_sha256()}


def test_lost_only_copy_takes_every_rank_back(cluster: Cluster, etcd: EtcdProcess, tmp_path: Path) -> None:
    """Case 2 of the Gemini chapter (6.6.2): one rank's memory is gone, so all ranks restore the persisted step."""
    reference = cluster.host("reference")
    reference.launch(["--standalone", "--nproc-per-node", "2"], SCRIPT)
    config = tmp_path / "run.toml"
    config.write_text(f'[persist]\ntarget = "{tmp_path}/tier"\nevery_steps = 8\nevery_s = 0\n')
    assert reference.wait() == 0, reference.output
    alone = ("--rr-replicas", "1")
    survivor, lost = launch(cluster, "ab", etcd, config, *alone)
    tier = Tier(str(tmp_path / "tier"), cluster.name)
    wait_until(lambda: survivor.reached(1), timeout_s=60, what="step 1", host=survivor)
    (standby,) = launch(cluster, "c", etcd, config, *alone)
    held_back = hold_back(survivor, 16)
    wait_until(tier.published, timeout_s=60, what="a published step", host=survivor)
    reached = max(step for _, step, _ in survivor.steps())
    lost.lose()
    os.kill(held_back, signal.SIGCONT)
    for host in (survivor, standby):
        assert host.wait() == 0, host.output
    logs = "".join((host.run_dir / "resilientd.log").read_text() for host in (survivor, standby))
    # A step whose capture was skipped is not persisted, but the next that was committed.
    fallen_back = re.search(r"every rank falls back to step (\d+) in the persistent tier", logs)
    assert fallen_back, logs
    assert 8 <= int(fallen_back[1]) <= reached
    expected = {(rank, step): loss for rank, step, loss in reference.steps()}
    seen = [line for host in (survivor, lost, standby) for line in host.steps()]
    assert {(rank, step) for rank, step, _ in seen} == expected.keys()
    for rank, step, loss in seen:
        assert expected[rank, step] == loss, f"rank {rank} step {step}"
    assert {host.params_sha256() for host in (survivor, standby)} - {None} == {reference.params_sha256()}


def test_lost_placement_group_falls_back_to_the_persistent_tier(
    cluster: Cluster, etcd: EtcdProcess, tmp_path: Path
) -> None:
    """Both hosts that hold the committed step die at once; two standbys go on from the persisted one."""
    steps = ["--steps", "80"]
    reference = cluster.host("reference")
    reference.launch(["--standalone", "--nproc-per-node", "2"], [*SCRIPT, *steps])
    config = tmp_path / "run.toml"
    config.write_text(f'[persist]\ntarget = "{tmp_path}/tier"\nevery_steps = 4\nevery_s = 0\n')
    assert reference.wait() == 0, reference.output
    hosts = launch(cluster, "abcd", etcd, config, script=[*SCRIPT, *steps])
    tier = Tier(str(tmp_path / "tier"), cluster.name)
    wait_until(tier.published, timeout_s=60, what="a published step", host=hosts[0])
    active = [host for host in hosts if host.starts()]
    hold_back(active[0], 1)
    members = ("get", "--prefix", "--keys-only", f"/resilient-run/{cluster.name}/rdzv/members/")
    wait_until(lambda: etcd.ctl(*members).count("/members/") == 4, timeout_s=60, what="two standbys")
    standbys = [host for host in hosts if not host.starts()]
    assert len(active) == len(standbys) == 2
    for host in active:
        host.lose()
    for host in standbys:
        assert host.wait() == 0, host.output
    expected = {(rank, step): loss for rank, step, loss in reference.steps()}
    for host in [*active, *standbys]:
        for rank, step, loss in host.steps():
            assert expected[rank, step] == loss, f"rank {rank} step {step}"
    persisted = {host.steps()[0][1] - 1 for host in standbys}
    assert len(persisted) == 1, "the ranks went on from different steps"
    assert persisted.pop() >= 4, "not every step is committed, but the first persisted one is a fourth at the earliest"
    assert {host.params_sha256() for host in standbys} - {None} == {reference.params_sha256()}
