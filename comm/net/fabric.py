"""The ranks of a job as Espresso's phases see them: all of them, those of a host, and one of each host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import CommError
from ..plan.tree import Phase
from .transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Three transports of one rank.

    Attributes:
        flat: All ranks.
        intra: The ranks of this host, in the same order on every host.
        inter: The ranks that have this rank's place on their hosts.
    """

    flat: Transport
    intra: Transport
    inter: Transport

    def of(self, phase: Phase) -> Transport:
        """Return who takes part in a phase."""
        match phase:
            case Phase.FLAT:
                return self.flat
            case Phase.INTER:
                return self.inter
            case Phase.INTRA1 | Phase.INTRA2:
                return self.intra


def make_fabric(ranks: Sequence[int], *, ranks_per_host: int, device: torch.device | str = "cpu") -> Fabric:
    """Return a fabric of process groups of its own; all of `ranks` call this together.

    Args:
        ranks: Global ranks, those of a host next to each other.
        ranks_per_host: How many a host has.
        device: Where messages are.

    Raises:
        CommError: The ranks are no multiple of `ranks_per_host`.
    """
    if ranks_per_host < 1 or len(ranks) % ranks_per_host:
        raise CommError(f"{len(ranks)} ranks are no multiple of {ranks_per_host} per host; give a divisor")
    host, place = divmod(list(ranks).index(dist.get_rank()), ranks_per_host)
    return Fabric(
        flat=Transport.among(ranks, device),
        intra=Transport.among(ranks[host * ranks_per_host :][:ranks_per_host], device),
        inter=Transport.among(ranks[place::ranks_per_host], device),
    )
