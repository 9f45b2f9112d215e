"""What a host knows of one job's coordination, shared by the tasks that learn it and those that act on it."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient_run.ckpt.format.pair import Pair

from .commit import Agreed, Missed, Unhealthy
from .hang import ALIVE, BUSY, SILENT
from .quarantine import Quarantine
from .recoveries import Recoveries
from .rounds import Round
from .work import RankWork

_SHOWN_S = 5.0


@dataclass(kw_only=True, slots=True, eq=False)
class JobView:
    """The job as this host sees it.

    An assignment wakes whoever waits for what it makes true. Whoever changes something else that others wait for here,
    a slot or a table of their own, calls `notify`.

    Attributes:
        host: Name of this host in the job.
        replicas: Copies of each checkpoint, m.
        elastic: Whether the run may go on in another number of ranks.
        injection: Whether the launcher of this host allows faults; nothing in etcd says so.
        round: The current generation, None until one is known.
        finishing: All workers of some host have succeeded in it.
        watermark: The newest committed pair, None until there is one.
        next: What etcd says is captured next, as generation and step; see `agreed`.
        watermark_revision: etcd revision of the watermark, 0 while the key does not exist, None until it was read.
        addresses: Host → address and port of its daemon, this one excluded.
        arrivals: Host whose launcher waits for a seat → when it came.
        left_out: Hosts whose replicas commits do not wait for, as the root knows.
        leader: The host that is elected root, None while none is.
        leader_revision: etcd revision of that election, 0 while there is no root, None until it was read.
        decisions: What roots decided, as `root/decisions` has it, oldest first.
        quarantines: Hosts that launchers avoid, and until when.
        recoveries: What failures have cost.
        every_here: Of how many steps this host can send one checkpoint (`Pacer.every`).
        every_elsewhere: Host → the same of the others.
        sign_here: The sign of life of the ranks of this host (`HangDetector.sign`).
        signs: Host → the same of the others.
        done: Generation and newest step that an own rank has completed, None before the first.
        missed: The next capture that an own rank has missed last, or that has no room here; None while none has.
        work: Own rank → what it has computed in this generation.
        unhealthy_here: Uncommitted steps that own ranks call unhealthy.
        unhealthy: Steps because of which the run went back.
    """

    _waiting: dict[asyncio.Future[None], Callable[[], bool]] = field(init=False, default_factory=dict)
    _added_up: tuple[tuple[object, ...], tuple[int, str]] = field(init=False, default=((0, 0, 0), (1, SILENT)))
    host: str
    replicas: int
    injection: bool = False
    elastic: bool = False
    round: Round | None = None
    finishing: bool = False
    watermark: Pair | None = None
    next: Pair | None = None
    older: tuple[Pair, ...] = ()
    watermark_revision: int | None = None
    addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    arrivals: Mapping[str, int] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    leader: str | None = None
    leader_revision: int | None = None
    decisions: tuple[dict[str, Any], ...] = ()
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    recoveries: Recoveries = field(default_factory=Recoveries)
    every_here: int = 1
    every_elsewhere: dict[str, int] = field(default_factory=dict)
    sign_here: str = ""
    signs: dict[str, str] = field(default_factory=dict)
    done: Pair | None = None
    missed: Missed | None = None
    work: Mapping[int, RankWork] = field(default_factory=dict)
    unhealthy_here: Mapping[Pair, Unhealthy] = field(default_factory=dict)
    unhealthy: frozenset[Pair] = frozenset()

    if not TYPE_CHECKING:  # which takes it for leave to assign to any name

        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value)
            self.notify()

    @property
    def generation(self) -> int:
        """Number of the current generation, 0 before the first."""
        return 0 if self.round is None else self.round.generation

    @property
    def committed(self) -> Pair | None:
        """The newest pair known to be committed: the watermark of this generation, before that what it restores."""
        return self.agreed.committed

    @property
    def agreed(self) -> Agreed:
        """What is committed, and what is captured next."""
        return Agreed.of(self.round, self.watermark, self.next, self.older)

    def miss(self, missed: Missed) -> None:
        """Let the root hear that what is captured next will never be committed."""
        known = self.missed
        if known is None or (known.next, known.step) < (missed.next, missed.step):
            self.missed = missed

    @property
    def every(self) -> int:
        """Of how many steps every host can send one checkpoint."""
        return max(self.every_here, self._elsewhere[0])

    @property
    def sign_elsewhere(self) -> str:
        """The strongest sign of life of the ranks of other hosts."""
        return self._elsewhere[1]

    @property
    def _elsewhere(self) -> tuple[int, str]:
        """Both of the other hosts of the round, which are asked for at every step: added up only when they change."""
        source = self.round, self.every_elsewhere, self.signs
        if any(now is not then for now, then in zip(source, self._added_up[0], strict=True)):
            hosts = () if self.round is None else self.round.hosts
            every = max((self.every_elsewhere.get(host, 1) for host in hosts), default=1)
            signs = {self.signs.get(host, SILENT) for host in hosts}
            strongest = next((sign for sign in (ALIVE, BUSY) if sign in signs), SILENT)
            object.__setattr__(self, "_added_up", (source, (every, strongest)))
        return self._added_up[1]

    @property
    def overlooks(self) -> bool:
        """Tell whether the root lets a hang of this generation be."""
        return any(
            (entry.get("kind"), entry.get("generation")) == ("overlook", self.generation) for entry in self.decisions
        )

    @property
    def is_root(self) -> bool:
        """Tell whether this host is the elected root and still in the round, and so moves the watermark."""
        return self.leader == self.host and self.is_member

    @property
    def is_member(self) -> bool:
        """Tell whether this host is in the current round."""
        return self.round is not None and self.host in self.round

    @property
    def own_ranks(self) -> range:
        """The ranks that run on this host."""
        return range(0) if self.round is None else self.round.ranks(self.host)

    @property
    def spares(self) -> tuple[str, ...]:
        """The hosts without a seat that keep replicas of every rank."""
        if self.round is None or not self.arrivals:
            return ()
        return self.round.spares(self.arrivals, self.addresses.keys() | {self.host}, self.replicas)

    def holders(self, rank: int) -> tuple[str, ...]:
        """Return the hosts that must hold `rank`'s replicas, the one that runs it first; none for an unknown rank."""
        seated = () if self.round is None else self.round.holders(rank, self.replicas)
        return (*seated, *self.spares) if seated else ()

    @property
    def kept_ranks(self) -> tuple[int, ...]:
        """The ranks whose replicas this host must hold, its own first."""
        if self.round is None:
            return ()
        if self.host in self.spares:
            return tuple(range(self.round.world_size))
        return self.round.kept(self.host, self.replicas)

    def knows(self, generation: int) -> bool:
        """Tell whether `generation`, or a later one, and the watermark have been read."""
        return self.generation >= generation and self.watermark_revision is not None

    def notify(self) -> None:
        """Wake everybody whose condition holds now."""
        for waiter, condition in list(self._waiting.items()):
            if not waiter.done() and condition():
                waiter.set_result(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is checked now, and whenever something may have changed."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = condition
            try:
                await waiter
            finally:
                del self._waiting[waiter]

    async def wait_until_shown(self, changed: Callable[[], bool]) -> None:
        """Wait until the mirror shows that one of the keys that guarded a write has changed.

        Applied or refused, one has; but an etcd that comes back as it was before shows it never. So this ends after
        some seconds, too: to write the same again harms nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHOWN_S):
                await self.wait_for(changed)
