"""Balanced parallelism without indices: what Zen is compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from resilient_run.comm.errors import CommError
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport, from_bytes, to_bytes
from resilient_run.comm.zen.partition import Balanced, join
from resilient_run.comm.zen.sparse import Sparse, compress, expand, merge


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Known:
    """Where everybody's values belong: this rank's, what others push here, and the sums of each server."""

    own: Tensor
    pushed: list[Tensor]
    pulled: list[Tensor]


class IndexFree(Scheme):
    """Balanced parallelism that sends no indices at all: the bound for schemes that do.

    The first step of a key exchanges indices, all later ones only values; so it is right as long as every rank's
    gradient keeps its zeros where they were, as in a benchmark.

    Args:
        transport: The ranks.
        seed: The same on all ranks.
    """

    name = "index-free"

    def __init__(self, transport: Transport, *, seed: int = 0) -> None:
        super().__init__(transport)
        self._seed = seed
        self._known: dict[str, _Known] = {}

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks, added in the order of ranks.

        Raises:
            CommError: This rank's gradient has other zeros than in the first step.
        """
        own = compress(gradient)
        cut = Balanced(length=own.length, servers=self.transport.size, seed=self._seed)
        parts = cut.split(own)
        if key not in self._known:
            self._known[key] = self._exchange_indices(own, parts)
        known = self._known[key]
        if not torch.equal(known.own, own.indices):
            raise CommError(f"the zeros of {key} are no longer where they were; {self.name} serves benchmarks only")
        item = gradient.itemsize
        pushed = self.transport.all_to_all(
            [to_bytes(part.values) for part in parts], sizes_bytes=[item * indices.numel() for indices in known.pushed]
        )
        length = cut.size(self.transport.rank)
        share = merge(
            [
                Sparse(indices=indices, values=_column(message, gradient), length=length)
                for indices, message in zip(known.pushed, pushed, strict=True)
            ]
        )
        # A sum may have cancelled to zero; its place was announced.
        values = expand(share, own.values.new_empty(length))[known.pulled[self.transport.rank].long()]
        pulled = self.transport.send_to_all(
            to_bytes(values), sizes_bytes=[item * indices.numel() for indices in known.pulled]
        )
        shares = [
            Sparse(indices=indices, values=_column(message, gradient), length=cut.size(server))
            for server, (indices, message) in enumerate(zip(known.pulled, pulled, strict=True))
        ]
        return expand(join(cut, shares, own.length), gradient)

    def _exchange_indices(self, own: Sparse, parts: list[Sparse]) -> _Known:
        pushed = [
            _indices(message) for message in self.transport.all_to_all([to_bytes(part.indices) for part in parts])
        ]
        union = torch.unique(torch.cat(pushed))
        pulled = [_indices(message) for message in self.transport.send_to_all(to_bytes(union))]
        return _Known(own=own.indices, pushed=pushed, pulled=pulled)


def _indices(message: Tensor) -> Tensor:
    return from_bytes(message, (torch.int32, message.numel() // 4))[0]


def _column(message: Tensor, like: Tensor) -> Tensor:
    return from_bytes(message, (like.dtype, message.numel() // like.itemsize))[0].view(-1, 1)
