"""Collectives: everyone ends with what the routine says, and costs count the messages that are sent."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from netlab import NetLab
from ranks import run_hosts, run_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

from resilient_run.comm.net.collectives import (
    broadcast_from,
    gather_shares,
    gather_to,
    reduce_scatter,
    reduce_to,
    relay_gather,
)
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.scheme import Dense
from resilient_run.comm.net.transport import Traffic, Transport
from resilient_run.comm.plan.collective import Hop, is_short, load, turns
from resilient_run.comm.plan.tree import Routine

pytestmark = pytest.mark.jobs

SIZES = [1, 2, 3, 4, 5, 6, 7, 8]
LONG = 300_000
"""Elements of a float32 tensor that does not go at once."""
CARRIED_OUT = (Routine.ALL_GATHER, Routine.BROADCAST, Routine.REDUCE_SCATTER, Routine.REDUCE)
"""Those whose rounds are written out, because ranks pass on what they received."""


def rounds(routine: Routine, size: int) -> list[list[Hop]]:
    """Return the messages of each round; those of an all-to-all go to one distance after the other."""
    if routine is Routine.ALL_TO_ALL:
        ahead = ([(rank, (rank + distance) % size) for rank in range(size)] for distance in range(1, size))
        return [[Hop(rank, to, (to,)) for rank, to in each] for each in ahead]
    ranks = [turns(routine, size, rank) for rank in range(size)]
    return [[sent for sent, _ in each if sent is not None] for each in zip(*ranks, strict=True)]


def blocks(routine: Routine, size: int) -> int:
    """Return how many blocks make what a rank holds before a collective."""
    return size if routine in (Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL) else 1


def given(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_any_size_reach_all_or_the_root(size: int) -> None:
    """Some are empty, and where they begin is no multiple of anything."""
    root = size - 1

    def work(transport: Transport) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None, int]:
        mine = torch.full((7 * transport.rank,), transport.rank, dtype=torch.uint8)
        announced = relay_gather(transport, mine)
        header_bytes = transport.traffic.header_bytes
        known = relay_gather(transport, mine, sizes_bytes=[7 * rank for rank in range(size)])
        return announced, known, gather_to(root, mine, transport), header_bytes

    for rank, (announced, known, gathered, header_bytes) in enumerate(run_ranks(size, work)):
        assert (gathered is not None) == (rank == root)
        for found in (announced, known, gathered or known):
            assert [message.tolist() for message in found] == [[sender] * 7 * sender for sender in range(size)]
        assert header_bytes == 8 * (size - 1)


@pytest.mark.parametrize("numel", [0, 1, 5, LONG])
@pytest.mark.parametrize("size", SIZES)
def test_sums_and_broadcasts_by_a_tree_and_along_a_chain(size: int, numel: int) -> None:
    root = size // 2

    def work(transport: Transport) -> tuple[Tensor | None, Tensor, Tensor]:
        total = reduce_to(root, given(transport.rank, numel), transport)
        message = None if total is None else total.view(torch.uint8)
        known = broadcast_from(root, message, transport, size_bytes=4 * numel)
        return total, known, broadcast_from(root, message, transport)

    expected = sum(given(rank, numel) for rank in range(size))
    found = run_ranks(size, work)
    for rank, (total, known, announced) in enumerate(found):
        assert (total is not None) == (rank == root)
        assert torch.equal(known, announced)
        assert torch.equal(known, found[root][1])
        torch.testing.assert_close(known.view(torch.float32), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_shares_of_the_sum_are_gathered_again(size: int, dtype: torch.dtype) -> None:
    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        share = reduce_scatter(transport, torch.arange(3 * size, dtype=dtype))
        return share.clone(), gather_shares(transport, share)

    for rank, (share, whole) in enumerate(run_ranks(size, work)):
        assert torch.equal(whole, size * torch.arange(3 * size, dtype=dtype))
        assert torch.equal(share, whole[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_sum_in_two_steps_sends_what_the_all_reduce_does(size: int) -> None:
    def work(transport: Transport) -> tuple[int, int]:
        Dense(transport).reduce("w", torch.ones(3 * size))
        once = transport.traffic.sent_bytes
        gather_shares(transport, reduce_scatter(transport, torch.ones(3 * size)))
        return once, transport.traffic.sent_bytes - once

    assert run_ranks(size, work) == [(2 * (size - 1) * 12,) * 2] * size


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("routine", [Routine.REDUCE, Routine.BROADCAST, Routine.REDUCE_SCATTER, Routine.ALL_GATHER])
def test_bytes_are_those_of_the_rounds(routine: Routine, size: int) -> None:
    numel = 12 * 25_000
    held_bytes = 4 * numel // size if routine is Routine.ALL_GATHER else 4 * numel

    def work(transport: Transport) -> Traffic:
        match routine:
            case Routine.REDUCE:
                reduce_to(0, torch.ones(numel), transport)
            case Routine.BROADCAST:
                whole = torch.ones(numel).view(torch.uint8) if transport.rank == 0 else None
                broadcast_from(0, whole, transport, size_bytes=4 * numel)
            case Routine.REDUCE_SCATTER:
                reduce_scatter(transport, torch.ones(numel))
            case _:
                gather_shares(transport, torch.ones(numel // size))
        return transport.traffic

    sent, received = Counter(), Counter()
    for hops in rounds(routine, size):
        for hop in hops:
            sent[hop.sender] += len(hop.blocks)
            received[hop.receiver] += len(hop.blocks)
    block_bytes = held_bytes / blocks(routine, size)
    for rank, traffic in enumerate(run_ranks(size, work)):
        assert traffic.sent_bytes == sent[rank] * block_bytes
        assert traffic.received_bytes == received[rank] * block_bytes


@pytest.mark.parametrize("routine", CARRIED_OUT)
@pytest.mark.parametrize("size", SIZES[1:])
def test_no_rank_sends_or_receives_two_messages_in_a_round(routine: Routine, size: int) -> None:
    for hops in rounds(routine, size):
        assert len({hop.sender for hop in hops}) == len({hop.receiver for hop in hops}) == len(hops) > 0


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("routine", [Routine.REDUCE_SCATTER, Routine.ALL_GATHER])
def test_startups_are_the_longest_way_of_a_block(routine: Routine, size: int) -> None:
    """What a rank passes on waits for what came. In a tree and an all-to-all, sends of a rank wait for each other."""
    waited: Counter[tuple[int, int]] = Counter()
    for hops in rounds(routine, size):
        sent = {hop: 1 + max(waited[hop.sender, block] for block in hop.blocks) for hop in hops}
        for hop, startups in sent.items():
            for block in hop.blocks:
                waited[hop.receiver, block] = max(waited[hop.receiver, block], startups)
    assert load(routine, size).startups == max(waited.values())


@pytest.mark.parametrize("numel", [1000, LONG])
@pytest.mark.parametrize("size", SIZES[1:])
def test_long_messages_follow_each_other_as_their_startups_say(size: int, numel: int) -> None:
    def work(transport: Transport) -> tuple[list[Tensor], list[Tensor] | None, list[int]]:
        message = given(transport.rank, numel).view(torch.uint8)
        found, counted = [], []
        for call in (
            lambda: transport.all_to_all([message] * size, sizes_bytes=[message.numel()] * size),
            lambda: gather_to(0, message, transport, sizes_bytes=[message.numel()] * size),
        ):
            transport.traffic.reset()
            found.append(call())
            counted.append(transport.traffic.rounds)
        return found[0], found[1], counted

    exchanged, gathered = 4 * numel * size, 4 * numel
    all_to_all = load(Routine.ALL_TO_ALL, size, short=is_short(Routine.ALL_TO_ALL, size, exchanged)).startups
    gather = load(Routine.GATHER, size, short=is_short(Routine.GATHER, size, gathered)).startups
    assert (all_to_all, gather) == (1, 1) if numel < LONG else (size - 1, size - 1)
    for rank, (everyones, at_root, counted) in enumerate(run_ranks(size, work)):
        assert counted == [all_to_all, 1 if rank else gather]
        for found in (everyones, *([] if rank else [at_root])):
            assert found is not None
            assert all(torch.equal(each.view(torch.float32), given(n, numel)) for n, each in enumerate(found))


@pytest.mark.parametrize(("hosts", "per_host"), [(4, 1), (2, 3)])
def test_slow_link_gets_less_at_once(netlab: Callable[..., NetLab], hosts: int, per_host: int) -> None:
    """And long messages in parts."""
    size = hosts * per_host

    def work(fabric: Fabric) -> tuple[float, int, list[int], list[Tensor]]:
        transport, traffic = fabric.flat, replace(fabric.flat.traffic)
        message = given(transport.rank, 60_000).view(torch.uint8)
        before = len(transport.parts(message))
        transport.learn()
        assert transport.traffic == traffic
        parts = [part.numel() for part in transport.parts(message)]
        received = transport.all_to_all([message] * size, sizes_bytes=[message.numel()] * size)
        return transport.at_once_bytes, before, parts, received

    lab = netlab(hosts, rate="20mbit")
    found = run_hosts(hosts, per_host, work, lab=lab.hosts)
    for at_once_bytes, before, parts, received in found:
        assert at_once_bytes == found[0][0]
        assert before == 1
        assert (sum(parts), max(parts)) == (240_000, int(at_once_bytes) // 2)
        assert [message.view(torch.float32).tolist() for message in received] == [
            given(rank, 60_000).tolist() for rank in range(size)
        ]


class Asking:
    """A process group that notes which messages are asked for before an earlier one is there."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._asked: list[tuple[int, int]] = []
        self.ahead: set[tuple[int, int]] = set()
        self.most_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        self.ahead |= {(waited, source) for waited, _ in self._asked}
        asked = source, tensors[0].nbytes
        self._asked.append(asked)
        self.most_bytes = max(self.most_bytes, sum(size_bytes for _, size_bytes in self._asked))
        work = self._group.recv(tensors, source, tag)
        return SimpleNamespace(wait=lambda: (work.wait(), self._asked.remove(asked)))


