"""SparDL with residuals that lose something, which the paper compares with global ones (SparDL, Section 3.2)."""

import torch
from torch import Tensor

from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.spardl.spardl import SparDL


class LocalResiduals(SparDL):
    """A rank keeps its own part of what it did not send itself."""

    def _residual(self, accumulated: Tensor, work: Tensor, selected: list[Coo], final: Coo) -> Tensor:
        return accumulated.masked_fill_(self._gone(accumulated, selected, final), 0)

    def _gone(self, accumulated: Tensor, selected: list[Coo], final: Coo) -> Tensor:
        gone = torch.zeros_like(accumulated, dtype=torch.bool)
        for entries in selected:
            gone[entries.indices] = True
        return gone


class PartialResiduals(LocalResiduals):
    """A rank also keeps what it sent itself and is in no rank's result; what others discard of a sum is lost."""

    def _gone(self, accumulated: Tensor, selected: list[Coo], final: Coo) -> Tensor:
        present = torch.zeros_like(accumulated, dtype=torch.bool)
        present[final.indices] = True
        return super()._gone(accumulated, selected, final) & present
