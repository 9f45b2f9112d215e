"""What a rank keeps where an element is summed by one rank alone."""

import torch
from torch import Tensor

from resilient_run.comm.ops.coo import Coo


def settle(accumulated: Tensor, work: Tensor, sent: Coo, final: Coo) -> None:
    """Take out of `accumulated` what was sent and is in the final sum; what rounding left of it in `work` stays."""
    arrived = torch.zeros_like(accumulated, dtype=torch.bool)
    arrived[final.indices] = True
    gone = sent.indices[arrived[sent.indices]]
    accumulated[gone] = work[gone]
