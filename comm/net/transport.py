"""What schemes send: messages of any size between the ranks of one process group, and every byte counted."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceScatterOptions, Work
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _world

from ..errors import MessageError
from ..plan.collective import MOST_AT_ONCE_BYTES, at_once_bytes

T = TypeVar("T")
_SIZE_BYTES = 8
_MOST_BYTES = 1 << 40
"""More than any memory has for one message."""
_PROBE_BYTES = 64 << 10
_PROBES = 5
_FIRST_COUNT = 1 << 32
"""Above what torch counts to, so that none of its names is one of ours."""
_Sent = tuple[Work, Tensor]
"""What is being sent, and its memory."""
_groups_among = WeakKeyDictionary[ProcessGroup, Counter[tuple[int, ...]]]()
"""Default group → ranks → groups that `_new_group` has made of them; a process may outlive its default group."""
_begun: WeakValueDictionary[torch.device, Work] = WeakValueDictionary()
"""GPU → the all-reduce begun last on it, while it is to be waited for."""


@dataclass(kw_only=True, slots=True)
class Traffic:
    """What one rank has sent and received since the last `reset`.

    Attributes:
        sent_bytes: Payload sent to other ranks; of the library's all-reduce the bytes of its ring.
        received_bytes: Payload received from other ranks.
        header_bytes: Announcements of sizes, sent.
        rounds: Exchanges that had to follow each other; the library's all-reduce is one.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    header_bytes: int = 0
    rounds: int = 0

    def reset(self) -> None:
        """Count from zero again."""
        self.sent_bytes = self.received_bytes = self.header_bytes = self.rounds = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a rank does in a round of a collective.

    Attributes:
        outgoing: Makes the messages for other ranks, of what came in the turns before.
        sizes_bytes: Other rank that sends a message → its size.
        take: Takes the messages, by rank.
    """

    outgoing: Callable[[], Mapping[int, Tensor]]
    sizes_bytes: Mapping[int, int]
    take: Callable[[dict[int, Tensor]], object]


class Transport:
    """The ranks of one process group, as gradient schemes see them.

    Messages are 1-D uint8 tensors (see `to_bytes`, `from_bytes`) on the transport's device. All ranks of the group make
    the same calls in the same order; calls block until what was received is there (on CUDA: is enqueued).

    Args:
        group: Gloo or NCCL. Schemes that run beside DDP need a group of their own.
        device: Where messages are: of the CPU for Gloo, this rank's GPU for NCCL.

    Attributes:
        traffic: What this rank has sent and received.
        at_once_bytes: How much may come from all other ranks at once, as `learn` has found out.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | str = "cpu") -> None:
        self.traffic = Traffic()
        self.device = torch.device(device)
        self._group = group
        self.at_once_bytes: float = MOST_AT_ONCE_BYTES

    @classmethod
    def among(cls, ranks: Sequence[int], device: torch.device | str = "cpu") -> Self:
        """Return the transport of a new process group, which these global ranks, and no others, make together."""
        _level(ranks)
        return cls.over(_new_group(ranks), device)

    @classmethod
    def over(cls, group: ProcessGroup, device: torch.device | str = "cpu") -> Self:
        """Return the transport of a group once it has learnt what it may send; all ranks call this together."""
        made = cls(group, device)
        made.learn()
        return made

    def learn(self) -> None:
        """Find out how much may come from all other ranks at once; all ranks call it together."""
        if self.device.type != "cpu" or self.size <= 2:
            return
        self.at_once_bytes = MOST_AT_ONCE_BYTES
        with self.uncounted():
            self.at_once_bytes = at_once_bytes(*self._startup_and_byte_s())

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out of `traffic` what is sent in the block, which belongs to no step."""
        traffic, self.traffic = self.traffic, Traffic()
        try:
            yield
        finally:
            self.traffic = traffic

    def _startup_and_byte_s(self) -> tuple[float, float]:
        # Not with neighbours: ranks of a host stand next to each other.
        ahead, behind = ((self.rank + way * (self.size // 2)) % self.size for way in (1, -1))

        def swap_s(size_bytes: int) -> float:
            message = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
            began_s = time.perf_counter()
            self.exchange({ahead: message}, [behind], sizes_bytes={behind: size_bytes})
            return time.perf_counter() - began_s

        swap_s(_PROBE_BYTES)  # makes connections, and takes what a link lets pass at once after a pause
        # Not by turns: a rank that is still in a long swap would make a short one of the others look long.
        seconds = [[swap_s(size_bytes) for _ in range(_PROBES)] for size_bytes in (_PROBE_BYTES, 1)]
        measured = self.gather_numbers(torch.tensor(seconds, dtype=torch.float64).view(-1))
        # One that stands still for a moment makes one swap of two others long, or its own short.
        usual = measured.median(dim=0).values.view(len(seconds), -1)
        probe_s, startup_s = float(usual[0].median()), float(usual[1].min())
        return startup_s, max(0.0, probe_s - startup_s) / _PROBE_BYTES

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size()

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        sources: Collection[int],
        *,
        sizes_bytes: Mapping[int, int] | None = None,
    ) -> dict[int, Tensor]:
        """Send all messages, each to its rank, and return source → the message that it sent here.

        They go at once, or, where more would come than the link passes, one after the other: senders would overrun the
        queue in front of a receiver, and TCP waits and sends again (incast).

        Args:
            outgoing: Other rank → message.
            sources: Other ranks that send a message to this one.
            sizes_bytes: Source → size of its message, where both sides know it (as 0 too); None announces the sizes
                first, which costs a round trip and `_SIZE_BYTES` for each message.

        Raises:
            MessageError: A size that was announced is not possible.
        """
        senders = sorted(sources, key=lambda source: (self.rank - source) % self.size)
        if sizes_bytes is None:
            sizes_bytes = self.announce(outgoing, senders)
        found: dict[int, Tensor] = {}
        sizes = {rank: sizes_bytes[rank] for rank in senders}
        if self._over_gloo and sum(sizes.values()) > self.at_once_bytes:
            # One distance after the other: no rank sends to two that it would hold up.
            pairs = (
                ((self.rank + ahead) % self.size, (self.rank - ahead) % self.size) for ahead in range(1, self.size)
            )
            turns = [
                Turn(outgoing=partial(_only, outgoing, to), sizes_bytes=_only(sizes, source), take=found.update)
                for to, source in pairs
                if to in outgoing or source in sizes
            ]
        else:
            turns = [Turn(outgoing=lambda: outgoing, sizes_bytes=sizes, take=found.update)]
        self.relay(turns)
        return found

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Return this rank's n-th of the 1-D `tensor`, whose length is a multiple of the ranks, summed over all.

        By the library: Gloo's moves as many bytes as an all-reduce.
        """
        share = torch.empty(tensor.numel() // self.size, dtype=tensor.dtype, device=tensor.device)
        self._follow_begun()
        self._group._reduce_scatter_base(share, tensor.contiguous(), ReduceScatterOptions()).wait()
        self._count_ring((self.size - 1) * share.nbytes)
        return share

    def all_gather_dense(self, share: Tensor) -> Tensor:
        """Return the 1-D shares of all ranks, all of one length, one after the other; by the library."""
        whole = torch.empty(share.numel() * self.size, dtype=share.dtype, device=share.device)
        self._follow_begun()
        self._group._allgather_base(whole, share.contiguous()).wait()
        self._count_ring((self.size - 1) * share.nbytes)
        return whole

    def relay(self, turns: Sequence[Turn]) -> None:
        """Send and receive turn by turn; over Gloo, what comes in later turns may arrive before it is their turn."""
        rooms = [
            {rank: torch.empty(size, dtype=torch.uint8, device=self.device) for rank, size in turn.sizes_bytes.items()}
            for turn in turns
        ]
        # NCCL would wait for all that is asked for before it begins to send.
        inbox = _Inbox(self, (room for each in rooms for room in each.items())) if self._over_gloo else None
        sends: list[_Sent] = []
        for turn, incoming in zip(turns, rooms, strict=True):
            outgoing = turn.outgoing()
            if inbox is None:
                self._coalesce(outgoing, incoming)
            else:
                sends += self._send(outgoing)
                for _ in incoming:
                    inbox.take()
            turn.take(incoming)
            self.traffic.sent_bytes += sum(message.numel() for message in outgoing.values())
            self.traffic.received_bytes += sum(message.numel() for message in incoming.values())
            self.traffic.rounds += 1
        for work, _ in sends:
            work.wait()

    @property
    def _over_gloo(self) -> bool:
        return self.device.type == "cpu"

    @property
    def paced(self) -> bool:
        """Tell whether a link is so slow that long messages are cut, and only so much is on its way at once."""
        return self._over_gloo and self.at_once_bytes < MOST_AT_ONCE_BYTES

    def parts(self, message: Tensor) -> list[Tensor]:
        """Return a message as both of its ends cut it, without empty parts."""
        if not message.numel():
            return []
        return list(torch.split(message, int(self.at_once_bytes) // 2)) if self.paced else [message]

    def ask(self, source: int, part: Tensor, parts: int) -> Work:
        """Ask a rank for a part of a message, which is cut into so many."""
        # As a tag, so that ranks that differ about a message never take a part for another one.
        return self._group.recv([part], source, parts)

    def _send(self, outgoing: Mapping[int, Tensor]) -> list[_Sent]:
        sent = []
        for rank, message in outgoing.items():
            parts = self.parts(message.contiguous())
            sent += [(self._group.send([part], rank, len(parts)), part) for part in parts]
        return sent

    def announce(self, outgoing: Mapping[int, Tensor], senders: Collection[int]) -> dict[int, int]:
        """Announce to other ranks the sizes of the messages for them, and return those that these senders announce.

        Raises:
            MessageError: A size is not possible.
        """
        # All sizes in one tensor each way: the CPU waits for a GPU whenever it reads one.
        sizes = torch.tensor([message.numel() for message in outgoing.values()], dtype=torch.int64, device=self.device)
        messages = dict(zip(outgoing, sizes.view(-1, 1).view(torch.uint8), strict=True))
        with self.uncounted():
            heard = self.exchange(messages, senders, sizes_bytes=dict.fromkeys(senders, _SIZE_BYTES))
        self.traffic.header_bytes += _SIZE_BYTES * len(messages)
        numbers: list[int] = torch.cat([sizes[:0].view(torch.uint8), *heard.values()]).view(torch.int64).tolist()
        announced = dict(zip(heard, numbers, strict=True))
        for rank, size_bytes in announced.items():
            if not 0 <= size_bytes <= _MOST_BYTES:
                raise MessageError(
                    f"rank {rank} announces a message of {size_bytes} bytes; run one version on all ranks"
                )
        return announced

    def all_to_all(self, messages: Sequence[Tensor], *, sizes_bytes: Sequence[int] | None = None) -> list[Tensor]:
        """Send `messages[r]` to rank r and return what each rank sent here, in the order of ranks; own by reference."""
        found = {self.rank: messages[self.rank]}
        outgoing = {rank: message for rank, message in enumerate(messages) if rank != self.rank}
        known = None if sizes_bytes is None else dict(enumerate(sizes_bytes))
        found |= self.exchange(outgoing, outgoing, sizes_bytes=known)
        return [found[rank] for rank in range(self.size)]

    def send_to_all(self, message: Tensor, *, sizes_bytes: Sequence[int] | None = None) -> list[Tensor]:
        """Send `message` to all and return what each rank sent, in the order of ranks; own by reference."""
        return self.all_to_all([message] * self.size, sizes_bytes=sizes_bytes)

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks, a row for each; 1-D, of one length and type on all."""
        own = numbers.to(self.device)
        messages = self.send_to_all(to_bytes(own), sizes_bytes=[own.nbytes] * self.size)
        return torch.stack([from_bytes(message, (own.dtype, own.numel()))[0] for message in messages])

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in their order; of any length, but at least one."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        return [bytes(message.cpu().numpy()) for message in self.send_to_all(own)]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks in place with the library's own all-reduce; Gloo gathers a sparse one."""
        self.begin_all_reduce(tensor).wait()

    def begin_all_reduce(self, tensor: Tensor) -> Work:
        """Begin what `all_reduce` does and return what waits for it; other calls may come in between."""
        if tensor.is_sparse:
            self._count_ring((self.size - 1) * (tensor.indices().nbytes + tensor.values().nbytes))
        else:
            self._count_ring(2 * (self.size - 1) * tensor.nbytes / self.size)
        self._follow_begun()
        work = self._group.allreduce([tensor])
        if not self._over_gloo:
            _begun[self.device] = work
        return work

    def _follow_begun(self) -> None:
        """Let the current stream go on only after the all-reduce begun last, whatever group it is of.

        Ranks give a GPU collectives in one order. Communicators have streams of their own, on which GPUs may begin
        them in another one, and ranks that differ in it may wait for each other for ever.
        """
        if (work := _begun.pop(self.device, None)) is not None:
            work.wait()

    def _count_ring(self, moved_bytes: float) -> None:
        self.traffic.sent_bytes += round(moved_bytes)
        self.traffic.received_bytes += round(moved_bytes)
        self.traffic.rounds += 1

    def _coalesce(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Post all sends and receives over NCCL, empty ones left out on both sides, and wait for them."""
        receives = [(rank, message) for rank, message in incoming.items() if message.numel()]
        sent = [(rank, message.contiguous()) for rank, message in outgoing.items() if message.numel()]
        if not receives and not sent:
            return
        self._follow_begun()
        # NCCL would wait for the first send's receiver before it begins the next call.
        self._group._start_coalescing(self.device)
        for rank, message in receives:
            self._group.recv([message], rank, 0)
        for rank, message in sent:
            self._group.send([message], rank, 0)
        self._group._end_coalescing(self.device).wait()


def _only(by_rank: Mapping[int, T], rank: int) -> dict[int, T]:
    return {rank: by_rank[rank]} if rank in by_rank else {}


class _Inbox:
    """Messages of other ranks over Gloo, in the order in which they are taken.

    Gloo sends a message when its receiver asks for it. What is asked for has to follow what the receiver itself is
    sending, and messages of several senders get in each other's way. So no more is asked for ahead than may come at
    once. Where nothing is slow, what one sender sends is asked for ahead as well.

    Args:
        transport: The ranks.
        rooms: The rank that sends a message, and where it goes.
    """

    def __init__(self, transport: Transport, rooms: Iterable[tuple[int, Tensor]]) -> None:
        self._transport = transport
        self._counts: deque[int] = deque()
        self._due: deque[tuple[int, Tensor, int]] = deque()
        for source, room in rooms:
            parts = transport.parts(room)
            self._counts.append(len(parts))
            self._due.extend((source, part, len(parts)) for part in parts)
        self._asked: deque[tuple[int, int, Work]] = deque()
        self._asked_bytes = 0
        self._ask()

    def take(self) -> None:
        """Wait until the next message is there."""
        for _ in range(self._counts.popleft()):
            _, size_bytes, work = self._asked.popleft()
            work.wait()
            self._asked_bytes -= size_bytes
            self._ask()

    def _ask(self) -> None:
        while self._due and self._may_come():
            source, part, parts = self._due.popleft()
            self._asked.append((source, part.numel(), self._transport.ask(source, part, parts)))
            self._asked_bytes += part.numel()

    def _may_come(self) -> bool:
        source, part, _ = self._due[0]
        if not self._asked or self._asked_bytes + part.numel() <= self._transport.at_once_bytes:
            return True
        return not self._transport.paced and self._asked[0][0] == source


def _level(ranks: Sequence[int]) -> None:
    """Let all of `ranks`, which call this together, be in as many process groups.

    torch before 2.14 names a new group after that number, and its ranks would wait for each other under different
    names.
    """
    together = tuple(sorted(ranks))
    place = f"resilient-run/groups/{hash(together)}/{_made_among()[together]}"
    store = _get_default_store()
    store.set(f"{place}/{dist.get_rank()}", str(len(_world.pg_names)))
    keys = [f"{place}/{rank}" for rank in together]
    is_extended = store.has_extended_api()  # type: ignore[attr-defined]
    most = max(map(int, store.multi_get(keys) if is_extended else map(store.get, keys)))
    while len(_world.pg_names) < most:
        # Gloo's, which needs no other rank where NCCL would split a communicator.
        _new_group([dist.get_rank()], backend="gloo")


def _new_group(ranks: Sequence[int], backend: str | None = None) -> ProcessGroup:
    """Return a new group of `ranks`, which make it together, without the others.

    torch 2.14 and later name it after a count of the groups that a rank has made, and count it there. The names of
    groups that all ranks make later come from the same count: it must not differ between who is in this one and who
    is not.
    """
    together = tuple(sorted(ranks))
    _made_among()[together] += 1
    count = _world.group_count
    _world.group_count = _FIRST_COUNT + _made_among()[together]
    try:
        made: ProcessGroup = dist.new_group(
            list(ranks), timeout=_timeout(), backend=backend, use_local_synchronization=True
        )
    finally:
        _world.group_count = count
    return made


def _made_among() -> Counter[tuple[int, ...]]:
    return _groups_among.setdefault(_get_default_group(), Counter())


def _timeout() -> timedelta | None:
    """Return how long the default group waits, as the script has it; torch would wait for 30 minutes in ours."""
    world = _get_default_group()
    backend = world._get_backend(world._device_types[0])
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def to_bytes(*parts: Tensor) -> Tensor:
    """Return the memory of `parts`, one after the other, as one 1-D uint8 message.

    Put wider types first: `from_bytes` reads a part in place only where its offset in memory is a multiple of its
    item size.
    """
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def from_bytes(message: Tensor, *parts: tuple[torch.dtype, int]) -> list[Tensor]:
    """Return the parts of a message of `to_bytes`, given as (dtype, number of elements) each.

    Raises:
        MessageError: The message has another size.
    """
    expected_bytes = sum(dtype.itemsize * count for dtype, count in parts)
    if message.numel() != expected_bytes:
        raise MessageError(
            f"a message of {message.numel()} bytes came where {expected_bytes} were expected; "
            f"run the same version with the same options on all ranks"
        )
    found, offset = [], 0
    for dtype, count in parts:
        end = offset + dtype.itemsize * count
        part = message[offset:end]
        found.append((part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype))
        offset = end
    return found
