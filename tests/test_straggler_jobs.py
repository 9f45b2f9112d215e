"""A slow rank's host is replaced in a real run, which goes on with the right bits, and only once."""

from pathlib import Path

import pytest
from cluster import LIGHT, Cluster, assert_same_training, recovered, wait_until

pytestmark = pytest.mark.jobs

SCRIPT = (*LIGHT, "--steps", "64")
TRAINER = str(Path(__file__).with_name("slow_trainer.py"))


def test_host_of_a_slow_rank_is_replaced_and_not_the_next_one(
    cluster: Cluster, etcd_endpoint: str, tmp_path: Path
) -> None:
    """Two standbys are ready, and the rank is as slow on the first of them: it does more than the other one."""
    config = tmp_path / "config.toml"
    config.write_text("[detect]\nstraggler_replace_s = 1.0\n")
    launcher = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3"]
    launcher += ["--rdzv-endpoint", etcd_endpoint, "--rdzv-id", cluster.name, "--rdzv-conf", "lease_ttl=3"]
    launcher += ["--local-addr", "127.0.0.1", "--rr-config", str(config)]
    first, other, *standbys = hosts = [cluster.host(name) for name in "abcd"]
    for host in (first, other):
        host.launch(launcher, [TRAINER, *SCRIPT])
    wait_until(lambda: first.reached(2), timeout_s=60, what="step 2", host=first)
    for host in standbys:
        host.launch(launcher, [TRAINER, *SCRIPT])
    for host in hosts:
        assert host.wait(200) == 0, host.output
    (replaced,) = [host for host in (first, other) if 0 in host.pids()]
    (newcomer,) = [host for host in standbys if host.starts()]
    assert list(newcomer.pids()) == [0]
    assert recovered(newcomer) == recovered(other if replaced is first else first) == 1
    assert recovered(replaced) == 0
    logs = "".join((host.run_dir / "resilientd.log").read_text() for host in hosts)
    assert f"straggler (fail): rank 0 on host {newcomer.name} computes" in logs
    undisturbed = cluster.host("undisturbed")
    undisturbed.launch(["--standalone", "--nproc-per-node", "2"], SCRIPT)
    assert undisturbed.wait() == 0, undisturbed.output
    assert_same_training(hosts, undisturbed)
