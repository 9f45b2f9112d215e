"""Compressed parts of a tensor on their way between ranks, and the collectives of them: who ends up with which."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..errors import MessageError
from ..net.collectives import gather_to, relay_gather
from ..net.transport import Transport, copied_to_device, to_bytes

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


def pack(held: Sequence[Pieces]) -> list[Tensor]:
    """Return a message for each: counts and sizes first, then the data."""
    every = [[message for piece in each.pieces for message in piece] for each in held]
    heads = []
    for each, messages in zip(held, every, strict=True):
        head = [each.numel, len(each.pieces), *(len(piece) for piece in each.pieces)]
        head += [number for message in messages for number in (message.data.numel(), message.seed)]
        heads.append([len(head), *head])
    numbers = copied_to_device([number for head in heads for number in head], every[0][0].data.device)
    return [
        to_bytes(head, *(message.data for message in messages))
        for head, messages in zip(torch.split(numbers, [len(head) for head in heads]), every, strict=True)
    ]


def unpack(messages: Sequence[Tensor]) -> list[Pieces]:
    """Return the pieces of each message.

    Raises:
        MessageError: One is none.
    """
    wrong = [message.numel() for message in messages if message.numel() < _NUMBER_BYTES]
    lengths = [] if wrong else _numbers([message[:_NUMBER_BYTES] for message in messages])
    ends = [_NUMBER_BYTES * (1 + length) for length in lengths]
    wrong += [
        message.numel()
        for message, end in zip(messages, ends, strict=False)
        if not _NUMBER_BYTES < end <= message.numel()
    ]
    if wrong:
        raise MessageError(f"a message of {wrong[0]} bytes is not made of pieces; run one version on all ranks")
    heads = iter(_numbers([message[_NUMBER_BYTES:end] for message, end in zip(messages, ends, strict=True)]))
    return [
        _pieces(message, end, list(islice(heads, length)))
        for message, end, length in zip(messages, ends, lengths, strict=True)
    ]


def _numbers(parts: Sequence[Tensor]) -> list[int]:
    """Return the numbers of several messages; copied together, because a message may begin anywhere in what came."""
    found: list[int] = torch.cat(list(parts)).view(torch.int64).tolist()
    return found


def _pieces(message: Tensor, offset: int, head: list[int]) -> Pieces:
    """Return the pieces of a message whose data begins at `offset`."""
    try:
        numel, count = head[0], head[1]
        counts, rest = head[2 : 2 + count], head[2 + count :]
        pieces, at = [], 0
        for each in counts:
            piece = []
            for size_bytes, seed in zip(rest[at : at + 2 * each : 2], rest[at + 1 : at + 2 * each : 2], strict=True):
                piece.append(Message(seed=seed, data=message[offset : offset + size_bytes].clone()))
                offset += size_bytes
            at += 2 * each
            pieces.append(piece)
    except (IndexError, RuntimeError, ValueError) as error:
        raise MessageError(f"a message of {message.numel()} bytes is not made of pieces: {error}") from error
    if offset != message.numel():
        raise MessageError(
            f"pieces of {offset} bytes came in a message of {message.numel()}; run one version on all ranks"
        )
    return Pieces(numel=numel, pieces=pieces)


def gather_all(held: Pieces, transport: Transport, *, alike: bool) -> list[Pieces]:
    """Return what all ranks hold, in their order.

    Args:
        held: This rank's; as many pieces and messages on each.
        transport: The ranks.
        alike: The messages of all ranks have the same sizes, so that nobody needs to announce them.
    """
    (packed,) = pack([held])
    return unpack(relay_gather(transport, packed, sizes_bytes=_sizes(packed, transport, alike)))


def scatter_all(held: Pieces, transport: Transport, *, alike: bool) -> list[Pieces]:
    """Return what all ranks hold of this rank's share of the pieces, in their order; like `gather_all`."""
    each = len(held.pieces) // transport.size
    parts = [held.pieces[rank * each : (rank + 1) * each] for rank in range(transport.size)]
    packed = pack([Pieces(numel=held.numel, pieces=part) for part in parts])
    sizes_bytes = _sizes(packed[transport.rank], transport, alike)
    return unpack(transport.all_to_all(packed, sizes_bytes=sizes_bytes))


def gather_pieces_to(root: int, held: Pieces, transport: Transport, *, alike: bool) -> list[Pieces] | None:
    """Return on `root` what all ranks hold, in their order, and None on the others; like `gather_all`."""
    (packed,) = pack([held])
    found = gather_to(root, packed, transport, sizes_bytes=_sizes(packed, transport, alike))
    return None if found is None else unpack(found)


def _sizes(packed: Tensor, transport: Transport, alike: bool) -> list[int] | None:
    return [packed.numel()] * transport.size if alike else None
