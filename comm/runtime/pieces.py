"""Compressed parts of a tensor on their way between ranks, and the collectives of them: who ends up with which."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..errors import MessageError
from ..net.collectives import broadcast_from, gather_to, relay_gather
from ..net.transport import Transport, to_bytes
from ..plan.tree import Routine

_NUMBER_BYTES = torch.int64.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One compressed piece of one rank, and the seed that decodes it."""

    seed: int
    data: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Neighbouring pieces of `numel` elements each, with the messages whose sum each is."""

    numel: int
    pieces: list[list[Message]]


def summands(sources: Sequence[Pieces]) -> Pieces:
    """Return the same pieces with the messages of all sources."""
    pieces = [
        [message for piece in same for message in piece] for same in zip(*(s.pieces for s in sources), strict=True)
    ]
    return Pieces(numel=sources[0].numel, pieces=pieces)


def neighbours(sources: Sequence[Pieces]) -> Pieces:
    """Return the pieces of all sources, one after the other."""
    return Pieces(numel=sources[0].numel, pieces=[piece for source in sources for piece in source.pieces])


def pack(held: Pieces) -> Tensor:
    """Return a message: counts and sizes first, then the data."""
    messages = [message for piece in held.pieces for message in piece]
    head = [held.numel, len(held.pieces), *(len(piece) for piece in held.pieces)]
    head += [number for message in messages for number in (message.data.numel(), message.seed)]
    numbers = torch.tensor([len(head), *head], device=messages[0].data.device)
    return to_bytes(numbers, *(message.data for message in messages))


def unpack(message: Tensor) -> Pieces:
    """Return the pieces of a message.

    Raises:
        MessageError: It is none.
    """
    try:
        (length,) = _numbers(message[:_NUMBER_BYTES])
        offset = _NUMBER_BYTES * (1 + length)
        head = iter(_numbers(message[_NUMBER_BYTES:offset]))
        numel, count = next(head), next(head)
        pieces = []
        for each in list(islice(head, count)):
            piece = []
            for _ in range(each):
                size_bytes, seed = next(head), next(head)
                piece.append(Message(seed=seed, data=message[offset : offset + size_bytes].clone()))
                offset += size_bytes
            pieces.append(piece)
    except (StopIteration, RuntimeError, ValueError) as error:
        raise MessageError(
            f"a message of {message.numel()} bytes is not made of pieces; run one version on all ranks"
        ) from error
    if offset != message.numel():
        raise MessageError(
            f"pieces of {offset} bytes came in a message of {message.numel()}; run one version on all ranks"
        )
    return Pieces(numel=numel, pieces=pieces)


def _numbers(part: Tensor) -> list[int]:
    # Copied, because a message may begin anywhere in what came.
    numbers: list[int] = part.clone().view(torch.int64).tolist()
    return numbers


def carry_pieces(
    routine: Routine, held: Pieces | None, transport: Transport, *, root: int, alike: bool, parts_differ: bool = False
) -> Pieces | None:
    """Return what a rank holds after a collective of compressed data.

    Args:
        routine: One of compressed data.
        held: This rank's, as many pieces and messages on each; None on all but `root` before a broadcast.
        transport: The ranks.
        root: Who receives or sends everything, if anybody does.
        alike: The messages of all ranks have the same sizes, so that nobody needs to announce them.
        parts_differ: Ranks hold different parts of the tensor, and gather all of it.
    """
    if routine is Routine.BROADCAST:
        return unpack(broadcast_from(root, None if held is None else pack(held), transport))
    assert held is not None
    count = transport.size if routine is Routine.ALL_TO_ALL else 1
    each = len(held.pieces) // count
    packed = [pack(Pieces(numel=held.numel, pieces=held.pieces[each * n : each * (n + 1)])) for n in range(count)]
    sizes_bytes = [packed[-1].numel()] * transport.size if alike else None
    match routine:
        case Routine.ALL_TO_ALL:
            found = transport.all_to_all(packed, sizes_bytes=sizes_bytes)
        case Routine.GATHER:
            gathered = gather_to(root, packed[0], transport, sizes_bytes=sizes_bytes)
            if gathered is None:
                return None
            found = gathered
        case Routine.ALL_GATHER:
            found = relay_gather(transport, packed[0], sizes_bytes=sizes_bytes)
        case _:
            raise AssertionError(f"{routine} is no collective of messages")
    sources = [unpack(message) for message in found]
    return neighbours(sources) if parts_differ else summands(sources)
