"""Sums as generators of the rounds in which ranks exchange messages, so that those of several gradients go together."""

from abc import ABC, abstractmethod
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
    """

    outgoing: Mapping[int, Tensor]
    sources: Sequence[int]
    sizes_bytes: Mapping[int, int] | None


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
    received = yield Messages(outgoing={other: messages[other] for other in others}, sources=others, sizes_bytes=known)
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
            received = yield from swap(_joined(held[:number], with_sizes=True), to=to, source=source)
            held += _parts(source, received, number)
        else:
            expected = [sizes_bytes[(own + distance + offset) % count] for offset in range(number)]
            outgoing = to_bytes(*held[:number])
            received = yield from swap(outgoing, to=to, source=source, size_bytes=sum(expected))
            held += torch.split(received, expected)
        distance *= 2
    return [held[(place - own) % count] for place in range(count)]


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


class RoundScheme(Scheme, ABC):
    """A scheme whose sums are rounds, in which gradients that come together send what they have to send together."""

    @abstractmethod
    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Yield the rounds of `reduce`, and return what it returns."""

    def reduce_together(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the sums, in as many rounds as the gradient has that needs most; each is what it would be alone."""
        return carry_out(self.transport, [self.rounds(key, gradient) for key, gradient in gradients])


def _exchange(transport: Transport, asked: Sequence[Messages]) -> list[dict[int, Tensor]]:
    """Return for each exchange source → message."""
    if len(asked) <= 1:
        return [transport.exchange(each.outgoing, each.sources, sizes_bytes=each.sizes_bytes) for each in asked]
    outgoing: dict[int, list[Tensor]] = {}
    senders: dict[int, list[int]] = {}
    for index, each in enumerate(asked):
        for rank, message in each.outgoing.items():
            outgoing.setdefault(rank, []).append(message)
        for source in each.sources:
            senders.setdefault(source, []).append(index)
    known = [each.sizes_bytes for each in asked if each.sizes_bytes is not None]
    all_known = len(known) == len(asked)
    sizes = {source: [known[index][source] for index in indices] for source, indices in senders.items() if all_known}
    made: dict[tuple[int, ...], Tensor] = {}  # what goes to several ranks is joined once
    for parts in outgoing.values():
        if (key := tuple(map(id, parts))) not in made:
            made[key] = _joined(parts, with_sizes=not all_known)
    received = transport.exchange(
        {rank: made[tuple(map(id, parts))] for rank, parts in outgoing.items()},
        senders,
        sizes_bytes={source: sum(map(_room, each)) for source, each in sizes.items()} if all_known else None,
    )
    found: list[dict[int, Tensor]] = [{} for _ in asked]
    for source, indices in senders.items():
        for index, part in zip(indices, _parts(source, received[source], len(indices), sizes.get(source)), strict=True):
            found[index][source] = part
    return found


def _room(size_bytes: int) -> int:
    """Return what a message takes among others."""
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _joined(parts: Sequence[Tensor], *, with_sizes: bool) -> Tensor:
    """Return messages as one; where sizes are told, they come first."""
    padding = parts[0].new_zeros(_ALIGNED_BYTES)
    filled = [each for part in parts for each in (part, padding[: _room(part.numel()) - part.numel()])]
    sizes = [torch.tensor([part.numel() for part in parts], device=padding.device)] if with_sizes else []
    return to_bytes(*sizes, *filled)


def _parts(source: int, joined: Tensor, count: int, sizes_bytes: Sequence[int] | None = None) -> list[Tensor]:
    """Return the messages, so many, that a rank has joined, of these sizes, or of those that it tells.

    Raises:
        MessageError: It has joined others.
    """
    begin = 0
    if sizes_bytes is None:
        begin = torch.int64.itemsize * count
        sizes_bytes = joined[:begin].view(torch.int64).tolist() if joined.numel() >= begin else [-1]
        if min(sizes_bytes) < 0 or joined.numel() != begin + sum(map(_room, sizes_bytes)):
            raise MessageError(
                f"rank {source} sent {joined.numel()} bytes that are not {count} messages with their sizes; run the "
                f"same version with the same options on all ranks"
            )
    ends = accumulate(map(_room, sizes_bytes), initial=begin)
    return [joined[begin : begin + size_bytes] for begin, size_bytes in zip(ends, sizes_bytes, strict=False)]
