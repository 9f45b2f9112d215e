"""What options of the tree send, by the rounds that planners derive costs from, by counters, and by the kernel's."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

import pytest
import torch
from netlab import NetLab
from ranks import run_hosts

from resilient_run.comm.compress.compressor import Compressor
from resilient_run.comm.compress.compressors import NAMES, named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.espresso.cost import Holding, held_after
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.plan.collective import MOST_AT_ONCE_BYTES, Hop, turns
from resilient_run.comm.plan.constraints import gpu_only
from resilient_run.comm.plan.tree import Comm, Comp, Option, Phase, Routine, all_options
from resilient_run.comm.runtime.execute import OptionScheme

pytestmark = pytest.mark.lab

# On which device something is compressed makes no difference to the network.
OPTIONS = [option for option in all_options() if gpu_only(option)]
NUMEL = 1 << 18
_FRAME_BYTES = 14 + 20 + 32
"""Headers of a packet: Ethernet, IPv4, and TCP with time stamps."""
_NET = "/proc/thread-self/net"
_ATTEMPTS = 50
_PATIENT_TCP = """
cd /proc/sys/net/ipv4
echo 0 > tcp_early_retrans
echo 0 > tcp_recovery
! [ -e tcp_rto_min_us ] || echo 2000000 > tcp_rto_min_us
"""
"""Lets TCP send nothing again that a busy machine is only slow to acknowledge: no probes, and long timeouts."""


@dataclass(kw_only=True, slots=True)
class HostBytes:
    """What a host sends to others, receives from others, and passes between its own ranks; and segments sent again."""

    sent: float = 0.0
    received: float = 0.0
    within: float = 0.0
    again: int = 0

    def __sub__(self, other: "HostBytes") -> "HostBytes":
        return HostBytes(
            sent=self.sent - other.sent,
            received=self.received - other.received,
            within=self.within - other.within,
            again=self.again - other.again,
        )


def on_the_wire() -> HostBytes:
    """Return what the interfaces of this thread's host have counted, without headers of packets."""
    counts = {}
    for line in Path(_NET, "dev").read_text().splitlines()[2:]:
        name, numbers = line.split(":")
        counts[name.strip()] = [int(number) for number in numbers.split()]
    titles, values = (line.split() for line in Path(_NET, "snmp").read_text().splitlines() if line.startswith("Tcp:"))
    tcp = dict(zip(titles, values, strict=True))
    received_bytes, packets_in, sent_bytes, packets_out = (counts["eth0"][column] for column in (0, 1, 8, 9))
    return HostBytes(
        sent=sent_bytes - _FRAME_BYTES * packets_out,
        received=received_bytes - _FRAME_BYTES * packets_in,
        within=counts["lo"][8] - _FRAME_BYTES * counts["lo"][9],
        again=int(tcp["RetransSegs"]),
    )


