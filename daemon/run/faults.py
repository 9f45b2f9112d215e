"""The kinds of faults that `resilient-inject` knows, and the order that carries one to its host.

Each kind's parameters are a flat dataclass like a section of the configuration file, with defaults and ranges.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError

from ..base.fields import MAX_INTEGER, Fields
from ..base.policy import parse_settings, setting

_MAX_RANK = (1 << 24) - 1


class Scope(StrEnum):
    """What a fault strikes: one rank, a replica of one rank, a host, or what surrounds a host."""

    RANK = "rank"
    REPLICA = "replica"
    HOST = "host"
    LAB = "lab"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nothing:
    """No parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """How long a process stands still; 0: for good."""

    duration_s: float = setting(0.0, low=0, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """What is wrong with the replica afterwards; with `kill`, its rank is killed at once, so that it is needed."""

    how: str = setting("bit-flip", choices=("bit-flip", "truncation", "stale"))
    kill: bool = setting(False)


@dataclass(frozen=True, kw_only=True, slots=True)
class BitFlip:
    """Which bit: of the tensor `leaf` of a registered module or optimizer (any when empty), as `seed` draws it."""

    leaf: str = setting("")
    seed: int = setting(0, low=0, high=MAX_INTEGER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence:
    """Whose lease is not kept alive, and for how long."""

    of: str = setting("launcher", choices=("launcher", "daemon", "both"))
    duration_s: float = setting(8.0, low=0.1, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """How much is taken, all but `leave_bytes` when `size_bytes` is 0, and for how long."""

    size_bytes: int = setting(0, low=0, high=1 << 50)
    leave_bytes: int = setting(0, low=0, high=1 << 50)
    duration_s: float = setting(5.0, low=0.1, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFilling(Filling):
    """As `Filling`, on the file system of `directory`."""

    directory: str = setting("/tmp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Which interface, how long, and whether that may be the one with the default route."""

    interface: str = setting("eth0")
    duration_s: float = setting(5.0, low=0.1, high=3600)
    force: bool = setting(False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown(Cut):
    """As `Cut`, but so many Mbit/s are left in the sending direction."""

    rate_mbit: float = setting(10.0, low=0.1, high=1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdMember:
    """The process of an etcd member on the host: its pid, or else the absolute path of a file that holds it."""

    pid: int = setting(0, low=0, high=1 << 30)
    pid_file: str = setting("-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: As on the command line.
        scope: What it strikes.
        what: One line for a person.
        parameters: Dataclass of its parameters.
        costs_a_host: Until it is recovered from, replicas of one host are lost or out of reach.
    """

    name: str
    scope: Scope
    what: str
    parameters: type = Nothing
    costs_a_host: bool = False


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="kill-rank", scope=Scope.RANK, what="SIGKILL a rank's trainer"),
        Kind(name="stop-rank", scope=Scope.RANK, what="SIGSTOP a rank's trainer", parameters=Halt),
        Kind(name="hang-rank", scope=Scope.RANK, what="block a rank inside Checkpointer.step()", parameters=Halt),
        Kind(name="raise", scope=Scope.RANK, what="raise InjectedFault in a rank's next Checkpointer.step()"),
        Kind(
            name="flip-bit",
            scope=Scope.RANK,
            what="flip a bit of a rank's parameters or optimizer state before its next Checkpointer.step()",
            parameters=BitFlip,
        ),
        Kind(
            name="corrupt-replica",
            scope=Scope.REPLICA,
            what="damage the newest replica of a rank that a host holds",
            parameters=Corruption,
            costs_a_host=True,
        ),
        Kind(name="kill-launcher", scope=Scope.HOST, what="SIGKILL a host's launcher"),
        Kind(name="kill-daemon", scope=Scope.HOST, what="SIGKILL a host's daemon"),
        Kind(
            name="lose-host",
            scope=Scope.HOST,
            what="SIGKILL launcher, workers and daemon of a host and remove its slots",
            costs_a_host=True,
        ),
        Kind(
            name="delay-heartbeats",
            scope=Scope.HOST,
            what="SIGSTOP launcher or daemon for a while, so that nobody keeps their leases alive",
            parameters=Silence,
            costs_a_host=True,
        ),
        Kind(name="fill-memory", scope=Scope.HOST, what="fill the tmpfs of the slots", parameters=Filling),
        Kind(name="fill-disk", scope=Scope.HOST, what="fill a disk of a host", parameters=DiskFilling),
        Kind(
            name="cut-network",
            scope=Scope.LAB,
            what="take a network interface of a host down",
            parameters=Cut,
            costs_a_host=True,
        ),
        Kind(name="slow-network", scope=Scope.LAB, what="slow a network interface down", parameters=Slowdown),
        Kind(name="kill-etcd", scope=Scope.LAB, what="SIGKILL an etcd member on a host", parameters=EtcdMember),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One fault for one host.

    It strikes when the host has reached `at_step` (at once without one), and `after_s` seconds later.

    Attributes:
        kind: Name of the kind.
        host: Who carries it out.
        rank: The rank it strikes; for a replica None means one that the host keeps for a peer, for a host it is None.
        at_step: Completed steps of the rank, of the host's own ranks, or (on a standby) of the watermark.
        after_s: Seconds.
        parameters: The kind's parameters.
    """

    kind: str
    host: str
    rank: int | None = None
    at_step: int | None = None
    after_s: float = 0.0
    parameters: Any = field(default_factory=Nothing)

    @classmethod
    def parse(cls, value: Mapping[str, Any], what: str) -> Self:
        """Return the order in an etcd value or a campaign; `what` names it in errors.

        Raises:
            DaemonError: It is no order, or for an unknown kind, or has parameters that its kind does not take.
        """
        fields = Fields(value, what)
        name = fields.text("kind", max_bytes=64)
        kind = KINDS.get(name)
        if kind is None:
            raise DaemonError(f"{what}: no kind {name!r}; there are: {', '.join(KINDS)}")
        rank = fields.optional_integer("rank", high=_MAX_RANK)
        if kind.scope is Scope.RANK and rank is None:
            raise DaemonError(f"{what}: {name} strikes a rank: say which (--rank)")
        if kind.scope in (Scope.HOST, Scope.LAB) and rank is not None:
            raise DaemonError(f"{what}: {name} strikes a host, not rank {rank}")
        return cls(
            kind=name,
            host=fields.text("host"),
            rank=rank,
            at_step=fields.optional_integer("at_step", high=MAX_INTEGER),
            after_s=fields.number("after_s", high=86400) if "after_s" in value else 0.0,
            parameters=parse_settings(kind.parameters, name, value.get("parameters", {}), where=what),
        )

    def to_value(self) -> dict[str, Any]:
        """Return what `parse` reads."""
        return asdict(self)
