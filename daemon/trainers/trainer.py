"""One trainer's session with the daemon: from its `attach` until its connection ends or a newer generation begins."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.slot import SlotHeader

from ..base.fields import Fields
from ..peers.pacing import Pacer
from ..peers.reading import Wanted
from ..peers.replication import Replicator
from ..run.hang import HangDetector
from ..run.view import JobView
from ..slots.slots import Geometry, JobSlots

log = logging.getLogger(__name__)

Event = Callable[..., None]


@dataclass(kw_only=True, slots=True, eq=False)
class Trainer:
    """What one rank of one generation may ask for and report.

    Attributes:
        rank: Its global rank.
        generation: The generation that it was started for.
        topology: Fingerprint that a checkpoint must have been made with.
        pid: Its process, as it says.
        state_bytes: About how much it captures.
        notify: Sends it a message.
        close: Ends its connection.
        event: Tells the launcher of something.
        hang: Hears when it waits for its state.
        step: The newest that it completed since it attached, 0 before the first.
    """

    rank: int
    generation: int
    topology: int
    pid: int
    state_bytes: int
    view: JobView
    slots: JobSlots
    replicator: Replicator
    pacer: Pacer
    notify: Callable[[dict[str, Any]], None]
    close: Callable[[], None]
    event: Event
    hang: HangDetector
    step: int = 0
    _source: str | None = None

    async def allocate(self, geometry: Geometry) -> dict[str, Any]:
        """Lend the trainer slots with room for `geometry`.

        Raises:
            MemoryBudgetError: They do not fit.
            DaemonError: Its generation is over.
        """
        self._check_current()
        await self.replicator.lend(self.rank)
        geometry = self.slots.roomy(self.rank, geometry, ranks=self.view.kept_ranks)
        await self.slots.make_room(self.rank, geometry, view=self.view)
        self._check_current()
        files = await self.slots.allocate(self.rank, geometry, agreed=self.view.agreed)
        self.view.notify()  # others may wait for what went
        return {"paths": [str(file.slot.path) for file in files]}

    async def restore(self) -> dict[str, Any]:
        """Name a verified slot with exactly the planned step.

        Raises:
            RestoreError: There is no verified copy.
            TopologyError: It is of another topology.
            DaemonError: The trainer's generation is over.
        """
        self._check_current()
        self.hang.restoring(self.rank)
        restored = await self.replicator.restore(self.rank, self.topology)
        self._source = restored.source
        return {"path": restored.path, "source": restored.source}

    async def read(self, fields: Fields) -> dict[str, Any]:
        """Give the trainer ranges of what another number of ranks captured, or of an import.

        Raises:
            RestoreError: Nobody has them any more.
            MemoryBudgetError: They do not fit.
            DaemonError: The trainer's generation is over, or its round restores nothing of that kind.
        """
        self._check_current()
        round_ = self.view.round
        if round_ is None or round_.restore is None or round_.read_of is None:
            raise DaemonError(f"rank {self.rank}: what this round restores was captured by as many ranks as it has")
        self.hang.restoring(self.rank)
        wanted = Wanted.parse(fields, round_.read_of)
        answer = await self.replicator.read(self.rank, round_.restore, wanted)
        self._source = self.replicator.reader.source
        return answer

    def restored(self, step: int, seconds: float) -> None:
        """Record that the trainer has its state back."""
        self.replicator.reader.end(self.rank)
        self.hang.restored(self.rank, step)
        self.event("restored", rank=self.rank, step=step, source=self._source, seconds=seconds)

    def connected(self, ranks: Collection[int]) -> None:
        """Record that the trainer can bring its captures to the trainers of `ranks` now."""
        round_ = self.view.round
        if round_ is not None and round_.generation == self.generation:
            hosts = [host for host in round_.hosts if not set(ranks).isdisjoint(round_.ranks(host))]
            self.replicator.trainers.connected(self.rank, hosts)

    async def allocate_replica(self, page: bytes) -> dict[str, Any]:
        """Lend the trainer a slot for the replica whose header `page` another trainer announced.

        Raises:
            MemoryBudgetError: It does not fit.
            DaemonError: It is none that this trainer receives, or its generation is over.
        """
        self._check_current()
        return await self.replicator.trainers.lend(self.rank, page)

    def progress(self, step: int) -> None:
        """Record that an optimizer step is done."""
        self.replicator.trainers.stepped(self.rank)
        if not self.step:
            self.event("first_step", rank=self.rank, step=step)
        self.step = step

    def complete(self, path: str, generation: int, step: int) -> None:
        """Hold and offer a capture, if the slot's header says exactly what the trainer says."""
        file = self.slots.at(self.rank, path)
        try:
            if self.generation != self.view.generation:
                raise SlotError(f"its generation {self.generation} is over")
            if file is None:
                raise SlotError("it is none of the rank's slots")
            header = file.slot.header()
            said = (self.slots.record.run_id, self.topology, self.rank, generation, step)
            found = (header.run_id, header.topology, header.rank, header.generation, header.step)
            if found != said or generation != self.generation:
                raise SlotError(f"it holds {found}, not {said}")
        except SlotError as error:
            log.warning("rank %d: %s with step %d is not held: %s", self.rank, path, step, error)
            return
        file.pair = header.pair
        self._pace(header)
        self.view.notify()
        self.replicator.bring(self.rank)

    def _pace(self, header: SlotHeader) -> None:
        if self.view.round is not None:
            copies = len(self.view.holders(self.rank)) - 1
            self.pacer.captured(self.rank, header.step, checkpoint_bytes=header.used_bytes, copies=copies)

    def _check_current(self) -> None:
        if self.generation != self.view.generation:
            raise DaemonError(
                f"rank {self.rank}: generation {self.generation} is over, {self.view.generation} has begun"
            )
