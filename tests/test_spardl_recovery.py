"""SparDL under DDP and `resilient-run`: residuals and adaptive widths come back with everything else."""

from pathlib import Path

import pytest
from cluster import Cluster, assert_same_training, recovered

TRAINER = str(Path(__file__).parent / "hook_trainer.py")


@pytest.mark.slow
def test_killed_worker_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Two teams of two ranks, so that every phase takes part; without its residuals a restored rank would differ."""
    cluster = Cluster(tmp_path)
    try:
        undisturbed, killed = cluster.host("undisturbed"), cluster.host("killed")
        for host, extra in ((undisturbed, []), (killed, ["--kill-at", "7"])):
            arguments = [TRAINER, "spardl+bruck", "--steps", "12", *extra]
            host.launch(["--standalone", "--nproc-per-node", "4"], arguments)
            assert host.wait() == 0, host.output
        assert recovered(killed) == 1
        assert_same_training([killed], undisturbed)
        assert killed.params_sha256() == undisturbed.params_sha256() is not None
    finally:
        cluster.close()
