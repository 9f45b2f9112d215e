"""Moving captures of one job between hosts: bring own ones to their holders; fetch what is planned or lost."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from resilient_run.ckpt.errors import RestoreError, TopologyError
from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.ckpt.format.slot import SlotHeader

from ..base.supervise import Supervisor
from ..run.observation import Observation
from ..run.view import JobView
from ..slots.slots import JobSlots
from ..tier.fetch import TierSource
from .daemon_transport import DaemonTransport
from .handover import hand_over
from .pacing import Pacer
from .reading import SlotReader, Wanted
from .sources import RESTORE_PATIENCE_S, RETRY_S, Sources
from .trainer_transport import TrainerTransport
from .transport import ReplicaTransport

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_OFFER_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A verified slot with the planned step, and where it came from: "local", "peer" or "persisted"."""

    path: str
    source: str


class Replicator:
    """Sees to it that this host holds the replicas it must hold, and that its peers are brought those they must.

    Args:
        run_id: The job.
        view: What is known of the job.
        slots: What this host holds.
        pacer: Says how patient receivers must be.
        in_flight: Ranges of an offered capture that are asked for ahead.
        group: Runs the tasks.
        supervisor: Of the job's tasks.
        sources: Where replicas can be had.
        tier: The last of them, None without a persistent tier.
        observe: Takes why a replica cannot be kept here.

    Attributes:
        reader: Reads for trainers what another number of ranks captured.
        trainers: The transport that is asked first.
        daemons: The one that brings what trainers do not.
    """

    def __init__(
        self,
        *,
        run_id: str,
        view: JobView,
        slots: JobSlots,
        pacer: Pacer,
        in_flight: int,
        group: asyncio.TaskGroup,
        supervisor: Supervisor,
        sources: Sources,
        tier: TierSource | None,
        observe: Callable[[Mapping[str, Observation]], None],
    ) -> None:
        self._run_id = run_id
        self._view = view
        self._slots = slots
        self._group = group
        self._supervisor = supervisor
        self._sources = sources
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lent: set[int] = set()
        self.reader = SlotReader(view=view, slots=slots, sources=sources, tier=tier)
        self.trainers = TrainerTransport(run_id=run_id, view=view, slots=slots, spawn=self._once)
        self.daemons = DaemonTransport(
            view=view,
            slots=slots,
            sources=sources,
            pacer=pacer,
            in_flight=in_flight,
            spawn=self._once,
            supersede=self.trainers.supersede,
            observe=observe,
        )
        self._transports: tuple[ReplicaTransport, ...] = (self.trainers, self.daemons)

    async def run(self) -> None:
        """Bring again whatever is not committed: it can be lost with its connection or its receiver."""

        def reach() -> tuple[object, ...]:
            return self._view.round, spares(), *(transport.reach for transport in self._transports)

        def spares() -> tuple[str, ...]:
            return self._view.spares if self._view.knows(1) else ()

        before: tuple[str, ...] = ()
        while True:
            if spares() != before:
                before = spares()
                self._replenish()
            for rank in self._view.own_ranks:
                self.bring(rank)
            known = reach()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OFFER_AGAIN_S):
                    await self._view.wait_for(lambda: reach() != known)  # noqa: B023

    def bring(self, rank: int) -> None:
        """Let the newest capture of the own `rank` be brought to its placement peers, while it may be committed."""
        file, round_ = self._slots.newest(rank), self._view.round
        if file is None or file.pair is None or round_ is None or file.pair < self._view.agreed.next:
            return
        for host in self._view.holders(rank)[1:]:
            # The first that takes it upon itself is the last that is asked.
            any(transport.bring(host, rank, file) for transport in self._transports)

    async def lend(self, rank: int) -> None:
        """Leave the slots of `rank` to its trainer for the rest of the generation."""
        async with self._slots.receiving[rank]:
            self._lent.add(rank)

    async def abort(self) -> None:
        """Stop whatever is on its way: the generation is over, and what it left is about to be cleared."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lent.clear()
        self.reader.end()
        self._sources.origins.clear()
        for transport in self._transports:
            transport.end()

    def repair(self) -> None:
        """Begin to fetch every replica of the round's step that this host must hold and does not, own ranks first.

        What it has of other ranks is handed over to those who must hold it now; but where another number of ranks
        captured that step, all of it stays where it is until this round commits something.
        """
        if self._view.round is None:
            return
        restore, kept = self._view.round.restore, self._view.kept_ranks
        for rank in {file.rank for file in self._slots.files()}.difference(kept):
            self._slots.surrender(rank, but=restore)
            if restore is not None and not self._view.round.reshapes and self._slots.find(rank, restore) is not None:
                work = partial(
                    hand_over, rank, restore, view=self._view, slots=self._slots, find_peer=self._sources.peer
                )
                self._spawn(self._supervisor.keep(f"hand over rank {rank}", work))
        self._replenish()

    def _replenish(self) -> None:
        """Begin to fetch what is committed of every rank that this host must hold and does not, own ranks first."""
        committed, round_ = self._view.committed, self._view.round
        if round_ is not None and round_.reshapes and committed == round_.restore:
            return
        for rank in self._view.kept_ranks:
            if committed is not None and not is_import(committed) and self._slots.find(rank, committed) is None:
                self._spawn(self._supervisor.keep(f"repair rank {rank}", partial(self._repair, rank, committed)))

    async def restore(self, rank: int, topology: int) -> Restored:
        """Return a verified slot of the own `rank` with exactly the round's step: local, else fetched from a peer.

        Raises:
            RestoreError: Nobody who can be asked holds a verified copy, or the generation ended meanwhile.
            TopologyError: The checkpoint was made by another topology.
        """
        return await self._answer(rank, self._restore(rank, topology))

    async def read(self, rank: int, pair: Pair, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """Do what `SlotReader.read` says; RestoreError if the generation ended meanwhile."""
        return await self._answer(rank, self.reader.read(rank, pair, wanted))

    async def _answer(self, rank: int, work: Coroutine[Any, Any, _T]) -> _T:
        # Not in the task group: its failure is the answer to one trainer.
        task = self._track(asyncio.create_task(work))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise RestoreError(f"rank {rank}: its generation ended during the restore; another one has begun")
        return task.result()

    async def _restore(self, rank: int, topology: int) -> Restored:
        round_ = self._view.round
        pair = None if round_ is None else round_.restore
        if pair is None:
            raise RestoreError(f"rank {rank}: this generation starts from the beginning, there is nothing to restore")
        if round_ is not None and round_.read_of is not None:
            raise TopologyError(
                f"step {pair[1]} was captured with world size {round_.read_of}, this run has {round_.world_size}: "
                "start as many workers as before, or give --rr-elastic, with which a run may go on in another one"
            )
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + RESTORE_PATIENCE_S, RETRY_S[0]
        while True:
            late = loop.time() > deadline
            async with self._slots.receiving[rank]:
                header, tried, again = await self._local(rank, pair), list[str](), False
                if header is None:
                    tried, again = await self._sources.fetch_from_any(rank, pair, insist=late)
                    header = await self._local(rank, pair)
            file = self._slots.find(rank, pair)
            if header is not None and file is not None and round_ is not None:
                if (header.topology, header.run_id) != (topology, self._run_id):
                    raise TopologyError(
                        f"step {pair[1]} of rank {rank} was saved by run {header.run_id!r} with world size "
                        f"{header.world_size} and topology {header.topology:#x}; this is {self._run_id!r} with "
                        f"world size {round_.world_size} and {topology:#x}: start it as before, or with a new run id"
                    )
                return Restored(path=str(file.slot.path), source=self._sources.origins.get((rank, pair), "local"))
            if not again or late:
                lost = self._slots.lost.get(rank)
                missing = "no local slot" + (f" ({lost})" if lost else "")
                raise RestoreError(
                    f"no verified copy of rank {rank} at step {pair[1]} (generation {pair[0]}) is left: "
                    f"{'; '.join([missing, *tried])}. Start a new run id"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    async def _local(self, rank: int, pair: Pair) -> SlotHeader | None:
        """Return the header of the local slot with `pair`; one that does not verify is cleared and reported."""
        file = self._slots.find(rank, pair)
        if file is None:
            return None
        if (rank, pair) in self._sources.origins:
            # It was verified when it arrived, a moment ago.
            return file.slot.header()
        header = await self._slots.verified(file)
        if header is None:
            self._view.notify()
        return header

    async def _repair(self, rank: int, pair: Pair) -> None:
        """Fetch `pair` of `rank` from whoever has it, until it is here or no longer the newest committed pair."""
        pause_s, own = RETRY_S[0], rank in self._view.own_ranks
        if not own:
            # Training waits for the own ranks only: they have the link to themselves.
            await self._view.wait_for(lambda: self._view.committed != pair or self._has_own(pair))
        while self._view.committed == pair and rank not in self._lent:
            if own and (newest := self._slots.newest(rank)) and newest.pair and newest.pair > pair:
                return
            async with self._slots.receiving[rank]:
                if self._slots.find(rank, pair) is not None:
                    return
                try:
                    tried, _ = await self._sources.fetch_from_any(rank, pair)
                except TopologyError as error:
                    # Whoever restores it is told.
                    log.error("%s", error)
                    return
                if self._slots.find(rank, pair) is not None:
                    log.info("re-created the replica of rank %d at generation %d step %d", rank, *pair)
                    return
            if pause_s >= RETRY_S[1]:
                log.warning("cannot re-create the replica of rank %d at %s yet: %s", rank, pair, "; ".join(tried))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    def _has_own(self, pair: Pair) -> bool:
        """Tell whether every own rank holds `pair`, or something newer."""
        newest = [self._slots.newest(rank) for rank in self._view.own_ranks]
        return all(file is not None and file.pair is not None and file.pair >= pair for file in newest)

    def _once(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._spawn(self._supervisor.once(name, work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            task = self._group.create_task(work)
        except RuntimeError:
            # The job ends, and its group with it.
            work.close()
        else:
            self._track(task)

    def _track(self, task: asyncio.Task[_T]) -> asyncio.Task[_T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
