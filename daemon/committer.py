"""Moves the watermark of one job while this host is its root."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from .commit import advance
from .etcd import Etcd, EtcdUnavailable
from .root_state import COMMITTED_KEY, RootState
from .rounds import Pair
from .slots import JobSlots
from .view import JobView

_RETRY_S = 0.5


class Committer:
    """Commits what every rank has all its replicas of, for as long as `run` runs.

    For a moment two hosts may both take themselves for the root: one whose lease expired while it was stopped or cut
    off, and its successor. That does no harm: a commit names the revisions of the round, of the watermark and of the
    fence that it was decided on, so of two commits that were decided on the same state one is refused, and one that
    was decided on an older state always is.

    Args:
        etcd: The job's connection.
        prefix: Of the job's keys.
        view: What is known of the job.
        slots: What this host holds.
        state: What the job's keys say; whoever changes it calls the view's `notify` when `due` then says so.
        also: Returns what else is put when a pair is committed, by key without the prefix.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        *,
        view: JobView,
        slots: JobSlots,
        state: RootState,
        also: Callable[[Pair], Mapping[str, Any]] | None,
    ) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._view = view
        self._slots = slots
        self._state = state
        self._also = also
        self._tried: dict[str, int] = {}

    async def run(self) -> None:
        """Move the watermark whenever every rank has all its replicas of something newer."""
        while True:
            await self._view.wait_for(lambda: self.due() is not None)
            pair, guards = self.due(), self._guards()
            if pair is None:
                continue
            puts: dict[str, Any] = {"ckpt/watermark": {"generation": pair[0], "step": pair[1]}}
            world_size = self._state.world_size
            if self._state.committed != world_size:
                # Launchers do not follow the watermark, but must not lead the run to another size from now on.
                puts[COMMITTED_KEY] = {"world_size": world_size}
            if self._also is not None:
                puts |= self._also(pair)
            # Applied or refused, one of the guarded keys changes, and the mirror will show it.
            self._tried = guards
            try:
                await self._etcd.commit(
                    {f"{self._prefix}{key}": revision for key, revision in guards.items()},
                    {f"{self._prefix}{key}": value for key, value in puts.items()},
                )
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)
                self._tried = {}

    def due(self) -> Pair | None:
        """Return the pair to commit now, None without one or while it is not known what became of the one before."""
        tally = self._state.tally
        if tally is None or self._guards() == self._tried:
            return None
        # Our own replicas need no way through etcd to count.
        tally.see(self._view.host, self._slots.held())
        return advance(self._state.watermark, tally)

    def _guards(self) -> dict[str, int]:
        return {key: self._state.revision(key) for key in ("rdzv/round", "ckpt/watermark", "ckpt/fence")}
