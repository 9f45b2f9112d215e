"""Sums as generators of the rounds in which ranks exchange messages, so that those of several gradients go together."""

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import MessageError
from ..ops.kernels import checked_together, read_together
from .collectives import relay_gather
from .scheme import Scheme
from .transport import Transport, copied_to_device, to_bytes

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gathering:
    """An all-gather in which ranks pass on what others sent (`relay_gather`).

    Attributes:
        message: This rank's.
        sizes_bytes: Of each rank's message; None, then on all ranks, where sizes have to be announced.
    """

    message: Tensor
    sizes_bytes: Sequence[int] | None


Rounds = Generator[Messages | Gathering | Tensor, Any, T]
"""Yields what ranks do together, is sent source → message, and returns a result.

For one gradient all ranks go through as many rounds; a rank that has nothing to do in one yields an empty one. Between
rounds it may yield what the CPU has to read, and is sent the numbers, as a `Finding` is. Ranks may do that differently
often. So a collective that it calls by itself, in which all ranks have one order, comes before what it reads.
"""


def idle(count: int) -> Rounds[None]:
    """Let others go through `count` rounds, in which sizes are announced."""
    for _ in range(count):
        yield Messages(outgoing={}, sources=[], sizes_bytes=None)


def swap(message: Tensor, *, to: int, source: int, size_bytes: int | None = None) -> Rounds[Tensor]:
    """Send `message` to rank `to` and return that of rank `source`."""
    known = None if size_bytes is None else {source: size_bytes}
    received: Mapping[int, Tensor] = yield Messages(outgoing={to: message}, sources=[source], sizes_bytes=known)
    return received[source]


def all_to_all(
    rank: int, messages: Sequence[Tensor], *, sizes_bytes: Sequence[int] | None = None
) -> Rounds[list[Tensor]]:
    """Send `messages[r]` to rank r, and return what each sent to `rank`, this one; as `Transport.all_to_all`."""
    others = [other for other in range(len(messages)) if other != rank]
    known = None if sizes_bytes is None else {other: sizes_bytes[other] for other in others}
    received: Mapping[int, Tensor] = yield Messages(
        outgoing={other: messages[other] for other in others}, sources=others, sizes_bytes=known, by_all=True
    )
    return [messages[rank] if place == rank else received[place] for place in range(len(messages))]


def gather(message: Tensor, *, sizes_bytes: Sequence[int] | None = None) -> Rounds[list[Tensor]]:
    """Return the messages of all ranks, in their order; as `relay_gather`."""
    held: Mapping[int, Tensor] = yield Gathering(message=message, sizes_bytes=sizes_bytes)
    return [held[rank] for rank in range(len(held))]


def carry_out(transport: Transport, runs: Sequence[Rounds[T]]) -> list[T]:
    """Return the results; in each round the messages of all `runs` for one rank go as one.

    All ranks call this together, with as many runs in the same order.

    Raises:
        MessageError: A message is not what its sender had to send.
    """
    results: dict[int, T] = {}
    with checked_together():
        asked = _advanced(runs, dict.fromkeys(range(len(runs))), results)
        while asked:
            messages = {index: each for index, each in asked.items() if isinstance(each, Messages)}
            gatherings = {index: each for index, each in asked.items() if isinstance(each, Gathering)}
            answers: dict[int, Mapping[int, Tensor] | None] = {}
            answers.update(zip(messages, _exchange(transport, list(messages.values())), strict=True))
            answers.update(zip(gatherings, _gather(transport, list(gatherings.values())), strict=True))
            asked, messages, gatherings = {}, {}, {}  # nobody needs what was before any more
            asked, answers = _advanced(runs, answers, results), {}
    return [results[index] for index in range(len(runs))]


def _advanced(
    runs: Sequence[Rounds[T]], answers: Mapping[int, Mapping[int, Tensor] | None], results: dict[int, T]
) -> dict[int, Messages | Gathering]:
    """Return what these runs ask others for, given the answers to what they asked before, and put results there."""
    asked: dict[int, Any] = {}
    given: Mapping[int, Mapping[int, Tensor] | list[int] | None] = answers
    while given:
        for index, answer in sorted(given.items(), key=itemgetter(0)):
            try:
                asked[index] = next(runs[index]) if answer is None else runs[index].send(answer)
            except StopIteration as ended:
                results[index] = ended.value
        unread = {index: asked.pop(index) for index in list(asked) if isinstance(asked[index], Tensor)}
        given = dict(zip(unread, read_together(unread.values()), strict=True))
    return dict(sorted(asked.items()))  # on all ranks in one order


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
    if not asked:
        return []
    if len(asked) == 1:
        return [_pass(transport, asked[0])]
    outgoing: dict[int, list[Tensor]] = {}
    senders: dict[int, list[int]] = {}
    for distance in range(1, transport.size):  # ranks are asked in the order in which they send
        ahead, behind = ((transport.rank + way * distance) % transport.size for way in (1, -1))
        outgoing[ahead] = [each.outgoing[ahead] for each in asked if ahead in each.outgoing]
        senders[behind] = [index for index, each in enumerate(asked) if behind in each.sources]
    senders = {source: indices for source, indices in senders.items() if indices}
    sizes = _known_sizes(asked, senders)
    received = _pass(
        transport,
        Messages(
            outgoing=_joined(outgoing, with_sizes=sizes is None),
            sources=list(senders),
            sizes_bytes=None if sizes is None else {source: sum(map(_room, each)) for source, each in sizes.items()},
            by_all=any(each.by_all for each in asked),
        ),
    )
    if sizes is None:
        sizes = _announced_sizes(received, {source: len(indices) for source, indices in senders.items()})
    found: list[dict[int, Tensor]] = [{} for _ in asked]
    for source, indices in senders.items():
        for index, part in zip(indices, _parts(received[source], sizes[source]), strict=True):
            found[index][source] = part
    return found


