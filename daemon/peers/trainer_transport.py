"""The transport by trainers: which one sends to which, how long the daemons wait for it, and the slots lent for it."""

import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import SlotHeader, parse_header

from ..run.rounds import Round
from ..run.view import JobView
from ..slots.slots import MAX_SLOT_BYTES, Geometry, JobSlots, SlotFile

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


def routes(round_: Round, rank: int, replicas: int) -> dict[str, list[int]]:
    """Return whom the trainer of `rank` exchanges replicas with; each replica has one sender and one receiver.

    Returns:
        "send_to" → the ranks that receive its captures, one on each host that must hold them; "receive_from" → those
        whose captures it receives for its host.
    """
    home, *others = round_.holders(rank, replicas)
    kept = (owner for owner in round_.kept(home, replicas) if owner not in round_.ranks(home))
    return {
        "send_to": [receiver(round_, rank, host) for host in others],
        "receive_from": [owner for owner in kept if receiver(round_, owner, home) == rank],
    }


@dataclass(kw_only=True, slots=True, eq=False)
class _Sender:
    hosts: frozenset[str] = frozenset()
    pair: Pair | None = None
    since_s: float = 0.0
    stepped_s: float | None = None
    step_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loan:
    file: SlotFile
    pair: Pair
    receiver: int
    page: bytes


