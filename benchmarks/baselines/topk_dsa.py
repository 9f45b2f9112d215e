"""TopkDSA: owners add up their block of all ranks' greatest elements, then send it sparse or dense (SparCML)."""

import torch
from torch import Tensor

from resilient_run.comm.net.entries import from_message, kept_count, size_bytes, take, to_message, top_k
from resilient_run.comm.net.rounds import Rounds, all_to_all, bruck_gather
from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.spardl.sparse_scheme import SparseScheme, Synchronized
from resilient_run.comm.spardl.srs import TeamBlocks


class TopkDSA(SparseScheme):
    """Split all-gather of each rank's top-k: direct sends to the owners of blocks, then an all-gather of their sums.

    Nothing is discarded on the way, so a sum has up to n·k elements: between 4·k·(n-1)/n and (2·k + numel)·(n-1)/n
    words, each block in the smaller of both formats. The result is that of `TopkA`, bit for bit.
    """

    name = "topk-dsa"

    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        dtype = total.dtype
        rank, ranks = self.transport.rank, self.transport.size
        blocks = TeamBlocks(numel=accumulated.numel(), count=ranks, kept=kept_count(accumulated.numel(), self.density))
        mine = take(accumulated, top_k(accumulated, blocks.kept), dtype)
        bounds = [blocks.span(block)[1] for block in range(ranks - 1)]
        inner = torch.tensor(bounds, dtype=torch.int32, device=mine.indices.device)
        cuts = torch.searchsorted(mine.indices, inner).cpu()
        parts = zip(mine.indices.tensor_split(cuts), mine.values.tensor_split(cuts), strict=True)
        received = yield from all_to_all(
            rank, [to_message(Coo(indices=indices, values=values)) for indices, values in parts]
        )

        start, end = blocks.span(rank)
        block_sum = torch.zeros(end - start, dtype=accumulated.dtype, device=accumulated.device)
        touched = torch.zeros(end - start, dtype=torch.bool, device=accumulated.device)
        for message in received:
            entries = from_message(message, dtype, start=start, end=end)
            places = entries.indices.long() - start
            block_sum[places] += entries.values
            touched[places] = True
        total.zero_()
        total[start:end] = block_sum.to(dtype)
        yield from self._gather(total, touched, blocks)
        return Synchronized(values=total, residual=accumulated)

    def _gather(self, total: Tensor, touched: Tensor, blocks: TeamBlocks) -> Rounds[None]:
        """Fill the other ranks' blocks of `total`; a message with the size of the dense block is the dense block."""
        start, end = blocks.span(self.transport.rank)
        own = total[start:end]
        places = touched.nonzero().view(-1)
        if size_bytes(places.numel(), total.dtype) < own.nbytes:
            message = to_message(Coo(indices=(places + start).to(torch.int32), values=own[places]))
        else:
            message = own.view(torch.uint8)
        messages = yield from bruck_gather(self.transport.rank, range(blocks.count), message)
        for block, received in enumerate(messages):
            start, end = blocks.span(block)
            if received.numel() == (end - start) * total.itemsize:
                total[start:end].view(torch.uint8).copy_(received)
            else:
                entries = from_message(received, total.dtype, start=start, end=end)
                total[entries.indices] = entries.values
