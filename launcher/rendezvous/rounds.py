"""The mirror of a run's `rdzv/` keys, and which group ranks hosts get: pure functions.

Group ranks are stable: a host that stays keeps its rank, a newcomer fills the hole that a lost host left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.daemon.base.goodput import Recovery
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.life import Life
from resilient_run.daemon.run.mirror import Mirror, generation_and_host, of
from resilient_run.daemon.run.quarantine import Quarantine
from resilient_run.daemon.run.records import Agreement, Failure
from resilient_run.daemon.run.rounds import Member, Round, Seat, allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Everything below a run's `rdzv/` at one moment.

    `committed` is the number of ranks that what is committed was made by, None while nothing is. `silent` has the keys
    of members that are left out because they give no sign, and the revisions of these keys.
    """

    members: Mapping[str, Member]
    round: Round | None = None
    stores: Mapping[int, tuple[str, int]]
    failures: Mapping[int, Failure]
    done: frozenset[tuple[int, str]]
    job: Agreement | None = None
    life: Life | None = None
    committed: int | None = None
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    recovered: Mapping[tuple[int, str], Recovery] = field(default_factory=dict)
    silent: Mapping[str, int] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The generation formed last, 0 before the first; a run that begins with a persisted pair counts on from it."""
        if self.round is not None:
            return self.round.generation
        return 0 if self.job is None else self.job.after_generation

    @property
    def bound(self) -> int | None:
        """The only number of ranks that can restore what the run has, None when it has nothing or any number can.

        An import, which is of generation 0, can be restored by any; and what a run with --rr-elastic has, too.
        """
        return None if self.elastic_s is not None else self.captured_by

    @property
    def elastic_s(self) -> float | None:
        """How long a run with --rr-elastic waits before it goes on with fewer ranks, or grows; None without that."""
        return None if self.job is None else self.job.elastic_s

    @property
    def captured_by(self) -> int | None:
        """The number of ranks that made what the run has, None when it has nothing or an import."""
        if self.committed is not None or self.round is None or self.round.restore is None:
            return self.committed
        return None if is_import(self.round.restore) else self.round.made_by or self.round.world_size

    def made_by(self, restore: Pair | None) -> int | None:
        """Return how many ranks captured `restore`, which is what is committed now; None for an import, or nothing."""
        if restore is None or is_import(restore):
            return None
        if self.round is None:
            return self.committed
        if restore[0] == self.round.generation:
            return self.round.world_size
        # Without one, a version before this one has formed the round, or the watermark was set back to another pair.
        return self.round.made_by if restore == self.round.restore and self.round.made_by else self.committed

    @classmethod
    def of(cls, mirror: Mirror) -> Self:
        """Return the view that `mirror`, a `rendezvous_mirror`, has now."""
        folders = mirror.folders
        return cls(
            members=dict(folders[keys.MEMBERS]),
            round=mirror.get(keys.ROUND),
            stores=dict(folders[keys.STORES]),
            failures=dict(folders[keys.FAILURES]),
            done=frozenset(folders[keys.DONE]),
            job=mirror.get(keys.JOB),
            life=Life.of(mirror),
            committed=mirror.get(keys.COMMITTED),
            quarantines=dict(folders[keys.QUARANTINES]),
            recovered=dict(folders[keys.RECOVERED]),
        )

    def keeping(self, before: "View") -> "View":
        """Return this view with the members of its round that `before` had and that are no longer there."""
        seats = () if self.round is None else self.round.seats
        absent = {
            seat.host: member
            for seat in seats
            if seat.host not in self.members
            and (member := before.members.get(seat.host)) is not None
            and member.session == seat.session
        }
        return replace(self, members={**self.members, **absent}) if absent else self

    def quarantine_of(self, host: str, now_unix_s: float) -> Quarantine | None:
        """Return the quarantine that `host` is in, None when it is in none or its cool-down has ended."""
        quarantine = self.quarantines.get(host)
        return quarantine if quarantine is not None and quarantine.left_s(now_unix_s) > 0 else None

    def cool_down_s(self, now_unix_s: float) -> float | None:
        """Return the seconds until the next quarantine of a live launcher's host ends, None when there is none."""
        left = [found.left_s(now_unix_s) for host in self.members if (found := self.quarantine_of(host, now_unix_s))]
        return min(left, default=None)


