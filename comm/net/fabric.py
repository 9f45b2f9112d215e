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
        CommError: As `agreed`.
    """
    flat = Transport.among(ranks, device)
    agreed([given for (given,) in tell_all(flat, [as_told(ranks_per_host)])])
    host, place = divmod(flat.rank, ranks_per_host)
    return Fabric(
        flat=flat,
        intra=Transport.among(ranks[host * ranks_per_host :][:ranks_per_host], device),
        inter=Transport.among(ranks[place::ranks_per_host], device),
    )


UNTOLD = -1
"""Stands, among the numbers of ranks per host that ranks tell each other, for none."""


def as_told(ranks_per_host: int | None) -> int:
    """Return the number that tells others what this rank is given; 0 for what cannot be one."""
    if ranks_per_host is None:
        return UNTOLD
    return ranks_per_host if type(ranks_per_host) is int and 0 < ranks_per_host < 1 << 31 else 0


def agreed(told: Sequence[int]) -> int:
    """Return the number of ranks per host that all ranks tell, which divides theirs.

    Raises:
        CommError: There is none; on all ranks alike.
    """
    first = told[0]
    if any(number != first for number in told):
        given = ", ".join("none" if number == UNTOLD else str(number) for number in told)
        raise CommError(f"the ranks are given {given} ranks per host: give all the same divisor of {len(told)}")
    if first < 1 or len(told) % first:
        raise CommError(f"{len(told)} ranks are no multiple of {first} per host; give a divisor")
    return first


def tell_all(flat: Transport, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, as many of each."""
    own = torch.tensor(numbers, dtype=torch.int64, device=flat.device)
    messages = flat.send_to_all(to_bytes(own), sizes_bytes=[own.nbytes] * flat.size)
    return [from_bytes(message, (own.dtype, len(numbers)))[0].tolist() for message in messages]