@pytest.mark.parametrize(("numel", "ahead"), [(1000, {(2, 1)}), (LONG, set())])
def test_long_messages_of_two_senders_are_not_asked_for_together(numel: int, ahead: set[tuple[int, int]]) -> None:
    """Rank 0 of four waits for rank 2, and then for rank 1."""

    def work(transport: Transport) -> set[tuple[int, int]]:
        asking = Asking(transport._group)
        gather_shares(Transport(cast("ProcessGroup", asking)), torch.ones(numel))
        return asking.ahead

    assert run_ranks(4, work)[0] == ahead


def test_ring_is_asked_for_at_once() -> None:
    """All comes from one neighbour, one after the other."""

    def work(transport: Transport) -> set[tuple[int, int]]:
        asking = Asking(transport._group)
        gather_shares(Transport(cast("ProcessGroup", asking)), torch.ones(LONG))
        return asking.ahead

    assert run_ranks(3, work) == [{(2, 2)}, {(0, 0)}, {(1, 1)}]


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_slow_links_bring_no_more_at_once_than_they_may(size: int) -> None:
    """Of one sender or of several, of messages that ranks pass on, add up, swap, or send to all."""

    def work(transport: Transport) -> tuple[int, list[list[float]]]:
        asking = Asking(transport._group)
        slow = Transport(cast("ProcessGroup", asking))
        slow.at_once_bytes = 10_001.5
        mine = given(transport.rank, 7000)
        after, before = (transport.rank + 1) % size, (transport.rank - 1) % size
        found = [
            gather_shares(slow, mine),
            torch.cat(slow.send_to_all(mine.view(torch.uint8), sizes_bytes=[mine.nbytes] * size)).view(torch.float32),
            reduce_scatter(slow, mine.repeat(size)),
            slow.exchange({after: mine.view(torch.uint8)}, [before])[before].view(torch.float32),
        ]
        return asking.most_bytes, [each.tolist() for each in found]

    every = torch.cat([given(rank, 7000) for rank in range(size)])
    total = every.view(size, -1).sum(dim=0)
    for rank, (most_bytes, (gathered, sent, added, swapped)) in enumerate(run_ranks(size, work)):
        assert 5000 < most_bytes <= 10_001
        assert gathered == sent == every.tolist()
        assert added == pytest.approx(total.tolist(), rel=1e-5, abs=1e-5)
        assert swapped == given((rank - 1) % size, 7000).tolist()


