"""Schemes in which every rank sums its part of a gradient: push to the part's server, sum at once, pull from all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CommError
from ..net.rounds import Rounds, all_to_all
from ..net.scheme import Scheme
from ..net.transport import Transport, from_bytes, to_bytes
from ..ops.block import BLOCK
from ..ops.op import Finding, alone
from ..ops.spread import murmur
from .centralized import RowScheme
from .formats import ALL, Format, decode, encode
from .partition import Balanced, Even, Partition, join
from .sparse import Sparse, compress, expand, merge


def push_and_pull(
    rank: int, ranks: int, own: Sparse, cut: Partition, *, formats: Sequence[Format] = ALL
) -> Rounds[Sparse]:
    """Return the sum over all `ranks`, of which `rank` is this one; each server adds in the order of ranks."""
    width, dtype = own.width, own.values.dtype
    lengths = [cut.size(server) for server in range(ranks)]
    parts = yield from cut.split(own)
    messages = yield from all_to_all(rank, encode(parts, formats))
    pushed = yield from decode.finding(messages, [lengths[rank]] * ranks, width=width, dtype=dtype)
    share = yield from merge.finding(pushed)
    messages = yield from all_to_all(rank, encode([share], formats) * ranks)
    pulled = yield from decode.finding(messages, lengths, width=width, dtype=dtype)
    return join(cut, pulled, own.length)


class SparsePS(RowScheme):
    """A parameter server on every rank for an even range of the gradient, coordinates both ways (thesis 3.2.5)."""

    name = "sparse-ps"

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks, in the order of ranks."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        own, ranks = (yield from self._rows(dense)), self.transport.size
        cut = Even(length=own.length, servers=ranks)
        summed = yield from push_and_pull(self.transport.rank, ranks, own, cut, formats=self._formats)
        total = expand(summed, dense)
        return total.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else total


class OmniReduce(SparsePS):
    """The same with blocks of 256 elements, of which those that are all zero are left out (thesis 3.2.5)."""

    name = "omnireduce"

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)

    def _rows(self, gradient: Tensor) -> Finding[Sparse]:
        return compress.finding(gradient, BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What a lossy scheme left out of one rank's gradient.

    Attributes:
        elements: Elements that were not zero.
        lost: How many of them were not sent.
    """

    elements: int
    lost: int


class Strawman(Scheme):
    """One hash into a memory in which the second of two indices at one place is lost (Algorithm 3.1 of the thesis).

    Args:
        transport: The ranks.
        memory: Places per element of the gradient, of all ranks' parts together; the thesis shows 2 and 8.
        seed: The same on all ranks.

    Attributes:
        losses: Key → loss of this rank in its last step.
    """

    name = "strawman"

    def __init__(self, transport: Transport, *, memory: float = 2.0, seed: int = 0) -> None:
        super().__init__(transport)
        self.losses: dict[str, Loss] = {}
        self._memory = memory
        self._seed = seed

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks of what was not lost."""
        own, ranks = compress(gradient), self.transport.size
        places = max(1, int(self._memory * own.length / ranks)) * ranks
        place, order = torch.sort(murmur(own.indices, self._seed) % places, stable=True)
        first = torch.ones_like(place, dtype=torch.bool)
        first[1:] = place[1:] != place[:-1]
        kept = order[first]
        self.losses[key] = Loss(elements=own.count, lost=own.count - kept.numel())
        counts: list[int] = torch.bincount(place[first] * ranks // places, minlength=ranks).tolist()
        parts = zip(torch.split(own.indices[kept], counts), torch.split(own.values[kept], counts), strict=True)
        sparse = [Sparse(indices=indices, values=values, length=own.length) for indices, values in parts]
        total = self._merged(self.transport.all_to_all(encode(sparse, (Format.COO,))), own)
        return expand(self._merged(self.transport.send_to_all(*encode([total], (Format.COO,))), own), gradient)

    def _merged(self, messages: Sequence[Tensor], own: Sparse) -> Sparse:
        return merge(decode(messages, [own.length] * len(messages), width=1, dtype=own.values.dtype))


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
        parts = alone(cut.split(own))
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