@dataclass(kw_only=True, slots=True, eq=False)
class TrainerTransport:
    """Leaves captures to the trainers of this host that are connected to others, and lends those slots to receive in.

    A trainer's word is not enough: its file is held once the daemon has verified every checksum against the header
    that was announced. A file that is taken away is unlinked, because its trainer may still write to it.

    Attributes:
        run_id: The job.
        view: What is known of the job.
        slots: What this host holds.
        spawn: Runs a named task that ends with the generation.
        now_s: The clock.
    """

    run_id: str
    view: JobView
    slots: JobSlots
    spawn: Callable[[str, Callable[[], Awaitable[None]]], None]
    now_s: Callable[[], float] = time.monotonic
    _senders: dict[int, _Sender] = field(default_factory=dict)
    _loans: dict[int, _Loan] = field(default_factory=dict)

    @property
    def reach(self) -> object:
        """Rank → hosts to which its trainer has connections."""
        return {rank: sender.hosts for rank, sender in self._senders.items() if sender.hosts}

    def bring(self, host: str, rank: int, file: SlotFile) -> bool:
        """Tell whether the capture in `file` is left to the trainer of `rank`: it is connected to `host`, and not late.

        Its time runs from the first call for this capture.
        """
        sender = self._senders.setdefault(rank, _Sender())
        if sender.pair != file.pair:
            sender.pair, sender.since_s = file.pair, self.now_s()
        if host not in sender.hosts:
            return False
        waited_s, patience_s = self.now_s() - sender.since_s, max(PATIENCE_S, PATIENCE_STEPS * sender.step_s)
        if waited_s > patience_s:
            late = "the trainer of rank %d has not brought %s to host %s in %.1f s (limit %.1f s)"
            log.debug(late, rank, file.pair, host, waited_s, patience_s)
        return waited_s <= patience_s

    def connected(self, rank: int, hosts: Collection[str]) -> None:
        """Note to which hosts the trainer of `rank` has connections now."""
        self._senders.setdefault(rank, _Sender()).hosts = frozenset(hosts)
        log.info("the trainer of rank %d brings its captures itself to hosts %s", rank, sorted(hosts))
        self.view.notify()

    def stepped(self, rank: int) -> None:
        """Note that the trainer of `rank` has made a step."""
        sender, now_s = self._senders.setdefault(rank, _Sender()), self.now_s()
        if sender.stepped_s is not None:
            sender.step_s = now_s - sender.stepped_s
        sender.stepped_s = now_s

    def detached(self, rank: int) -> None:
        """Expect nothing more of the trainer of `rank`, and take away what it was lent: it is gone."""
        self._senders.pop(rank, None)
        self.end(rank)
        self.view.notify()

    async def lend(self, receiver: int, page: bytes) -> dict[str, Any]:
        """Lend the trainer `receiver` a slot to write the capture in that `page` announces.

        Returns:
            "path" → of the slot; None when the capture is "held" already, or no slot is free yet (a commit may not be
            known here yet).

        Raises:
            DaemonError: It is no capture of this generation that this trainer receives for this host.
            MemoryBudgetError: There is no room for it.
        """
        header = self._checked(receiver, page)
        rank, pair = header.rank, header.pair
        geometry = Geometry(capacity_bytes=header.used_bytes, payload_offset=header.payload_offset)
        async with self.slots.receiving[rank]:
            self.supersede(rank)
            if self.slots.find(rank, pair) is not None:
                return {"path": None, "held": True}
            await self.slots.make_room(rank, geometry, view=self.view)
            file = await self.slots.place(rank, geometry, agreed=self.view.agreed)
            if file is None:
                return {"path": None, "held": False}
            if self.view.generation != pair[0]:
                self.slots.discard(file)
                raise DaemonError(f"generation {pair[0]} is over")
            self._loans[rank] = _Loan(file=file, pair=pair, receiver=receiver, page=page)
            return {"path": str(file.slot.path), "held": False}

    def received(self, receiver: int, path: str) -> None:
        """Verify what the trainer `receiver` has written to `path`, and hold it if every checksum is right."""
        if (loan := self._lent(receiver, path)) is not None:
            self.spawn("receive", partial(self._accept, loan))
        else:
            log.info("rank %d: %s was taken away before it was received", receiver, path)

    def dropped(self, receiver: int, path: str) -> None:
        """Take `path` back from the trainer `receiver`, which will not receive the rest."""
        if (loan := self._lent(receiver, path)) is not None:
            self.supersede(loan.file.rank)

    def supersede(self, rank: int) -> None:
        """Take away what is lent for replicas of `rank`: they come in another way, or newer ones come."""
        if (loan := self._loans.pop(rank, None)) is not None:
            self.slots.discard(loan.file)

    def end(self, receiver: int | None = None) -> None:
        """Take away everything that is lent, or only what is lent to the trainer `receiver`."""
        for rank, loan in list(self._loans.items()):
            if receiver in (None, loan.receiver):
                self.supersede(rank)

    async def _accept(self, loan: _Loan) -> None:
        rank = loan.file.rank
        async with self.slots.receiving[rank]:
            if self._loans.get(rank) is not loan:
                return
            del self._loans[rank]
            try:
                await self.slots.accept(loan.file, loan.page)
            except SlotError as error:
                log.warning("what rank %d received as %s is not held: %s", loan.receiver, loan.pair, error)
            finally:
                loan.file.busy = False
                if loan.file.pair is None:
                    self.slots.discard(loan.file)
        self.view.notify()

    def _lent(self, receiver: int, path: str) -> _Loan | None:
        loans = (loan for loan in self._loans.values() if str(loan.file.slot.path) == path)
        return next((loan for loan in loans if loan.receiver == receiver), None)

    def _checked(self, receiver: int, page: bytes) -> SlotHeader:
        """Return the header in `page`.

        Raises:
            DaemonError: It is no capture of this generation that `receiver` receives for this host.
        """
        try:
            header = parse_header(page, MAX_SLOT_BYTES)
        except SlotError as error:
            raise DaemonError(
                f"a trainer announced to rank {receiver} something that is not a capture: {error}"
            ) from None
        round_ = self.view.round
        if round_ is None or (header.run_id, header.generation) != (self.run_id, round_.generation):
            raise DaemonError(
                f"a trainer announced generation {header.generation} of run {header.run_id!r}, "
                f"this is generation {self.view.generation} of {self.run_id!r}"
            )
        if header.rank not in routes(round_, receiver, self.view.replicas)["receive_from"]:
            raise DaemonError(f"rank {receiver} does not receive replicas of rank {header.rank}")
        return header
