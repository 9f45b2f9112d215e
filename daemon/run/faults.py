"""The kinds of faults that `resilient-inject` knows, and the order that carries one to its host.

Each kind's parameters are a flat dataclass like a section of the configuration file, with defaults and ranges.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError

from ..base.codec import Record, SettingsRecord, limited
from ..base.fields import Fields

_MAX_RANK = (1 << 24) - 1


class Scope(StrEnum):
    """What a fault strikes: one rank, a replica of one rank, a host, or what surrounds a host."""

    RANK = "rank"
    REPLICA = "replica"
    HOST = "host"
    LAB = "lab"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nothing(SettingsRecord):
    """No parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt(SettingsRecord):
    """How long a process stands still; 0: for good."""

    duration_s: float = limited(0.0, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drag(SettingsRecord):
    """How many times as long each step computes, and for how long; 0: for good."""

    factor: float = limited(1.5, low=1, high=100)
    duration_s: float = limited(0.0, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption(SettingsRecord):
    """What is wrong with the replica afterwards; with `kill`, its rank is killed at once, so that it is needed."""

    how: str = limited("bit-flip", choices=("bit-flip", "truncation", "stale"))
    kill: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BitFlip(SettingsRecord):
    """Which bit: of the tensor `leaf` of a registered module or optimizer (any when empty), as `seed` draws it."""

    leaf: str = ""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Silence(SettingsRecord):
    """Whose lease is not kept alive, and for how long."""

    of: str = limited("launcher", choices=("launcher", "daemon", "both"))
    duration_s: float = limited(8.0, low=0.1, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filling(SettingsRecord):
    """How much is taken, all but `leave_bytes` when `size_bytes` is 0, and for how long."""

    size_bytes: int = limited(0, high=1 << 50)
    leave_bytes: int = limited(0, high=1 << 50)
    duration_s: float = limited(5.0, low=0.1, high=3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFilling(Filling):
    """As `Filling`, on the file system of `directory`."""

    directory: str = "/tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut(SettingsRecord):
    """Which interface, how long, and whether that may be the one with the default route."""

    interface: str = limited("eth0")
    duration_s: float = limited(5.0, low=0.1, high=3600)
    force: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown(Cut):
    """As `Cut`, but so many Mbit/s are left in the sending direction."""

    rate_mbit: float = limited(10.0, low=0.1, high=1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdMember(SettingsRecord):
    """The process of an etcd member on the host: its pid, or else the absolute path of a file that holds it."""

    pid: int = limited(0, high=1 << 30)
    pid_file: str = "-"


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
    parameters: type[Record] = Nothing
    costs_a_host: bool = False


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="kill-rank", scope=Scope.RANK, what="SIGKILL a rank's trainer"),
        Kind(name="stop-rank", scope=Scope.RANK, what="SIGSTOP a rank's trainer", parameters=Halt),
        Kind(name="hang-rank", scope=Scope.RANK, what="block a rank inside Checkpointer.step()", parameters=Halt),
        Kind(
            name="slow-rank",
            scope=Scope.RANK,
            what="let a rank compute for longer in each Checkpointer.step()",
            parameters=Drag,
        ),
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
class Order(Record):
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
    rank: int | None = limited(None, high=_MAX_RANK)
    at_step: int | None = None
    after_s: float = limited(0.0, high=86400)
    parameters: Any = limited(factory=Nothing, write=Record.to_value)

    @classmethod
    def parse(cls, value: Mapping[str, Any], what: str = "order", **given: Any) -> Self:
        """Return the order in an etcd value or a campaign; `what` names it in errors.

        Raises:
            DaemonError: It is no order, or for an unknown kind, or has parameters that its kind does not take.
        """
        name = Fields(value, what).text("kind", high=64)
        kind = KINDS.get(name)
        if kind is None:
            raise DaemonError(f"{what}: no kind {name!r}; there are: {', '.join(KINDS)}")
        parameters = Fields({"parameters": {}, **value}, what).object("parameters")
        order = cls.of_fields(Fields(value, what), parameters=kind.parameters.parse(parameters, f"{what}, {name}"))
        if kind.scope is Scope.RANK and order.rank is None:
            raise DaemonError(f"{what}: {name} strikes a rank: say which (--rank)")
        if kind.scope in (Scope.HOST, Scope.LAB) and order.rank is not None:
            raise DaemonError(f"{what}: {name} strikes a host, not rank {order.rank}")
        return order
