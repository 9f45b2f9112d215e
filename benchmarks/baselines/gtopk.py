"""gTopk: a tree keeps the greatest k elements of each sum of two, and its root tells everybody (Shi et al. 2019)."""

from torch import Tensor

from resilient_run.comm.errors import CommError
from resilient_run.comm.net.entries import (
    add_to,
    added,
    copied,
    from_message,
    kept_count,
    rounded,
    size_bytes,
    take,
    to_message,
    top_k,
)
from resilient_run.comm.net.rounds import Messages, Rounds
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.spardl.sparse_scheme import SparseScheme, Synchronized

from .settled import settle


class GTopk(SparseScheme):
    """Reduction tree, then broadcast tree: 2·log2 n rounds, 4·k·log2 n words along the longest way.

    Residuals are as published: a rank keeps its own part of all that is not in the result or that it did not select.
    What the tree discards of a sum that another branch brings into the result is lost.

    Args:
        transport: Of a power of two of ranks.
        density: k / numel.

    Raises:
        CommError: The ranks are not a power of two.
    """

    name = "gtopk"

    def __init__(self, transport: Transport, *, density: float = 0.01) -> None:
        super().__init__(transport, density=density)
        if transport.size & (transport.size - 1):
            raise CommError(f"gtopk needs a power of two of ranks, not {transport.size}; use spardl, which takes any")

    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        dtype = total.dtype
        kept = kept_count(accumulated.numel(), self.density)
        work = copied(accumulated, total)
        mine = take(work, top_k(work, kept), dtype)
        root = yield from self._reduce_tree(mine, kept, work)
        final = yield from self._broadcast(root, kept, work)
        settle(accumulated, work, mine, final)
        add_to(total.zero_(), final)
        return Synchronized(values=final.values, residual=accumulated)

    def _reduce_tree(self, mine: Coo, kept: int, work: Tensor) -> Rounds[Coo]:
        """Return the root's list on rank 0, and on others what they sent last."""
        dtype, rank = mine.values.dtype, self.transport.rank
        distance = 1
        while distance < self.transport.size:
            phase = rank % (2 * distance)
            if phase == 0:
                source, size = rank + distance, size_bytes(kept, dtype)
                received = yield Messages(outgoing={}, sources=[source], sizes_bytes={source: size})
                other = from_message(received[source], dtype, end=work.numel())
                summed = added([mine, other], work.dtype)
                best = top_k(summed.values, kept)
                mine = Coo(indices=summed.indices[best], values=rounded(summed.values[best], dtype))
            else:
                outgoing = {rank - distance: to_message(mine)} if phase == distance else {}
                yield Messages(outgoing=outgoing, sources=[], sizes_bytes={})
            distance *= 2
        return mine

    def _broadcast(self, mine: Coo, kept: int, work: Tensor) -> Rounds[Coo]:
        rank, message, dtype = self.transport.rank, to_message(mine), mine.values.dtype
        distance = self.transport.size // 2
        while distance:
            phase = rank % (2 * distance)
            outgoing = {rank + distance: message} if phase == 0 else {}
            sources = [rank - distance] if phase == distance else []
            known = {source: size_bytes(kept, dtype) for source in sources}
            received = yield Messages(outgoing=outgoing, sources=sources, sizes_bytes=known)
            message = next(iter(received.values()), message)
            distance //= 2
        return from_message(message, dtype, end=work.numel())
