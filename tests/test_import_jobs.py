"""Whole jobs that begin with an import: the same training in the same world, any other world, and never a wrong one."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from cluster import ENDLESS, Cluster, Host, wait_until
from launchers import run_trainers

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.tier.tier import Tier

pytestmark = pytest.mark.jobs

TRAINER = str(Path(__file__).parent / "import_trainer.py")


def ctl(tmp_path: Path, *arguments: str) -> str:
    """Run `resilientctl` where no daemon is and return its output."""
    done = CliRunner().invoke(resilientctl, ["--run-dir", str(tmp_path), "--shm-dir", str(tmp_path), *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def launch(host: Host, nproc: int, run_id: str, tier: Path, *script: str) -> None:
    """Start a run of one host with the id `run_id`."""
    arguments = ["--nproc-per-node", str(nproc), "--rdzv-id", run_id, "--rr-persist", str(tier)]
    host.launch(arguments, script)


def digests(lines: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(line["step"], line["sha256"]) for line in lines if "sha256" in line]


def test_export_and_import_change_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Half of a training is exported from the tier; a new run begins with that and ends like an undisturbed one."""
    # With a pause after each step, in which what was committed is published before the end.
    script = [*ENDLESS, "--steps", "16"]
    config = tmp_path / "run.toml"
    config.write_text(f'[persist]\ntarget = "{tmp_path}/tier"\nevery_steps = 4\nevery_s = 0\n')
    first, second = cluster.host("first"), cluster.host("second")
    first.launch(["--nproc-per-node", "2", "--rdzv-id", "first", "--rr-config", str(config)], script)
    assert first.wait() == 0, first.output
    tier = Tier(str(tmp_path / "tier"), "first")
    step = next(step for _, step in tier.published() if step < 16)
    where = ["--run-id", "first", "--target", str(tmp_path / "tier"), "--from", "persist", "--step", str(step)]
    ctl(tmp_path, "export", *where, "--to", str(tmp_path / "exported"))
    ctl(tmp_path, "import", str(tmp_path / "exported"), "--run-id", "second", "--target", str(tmp_path / "tier"))
    launch(second, 2, "second", tmp_path / "tier", *script)
    assert second.wait() == 0, second.output
    assert f"begins with the imported step {step}" in second.output
    assert "the import of step" not in second.output, "nothing was absent"
    expected = {(rank, done): loss for rank, done, loss in first.steps() if done > step}
    assert {(rank, done): loss for rank, done, loss in second.steps()} == expected
    assert second.params_sha256() == first.params_sha256()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    """Return a plain DCP checkpoint of two DDP ranks after four steps, and the digest of its state."""
    directory = tmp_path_factory.mktemp("plain") / "saved"
    printed = run_trainers([TRAINER, "--save", str(directory)], 2)
    step, digest = digests([json.loads(line) for line in printed.splitlines() if line.startswith("{")])[-1]
    assert step == 4
    return directory, digest


@pytest.mark.nightly
def test_two_ddp_ranks_go_on_as_three_fsdp_ranks(cluster: Cluster, tmp_path: Path, saved: tuple[Path, object]) -> None:
    """And a rank that dies before anything is committed makes all of them import again."""
    source, digest = saved
    ctl(tmp_path, "import", str(source), "--run-id", "go", "--target", str(tmp_path / "tier"), "--step", "4")
    host = cluster.host("a")
    launch(host, 3, "go", tmp_path / "tier", TRAINER, "--fsdp", "--die", "--steps", "7")
    assert host.wait() == 0, host.output
    found = digests(host.lines)
    assert [step for step, _ in found] == [4, 4, 5, 6, 7]
    assert found[0] == found[1] == (4, digest)
    assert host.output.count("it does not have epoch") == 2, "one rank says so, in each generation"
    (recovery,) = host.recoveries()
    assert recovery["restored_step"] == 4


@pytest.mark.nightly
def test_lost_memory_takes_every_rank_back_to_the_import(
    cluster: Cluster, tmp_path: Path, saved: tuple[Path, object], etcd_endpoint: str
) -> None:
    """Two hosts without replicas: what one of them had is gone, and nothing was published since the import."""
    source, digest = saved
    tier, run_id = tmp_path / "tier", tmp_path.name
    ctl(tmp_path, "import", str(source), "--run-id", run_id, "--target", str(tier), "--step", "4")
    arguments = ["--nnodes", "2", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd_endpoint, "--rdzv-id", run_id]
    arguments += ["--rdzv-conf", "lease_ttl=3", "--local-addr", "127.0.0.1", "--rr-replicas", "1"]
    hosts = [cluster.host(name) for name in "abc"]
    survivor, lost, standby = hosts
    for host in (survivor, lost):
        host.launch([*arguments, "--rr-persist", str(tier)], [TRAINER, "--steps", "300"])
    wait_until(lambda: survivor.committed_step() > 10, timeout_s=120, what="a committed step", host=survivor)
    lost.lose()
    standby.launch([*arguments, "--rr-persist", str(tier)], [TRAINER, "--steps", "300"])
    for host in (survivor, standby):
        assert host.wait() == 0, host.output
    found = [pair for host in hosts for pair in digests(host.lines)]
    assert found.count((4, digest)) == 2, "both generations began with the import"
    # The second generation did what the first one had done.
    assert {step for step, _ in found} == set(range(4, 301))
    assert len(set(found)) == 297


def test_damaged_import_ends_the_run(cluster: Cluster, tmp_path: Path, saved: tuple[Path, object]) -> None:
    source, _ = saved
    ctl(tmp_path, "import", str(source), "--run-id", "go", "--target", str(tmp_path / "tier"), "--step", "4")
    path = tmp_path / "tier" / "go" / "0-4" / "rank0.zst"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    host = cluster.host("a")
    launch(host, 2, "go", tmp_path / "tier", TRAINER)
    assert host.wait() != 0
    cause = "begins with the import of step 4, which cannot be read: .* rank 0 of .* does not match its checksums"
    assert re.search(cause, host.output), host.output
    assert "generation 2" not in (host.run_dir / "resilientd.log").read_text(), "no restart cures this"
    assert digests(host.lines) == []