def modelled(option: Option, hosts: int, per_host: int, key: str, ratio: float) -> list[HostBytes]:
    """Return what each host sends, receives and passes within by the rounds of the option's collectives.

    A message has `ratio` of the bytes of what it stands for.
    """
    found = [HostBytes() for _ in range(hosts)]
    holding = Holding(senders=per_host)
    for step in option.steps:
        if not isinstance(step, Comm):
            holding = replace(holding, messages=1 if isinstance(step, Comp) else 0)
            continue
        ranks = {Phase.FLAT: hosts * per_host, Phase.INTER: hosts}.get(step.phase, per_host)
        held_bytes = holding.region * 4 * NUMEL * (holding.messages * ratio if step.compressed else 1)
        for source, target, moved_bytes in moves(step, ranks, held_bytes):
            if step.phase is Phase.INTER:
                root = zlib.crc32(key.encode()) % hosts
                ends = [((source + root) % hosts, (target + root) % hosts)] * holding.senders
            elif step.phase is Phase.FLAT:
                root = zlib.crc32(key.encode()) * (per_host if hosts > 1 else 1) % ranks
                ends = [((source + root) % ranks // per_host, (target + root) % ranks // per_host)]
            else:
                ends = [(host, host) for host in range(hosts)]
            for sender, receiver in ends:
                if sender == receiver:
                    found[sender].within += moved_bytes
                else:
                    found[sender].sent += moved_bytes
                    found[receiver].received += moved_bytes
        holding = held_after(step, holding, ranks)
    return found


def moves(step: Comm, ranks: int, held_bytes: float) -> Iterator[tuple[int, int, float]]:
    """Yield sender, receiver and bytes of all messages of a collective."""
    cuts = step.routine in (Routine.ALL_REDUCE, Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL)
    block_bytes = held_bytes / ranks if cuts else held_bytes
    for rank in range(ranks):
        for hop in sends(step.routine, ranks, rank):
            yield hop.sender, hop.receiver, len(hop.blocks) * block_bytes


def sends(routine: Routine, ranks: int, rank: int) -> list[Hop]:
    """Return what a rank sends: to the root in a gather, twice around a ring in an all-reduce."""
    if routine is Routine.GATHER:
        return [Hop(rank, 0, (rank,))] if rank else []
    if routine is Routine.ALL_REDUCE:
        return [Hop(rank, (rank + 1) % ranks, (0,))] * (2 * (ranks - 1))
    if routine is Routine.ALL_TO_ALL:
        return [Hop(rank, to, (to,)) for to in range(ranks) if to != rank]
    return [sent for sent, _ in turns(routine, ranks, rank) if sent is not None]


def covering() -> list[Option]:
    """Return a few options that have every collective of the tree."""
    missing = {comm for option in OPTIONS for comm in option.comms}
    chosen = []
    while missing:
        chosen.append(max(OPTIONS, key=lambda option: len(missing.intersection(option.comms))))
        missing -= set(chosen[-1].comms)
    return chosen


def compare(
    lab: NetLab,
    per_host: int,
    options: Sequence[Option],
    *,
    compressor: Compressor | None = None,
    at_once_bytes: float = MOST_AT_ONCE_BYTES,
) -> None:
    """Carry out options on a laboratory network, and hold rounds and counters against those of the interfaces.

    Less than `MOST_AT_ONCE_BYTES` cuts messages into parts, as on a slow link.
    """
    hosts, compressor = len(lab.hosts), compressor or named("fp16")
    assert compressor.fixed_size
    message_bytes = compressor.compress(torch.ones(NUMEL), seed=0).numel()
    for host in lab.hosts:
        host.popen(["sh", "-c", _PATIENT_TCP]).wait()
    meeting = Barrier(hosts * per_host)
    again: set[Option] = set()

    def measure(fabric: Fabric, scheme: OptionScheme, option: Option) -> tuple[HostBytes, float]:
        transports = {id(each): each for each in (fabric.flat, fabric.intra, fabric.inter)}.values()
        for _ in range(_ATTEMPTS):
            for transport in transports:
                transport.traffic.reset()
            meeting.wait()
            again.clear()
            before = on_the_wire()
            meeting.wait()
            scheme.reduce(str(option), torch.ones(NUMEL))
            meeting.wait()
            moved = on_the_wire() - before
            if moved.again:
                again.add(option)
            meeting.wait()
            # TCP sends again what a busy machine is slow to acknowledge.
            if not again:
                return moved, sum(each.traffic.sent_bytes + each.traffic.header_bytes for each in transports)
        raise AssertionError(f"TCP has sent something twice in each of {_ATTEMPTS} attempts")

    def work(fabric: Fabric) -> list[tuple[HostBytes, float]]:
        for transport in (fabric.flat, fabric.intra, fabric.inter):
            transport.at_once_bytes = at_once_bytes
        scheme = OptionScheme(fabric, ErrorFeedback(compressor), {str(option): option for option in options})
        return [measure(fabric, scheme, option) for option in options]

    ranks = run_hosts(hosts, per_host, work, lab=lab.hosts)
    for index, option in enumerate(options):
        expected = modelled(option, hosts, per_host, str(option), message_bytes / (4 * NUMEL))
        for host, model in enumerate(expected):
            measured, counted = ranks[host * per_host][index][0], 0.0
            for rank in ranks[host * per_host : (host + 1) * per_host]:
                counted += rank[index][1]
            close = {"rel": 0.02, "abs": 0.001 * 4 * NUMEL}
            where = f"{option}, host {host} of {hosts} with {per_host} ranks: {measured}, {model}, counted {counted}"
            assert measured.sent == pytest.approx(model.sent, **close), where
            assert measured.received == pytest.approx(model.received, **close), where
            assert measured.within == pytest.approx(model.within, **close), where
            assert counted == pytest.approx(measured.sent + measured.within, **close), where


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (3, 2), (2, 4)])
def test_every_collective_sends_what_it_costs(netlab: Callable[..., NetLab], hosts: int, per_host: int) -> None:
    compare(netlab(hosts, rate="40gbit"), per_host, covering())


def test_messages_in_parts_send_no_more(netlab: Callable[..., NetLab]) -> None:
    compare(netlab(3, rate="40gbit"), 2, covering(), at_once_bytes=48 << 10)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if named(name).fixed_size])
@pytest.mark.parametrize(("hosts", "per_host"), [(1, 4), (3, 1), (2, 3)])
def test_every_compressor_sends_what_it_costs(
    netlab: Callable[..., NetLab], name: str, hosts: int, per_host: int
) -> None:
    compare(netlab(hosts, rate="40gbit"), per_host, covering(), compressor=named(name, density=0.125))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hosts", "per_host"),
    [(hosts, per_host) for hosts in range(1, 9) for per_host in range(1, 9) if 2 <= hosts * per_host <= 8],
)
def test_every_option_sends_what_it_costs(netlab: Callable[..., NetLab], hosts: int, per_host: int) -> None:
    compare(netlab(hosts, rate="40gbit"), per_host, OPTIONS)
