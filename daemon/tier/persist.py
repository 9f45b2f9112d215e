"""Writing committed pairs to the persistent tier: one host's part.

The root asks every host for a pair in the transaction that commits it. Each host copies its own ranks' slots at once,
writes the copies to the tier in its own time, and answers; with all answers there the root publishes the pair.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from resilient_run.ckpt.errors import CheckpointError, DaemonError, MemoryBudgetError, SlotError
from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.ckpt.format.slot import HEADER_BYTES, parse_header

from ..base.policy import PersistPolicy
from ..base.supervise import Supervisor
from ..etcd.client import Etcd, EtcdUnavailable
from ..run import keys
from ..run.mirror import parse_pairs
from ..run.view import JobView
from ..slots.slots import JobSlots
from ..slots.snapshot import Snapshot
from .manifest import RankFile
from .persist_plan import PersistAnswer, PersistRequest
from .publish import Publisher
from .tier import FRAME_BYTES, Tier, TierError, call

log = logging.getLogger(__name__)

_PAUSES_S = (1.0, 5.0, 25.0)
_WRITERS = 4
_RETRY_S = 0.5


class Persister:
    """One host's part in persisting one job; its `Publisher` is the root's.

    Args:
        run_id: The job.
        policy: How often, and how many are kept.
        tier: Where to.
        view: What is known of the job.
        slots: What this host holds of it.
        supervisor: Of the job's tasks.
    """

    def __init__(
        self,
        *,
        run_id: str,
        policy: PersistPolicy,
        tier: Tier,
        view: JobView,
        slots: JobSlots,
        supervisor: Supervisor,
    ) -> None:
        self._run_id = run_id
        self._tier = tier
        self._view = view
        self._slots = slots
        self._supervisor = supervisor
        self._request: PersistRequest | None = None
        self._is_asked = False
        self._seeing = asyncio.Lock()
        self._taken: list[Snapshot] = []
        self._storing: asyncio.Task[None] | None = None
        self._etcd: Etcd | None = None
        self._answer: PersistAnswer | None = None
        self._answered: Pair | None = None
        self._error: str | None = None
        self._refused: set[Pair] = set()
        self._publisher = Publisher(run_id=run_id, policy=policy, tier=tier, view=view)

    # What the mirror of the watermark and the root's commit need.

    async def see(self, value: Mapping[str, Any] | None) -> None:
        """Copy the own ranks of a newly requested pair; the caller does not let anybody see a newer watermark before.

        For trainers may overwrite the slots of this pair as soon as they hear of a newer one.
        """
        if value is None:
            if self._is_asked:  # until the run was rolled back
                await self._forget()
            return
        try:
            request = PersistRequest.parse(value)
        except DaemonError as error:
            log.error("ignoring %s: %s", keys.PERSIST, error)
            return
        self._is_asked = True
        await self._take(request)

    def requested_with(self, pair: Pair) -> dict[str, dict[str, Any]]:
        """Return what the root must put with the watermark `pair`, by key below the run: a request if one is due."""
        return self._publisher.requested_with(pair, self._request)

    # What runs beside.

    async def run(self, etcd: Etcd) -> None:
        """Answer requests and, while this host is the root, publish; until cancelled."""
        self._etcd = etcd
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in {
                    "answer requests": partial(self._answer_requests, etcd),
                    "take back": partial(self._take_back, etcd),
                    "publish": partial(self._publisher.run, etcd, lambda: self._request),
                }.items():
                    group.create_task(self._supervisor.keep(name, work, essential=True))
        finally:
            await self._stop_storing()

    async def finish(self) -> None:
        """See to it that the newest committed pair is persisted as far as this host can; the caller limits the time."""
        pair, revision, etcd = self._view.committed, self._view.watermark_revision, self._etcd
        if pair is None or is_import(pair) or revision is None or etcd is None or not self._view.own_ranks:
            return
        if self._request is None or self._request.pair != pair:
            request = PersistRequest(pair=pair, unix_s=time.time())
            with contextlib.suppress(EtcdUnavailable):
                # Another host may have asked already; then its request shows up in the mirror.
                guards = {keys.WATERMARK: revision}
                await etcd.commit(guards, {keys.PERSIST: request.to_value()})
            await self._take(request)
        await self._view.wait_for(lambda: self._answered == pair)
        await self._view.wait_for(lambda: self._is_settled(pair))

    async def refuse(self, pair: Pair, reason: str) -> None:
        """Take back the publication of `pair`, of which a file turned out to be damaged; etcd hears when it can."""
        log.error("generation %d step %d no longer counts as published: %s", *pair, reason)
        try:
            await call(self._tier, self._tier.refuse, pair)
        except TierError as error:
            log.error("cannot remove its manifest: %s", error)
        self._refused.add(pair)
        self._view.notify()

    async def made_by(self, pair: Pair) -> int | None:
        """Return how many ranks captured a published pair, None if that cannot be read now."""
        try:
            return (await call(self._tier, self._tier.manifest, pair)).world_size
        except (TierError, SlotError) as error:
            log.warning("cannot tell how many ranks captured generation %d step %d: %s", *pair, error)
            return None

    def describe(self) -> dict[str, Any]:
        """Return what `resilientctl status` shows."""
        written = self._answer.pair if self._answer is not None and self._answer.error is None else None
        return {
            "target": self._tier.shown,
            "written": written and list(written),
            "error": self._error or self._publisher.error,
        }

    async def _take(self, request: PersistRequest) -> None:
        async with self._seeing:
            if self._request is not None and self._request.pair == request.pair:
                return
            # A daemon that was just started may see the request before the round.
            await self._view.wait_for(lambda: self._view.round is not None)
            await self._slots.adopt()
            self._request = request
            self._view.notify()
            await self._stop_storing()
            try:
                for rank in self._view.own_ranks:
                    self._taken.append(await Snapshot.take(self._slots, rank, request.pair))
            except (SlotError, MemoryBudgetError, OSError, MemoryError) as error:
                self._drop()
                self._fail(request.pair, str(error))
                return
            if self._taken:
                self._storing = asyncio.create_task(self._supervisor.once("store", partial(self._store, request.pair)))

    async def _forget(self) -> None:
        """Write no more of what was asked for: the run went back to before it."""
        async with self._seeing:
            self._request, self._is_asked = None, False
            await self._stop_storing()

    async def _stop_storing(self) -> None:
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.wait([self._storing])
        self._drop()

    async def _store(self, pair: Pair) -> None:
        """Write what was taken of `pair`, again if that fails, and leave an answer."""
        began_s = time.monotonic()
        try:
            world_size = {(await snapshot.verify()).world_size for snapshot in self._taken}.pop()
            files = await self._write_patiently(pair)
        except (CheckpointError, OSError, MemoryError) as error:
            self._fail(pair, str(error))
            return
        finally:
            self._drop()
        used_bytes = sum(file.capacity_bytes for file in files.values())
        stored_bytes = sum(file.stored_bytes for file in files.values())
        log.info(
            "persisted ranks %s of generation %d step %d in %.1f s: %.1f MiB, stored in %.1f MiB",
            sorted(files), *pair, time.monotonic() - began_s, used_bytes / (1 << 20), stored_bytes / (1 << 20),
        )  # fmt: skip
        self._error = None
        self._answer = PersistAnswer(pair=pair, world_size=world_size, ranks=files, error=None)
        self._view.notify()

    async def _write_patiently(self, pair: Pair) -> dict[int, RankFile]:
        """Write every rank's file, after a pause again those that the storage refused.

        Raises:
            TierError: It refused each time.
        """
        files: dict[int, RankFile] = {}
        for pause_s in _PAUSES_S:
            try:
                return await self._write(pair, files)
            except TierError as error:
                self._error = str(error)
                log.warning("generation %d step %d is not persisted yet, trying again: %s", *pair, self._error)
                await asyncio.sleep(pause_s)
        return await self._write(pair, files)

    async def _write(self, pair: Pair, files: dict[int, RankFile]) -> dict[int, RankFile]:
        """Write every rank's file that is not in `files`, a few at a time; a pair that is published stays as it is."""
        if pair in await call(self._tier, self._tier.published):
            manifest = await call(self._tier, self._tier.manifest, pair)
            return {snapshot.rank: manifest.ranks[snapshot.rank] for snapshot in self._taken}
        writers = asyncio.Semaphore(_WRITERS)

        async def write(snapshot: Snapshot) -> None:
            async with writers:
                files[snapshot.rank] = await self._write_rank(snapshot)

        try:
            async with asyncio.TaskGroup() as group:
                for snapshot in self._taken:
                    # A second copy beside the first may find no room.
                    if snapshot.rank not in files:
                        group.create_task(write(snapshot))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return files

    async def _write_rank(self, snapshot: Snapshot) -> RankFile:
        header = parse_header(snapshot.buffer[:HEADER_BYTES], len(snapshot.buffer))
        writer = await call(self._tier, self._tier.write, snapshot.pair, snapshot.rank)
        try:
            for start in range(0, header.used_bytes, FRAME_BYTES):
                data = snapshot.buffer[start : min(start + FRAME_BYTES, header.used_bytes)]
                await call(self._tier, writer.write, data, background=True)
            stored_bytes = await call(self._tier, writer.finish)
        except TierError:
            with contextlib.suppress(TierError):
                await call(self._tier, writer.abandon)
            raise
        return RankFile(
            capacity_bytes=header.used_bytes, payload_offset=header.payload_offset, stored_bytes=stored_bytes
        )

    def _fail(self, pair: Pair, reason: str) -> None:
        log.error("generation %d step %d is not persisted by this host: %s", *pair, reason)
        self._error = reason
        self._answer = PersistAnswer(pair=pair, world_size=0, ranks={}, error=reason[:1000])
        self._view.notify()

    def _drop(self) -> None:
        for snapshot in self._taken:
            snapshot.close()
        self._taken = []

    def _is_settled(self, pair: Pair) -> bool:
        """Tell whether `pair`, of which our part is written, needs this host no more: another one is the root, or it is
        published or failed. While nobody is, as when etcd was away for long, this host may be the next.
        """
        view = self._view
        if view.leader in (None, view.host) or view.round is None or view.leader not in view.round:
            return self._publisher.is_settled(pair)
        return True

    async def _take_back(self, etcd: Etcd) -> None:
        """Take refused pairs out of what etcd has as published."""
        key = keys.PERSISTED
        while True:
            await self._view.wait_for(lambda: bool(self._refused))
            refused = set(self._refused)
            try:
                entry = await etcd.get(key)
                left = [] if entry is None else [pair for pair in parse_pairs(entry.value) if pair not in refused]
                value = {"pairs": [list(pair) for pair in left]}
                if entry is None or await etcd.commit({key: entry.revision}, {key: value}):
                    self._refused -= refused
            except DaemonError as error:
                log.error("cannot withdraw a published step: %s", error)
                self._refused -= refused
            except EtcdUnavailable as error:
                log.warning("cannot tell etcd yet that %s is not published: %s", sorted(refused), error)
                await asyncio.sleep(_RETRY_S)

    async def _answer_requests(self, etcd: Etcd) -> None:
        while True:
            await self._view.wait_for(lambda: self._answer is not None and self._answer.pair != self._answered)
            answer = self._answer
            assert answer is not None
            try:
                await etcd.put(keys.ANSWERS(self._view.host), answer.to_value())
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            self._answered = answer.pair
            self._view.notify()
