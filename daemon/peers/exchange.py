"""Replication by the trainers themselves: which trainer sends to which, and when the daemons take over."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from ..run.rounds import Pair, Round

log = logging.getLogger(__name__)

PATIENCE_S: Final = 10.0
"""How long a trainer may take to bring a capture to a peer, at least."""

PATIENCE_STEPS: Final = 4
"""The same, in training steps: an interleaved transfer lasts as long as the idle spans make it last."""


def receiver(round_: Round, owner: int, host: str) -> int:
    """Return the rank on `host` whose trainer receives the replicas of the rank `owner`, which runs elsewhere.

    The one with the same place on its host; where there are fewer ranks, they take turns.
    """
    home = next(ranks for name in round_.hosts if owner in (ranks := round_.ranks(name)))
    there = round_.ranks(host)
    return there[(owner - home.start) % len(there)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Whom one trainer exchanges replicas with.

    Attributes:
        send_to: Ranks that receive its captures, one on each host that keeps them.
        receive_from: Ranks whose captures it receives for its host.
    """

    send_to: tuple[int, ...] = ()
    receive_from: tuple[int, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the routes as the answer to `attach` holds them."""
        return {"send_to": list(self.send_to), "receive_from": list(self.receive_from)}


def routes(round_: Round, rank: int, replicas: int) -> Routes:
    """Return the routes of the trainer of `rank`: every replica has exactly one sender and one receiver."""
    home, *others = round_.holders(rank, replicas)
    return Routes(
        send_to=tuple(receiver(round_, rank, host) for host in others),
        receive_from=tuple(
            owner
            for owner in round_.kept(home, replicas)
            if owner not in round_.ranks(home) and receiver(round_, owner, home) == rank
        ),
    )


def may_wait(*, reachable: bool, waited_s: float, step_s: float) -> tuple[bool, str]:
    """Decide whether a capture is left to its trainer, or offered to a peer's daemon now; return the reason as well.

    Args:
        reachable: Whether the trainer says that it has a connection to one on the peer.
        waited_s: Seconds since the capture was complete.
        step_s: Seconds that the trainer's last step took.
    """
    if not reachable:
        return False, "its trainer has no connection to a trainer there"
    patience_s = max(PATIENCE_S, PATIENCE_STEPS * step_s)
    if waited_s > patience_s:
        return False, f"its trainer has not brought it there in {waited_s:.1f} s (limit {patience_s:.1f} s)"
    return True, f"its trainer has {patience_s - waited_s:.1f} s left to bring it there"


@dataclass(kw_only=True, slots=True, eq=False)
class _Trainer:
    hosts: frozenset[str] = frozenset()
    pair: Pair | None = None
    captured_s: float = 0.0
    stepped_s: float | None = None
    step_s: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class Deliveries:
    """What the trainers of this host bring to peers themselves, so that the daemon need not.

    Attributes:
        now_s: The clock.
    """

    now_s: Callable[[], float] = time.monotonic
    _trainers: dict[int, _Trainer] = field(default_factory=dict)

    @property
    def connections(self) -> dict[int, frozenset[str]]:
        """Rank → hosts to which its trainer has connections."""
        return {rank: trainer.hosts for rank, trainer in self._trainers.items() if trainer.hosts}

    def connected(self, rank: int, hosts: Collection[str]) -> None:
        """Hear to which hosts the trainer of `rank` has connections now."""
        self._trainers.setdefault(rank, _Trainer()).hosts = frozenset(hosts)
        log.info("the trainer of rank %d brings its captures itself to hosts %s", rank, sorted(hosts))

    def captured(self, rank: int, pair: Pair) -> None:
        """Hear that `pair` of `rank` is complete."""
        trainer = self._trainers.setdefault(rank, _Trainer())
        if trainer.pair != pair:
            trainer.pair, trainer.captured_s = pair, self.now_s()

    def stepped(self, rank: int) -> None:
        """Hear that the trainer of `rank` has made a step."""
        trainer, now_s = self._trainers.setdefault(rank, _Trainer()), self.now_s()
        if trainer.stepped_s is not None:
            trainer.step_s = now_s - trainer.stepped_s
        trainer.stepped_s = now_s

    def gone(self, rank: int) -> None:
        """Hear that the trainer of `rank` is not attached any more: it brings nothing."""
        self._trainers.pop(rank, None)

    def awaited(self, host: str, rank: int, pair: Pair) -> tuple[bool, str]:
        """Tell whether the trainer of `rank` may still bring `pair` to `host`, and the reason."""
        trainer = self._trainers.get(rank, _Trainer())
        waited_s = self.now_s() - trainer.captured_s if trainer.pair == pair else 0.0
        return may_wait(reachable=host in trainer.hosts, waited_s=waited_s, step_s=trainer.step_s)
