"""Sums as generators of the rounds in which ranks exchange messages, so that those of several gradients go together."""

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import MessageError
from .scheme import Scheme
from .transport import Transport, to_bytes

T = TypeVar("T")
_ALIGNED_BYTES = 8
"""Where a part of a message begins: a multiple of the size of any type."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Messages:
    """What a rank sends and receives in one round.

    Attributes:
        outgoing: Other rank → message.
        sources: Other ranks that send a message here.
        sizes_bytes: Source → size of its message; None, then on all ranks, where sizes have to be announced.
        by_all: All ranks send to all others.
    """

    outgoing: Mapping[int, Tensor]
    sources: Sequence[int]
    sizes_bytes: Mapping[int, int] | None
    by_all: bool = False


Rounds = Generator[Messages, Mapping[int, Tensor], T]
"""Yields what ranks do together in a round, is sent source → message, and returns a result.

For one gradient all ranks go through as many rounds; a rank that has nothing to do in one yields an empty one.
"""


def idle(count: int) -> Rounds[None]:
    """Let others go through `count` rounds, in which sizes are announced."""
    for _ in range(count):
        yield Messages(outgoing={}, sources=[], sizes_bytes=None)


def swap(message: Tensor, *, to: int, source: int, size_bytes: int | None = None) -> Rounds[Tensor]:
    """Send `message` to rank `to` and return that of rank `source`."""
    known = None if size_bytes is None else {source: size_bytes}
    received = yield Messages(outgoing={to: message}, sources=[source], sizes_bytes=known)
    return received[source]


def all_to_all(
    rank: int, messages: Sequence[Tensor], *, sizes_bytes: Sequence[int] | None = None
) -> Rounds[list[Tensor]]:
    """Send `messages[r]` to rank r, and return what each sent to `rank`, this one; as `Transport.all_to_all`."""
    others = [other for other in range(len(messages)) if other != rank]
    known = None if sizes_bytes is None else {other: sizes_bytes[other] for other in others}
    received = yield Messages(
        outgoing={other: messages[other] for other in others}, sources=others, sizes_bytes=known, by_all=True
    )
    return [messages[rank] if place == rank else received[place] for place in range(len(messages))]


def bruck_gather(
    rank: int, members: Sequence[int], message: Tensor, *, sizes_bytes: Sequence[int] | None = None
) -> Rounds[list[Tensor]]:
    """Return the messages of all `members`, in their order; each rank receives every other's once.

    It takes ⌈log2 n⌉ rounds among any number of ranks (Bruck et al. 1997; SparDL, Section 2).

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
            sizes = torch.tensor([each.numel() for each in held[:number]], device=message.device)
            received = yield from swap(to_bytes(sizes, *held[:number]), to=to, source=source)
            held += _split_by_sizes(received, number)
        else:
            expected = [sizes_bytes[(own + distance + offset) % count] for offset in range(number)]
            outgoing = to_bytes(*held[:number])
            received = yield from swap(outgoing, to=to, source=source, size_bytes=sum(expected))
            held += torch.split(received, expected)
        distance *= 2
    return [held[(place - own) % count] for place in range(count)]


def _split_by_sizes(received: Tensor, number: int) -> list[Tensor]:
    header_bytes = number * torch.int64.itemsize
    sizes = received[:header_bytes].view(torch.int64).tolist() if received.numel() >= header_bytes else [-1]
    if min(sizes) < 0 or sum(sizes) != received.numel() - header_bytes:
        raise MessageError(
            f"{received.numel()} bytes came that are not {number} messages with their sizes; "
            f"run the same version with the same options on all ranks"
        )
    return list(torch.split(received[header_bytes:], sizes))


def carry_out(transport: Transport, runs: Sequence[Rounds[T]]) -> list[T]:
    """Return the results; in each round the messages of all `runs` for one rank go as one.

    All ranks call this together, with as many runs in the same order.

    Raises:
        MessageError: A message is not what its sender had to send.
    """
    results: dict[int, T] = {}
    answers: dict[int, Mapping[int, Tensor] | None] = dict.fromkeys(range(len(runs)))
    while answers:
        asked: dict[int, Messages] = {}
        for index, answer in answers.items():
            try:
                asked[index] = next(runs[index]) if answer is None else runs[index].send(answer)
            except StopIteration as ended:
                results[index] = ended.value
        answer, answers = None, {}  # nobody needs what was before any more
        answers.update(zip(asked, _exchange(transport, list(asked.values())), strict=True))
    return [results[index] for index in range(len(runs))]