def rendezvous_mirror() -> Mirror:
    """Return a mirror for the keys below `RENDEZVOUS`."""
    return Mirror(more_folders={keys.RECOVERED: (generation_and_host, of(Recovery))})


def assign_ranks(before: tuple[Seat, ...], ready: Mapping[str, Member], max_nodes: int) -> tuple[Seat, ...]:
    """Return up to `max_nodes` ready hosts by group rank: survivors first, then newcomers in order of arrival.

    Survivors keep their ranks and newcomers fill the holes, unless a kept rank would not be below the new size: then
    the survivors close up in their order, and the newcomers follow. A newcomer goes to a hole that a host of its own
    failure domain left, if there is one: so the fewest replicas move to other hosts.
    """
    kept = [(rank, ready[seat.host].seat) for rank, seat in enumerate(before) if seat.host in ready][:max_nodes]
    hosts_before = {seat.host for seat in before}
    newcomers = sorted(
        (member for host, member in ready.items() if host not in hosts_before),
        key=lambda member: (member.arrival, member.host),
    )
    size = min(len(kept) + len(newcomers), max_nodes)
    if kept and kept[-1][0] >= size:
        kept = [(rank, seat) for rank, (_, seat) in enumerate(kept)]
    seats = dict(kept)
    holes = [rank for rank in range(size) if rank not in seats]
    for rank in holes:
        label = before[rank].label if rank < len(before) else ""
        if match := next((member for member in newcomers if member.label == label), None):
            newcomers.remove(match)
            seats[rank] = match.seat
    for rank in holes:
        if rank not in seats:
            seats[rank] = newcomers.pop(0).seat
    return tuple(seats[rank] for rank in range(size))


def broken(view: View, generation: int) -> Failure | None:
    """Return why `generation` is broken, None while it is whole."""
    if generation in view.failures:
        return view.failures[generation]
    if view.round is None or view.round.generation != generation:
        now = "ended" if view.round is None else f"went on with generation {view.round.generation}"
        return _lost(generation, "", f"generation {generation} is over: the run {now} without this host")
    for seat in view.round.seats:
        member = view.members.get(seat.host)
        if member is None:
            return _lost(generation, seat.host, f"host {seat.host} is lost: its lease expired or its launcher left")
        if member.session != seat.session:
            return _lost(generation, seat.host, f"the launcher on host {seat.host} was replaced by a new one")
    return None


def unaware(view: View) -> set[str]:
    """Return the hosts of an elastic run's round, which is broken, whose launchers give no sign that they know."""
    if view.elastic_s is None or view.round is None or view.round.generation not in view.failures:
        return set()
    seats, generation = view.round.seats, view.round.generation
    return {seat.host for seat in seats if (member := view.members.get(seat.host)) and member.ready < generation}


def newcomers(view: View, max_nodes: int, now_unix_s: float) -> list[str]:
    """Return the hosts that wait to make the current round larger, in order of arrival; none when it cannot grow.

    It cannot when it is full, or has something to restore that fits no other number of ranks, or when no more of the
    ranks of --rr-sizes come together. A host in quarantine does not count.
    """
    if view.round is None or len(view.round.seats) >= max_nodes or view.bound is not None:
        return []
    waiting = [
        member
        for member in view.members.values()
        if member.host not in view.round
        and member.ready == view.round.generation + 1
        and view.quarantine_of(member.host, now_unix_s) is None
    ]
    seats = view.round.seats
    if waiting and view.job is not None and view.job.sizes:
        here = {host: member for host, member in view.members.items() if host in view.round}
        larger = allowed(view.job.sizes, seats, here | {member.host: member for member in waiting}, max_nodes)
        if sum(member.nproc for member in larger.values()) <= view.round.world_size:
            return []
    return [member.host for member in sorted(waiting, key=lambda member: (member.arrival, member.host))]


def _lost(generation: int, host: str, message: str) -> Failure:
    return Failure(generation=generation, host=host, kind="host_lost", message=message)
