"""Rounds: which hosts form a generation, which ranks they run, and which replicas each of them must hold."""

from bisect import bisect_right
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.ckpt.format.placement import replica_hosts

from ..base.codec import Record, limited
from ..base.fields import Fields
from ..base.spec import MAX_NPROC

MAX_WORLD_SIZE = 1 << 17
"""A round with more ranks is nobody's, and would only keep daemons busy."""


def machine_of(host: str) -> str:
    """Return the machine of `host`: further launchers of a run on one machine are the hosts `<machine>#1`, `#2`, …."""
    return host.partition("#")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat(Record):
    """One host's place in a round; `session` is its launcher, "" for an unknown one, `label` its failure domain."""

    host: str
    session: str = ""
    nproc: int = limited(low=1, high=MAX_NPROC)
    role: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member(Seat):
    """A live launcher, with the place that it would take; `arrival` orders launchers by when they came.

    `ready` is the generation that it could join next, 0 while it runs one; that one once it knows that it is broken.
    """

    host: str = limited(outside=True)
    addr: str
    pid: int
    ready: int
    arrival: int = limited(0, outside=True)

    @property
    def seat(self) -> Seat:
        """The place alone."""
        return Seat(host=self.host, session=self.session, nproc=self.nproc, role=self.role, label=self.label)


