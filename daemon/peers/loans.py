"""Slots lent to trainers that receive replicas for this host: lent, verified and held, or taken away."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.slot import SlotHeader, parse_header

from ..run.rounds import Pair
from ..run.view import JobView
from ..slots.slots import MAX_SLOT_BYTES, Geometry, JobSlots, SlotFile
from .exchange import routes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loan:
    file: SlotFile
    pair: Pair
    receiver: int
    page: bytes


class Loans:
    """The replicas that trainers of this host are receiving from other trainers.

    A trainer's word is not enough: its file is held once the daemon has verified every checksum against the header
    that was announced. A file that is taken away is unlinked, because its trainer may still write to it.

    Args:
        run_id: The job.
        view: What is known of the job.
        slots: What this host holds.
        receiving: A lock for each rank whose replica is being received.
        spawn: Runs a verification that ends with the generation.
    """

    def __init__(
        self,
        *,
        run_id: str,
        view: JobView,
        slots: JobSlots,
        receiving: Mapping[int, asyncio.Lock],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run_id = run_id
        self._view = view
        self._slots = slots
        self._receiving = receiving
        self._spawn = spawn
        self._loans: dict[str, _Loan] = {}

    async def lend(self, receiver: int, page: bytes) -> tuple[str | None, bool]:
        """Return the path of a slot in which the trainer `receiver` may write the capture that `page` announces.

        Returns:
            The path, None when it is held already or no slot is free yet (a commit may not be known here yet), and
            whether it is held.

        Raises:
            DaemonError: It is no capture of this generation that this trainer receives for this host.
            MemoryBudgetError: There is no room for it.
        """
        header = self._checked(receiver, page)
        rank, pair = header.rank, (header.generation, header.step)
        geometry = Geometry(capacity_bytes=header.used_bytes, payload_offset=header.payload_offset)
        async with self._receiving[rank]:
            self.take_away(rank)
            if self._slots.find(rank, pair) is not None:
                return None, True
            file = await self._slots.place(rank, geometry, agreed=self._view.agreed)
            if file is None:
                return None, False
            if self._view.generation != pair[0]:
                self._slots.discard(file)
                raise DaemonError(f"generation {pair[0]} is over")
            self._loans[str(file.slot.path)] = _Loan(file=file, pair=pair, receiver=receiver, page=page)
            return str(file.slot.path), False

    def received(self, receiver: int, path: str) -> None:
        """Verify what the trainer `receiver` has written to `path`, and hold it if every checksum is right."""
        loan = self._loans.get(path)
        if loan is None or loan.receiver != receiver:
            log.info("rank %d: %s was taken away before it was received", receiver, path)
            return
        self._spawn(self._accept(path, loan))

    def dropped(self, receiver: int, path: str) -> None:
        """Take `path` back from the trainer `receiver`, which will not receive the rest."""
        loan = self._loans.get(path)
        if loan is not None and loan.receiver == receiver:
            self._discard(path)

    def take_away(self, rank: int) -> None:
        """Take away what is lent for replicas of `rank`: they come in another way, or newer ones come."""
        self._discard(*(path for path, loan in self._loans.items() if loan.file.rank == rank))

    def end(self, receiver: int | None = None) -> None:
        """Take away everything that is lent, or only what is lent to the trainer `receiver`."""
        self._discard(*(path for path, loan in self._loans.items() if receiver in (None, loan.receiver)))

    async def _accept(self, path: str, loan: _Loan) -> None:
        async with self._receiving[loan.file.rank]:
            if self._loans.get(path) is not loan:
                return
            del self._loans[path]
            try:
                await self._slots.accept(loan.file, loan.page)
            except SlotError as error:
                log.warning("what rank %d received as %s is not held: %s", loan.receiver, loan.pair, error)
            finally:
                loan.file.busy = False
                if loan.file.pair is None:
                    self._slots.discard(loan.file)
        self._view.notify()

    def _checked(self, receiver: int, page: bytes) -> SlotHeader:
        """Return the header in `page`.

        Raises:
            DaemonError: It is no capture of this generation that `receiver` receives for this host.
        """
        try:
            header = parse_header(page, MAX_SLOT_BYTES)
        except SlotError as error:
            raise DaemonError(f"a trainer announced to rank {receiver} what is no capture: {error}") from None
        round_ = self._view.round
        if round_ is None or (header.run_id, header.generation) != (self._run_id, round_.generation):
            raise DaemonError(
                f"a trainer announced generation {header.generation} of run {header.run_id!r}, "
                f"this is generation {self._view.generation} of {self._run_id!r}"
            )
        if header.rank not in routes(round_, receiver, self._view.replicas).receive_from:
            raise DaemonError(f"rank {receiver} does not receive replicas of rank {header.rank}")
        return header

    def _discard(self, *paths: str) -> None:
        for path in paths:
            self._slots.discard(self._loans.pop(path).file)
