"""The plainest use of a compressor: every rank sends its message to all (an indivisible scheme, thesis section 4.2)."""

from typing import Any

import torch
from torch import Tensor

from ..net.rounds import Rounds, RoundScheme, bruck_gather
from ..net.scheme import laid_out
from ..net.transport import Transport
from .feedback import Memory


class Compressed(RoundScheme):
    """Sums what the ranks' messages decode to; what compression leaves out stays with each rank.

    Messages that can be summed are all-reduced, others all-gathered.

    Args:
        transport: The ranks.
        memory: What compresses and remembers.
    """

    name = "compressed"

    def __init__(self, transport: Transport, memory: Memory) -> None:
        super().__init__(transport)
        self.memory = memory

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum what was sent, equal on all ranks; a sparse gradient is dense on the way."""
        if gradient.numel() == 0:
            return gradient
        flat = gradient.to_dense().reshape(-1)
        compressor, numel, dtype = self.memory.compressor, flat.numel(), flat.dtype
        message, seed = self.memory.compress(key, flat)
        if (sum_dtype := compressor.summed_as(dtype)) is not None:
            self.transport.all_reduce(message.view(sum_dtype))
            total = compressor.decompress(message, numel, dtype, seed=seed)
        else:
            rank, ranks = self.transport.rank, self.transport.size
            # Of this rank's size, which warm-up changes.
            sizes_bytes = [message.numel()] * ranks if compressor.fixed_size else None
            # In the order of ranks, so that sums are equal bit for bit on all of them.
            total = torch.zeros(numel, dtype=dtype, device=flat.device)
            messages = yield from bruck_gather(rank, range(ranks), message, sizes_bytes=sizes_bytes)
            for received in messages:
                compressor.add(received, total, seed=seed)
        self.memory.undo_unless_finite([key], total)
        return laid_out(total.view(gradient.shape), gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return what the memory remembers."""
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank."""
        self.memory.load_state_dict(state)