class RoundScheme(Scheme):
    """A scheme whose sums are rounds, in which gradients that come together send what they have to send together."""

    @abstractmethod
    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Yield the rounds of `reduce`, and return what it returns."""

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return self.reduce_together([(key, gradient)])[0]

    def reduce_together(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums, in as many rounds as the gradient has that needs most; each is what it would be alone."""
        return carry_out(self.transport, [self.rounds(key, gradient) for key, gradient in gradients])


def _exchange(transport: Transport, asked: Sequence[Messages]) -> list[dict[int, Tensor]]:
    """Return for each exchange source → message."""
    if len(asked) <= 1:
        return [_pass(transport, each) for each in asked]
    outgoing: dict[int, list[Tensor]] = {}
    senders: dict[int, list[int]] = {}
    for distance in range(1, transport.size):  # ranks are asked in the order in which they send
        ahead, behind = ((transport.rank + way * distance) % transport.size for way in (1, -1))
        if parts := [each.outgoing[ahead] for each in asked if ahead in each.outgoing]:
            outgoing[ahead] = parts
        if indices := [index for index, each in enumerate(asked) if behind in each.sources]:
            senders[behind] = indices
    known = [each.sizes_bytes for each in asked if each.sizes_bytes is not None]
    sizes: dict[int, list[int]] = {}
    if len(known) == len(asked):
        sizes = {source: [known[index][source] for index in indices] for source, indices in senders.items()}
    received = _pass(
        transport,
        Messages(
            outgoing=_joined(outgoing, with_sizes=len(known) < len(asked)),
            sources=list(senders),
            sizes_bytes={source: sum(map(_room, each)) for source, each in sizes.items()}
            if len(known) == len(asked)
            else None,
            by_all=any(each.by_all for each in asked),
        ),
    )
    found: list[dict[int, Tensor]] = [{} for _ in asked]
    for source, indices in senders.items():
        own = sizes.get(source) or _announced_sizes(source, received[source], len(indices))
        for index, part in zip(indices, _parts(received[source], own), strict=True):
            found[index][source] = part
    return found


def _pass(transport: Transport, asked: Messages) -> dict[int, Tensor]:
    outgoing, sizes_bytes = asked.outgoing, asked.sizes_bytes
    if not asked.by_all:
        return transport.exchange(outgoing, asked.sources, sizes_bytes=sizes_bytes)
    nothing = torch.empty(0, dtype=torch.uint8, device=transport.device)
    received = transport.all_to_all(
        [outgoing.get(rank, nothing) for rank in range(transport.size)],
        sizes_bytes=None if sizes_bytes is None else [sizes_bytes.get(rank, 0) for rank in range(transport.size)],
    )
    return {source: received[source] for source in asked.sources}


def _room(size_bytes: int) -> int:
    """Return what a message takes among others."""
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _joined(outgoing: Mapping[int, Sequence[Tensor]], *, with_sizes: bool) -> dict[int, Tensor]:
    """Return for each rank with messages these as one; where sizes are told, they come first."""
    made: dict[tuple[int, ...], Tensor] = {}  # what goes to several ranks is joined once
    for parts in outgoing.values():
        if (key := tuple(map(id, parts))) not in made:
            padding = parts[0].new_zeros(_ALIGNED_BYTES)
            filled = [each for part in parts for each in (part, padding[: _room(part.numel()) - part.numel()])]
            sizes = [torch.tensor([part.numel() for part in parts], device=padding.device)] if with_sizes else []
            made[key] = to_bytes(*sizes, *filled)
    return {rank: made[tuple(map(id, parts))] for rank, parts in outgoing.items()}


def _parts(joined: Tensor, sizes_bytes: Sequence[int]) -> list[Tensor]:
    """Return the messages of these sizes, which are at the end of one that `_joined` made."""
    ends = list(accumulate(map(_room, sizes_bytes), initial=joined.numel() - sum(map(_room, sizes_bytes))))
    return [joined[begin : begin + size_bytes] for begin, size_bytes in zip(ends, sizes_bytes, strict=False)]


def _announced_sizes(source: int, joined: Tensor, count: int) -> list[int]:
    """Return the sizes of the messages, so many, that a rank has joined.

    Raises:
        MessageError: It has joined others.
    """
    header = joined[: torch.int64.itemsize * count]
    sizes: list[int] = header.view(torch.int64).tolist() if header.numel() == torch.int64.itemsize * count else [-1]
    if min(sizes) < 0 or joined.numel() != header.numel() + sum(map(_room, sizes)):
        raise MessageError(
            f"rank {source} sent {joined.numel()} bytes that are not {count} messages with their sizes; run the same "
            f"version with the same options on all ranks"
        )
    return sizes
