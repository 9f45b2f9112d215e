"""A run's `rdzv/` keys as records, and which group ranks hosts get: pure functions over a mirror of those keys.

docs/protocol.md has the keys. Group ranks are stable: a host that stays keeps its rank, a newcomer fills the hole
that a lost host left.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.etcd.client import Entry
from resilient_run.daemon.run.quarantine import Quarantine

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One host's place in a round."""

    host: str
    session: str
    nproc: int
    role: str
    label: str = ""

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Self:
        """Return the seat in a round's member list."""
        return cls(
            host=_get(value, "host", str),
            session=_get(value, "session", str),
            nproc=_get(value, "nproc", int),
            role=_get(value, "role", str),
            label=_label(value),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A live launcher: its leased key. `arrival` orders launchers by when they came; `label` is its failure domain."""

    host: str
    session: str
    nproc: int
    role: str
    addr: str
    pid: int
    ready: int
    label: str = ""
    arrival: int = 0

    @classmethod
    def from_entry(cls, host: str, entry: Entry) -> Self:
        """Return the member of `rdzv/members/<host>`."""
        return cls(
            host=host,
            session=_get(entry.value, "session", str),
            nproc=_get(entry.value, "nproc", int),
            role=_get(entry.value, "role", str),
            addr=_get(entry.value, "addr", str),
            pid=_get(entry.value, "pid", int),
            ready=_get(entry.value, "ready", int),
            label=_label(entry.value),
            arrival=entry.created,
        )

    def to_value(self) -> dict[str, Any]:
        """Return the key's value."""
        value = asdict(self)
        del value["host"], value["arrival"]
        return value

    @property
    def seat(self) -> Seat:
        """The place that this launcher takes in a round."""
        return Seat(host=self.host, session=self.session, nproc=self.nproc, role=self.role, label=self.label)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One generation: its members by group rank, and what it restores (`{"generation","step"}`) if anything."""

    generation: int
    members: tuple[Seat, ...]
    restore: dict[str, int] | None

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Self:
        """Return the round of `rdzv/round`."""
        restore = value.get("restore")
        if restore is not None:
            restore = {name: _get(restore, name, int) for name in ("generation", "step")}
        return cls(
            generation=_get(value, "generation", int),
            members=tuple(Seat.from_value(item) for item in _get(value, "members", list)),
            restore=restore,
        )

    def to_value(self) -> dict[str, Any]:
        """Return the key's value."""
        members = [asdict(seat) for seat in self.members]
        return {"generation": self.generation, "members": members, "restore": self.restore}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(seat.nproc for seat in self.members)

    def rank_of(self, host: str, session: str) -> int | None:
        """Return the group rank of this launcher, None when it is not in the round."""
        for rank, seat in enumerate(self.members):
            if seat.host == host and seat.session == session:
                return rank
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a generation is broken. `host` is where it happened; rank, pid and exit code are known for worker exits.

    `began_step` is the step that the generation started from: the root may see the failure after the next has begun.
    """

    host: str
    kind: str
    rank: int | None = None
    pid: int | None = None
    exitcode: int | None = None
    began_step: int | None = None
    unix_s: float
    message: str

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Self:
        """Return the failure of `rdzv/failure/<generation>`."""
        numbers = {name: value.get(name) for name in ("rank", "pid", "exitcode", "began_step")}
        return cls(
            host=_get(value, "host", str),
            kind=_get(value, "kind", str),
            unix_s=float(_get(value, "unix_s", (int, float))),
            message=_get(value, "message", str),
            **{name: None if number is None else _get(value, name, int) for name, number in numbers.items()},
        )

    def to_value(self) -> dict[str, Any]:
        """Return the key's value."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What all launchers of a run must agree on, and the secret that its daemons show each other.

    Attributes:
        incarnation: Random id of this life of the run id.
        min_nodes: Fewest hosts of a generation.
        max_nodes: Most hosts of a generation.
        token: The secret.
        injection: Whether `resilient-inject` may act on the run.
        after_generation: Of the persisted pair that this life begins with, 0 without one.
    """

    incarnation: str
    min_nodes: int
    max_nodes: int
    token: str
    injection: bool = False
    after_generation: int = 0

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Self:
        """Return the job of `rdzv/job`."""
        return cls(
            incarnation=_get(value, "incarnation", str),
            min_nodes=_get(value, "min_nodes", int),
            max_nodes=_get(value, "max_nodes", int),
            token=_get(value, "token", str),
            injection=_get({"injection": False, **value}, "injection", bool),
            after_generation=_get({"after_generation": 0, **value}, "after_generation", int),
        )

    def to_value(self) -> dict[str, Any]:
        """Return the key's value."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The end of a run."""

    reason: str
    failed: bool

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Self:
        """Return the end that `rdzv/closed` announces."""
        return cls(reason=_get(value, "reason", str), failed=_get(value, "failed", bool))

    def to_value(self) -> dict[str, Any]:
        """Return the key's value."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Everything below a run's `rdzv/` at one moment; `ignored` names keys whose values are not of their form.

    `committed` is the number of ranks that what is committed was made by, None while nothing is.
    """

    members: Mapping[str, Member]
    round: Round | None = None
    round_revision: int = 0
    stores: Mapping[int, tuple[str, int]]
    failures: Mapping[int, Failure]
    done: frozenset[tuple[int, str]]
    job: Job | None = None
    closed: Closed | None = None
    committed: int | None = None
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    recovered: Mapping[tuple[int, str], Mapping[str, Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        """The generation formed last, 0 before the first; a run that begins with a persisted pair counts on from it."""
        if self.round is not None:
            return self.round.generation
        return 0 if self.job is None else self.job.after_generation

    @property
    def bound(self) -> int | None:
        """The only number of ranks that can restore what the run has, None when it has nothing or any number can.

        An import, which is of generation 0, can be restored by any.
        """
        restores = self.round is not None and self.round.restore is not None and self.round.restore["generation"] > 0
        return self.round.world_size if self.committed is None and self.round and restores else self.committed

    @classmethod
    def parse(cls, entries: Mapping[str, Entry], prefix: str) -> Self:
        """Return the view of the entries whose full keys begin with `prefix` (".../rdzv/")."""
        members: dict[str, Member] = {}
        stores: dict[int, tuple[str, int]] = {}
        failures: dict[int, Failure] = {}
        done: set[tuple[int, str]] = set()
        quarantines: dict[str, Quarantine] = {}
        recovered: dict[tuple[int, str], Mapping[str, Any]] = {}
        single: dict[str, Any] = {}
        ignored: list[str] = []
        for key, entry in entries.items():
            try:
                match key.removeprefix(prefix).split("/"):
                    case ["members", host]:
                        members[host] = Member.from_entry(host, entry)
                    case ["store", generation]:
                        stores[int(generation)] = (_get(entry.value, "addr", str), _get(entry.value, "port", int))
                    case ["failure", generation]:
                        failures[int(generation)] = Failure.from_value(entry.value)
                    case ["done", generation, host]:
                        done.add((int(generation), host))
                    case ["recovered", generation, host]:
                        recovered[int(generation), host] = _recovery(entry.value)
                    case ["quarantine", host]:
                        quarantines[host] = Quarantine.parse(entry.value)
                    case ["round"]:
                        single["round"], single["round_revision"] = Round.from_value(entry.value), entry.revision
                    case ["job"]:
                        single["job"] = Job.from_value(entry.value)
                    case ["committed"]:
                        if entry.value.get("world_size") is not None:
                            single["committed"] = _get(entry.value, "world_size", int)
                    case ["closed"]:
                        single["closed"] = Closed.from_value(entry.value)
                    case _:
                        ignored.append(f"{key}: not a key of this protocol")
            except (ValueError, DaemonError) as error:
                ignored.append(f"{key}: {error}")
        return cls(
            members=members,
            stores=stores,
            failures=failures,
            done=frozenset(done),
            quarantines=quarantines,
            recovered=recovered,
            ignored=tuple(ignored),
            **single,
        )

    def keeping(self, before: "View") -> "View":
        """Return this view with the members of its round that `before` had and that are no longer there."""
        seats = () if self.round is None else self.round.members
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
        return _lost("", f"generation {generation} is over: the run {now} without this host")
    for seat in view.round.members:
        member = view.members.get(seat.host)
        if member is None:
            return _lost(seat.host, f"host {seat.host} is lost: its lease expired or its launcher left")
        if member.session != seat.session:
            return _lost(seat.host, f"the launcher on host {seat.host} was replaced by a new one")
    return None


def explained(failure: Failure, before: Round, view: View) -> Failure:
    """Return the loss of another host of the round `before` in the place of a worker exit because of it.

    `view` has the round that follows. As the root does (`daemon/root/decide.py`): a worker whose collectives fail exits
    with a positive code at once, and a host counts as lost only when its lease expires.
    """
    if view.round is None or failure.kind != "worker_exit" or (failure.exitcode or 0) <= 0:
        return failure
    live = {(seat.host, seat.session) for seat in view.round.members}
    live |= {(member.host, member.session) for member in view.members.values()}
    gone = [seat.host for seat in before.members if (seat.host, seat.session) not in live]
    if not gone or failure.host in gone:
        return failure
    return replace(failure, host=gone[0], kind="host_lost", message=f"host {gone[0]} is lost, and {failure.message}")


def newcomers(view: View, max_nodes: int, now_unix_s: float) -> list[str]:
    """Return the hosts that wait to make the current round larger, in order of arrival; none when it cannot grow.

    It cannot when it is full, or has something to restore that fits no other number of ranks. A host in quarantine
    does not count.
    """
    if view.round is None or len(view.round.members) >= max_nodes or view.bound is not None:
        return []
    inside = {seat.host for seat in view.round.members}
    waiting = [
        member
        for member in view.members.values()
        if member.host not in inside
        and member.ready == view.round.generation + 1
        and view.quarantine_of(member.host, now_unix_s) is None
    ]
    return [member.host for member in sorted(waiting, key=lambda member: (member.arrival, member.host))]


def _lost(host: str, message: str) -> Failure:
    return Failure(host=host, kind="host_lost", unix_s=0.0, message=message)


def _recovery(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a host's recovery event; ValueError when it lacks what the one for all hosts is made of."""
    for name in ("host", "kind", "cause"):
        _get(value, name, str)
    _get(value, "generation", int), _get(value, "complete", bool), _get(value, "total_s", (int, float))
    ranks = _get(value, "ranks", dict)
    if not all(rank.isdecimal() and isinstance(source, str) for rank, source in ranks.items()):
        raise ValueError(f"field 'ranks' is {ranks!r}")
    for name in ("restored_step", "steps_lost"):
        if value.get(name, 0) is not None:
            _get(value, name, int)
    return value


def _label(value: Any) -> str:
    """Return the failure domain that a member or seat has, "" for none."""
    return _get({"label": "", **value}, "label", str) if isinstance(value, Mapping) else ""


def _get(value: Any, name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """Return a field of a JSON object; ValueError when it is missing or of another type."""
    field = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(field, kind) or (isinstance(field, bool) and kind is not bool):
        raise ValueError(f"field {name!r} is {field!r}")
    return field


__all__ = [
    "Closed",
    "Failure",
    "Job",
    "Member",
    "Round",
    "Seat",
    "View",
    "assign_ranks",
    "broken",
    "explained",
    "newcomers",
]