@dataclass(frozen=True, kw_only=True)
class Round(Record):
    """One generation of the worker group.

    Attributes:
        generation: 1-based number.
        seats: Its hosts, by group rank.
        restore: The pair that it starts from, None for the beginning.
        made_by: How many ranks captured that pair; None for the beginning, and for an import, which is of no number.
        older: Committed pairs before that one which stay in memory, captured by as many ranks as it has.
        revision: etcd revision of the round, which guards commits; 0 before it is written.
    """

    generation: int = limited(low=1)
    seats: tuple[Seat, ...] = limited(key="members")
    restore: Pair | None = None
    made_by: int | None = limited(None, low=1, high=MAX_WORLD_SIZE)
    older: tuple[Pair, ...] = ()
    revision: int = limited(0, outside=True)

    @classmethod
    def parse(cls, value: Mapping[str, Any], what: str = "round", **given: Any) -> Self:
        """Return the round in the etcd value `value`; see `Record.parse`."""
        round_ = cls.of_fields(Fields(value, what), **given)
        hosts = round_.hosts
        if not hosts or len(set(hosts)) != len(hosts):
            raise DaemonError(f"{what}: field 'members' must name at least one host and each once, got {hosts}")
        if round_.world_size > MAX_WORLD_SIZE:
            raise DaemonError(f"{what}: {round_.world_size} ranks, a run has at most {MAX_WORLD_SIZE}")
        return round_

    def gone(self, members: Mapping[str, Member], after: Self | None = None) -> tuple[str, ...]:
        """Return the hosts whose launcher is neither in the round `after` this one nor, by host, in `members`."""
        seats = [*members.values(), *(() if after is None else after.seats)]
        live, hosts = {(seat.host, seat.session) for seat in seats}, {seat.host for seat in seats}
        return tuple(
            seat.host
            for seat in self.seats
            if ((seat.host, seat.session) not in live if seat.session else seat.host not in hosts)
        )

    def rank_of(self, host: str, session: str) -> int | None:
        """Return the group rank of this launcher, None when it is not in the round."""
        rank = self._group_ranks.get(host)
        return None if rank is None or self.seats[rank].session != session else rank

    @property
    def began_step(self) -> int:
        """The step that this generation starts from."""
        return 0 if self.restore is None else self.restore[1]

    @property
    def read_of(self) -> int | None:
        """Of how many ranks trainers read what they restore; None if each takes its own slot. An import is one's."""
        return 1 if is_import(self.restore) else self.made_by if self.reshapes else None

    @property
    def reshapes(self) -> bool:
        """Tell whether what it restores was captured by another number of ranks than it has."""
        return self.made_by not in (None, self.world_size)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Host names, by group rank."""
        return tuple(seat.host for seat in self.seats)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(seat.nproc for seat in self.seats)

    def __contains__(self, host: str) -> bool:
        """Tell whether `host` has a seat."""
        return host in self._group_ranks

    def place(self, host: str) -> int | None:
        """Return the group rank of `host`, None when it has no seat."""
        return self._group_ranks.get(host)

    def ranks(self, host: str) -> range:
        """Return the ranks that run on `host`, none when it is no member."""
        index = self._group_ranks.get(host)
        return range(0) if index is None else self._ranks_at(index)

    def holders_by_host(self, replicas: int) -> tuple[tuple[str, ...], ...]:
        """Return for each host, by group rank, those that must hold the replicas of its ranks, itself first.

        Hosts on one machine are lost together, so the placement is of machines, and of theirs each takes its turn.
        """
        if replicas not in self._holders:
            machines = list(self._machines.values())
            labels = [self.seats[places[0]].label for places in machines]
            plan = replica_hosts(len(machines), replicas, labels)
            holders = {
                index: (index, *(machines[other][number % len(machines[other])] for other in others[1:]))
                for places, others in zip(machines, plan, strict=True)
                for number, index in enumerate(places)
            }
            self._holders[replicas] = tuple(
                tuple(self.hosts[holder] for holder in holders[index]) for index in range(len(self.hosts))
            )
        return self._holders[replicas]

    def host_of(self, rank: int) -> str | None:
        """Return the host that runs `rank`, None for an unknown rank."""
        return self.hosts[bisect_right(self._ends, rank)] if 0 <= rank < self.world_size else None

    def holders(self, rank: int, replicas: int) -> tuple[str, ...]:
        """Return the hosts that must hold `rank`'s replicas, the one that runs it first; none for an unknown rank."""
        if not 0 <= rank < self.world_size:
            return ()
        return self.holders_by_host(replicas)[bisect_right(self._ends, rank)]

    def kept(self, host: str, replicas: int) -> tuple[int, ...]:
        """Return the ranks whose replicas `host` must hold, its own first."""
        if (host, replicas) not in self._kept:
            owners = [index for index, holders in enumerate(self.holders_by_host(replicas)) if host in holders]
            ordered = sorted(owners, key=lambda owner: self.hosts[owner] != host)
            self._kept[host, replicas] = tuple(rank for owner in ordered for rank in self._ranks_at(owner))
        return self._kept[host, replicas]

    def lacks_machines(self, replicas: int) -> bool:
        """Tell whether its hosts are on fewer machines than there are to be replicas."""
        return len(self._machines) < replicas

    def spares(self, arrivals: Mapping[str, int], daemons: Container[str], replicas: int) -> tuple[str, ...]:
        """Return the hosts without a seat that keep replicas of every rank, too: one for each machine that is lacking.

        Who came first will be the first to take a place that becomes free.

        Args:
            arrivals: Host whose launcher waits for a seat → when it came.
            daemons: Hosts whose daemon is registered.
            replicas: Copies wanted of each rank.
        """
        machines, found = set(self._machines), []
        if self.lacks_machines(replicas):
            for host in sorted(arrivals, key=lambda host: (arrivals[host], host)):
                if len(machines) < replicas and host in daemons and machine_of(host) not in machines:
                    machines.add(machine_of(host))
                    found.append(host)
        return tuple(found)

    @cached_property
    def _machines(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for index, host in enumerate(self.hosts):
            found.setdefault(machine_of(host), []).append(index)
        return found

    @cached_property
    def _holders(self) -> dict[int, tuple[tuple[str, ...], ...]]:
        return {}

    @cached_property
    def _kept(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _group_ranks(self) -> dict[str, int]:
        return {host: index for index, host in enumerate(self.hosts)}

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(seat.nproc for seat in self.seats))

    def _ranks_at(self, index: int) -> range:
        return range(self._ends[index] - self.seats[index].nproc, self._ends[index])


def fitting(size: int, before: tuple[Seat, ...], ready: Mapping[str, Member], max_nodes: int) -> dict[str, Member]:
    """Return up to `max_nodes` of the ready hosts with at most `size` ranks together, survivors first."""
    kept, sizes = {seat.host for seat in before}, {seat.nproc for seat in before if seat.host not in ready}
    chosen: dict[str, Member] = {}
    for member in sorted(
        ready.values(),
        key=lambda member: (member.host not in kept, member.nproc not in sizes, member.arrival, member.host),
    ):
        if len(chosen) < max_nodes and sum(item.nproc for item in chosen.values()) + member.nproc <= size:
            chosen[member.host] = member
    return chosen


def allowed(
    sizes: tuple[int, ...], before: tuple[Seat, ...], ready: Mapping[str, Member], max_nodes: int
) -> dict[str, Member]:
    """Return the ready hosts that make the largest of `sizes`, all of them if any will do; none if none can be made."""
    if not sizes:
        return dict(ready)
    for size in sorted(sizes, reverse=True):
        found = fitting(size, before, ready, max_nodes)
        if sum(member.nproc for member in found.values()) == size:
            return found
    return {}
