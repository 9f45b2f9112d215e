"""The ranks of a job as Espresso's phases see them: all of them, those of a host, and one of each host."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
import torch.distributed as dist

from ..errors import CommError
from ..plan.tree import Phase
from .alike import check_alike
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

    With one rank per host, those of all hosts are all ranks.

    Args:
        ranks: Global ranks, those of a host next to each other.
        ranks_per_host: How many a host has.
        device: Where messages are.

    Raises:
        CommError: The ranks are given different numbers, or are not a multiple of it.
    """
    flat = Transport.among(ranks, device)
    check_alike(flat, ranks_per_host=ranks_per_host)
    ranks_per_host = check_divides(ranks_per_host, flat.size)
    if ranks_per_host == 1:
        alone = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # has nobody to talk to
        return Fabric(flat=flat, intra=Transport(alone, device), inter=flat)
    host, place = divmod(flat.rank, ranks_per_host)
    return Fabric(
        flat=flat,
        intra=Transport.among(ranks[host * ranks_per_host :][:ranks_per_host], device),
        inter=Transport.among(ranks[place::ranks_per_host], device),
    )


def check_divides(ranks_per_host: int, ranks: int) -> int:
    """Return how many ranks a host has; 2.0 is 2, as for `check_alike`, so that all ranks return or raise the same.

    Raises:
        CommError: The number does not divide `ranks`.
    """
    if not isinstance(ranks_per_host, Real) or ranks_per_host < 1 or ranks % ranks_per_host:
        raise CommError(f"{ranks} ranks are not a multiple of {ranks_per_host} per host; give a divisor")
    return int(ranks_per_host)
