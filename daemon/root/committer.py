"""Moves the watermark of one job while this host is its root, and says which step is captured next."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilient_run.ckpt.format.pair import Pair, pair_value

from ..etcd.client import Etcd, EtcdUnavailable
from ..peers.tree import ReportTree
from ..run import keys
from ..run.commit import Lead, advance, beside_newest
from ..run.view import JobView
from .state import RootState

log = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """What to write: a pair to commit, or None when the next capture was missed, or older pairs must make room.

    `older` stays in memory beside the newest, `done` is the newest step that is known to be completed in this
    generation, None where the next capture stays as it is, and `late` that a rank was.
    """

    generation: int
    pair: Pair | None
    older: tuple[Pair, ...]
    done: int | None
    late: bool = False


class Committer:
    """Commits what every rank has all its replicas of, for as long as `run` runs.

    With each commit it says which step is captured next. When a rank has missed that one, it can never be committed,
    and a later one is named in its place.

    For a moment two hosts may both take themselves for the root: one whose lease expired while it was stopped or cut
    off, and its successor. That does no harm: a write names the revisions of the round, of the watermark and of the
    next capture that it was decided on, so of two that were decided on the same state one is refused, and one that was
    decided on an older state always is.

    Args:
        etcd: The job's connection.
        view: What is known of the job.
        tree: Through which the hosts report.
        state: What the job's keys say; whoever changes it calls the view's `notify`.
        agrees: Tells whether ranks that must hold the same bytes do in a pair; else it is not committed.
        keep_every: Steps between the older committed pairs that stay in memory.
        also: Returns what else is put when a pair is committed, by key.
    """

    def __init__(
        self,
        etcd: Etcd,
        *,
        view: JobView,
        tree: ReportTree,
        state: RootState,
        agrees: Callable[[Pair], bool],
        keep_every: int,
        also: Callable[[Pair], Mapping[str, Any]] | None,
    ) -> None:
        self._etcd = etcd
        self._view = view
        self._tree = tree
        self._state = state
        self._agrees = agrees
        self._keep_every = keep_every
        self._also = also
        self._lead = Lead()

    async def run(self) -> None:
        """Move the watermark whenever every rank has all its replicas of something newer."""
        counted: dict[str, int] = {}
        while True:
            await self._view.wait_for(lambda: self.due() is not None)
            move, guards = self.due(), self._guards()
            if move is None:
                continue
            puts: dict[str, Mapping[str, Any]] = {}
            if guards != counted:  # else the same is written again
                counted = guards
                self._count(move)
            if move.older != self._state.get(keys.OLDER, ()):
                puts[keys.OLDER] = {"pairs": move.older}
            if move.pair is not None:
                puts[keys.WATERMARK] = pair_value(move.pair)
                world_size = None if self._state.round is None else self._state.round.world_size
                if self._state.get(keys.COMMITTED) != world_size:
                    # Launchers do not follow the watermark, but must not lead the run to another size from now on.
                    puts[keys.COMMITTED] = {"world_size": world_size}
                if self._also is not None:
                    puts |= self._also(move.pair)
            following = self._state.agreed.next.step
            if move.done is not None:
                following = self._lead.after(move.done, every=self._view.every)
            puts[keys.NEXT] = pair_value(Pair(move.generation, following))
            log.debug("%s is committed, step %d is captured next, %s stay", move.pair, following, move.older)
            try:
                await self._etcd.commit(guards, puts)
                await self._view.wait_until_shown(lambda: self._guards() != guards)  # noqa: B023
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)

    def _count(self, move: _Move) -> None:
        if move.done is None:
            return
        if move.pair is not None:
            self._lead.kept(move.done - move.pair[1])
        elif move.late:
            self._lead.missed()
        else:
            self._lead.failed()

    def due(self) -> _Move | None:
        """Return what to write, by what is known now; None without anything."""
        report, agreed, round_ = self._tree.report(), self._state.agreed, self._state.round
        if report is None or round_ is None or report.term[0] != round_.generation:
            return None
        pair = None if report.absent else advance(agreed, report.complete)
        if pair is not None and not self._agrees(pair):
            # No newer step is captured meanwhile: either this one is agreed on, or the comparison ends the generation.
            return None
        generation, following = agreed.next
        done = [self._view.done[1]] if self._view.done is not None and self._view.done[0] == generation else []
        keep = min(report.keep, 1 if self._state.life is None else self._state.life.job.keep)
        if pair is not None:
            older = agreed.older_after(report.complete, keep=keep, every=self._keep_every)
            return _Move(generation=generation, pair=pair, older=older, done=max([pair[1], *done]))
        older, missed = beside_newest(agreed.older, keep), report.missed
        if missed is not None and missed.next == agreed.next:
            last = max(following, missed.step, *done)
            return _Move(generation=generation, pair=None, older=older, done=last, late=missed.late)
        if older == agreed.older or generation != round_.generation:  # of a later one if it goes back to one of them
            return None
        return _Move(generation=generation, pair=None, older=older, done=None)

    def _guards(self) -> dict[str, int]:
        revisions = {key: self._state.revisions.get(key, 0) for key in (keys.ROUND, keys.WATERMARK, keys.NEXT)}
        return revisions if self._state.life is None else revisions | self._state.life.guard
