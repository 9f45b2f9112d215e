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

    With one rank per host, those of all hosts are all ranks.

    Args:
        ranks: Global ranks, those of a host next to each other.
        ranks_per_host: How many a host has.
        device: Where messages are.

    Raises:
        CommError: As `agreed`.
    """
    flat = Transport.among(ranks, device)
    agreed(flat.gather_numbers(torch.tensor([as_number(ranks_per_host)])).view(-1).tolist())
    if ranks_per_host == 1:
        alone = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # has nobody to talk to
        return Fabric(flat=flat, intra=Transport(alone, device), inter=flat)
    host, place = divmod(flat.rank, ranks_per_host)
    return Fabric(
        flat=flat,
        intra=Transport.among(ranks[host * ranks_per_host :][:ranks_per_host], device),
        inter=Transport.among(ranks[place::ranks_per_host], device),
    )


NOT_GIVEN = -1
"""Stands, among the numbers of ranks per host that ranks tell each other, for none."""


def as_number(ranks_per_host: int | None) -> int:
    """Return the number that tells others what this rank is given; 0 for what cannot be one."""
    if ranks_per_host is None:
        return NOT_GIVEN
    return ranks_per_host if type(ranks_per_host) is int and 0 < ranks_per_host < 1 << 31 else 0


def agreed(numbers: Sequence[int]) -> int:
    """Return the number of ranks per host that all ranks tell, which divides theirs.

    Raises:
        CommError: There is none; on all ranks alike.
    """
    first = numbers[0]
    if any(number != first for number in numbers):
        given = ", ".join("none" if number == NOT_GIVEN else str(number) for number in numbers)
        raise CommError(f"the ranks are given {given} ranks per host: give all the same divisor of {len(numbers)}")
    if first < 1 or len(numbers) % first:
        raise CommError(f"{len(numbers)} ranks are not a multiple of {first} per host; give a divisor")
    return first
