"""Training on real text: SparDL keeps up with top-k all-gather because of its residuals (SparDL, Section 4.1.3)."""

from functools import partial

import pytest
import torch
from baselines.residuals import LocalResiduals
from byte_model import train

from resilient_run.comm.spardl.spardl import SparDL
from resilient_run.comm.spardl.topk_a import TopkA


@pytest.mark.nightly
def test_global_residuals_converge_and_local_ones_do_so_visibly_worse() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        losses = [
            train(scheme, ranks=8, steps=150, every=50)
            for scheme in (
                TopkA,
                partial(SparDL, teams=2),
                partial(LocalResiduals, teams=2),
                partial(SparDL, teams=8),
            )
        ]
    finally:
        torch.set_num_threads(threads)
    gathered, kept, forgotten, in_eight_teams = losses
    assert all(run[-1] < run[0] < 4.0 for run in losses), "each of them learns something"
    assert kept[-1] < 1.05 * gathered[-1]
    assert in_eight_teams[-1] < 1.1 * gathered[-1]
    assert in_eight_teams[-1] < forgotten[-1]
    assert forgotten[-1] > kept[-1] + 0.05
    assert forgotten[-1] - gathered[-1] > 2 * (kept[-1] - gathered[-1])
