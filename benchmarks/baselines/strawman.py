"""Zen's strawman: one hash, no second try (thesis, Algorithm 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.spread import murmur
from resilient_run.comm.zen.formats import Format, decode, encode
from resilient_run.comm.zen.sparse import Sparse, compress, expand, merge


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
        places_of = murmur(own.indices, self._seed) % places
        place, order = torch.sort(places_of, stable=True)
        first = torch.ones_like(place, dtype=torch.bool)
        first[1:] = place[1:] != place[:-1]
        # By servers, whose indices ascend, as those of every `Sparse`.
        kept = order[first].sort().values
        servers = places_of[kept] * ranks // places
        kept = kept[servers.argsort(stable=True)]
        self.losses[key] = Loss(elements=own.count, lost=own.count - kept.numel())
        counts: list[int] = torch.bincount(servers, minlength=ranks).tolist()
        parts = zip(torch.split(own.indices[kept], counts), torch.split(own.values[kept], counts), strict=True)
        sparse = [Sparse(indices=indices, values=values, length=own.length) for indices, values in parts]
        total = self._merged(self.transport.all_to_all(encode(sparse, (Format.COO,))), own)
        return expand(self._merged(self.transport.send_to_all(*encode([total], (Format.COO,))), own), gradient)

    def _merged(self, messages: Sequence[Tensor], own: Sparse) -> Sparse:
        return merge(decode(messages, [own.length] * len(messages), width=1, dtype=own.values.dtype))
