"""All that the root knows of a run at one moment: what the run's etcd keys say."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from resilient_run.ckpt.format.pair import Pair

from ..run.commit import Unhealthy
from ..run.life import Life
from ..run.observation import Observation
from ..run.quarantine import Quarantine
from ..run.records import Failure
from ..run.rounds import Round
from .requests import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class RootView:
    """One run at one moment.

    Attributes:
        host: The root's own host.
        round: The current generation, None before the first.
        members: Hosts with a live launcher → the generation that it could join next, 0 while it runs one.
        nprocs: Hosts with a live launcher → how many ranks it runs.
        gone: Generation → its hosts without the launcher that they had in it: of the current generation once it is
            broken, and of the one before as it was when the current one was formed, if this root saw that.
        absent_s: Hosts of the round without a live launcher → for how long the root has seen it so, seconds.
        short_s: For how long the root has seen that a standby has to be asked for, seconds.
        daemons: Hosts whose daemon is registered.
        alive: Those of them whose sign of life is that a rank pauses or makes collectives.
        held: Host → the ranks of which its daemon holds what the round restores, of those that have said so.
        replicas: Copies of each checkpoint.
        watermark: The newest committed pair.
        persisted: Pairs that the persistent tier has published.
        failures: Generation → why it broke, of the current one and the one before.
        history: Failures that roots noted, oldest first.
        observations: Host → what is wrong there now.
        quarantines: By host, also those that are over.
        decisions: What roots decided, oldest first.
        unhealthy: Steps that ranks call unhealthy; nothing committed is after them.
        went_back: Steps because of which the run went back.
        requests: Hosts that the operator was asked for, oldest first; none that was given back.
        life: The life of the run, None while nobody has begun it.
        revisions: Key → revision of its last change; guards what is decided on this view.
    """

    host: str
    round: Round | None = None
    members: Mapping[str, int] = field(default_factory=dict)
    nprocs: Mapping[str, int] = field(default_factory=dict)
    gone: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    absent_s: Mapping[str, float] = field(default_factory=dict)
    short_s: float = 0.0
    daemons: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset()
    held: Mapping[str, frozenset[int]] = field(default_factory=dict)
    replicas: int = 1
    watermark: Pair | None = None
    persisted: tuple[Pair, ...] = ()
    failures: Mapping[int, Failure] = field(default_factory=dict)
    history: tuple[Failure, ...] = ()
    observations: Mapping[str, tuple[Observation, ...]] = field(default_factory=dict)
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    decisions: tuple[dict[str, Any], ...] = ()
    unhealthy: Mapping[Pair, Unhealthy] = field(default_factory=dict)
    went_back: tuple[Pair, ...] = ()
    requests: tuple[Request, ...] = ()
    life: Life | None = None
    revisions: Mapping[str, int] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """Number of the current generation, 0 before the first."""
        return 0 if self.round is None else self.round.generation

    @property
    def closed(self) -> bool:
        """Whether the run is over."""
        return self.life is not None and self.life.job.closed is not None

    @property
    def failure(self) -> Failure | None:
        """Why the current generation is broken, None while it is whole."""
        return self.failures.get(self.generation)

    def with_noted(self, failures: Iterable[Failure]) -> Self:
        """Return this view with `failures` in its history, in the place of what was noted of their generations."""
        history = {failure.generation: failure for failure in (*self.history, *failures)}
        return replace(self, history=tuple(history[generation] for generation in sorted(history)))

    def observed(self) -> Iterator[tuple[str, Observation]]:
        """Yield everything that is wrong now, with the host where it is."""
        for host, items in self.observations.items():
            for item in items:
                if item.kind != "straggler":
                    yield host, item
                # Only the root sees which rank is slow; in another generation that one may run elsewhere.
                elif item.generation == self.generation and self.round is not None and item.rank is not None:
                    slow = self.round.host_of(item.rank)
                    if slow is not None and not self._was_moved(self.round.ranks(slow)):
                        yield slow, item

    def _was_moved(self, ranks: range) -> bool:
        """Tell whether one of `ranks` was slow on another host, too, and so is slow by what it does."""
        return any(failure.kind == "unhealthy" and failure.rank in ranks for failure in self.history)

    def quarantined(self, now_unix_s: float) -> set[str]:
        """Return the hosts whose quarantine is not over."""
        return {host for host, quarantine in self.quarantines.items() if quarantine.left_s(now_unix_s) > 0}

    def unheld(self, hosts: frozenset[str]) -> list[int]:
        """Return the ranks of the round of whose newest committed pair none of `hosts` holds a replica."""
        if self.round is None or self.watermark is None:
            return []
        found: set[int] = set()
        if self.watermark[0] == self.generation:
            # It waited for all of them; a standby that keeps replicas may have come after it.
            for holders in self.round.holders_by_host(self.replicas):
                found.update(() if hosts.isdisjoint(holders) else self.round.ranks(holders[0]))
        else:
            found.update(*(self.held.get(host, ()) for host in hosts))
            if self.round.made_by is not None:
                return [rank for rank in range(self.round.made_by) if rank not in found]
        return [rank for rank in range(self.round.world_size) if rank not in found]
