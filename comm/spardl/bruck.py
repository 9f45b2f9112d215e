"""All-gather in ⌈log2 n⌉ rounds among any number of ranks (Bruck et al. 1997; SparDL, Section 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MessageError
from ..net.rounds import Rounds, swap
from ..net.transport import copied_to_device, to_bytes


def bruck_gather(
    rank: int, members: Sequence[int], message: Tensor, *, sizes_bytes: Sequence[int] | None = None
) -> Rounds[list[Tensor]]:
    """Return the messages of all `members`, in their order; each rank receives every other's once.

    Args:
        rank: This one, which is a member.
        members: Ranks, the same on all of them.
        message: This rank's.
        sizes_bytes: Of each member's message, where all know them; None sends 8 bytes with each.

    Raises:
        MessageError: What a member sent is not what it announced.
    """
    count, own = len(members), members.index(rank)
    held = [message]
    distance = 1
    while distance < count:
        number = min(distance, count - distance)
        to, source = members[(own - distance) % count], members[(own + distance) % count]
        if sizes_bytes is None:
            received = yield from swap(_with_sizes(held[:number]), to=to, source=source)
            held += yield from _split_by_sizes(received, number)
        else:
            expected = [sizes_bytes[(own + distance + offset) % count] for offset in range(number)]
            outgoing = to_bytes(*held[:number])
            received = yield from swap(outgoing, to=to, source=source, size_bytes=sum(expected))
            held += torch.split(received, expected)
        distance *= 2
    return [held[(place - own) % count] for place in range(count)]


def _with_sizes(messages: list[Tensor]) -> Tensor:
    sizes = copied_to_device([message.numel() for message in messages], messages[0].device)
    return to_bytes(sizes, *messages)


def _split_by_sizes(received: Tensor, number: int) -> Rounds[list[Tensor]]:
    header_bytes = number * torch.int64.itemsize
    sizes = (yield received[:header_bytes].view(torch.int64)) if received.numel() >= header_bytes else [-1]
    if min(sizes) < 0 or sum(sizes) != received.numel() - header_bytes:
        raise MessageError(
            f"{received.numel()} bytes came that are not {number} messages with their sizes; "
            f"run the same version with the same options on all ranks"
        )
    return list(torch.split(received[header_bytes:], sizes))