def test_ranks_of_a_host_share_its_adapter() -> None:
    """What 56 ranks of other hosts have has to come in, once; an all-to-all sends it for each rank of the host."""
    assert load(Routine.ALL_GATHER, 8, 8).adapter == 56
    assert load(Routine.GATHER, 8, 8).adapter == 56
    assert load(Routine.ALL_TO_ALL, 8, 8).adapter == 8 * 56 / 64
    assert load(Routine.ALL_REDUCE, 8, 8).adapter == 2 * 63 / 64


@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("routine", [*CARRIED_OUT, Routine.ALL_TO_ALL])
def test_loads_are_those_of_the_rounds(routine: Routine, per_host: int) -> None:
    """They are not counted message by message."""
    for hosts in (1, 2, 3, 4, 5, 8):
        ranks = hosts * per_host
        moved = crossed = 0
        for hops in rounds(routine, ranks):
            moved += max(len(hop.blocks) for hop in hops)
            crossing: Counter[tuple[str, int]] = Counter()
            for hop in hops:
                source, target = hop.sender // per_host, hop.receiver // per_host
                if source != target:
                    crossing["out", source] += len(hop.blocks)
                    crossing["in", target] += len(hop.blocks)
            crossed += max(crossing.values(), default=0)
        found, whole = load(routine, hosts, per_host), blocks(routine, ranks)
        assert (found.rank, found.adapter) == (moved / whole, crossed / whole), hosts
        assert found.startups == len(rounds(routine, ranks))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("routine", CARRIED_OUT)
def test_what_a_rank_receives_is_what_another_one_sends_it(routine: Routine, size: int) -> None:
    for each in zip(*(turns(routine, size, rank) for rank in range(size)), strict=True):
        sent = [sent for sent, _ in each if sent is not None]
        received = [received for _, received in each if received is not None]
        assert sorted(sent) == sorted(received)
        assert all(hop.sender == rank for rank, (hop, _) in enumerate(each) if hop is not None)


def test_thousands_of_ranks_are_counted_soon() -> None:
    """Their rounds have more messages than fit into memory."""
    for routine in (Routine.ALL_REDUCE, Routine.ALL_GATHER, Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL):
        assert load(routine, 5000, 8).adapter > 0.9
    assert load(Routine.BROADCAST, 1000, 8).startups == 13
