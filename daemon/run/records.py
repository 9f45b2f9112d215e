"""What launchers and the root write of a run beside its rounds: what it is, why a generation broke, how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from ..base.codec import UNIX_S, Record, limited
from ..base.fields import Fields
from . import keys

MAX_REASON_BYTES = 1 << 16
"""Of the end of a run, and of what recoveries give as their cause: both may quote the message of a failure."""

_MAX_MESSAGE_BYTES = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint(Record):
    """What a launcher starts, and with what; "" stands for what a launcher does not know, as plain torchrun's.

    Attributes:
        user: Name of the user.
        script: Name of the script, module, program or function.
        content: SHA-256 of the script, "" where there is no file of it.
        arguments: SHA-256 of its arguments, which may hold secrets.
        torch: Version of torch.
        formats: Versions of what resilient-run writes.
    """

    user: str = ""
    script: str = ""
    content: str = ""
    arguments: str = ""
    torch: str = ""
    formats: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements(Record):
    """What all launchers of a run must agree on.

    Attributes:
        min_nodes: Fewest hosts of a generation.
        max_nodes: Most hosts of a generation.
        key_proof: What follows from the run key, "" without one.
        fingerprint: What they start.
        elastic_s: How long a committed run waits for a host before it goes on with fewer ranks, and how long a
            generation lasts before it grows; None: it keeps its number of ranks.
        sizes: The numbers of ranks that it may have then, none for any.
        keep: How many committed steps stay in memory.
    """

    min_nodes: int
    max_nodes: int
    key_proof: str = ""
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    elastic_s: float | None = None
    sizes: tuple[int, ...] = ()
    keep: int = limited(1, low=1)

    def required(self) -> dict[str, Any]:
        """Return these by name, without what a subclass has beside them."""
        return {each.name: getattr(self, each.name) for each in fields(Requirements)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed(Record):
    """The end of a run."""

    reason: str = limited(high=MAX_REASON_BYTES, shown=True)
    failed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement(Requirements):
    """What the launchers of a run have agreed on, and the secret by which its daemons know each other.

    Attributes:
        incarnation: Random id of the lives that go on from each other, and so of what hosts hold in memory.
        token: The secret, where the hosts have no run key.
        after_generation: Of the persisted pair that the first life began with, 0 without one.
        life: Which of these lives it is, counted from 1.
        closed: How it ended, None while it goes on.
    """

    incarnation: str
    token: str
    after_generation: int = 0
    life: int = limited(1, low=1)
    closed: Closed | None = None

    @property
    def name(self) -> str:
        """The name of this life, which no other one has, of whatever run: its key's."""
        return f"{self.incarnation}.{self.life}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Record):
    """Why a generation is broken, and in the history what the root knows beyond that.

    Attributes:
        generation: The broken one.
        host: Where it happened, "" when no single host is to blame.
        kind: As in docs/internals/protocol.md.
        rank: The worker, None when it is none.
        exitcode: Of that worker, None when it did not exit.
        step: Of a hang, where training stood still, as in `Observation`; of a worker that exited, its last one.
        raised: Digests of type and text of the exception that ended a worker, with a point between them, "" where that
            is not known.
        pid: Of that worker.
        began_step: The step that the generation started from, None when the writer does not know it. The root may see
            the failure after the next generation has begun.
        unix_s: When it was written or noted.
        message: What a person wants to know.
    """

    generation: int
    host: str = limited("", high=_MAX_MESSAGE_BYTES)
    kind: str
    rank: int | None = None
    exitcode: int | None = limited(None, low=-(1 << 31))
    step: int | None = None
    began_step: int | None = None
    unix_s: float = limited(0.0, high=UNIX_S)
    message: str = limited("", high=_MAX_MESSAGE_BYTES, shown=True)
    raised: str = ""
    pid: int | None = None

    @property
    def way(self) -> tuple[int | None, int | None, str]:
        """How a worker exited, the same where a script fails as before: its code, after which step, and why."""
        return self.exitcode, self.step, self.raised

    @property
    def error(self) -> tuple[str, int | None, str]:
        """What failed, whatever its text says and wherever it was: kind, exit code, the exception's type."""
        return self.kind, self.exitcode, self.raised.partition(".")[0]

    def to_value(self) -> dict[str, Any]:
        """Return the etcd value; not every failure has a `step`."""
        value = Record.to_value(self)
        del value["generation"]
        if self.step is None:
            del value["step"]
        return value

    def to_item(self) -> dict[str, Any]:
        """Return the item of the history."""
        value = Record.to_value(self)
        del value["pid"]
        return value

    def explained(self, gone: Sequence[str]) -> Self:
        """Return the loss of a host that is `gone` in the place of a worker elsewhere that exited because of it.

        A worker whose collectives fail exits with a positive code at once, a lost host is seen when its lease expires.
        A worker that a signal killed did not exit so. Where the launcher of the worker is gone, too, etcd may have been
        away.
        """
        if self.kind != "worker_exit" or (self.exitcode or 0) <= 0 or not gone or self.host in gone:
            return self
        message = f"host {gone[0]} is lost, and {self.message or f'a worker on host {self.host} exited'}"
        return replace(self, host=gone[0], kind="host_lost", rank=None, pid=None, exitcode=None, message=message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Introduction(Record):
    """What a daemon tells the other hosts of itself.

    Attributes:
        addr: Where it listens for them: host name or address.
        port: The port there.
        every: Of how many steps it can send one checkpoint.
        sign: Of life, of its ranks; "" is none.
        injection: Whether its launcher allows faults on purpose; whoever writes anything else here changes nothing.
    """

    addr: str
    port: int = limited(low=1, high=65535)
    every: int = limited(low=1)
    sign: str = ""
    injection: bool = limited(False, read=lambda values, name: values.values.get(name) is True)


def parse_decisions(value: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return what roots decided, oldest first, as `root/decisions` has it.

    Raises:
        DaemonError: The value is no list of decisions.
    """
    return tuple(Fields(value, keys.DECISIONS).objects("decisions"))
