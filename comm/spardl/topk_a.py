"""TopkA: every rank gathers the greatest elements of all the others (SparCML; SparDL, Table 1)."""

import torch
from torch import Tensor

from ..net.entries import add_to, from_message, kept_count, size_bytes, take, to_message, top_k
from ..net.rounds import Rounds, bruck_gather
from .sparse_scheme import SparseScheme, Synchronized


class TopkA(SparseScheme):
    """All-gather of each rank's top-k, with what was not sent as its residual.

    A rank receives 2·k·(n-1) words in ⌈log2 n⌉ rounds, for any n: Bruck's all-gather needs no power of two.
    """

    name = "topk-a"

    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        dtype = total.dtype
        kept = kept_count(accumulated.numel(), self.density)
        mine = take(accumulated, top_k(accumulated, kept), dtype)
        ranks = range(self.transport.size)
        sizes = [size_bytes(kept, dtype)] * len(ranks)
        messages = yield from bruck_gather(self.transport.rank, ranks, to_message(mine), sizes_bytes=sizes)
        sums = total.zero_() if dtype == accumulated.dtype else torch.zeros_like(accumulated)
        lists = [from_message(message, dtype, end=total.numel()) for message in messages]
        add_to(sums, *lists)
        if sums is not total:
            total.copy_(sums)
        values = torch.cat([total[entries.indices] for entries in lists])
        return Synchronized(values=values, residual=accumulated)
