"""The lives of a run id: the transaction of each change from one state of a run to another (pure functions).

`keys.JOB` alone says which life of the run id is the current one and how it ended. Each life has a key of its own below
`keys.LIVES`, which is written when it begins and when it ends, and removed with it. Whoever is guarded by that writes
nothing into another life, nor into one that is over, also where etcd came back without its data and counts revisions
anew: no name comes twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from resilient_run.ckpt.format.pair import Pair, pair_value

from . import keys
from .mirror import Mirror
from .records import Agreement, Closed, Failure, Requirements
from .rounds import Round

_OF_ONE_LIFE = (keys.STORES(), keys.FAILURES(), keys.DONE(), keys.RECOVERED(), keys.INJECTION, keys.HISTORY)


class Transaction(NamedTuple):
    """What `Etcd.commit` takes."""

    guards: Mapping[str, int]
    puts: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    deletes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Life:
    """A life of a run id: what its launchers agree on and how it ended, and the revision of its key."""

    job: Agreement
    revision: int

    @classmethod
    def of(cls, mirror: Mirror) -> Self | None:
        """Return the one that `keys.JOB` names, of revision 0 if it has no key; None without a job."""
        job: Agreement | None = mirror.get(keys.JOB)
        return None if job is None else cls(job, mirror.revisions.get(keys.LIVES(job.name), 0))

    @property
    def guard(self) -> dict[str, int]:
        """What holds while it goes on, or has ended, as it does."""
        return {keys.LIVES(self.job.name): self.revision}

    def _guarded(self, round_revision: int | None) -> dict[str, int]:
        return self.guard if round_revision is None else {**self.guard, keys.ROUND: round_revision}

    def form(
        self,
        formed: Round,
        before: Round | None,
        watermark_revision: int,
        failure: Failure | None,
        silent: Mapping[str, int] = MappingProxyType({}),
    ) -> Transaction:
        """Form a round after `before`, with what is committed.

        `failure` is why that broke, if its key is to change; keys of `silent` must be as at these revisions.
        """
        # Whoever is in the new round has seen why the one before broke; nobody asks about those before it.
        stale = formed.generation - 2
        return Transaction(
            guards={
                **self.guard,
                **silent,
                keys.ROUND: 0 if before is None else before.revision,
                keys.WATERMARK: watermark_revision,
            },
            puts={keys.ROUND: formed.to_value()}
            | ({} if failure is None else {keys.FAILURES(failure.generation): failure.to_value()}),
            deletes=(keys.STORES(stale), keys.FAILURES(stale), keys.DONE(stale, ""), keys.RECOVERED(stale, "")),
        )

    def create(self, name: str, value: Mapping[str, Any], round_revision: int | None = None) -> Transaction:
        """Set a key that is not there, while the round is the one of that revision if it is given."""
        return Transaction(guards={**self._guarded(round_revision), name: 0}, puts={name: value})

    def end(self, closed: Closed, round_revision: int | None = None) -> Transaction:
        """End it, whose round is the one of that revision if it is given."""
        ended = replace(self.job, closed=closed)
        return Transaction(
            guards=self._guarded(round_revision),
            puts={keys.JOB: ended.to_value(), keys.LIVES(ended.name): {}},
        )

    def follow(self, terms: Requirements) -> Transaction:
        """Begin the next one once all have left this one, with its round and what it committed."""
        following = replace(self.job, life=self.job.life + 1, closed=None, **terms.required())
        # Whoever starts a run again has put something right: its failures so far count no more.
        return Transaction(
            guards={**self.guard, keys.MEMBERS(): 0},
            puts={keys.JOB: following.to_value(), keys.LIVES(following.name): {}},
            deletes=(keys.LIVES(self.job.name), *_OF_ONE_LIFE),
        )

    def clear(self) -> Transaction:
        """Remove it once all have left it, unless it failed and something is committed, which the next one restores."""
        failed = self.job.closed is None or self.job.closed.failed
        guards = {**self.guard, keys.MEMBERS(): 0} | ({keys.WATERMARK: 0} if failed else {})
        return Transaction(guards=guards, deletes=keys.lasting())

    def openings(self, terms: Requirements, *, abandoned: bool) -> tuple[Transaction, ...]:
        """Return what a new launcher may do before it can be in the run, best first; nothing if it goes on as it is.

        Args:
            terms: What the launcher asks of the run; those of a life that ended, or that all have left, bind nobody.
            abandoned: Whether all have left it, and nobody comes back.
        """
        if self.job.closed is not None:
            return (self.clear(), self.follow(terms)) if self.job.closed.failed else (self.clear(),)
        return (self.follow(terms),) if abandoned and replace(self.job, **terms.required()) != self.job else ()

    def why_over(self, now: Self | None, *, forgotten: bool) -> Closed:
        """Return why it is over, as its launcher sees it.

        Args:
            now: The life of the run id now.
            forgotten: Whether etcd came back without its data.
        """
        reason = "it was started again while this launcher was cut off"
        if now is None and forgotten:
            reason = "etcd came back without its data: keep its data directory, or run three members"
        elif now is None or now.job == self.job:
            reason = "the other hosts ended it while this one was cut off, or somebody changed its etcd keys"
        elif now.job.closed is not None and now.job.name == self.job.name:
            return now.job.closed
        return Closed(reason=reason, failed=True)


def sweep() -> Transaction:
    """Remove what is left of a run whose job somebody has removed."""
    return Transaction(guards={keys.JOB: 0, keys.MEMBERS(): 0}, deletes=keys.lasting())


def begin(job: Agreement, persisted: Sequence[Sequence[int]], world_size: int | None) -> Transaction:
    """Begin the first life of a run that etcd does not know.

    Args:
        job: The life.
        persisted: The published pairs of the run id, oldest first: it begins with the newest.
        world_size: The number of ranks that made the newest, None for an import.
    """
    puts: dict[str, Mapping[str, Any]] = {keys.JOB: job.to_value(), keys.LIVES(job.name): {}}
    if persisted:
        puts[keys.WATERMARK] = pair_value(Pair(*persisted[-1]))
        puts[keys.PERSISTED] = {"pairs": persisted}
        puts[keys.COMMITTED] = {"world_size": world_size}
    return Transaction(guards={keys.JOB: 0, keys.MEMBERS(): 0}, puts=puts)