def _gather(transport: Transport, asked: Sequence[Gathering]) -> list[Mapping[int, Tensor]]:
    """Return for each all-gather source → message."""
    if not asked:
        return []
    if len(asked) == 1:
        return [dict(enumerate(relay_gather(transport, asked[0].message, sizes_bytes=asked[0].sizes_bytes)))]
    known = [each.sizes_bytes for each in asked]
    sizes = {rank: [each[rank] for each in known if each is not None] for rank in range(transport.size)}
    are_known = None not in known
    held = relay_gather(
        transport,
        _joined({transport.rank: [each.message for each in asked]}, with_sizes=not are_known)[transport.rank],
        sizes_bytes=[sum(map(_room, each)) for each in sizes.values()] if are_known else None,
    )
    if not are_known:
        sizes = _announced_sizes(dict(enumerate(held)), dict.fromkeys(range(transport.size), len(asked)))
    parts = {rank: _parts(message, sizes[rank]) for rank, message in enumerate(held)}
    return [{rank: parts[rank][index] for rank in parts} for index in range(len(asked))]


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


def _known_sizes(asked: Sequence[Messages], senders: Mapping[int, Sequence[int]]) -> dict[int, list[int]] | None:
    """Return source → sizes of the messages that it sends, None where sizes are announced."""
    known = [each.sizes_bytes for each in asked]
    sizes = {}
    for source, indices in senders.items():
        sizes[source] = [each[source] for index in indices if (each := known[index]) is not None]
    return None if None in known else sizes


def _room(size_bytes: int) -> int:
    """Return what a message takes among others."""
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _joined(outgoing: Mapping[int, Sequence[Tensor]], *, with_sizes: bool) -> dict[int, Tensor]:
    """Return for each rank with messages these as one; where sizes are told, they come first."""
    distinct = {tuple(map(id, parts)): parts for parts in outgoing.values() if parts}
    if not distinct:
        return {}
    device = next(iter(distinct.values()))[0].device
    padding = torch.zeros(_ALIGNED_BYTES, dtype=torch.uint8, device=device)
    filled = {
        key: [each for part in parts for each in (part, padding[: _room(part.numel()) - part.numel()])]
        for key, parts in distinct.items()
    }
    if with_sizes:
        sizes = copied_to_device([part.numel() for parts in distinct.values() for part in parts], device)
        for key, own in zip(distinct, torch.split(sizes, [len(parts) for parts in distinct.values()]), strict=True):
            filled[key].insert(0, own)
    made = {key: to_bytes(*each) for key, each in filled.items()}
    return {rank: made[tuple(map(id, parts))] for rank, parts in outgoing.items() if parts}


def _parts(joined: Tensor, sizes_bytes: Sequence[int]) -> list[Tensor]:
    """Return the messages of these sizes, which are at the end of one that `_joined` made."""
    ends = list(accumulate(map(_room, sizes_bytes), initial=joined.numel() - sum(map(_room, sizes_bytes))))
    return [joined[begin : begin + size_bytes] for begin, size_bytes in zip(ends, sizes_bytes, strict=False)]


def _announced_sizes(messages: Mapping[int, Tensor], counts: Mapping[int, int]) -> dict[int, list[int]]:
    """Return source → sizes of the messages that it has joined, as many as are given.

    Raises:
        MessageError: It has joined others.
    """
    header_bytes = {source: torch.int64.itemsize * count for source, count in counts.items()}
    headers = [messages[source][:size_bytes] for source, size_bytes in header_bytes.items()]
    whole = all(messages[source].numel() >= size_bytes for source, size_bytes in header_bytes.items())
    # All at once: the CPU waits for a GPU whenever it reads.
    numbers = iter(torch.cat(headers).view(torch.int64).tolist() if whole and headers else [])
    sizes = {source: list(islice(numbers, count)) for source, count in counts.items()}
    for source, each in sizes.items():
        expected_bytes = header_bytes[source] + sum(map(_room, each))
        if min(each, default=-1) < 0 or messages[source].numel() != expected_bytes:
            raise MessageError(
                f"rank {source} sent {messages[source].numel()} bytes that are not {counts[source]} messages with "
                f"their sizes; run the same version with the same options on all ranks"
            )
    return sizes
