"""Rounds: which hosts form a generation, which ranks they run, and which replicas each of them must hold."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.import_manifest import IMPORT_GENERATION
from resilient_run.ckpt.format.placement import replica_hosts

from ..base.fields import Fields

Pair = tuple[int, int]
"""(generation, step) of a capture. Pairs of one run are ordered: a later generation starts behind what it restored."""

CLOSED_TTL_S = 10
"""How long the end of a run stays announced, for every live launcher to see; then the run id is free again."""


def machine_of(host: str) -> str:
    """Return the machine of `host`: further launchers of a run on one machine are the hosts `<machine>#1`, `#2`, …."""
    return host.partition("#")[0]


def is_import(pair: Pair | None) -> bool:
    """Tell whether `pair` was imported: it lies in the persistent tier, and no memory ever holds it."""
    return pair is not None and pair[0] == IMPORT_GENERATION


def pair_message(pair: Pair | None) -> dict[str, int] | None:
    """Return `pair` as it is written in messages."""
    return None if pair is None else {"generation": pair[0], "step": pair[1]}


@dataclass(frozen=True, kw_only=True)
class Round:
    """One generation of the worker group, as `rdzv/round` describes it.

    Attributes:
        generation: 1-based number.
        hosts: Host names by group rank.
        nprocs: Number of ranks on each of `hosts`.
        labels: Failure domain of each of `hosts`, empty when no host has one.
        sessions: Launcher of each of `hosts`, empty when they are not known.
        restore: The pair that this generation starts from, None for the beginning.
        revision: etcd revision of the round, which guards commits.
    """

    generation: int
    hosts: tuple[str, ...]
    nprocs: tuple[int, ...]
    restore: Pair | None
    revision: int
    labels: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: Mapping[str, Any], revision: int) -> Self:
        """Return the round in the etcd value `value`.

        Raises:
            DaemonError: The value is not a round.
        """
        fields = Fields(value, "rdzv/round")
        members = [Fields(member, "rdzv/round, members") for member in fields.objects("members")]
        hosts = tuple(member.text("host") for member in members)
        if not hosts or len(set(hosts)) != len(hosts):
            raise DaemonError(f"rdzv/round: field 'members' must name at least one host and each once, got {hosts}")
        labels = tuple(member.optional_text("label") for member in members)
        sessions = tuple(member.optional_text("session") for member in members)
        return cls(
            generation=fields.integer("generation", low=1),
            hosts=hosts,
            nprocs=tuple(member.integer("nproc", low=1, high=1 << 16) for member in members),
            labels=labels if any(labels) else (),
            sessions=sessions if all(sessions) else (),
            restore=fields.optional_pair("restore"),
            revision=revision,
        )

    def gone(self, launchers: Mapping[str, str], after: Self | None = None) -> tuple[str, ...]:
        """Return the hosts whose launcher is neither in the round `after` this one nor, by host, in `launchers`."""
        live = set(launchers.items()) | (set() if after is None else set(after._seats))
        hosts = {host for host, _ in live}
        return tuple(seat[0] for seat in self._seats if (seat not in live if self.sessions else seat[0] not in hosts))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.nprocs)

    def __contains__(self, host: str) -> bool:
        """Tell whether `host` is a member."""
        return host in self._group_ranks

    def ranks(self, host: str) -> range:
        """Return the ranks that run on `host`, none when it is no member."""
        index = self._group_ranks.get(host)
        return range(0) if index is None else self._ranks_at(index)

    def keepers(self, replicas: int) -> tuple[tuple[str, ...], ...]:
        """Return for each host, by group rank, those that must hold the replicas of its ranks, itself first.

        Hosts on one machine are lost together, so the placement is of machines, and of theirs each takes its turn.
        """
        if replicas not in self._keepers:
            seats: dict[str, list[int]] = {}
            for index, host in enumerate(self.hosts):
                seats.setdefault(machine_of(host), []).append(index)
            machines = list(seats.values())
            labels = [self.labels[places[0]] for places in machines] if self.labels else None
            plan = replica_hosts(len(machines), replicas, labels)
            keepers = {
                index: (index, *(machines[other][number % len(machines[other])] for other in others[1:]))
                for places, others in zip(machines, plan, strict=True)
                for number, index in enumerate(places)
            }
            self._keepers[replicas] = tuple(
                tuple(self.hosts[keeper] for keeper in keepers[index]) for index in range(len(self.hosts))
            )
        return self._keepers[replicas]

    def holders(self, rank: int, replicas: int) -> tuple[str, ...]:
        """Return the hosts that must hold `rank`'s replicas, the one that runs it first; none for an unknown rank."""
        if not 0 <= rank < self.world_size:
            return ()
        return self.keepers(replicas)[bisect_right(self._ends, rank)]

    def kept(self, host: str, replicas: int) -> tuple[int, ...]:
        """Return the ranks whose replicas `host` must hold, its own first."""
        owners = [index for index, keepers in enumerate(self.keepers(replicas)) if host in keepers]
        ordered = sorted(owners, key=lambda owner: self.hosts[owner] != host)
        return tuple(rank for owner in ordered for rank in self._ranks_at(owner))

    @cached_property
    def _seats(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.hosts, self.sessions or ("",) * len(self.hosts), strict=True))

    @cached_property
    def _keepers(self) -> dict[int, tuple[tuple[str, ...], ...]]:
        return {}

    @cached_property
    def _group_ranks(self) -> dict[str, int]:
        return {host: index for index, host in enumerate(self.hosts)}

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.nprocs))

    def _ranks_at(self, index: int) -> range:
        return range(self._ends[index] - self.nprocs[index], self._ends[index])
