"""The ranks of a job as Espresso's phases see them: all of them, those of a host, and one of each host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import CommError
from ..plan.tree import Phase
from .transport import Transport, from_bytes, to_bytes


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
        CommError: As `check_ranks_per_host`.
    """
    flat = Transport.among(ranks, device)
    check_ranks_per_host(flat, ranks_per_host)
    host, place = divmod(flat.rank, ranks_per_host)
    return Fabric(
        flat=flat,
        intra=Transport.among(ranks[host * ranks_per_host :][:ranks_per_host], device),
        inter=Transport.among(ranks[place::ranks_per_host], device),
    )


def check_ranks_per_host(flat: Transport, ranks_per_host: int) -> None:
    """Return if all ranks, which call this together, have the same number, and it divides theirs.

    Raises:
        CommError: They do not; on all ranks alike.
    """
    told = [number for (number,) in tell_all(flat, [ranks_per_host])]
    if len(set(told)) > 1:
        raise CommError(f"the ranks were told of {told} ranks per host: give all the same divisor of {flat.size}")
    if ranks_per_host < 1 or flat.size % ranks_per_host:
        raise CommError(f"{flat.size} ranks are no multiple of {ranks_per_host} per host; give a divisor")


def tell_all(flat: Transport, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, as many of each."""
    own = torch.tensor(numbers, device=flat.device)
    messages = flat.send_to_all(to_bytes(own), sizes_bytes=[own.nbytes] * flat.size)
    return [from_bytes(message, (own.dtype, len(numbers)))[0].tolist() for message in messages]
