"""The trainers of one job on this host: who is attached in which generation, and what they report."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.idle import MAX_SPANS, IdleProfile
from resilient_run.ckpt.format.pair import Pair, pair_value
from resilient_run.ckpt.format.wire import MAX_EAGER_BYTES

from ..base.fields import Fields
from ..base.spec import JobSpec
from ..peers.pacing import Pacer
from ..peers.replication import Replicator
from ..peers.trainer_transport import routes
from ..run.commit import Missed, Unhealthy, joined_unhealthy
from ..run.hang import HangDetector
from ..run.rounds import Round
from ..run.view import JobView
from ..run.work import RankWork, is_due
from ..slots.memory import host_bytes
from ..slots.slots import Geometry, JobSlots, read_size
from .trainer import Event, Trainer

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 60.0
_MAX_TEXT_BYTES = 1 << 16
_MAX_EAGER = 64
"""So many objects that change behind captures are remembered."""
_MAX_UNHEALTHY = 1024


class Sessions:
    """Every attached trainer by rank, and what trainers of this job have announced.

    Args:
        spec: The job.
        view: What is known of it.
        slots: What this host holds of it.
        replicator: Restores and offers captures.
        pacer: Says when they leave.
        failure: Returns why the job cannot go on, None while it can.
        event: Tells the launcher of something.
        hang: Hears what every trainer does.

    Attributes:
        last_steps: The step that each rank completed or restored last, as it said.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        view: JobView,
        slots: JobSlots,
        replicator: Replicator,
        pacer: Pacer,
        failure: Callable[[], str | None],
        event: Event,
        hang: HangDetector,
    ) -> None:
        self.last_steps: dict[int, int] = {}
        self._refused: dict[int, tuple[int, str]] = {}
        self._raised: dict[int, tuple[int, str, int]] = {}
        self._spec = spec
        self._view = view
        self._slots = slots
        self._replicator = replicator
        self._pacer = pacer
        self._failure = failure
        self._event = event
        self._hang = hang
        self._trainers: dict[int, Trainer] = {}
        self._unprotected: tuple[int, int, str] | None = None
        self._missed_captures = 0
        self._eager: set[str] = set()

    @property
    def ranks(self) -> list[int]:
        """The ranks whose trainers are attached."""
        return sorted(self._trainers)

    def find(self, rank: int) -> Trainer | None:
        """Return the attached trainer of `rank`."""
        return self._trainers.get(rank)

    def end(self, *, except_generation: int | None = None) -> None:
        """Close the trainers' connections, except those of a generation."""
        for trainer in list(self._trainers.values()):
            if trainer.generation != except_generation:
                trainer.close()

    def notify(self, message: dict[str, Any]) -> None:
        """Send `message` to every attached trainer."""
        for trainer in self._trainers.values():
            trainer.notify(message)

    async def attach(
        self, fields: Fields, notify: Callable[[dict[str, Any]], None], close: Callable[[], None]
    ) -> tuple[Trainer, dict[str, Any]]:
        """Begin a trainer's session in its generation, once that is known here and its slots are known to fit.

        Raises:
            MemoryBudgetError: They do not.
            DaemonError: The generation is over, did not come within 60 s, or has no such rank here; or another process
                is attached as this rank.
        """
        attached_s = time.monotonic()
        rank, local_rank = fields.integer("rank"), fields.integer("local_rank")
        world_size, generation = fields.integer("world_size", low=1), fields.integer("generation", low=1)
        topology, pid = fields.integer("topology", high=2**64 - 1), fields.integer("pid", low=1)
        estimate_bytes = fields.integer("estimate_bytes")
        round_ = await self._round(rank, generation)
        own = self._view.own_ranks
        if rank not in own or own.index(rank) != local_rank or world_size != round_.world_size:
            raise DaemonError(
                f"rank {rank} (local {local_rank}) of {world_size} does not fit generation {generation}, which runs "
                f"ranks {list(own)} of {round_.world_size} on host {self._spec.host}"
            )
        previous = self._trainers.get(rank)
        if previous is not None and previous.generation == generation and previous.pid != pid:
            raise DaemonError(
                f"process {previous.pid} is attached as rank {rank}, and two would write the same slots (this one is "
                f"{pid}): make one Checkpointer for each worker, or let resilient-run start every process that trains "
                "(--nproc-per-node)"
            )
        self._reserve(estimate_bytes, len(round_.holders(rank, self._view.replicas)))
        if self._slots.refresh([rank]):
            self._view.notify()
        trainer = Trainer(
            rank=rank,
            generation=generation,
            topology=topology,
            pid=pid,
            state_bytes=estimate_bytes,
            view=self._view,
            slots=self._slots,
            replicator=self._replicator,
            pacer=self._pacer,
            notify=notify,
            close=close,
            event=self._event,
            hang=self._hang,
        )
        self._trainers[rank] = trainer
        if previous is not None:
            previous.close()
            self._replicator.trainers.detached(rank)
        self._hang.attached(rank, pid, generation)
        idle = self._pacer.attach(rank, topology)
        self._slots.update_record(attached=True)
        log.info("rank %d (pid %d) attached in generation %d", rank, pid, generation)
        self._event("attached", rank=rank, monotonic_s=attached_s)
        replication = self._spec.policy.replication
        return trainer, {
            "restore": pair_value(round_.restore),
            "made_by": round_.made_by,
            "reshapes": round_.reshapes and self._view.elastic,
            "unhealthy": self._unhealthy_steps(round_),
            **self._view.agreed.to_value(),
            "eager": sorted(self._eager),
            "routes": routes(round_, rank, self._view.replicas) if replication.transport == "trainer" else None,
            "replication": {
                **asdict(replication),
                "sub_buffers": replication.in_flight,
                "sub_buffer_bytes": replication.chunk_bytes,
                "copies": len(round_.holders(rank, self._view.replicas)) - 1,
                "every": self._view.every,
                "idle": None if idle is None else idle.to_message(),
            },
        }

    async def _round(self, rank: int, generation: int) -> Round:
        """Wait until the generation in which `rank` attaches is known here, and return its round."""
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                await self._view.wait_for(lambda: self._failure() is not None or self._view.knows(generation))
        except TimeoutError:
            raise DaemonError(
                f"rank {rank} attaches in generation {generation}, but after {ATTACH_TIMEOUT_S:.0f} s etcd still says "
                f"{self._view.generation}; is etcd at {self._spec.etcd.where} reachable from this host?"
            ) from None
        self._check()
        round_ = self._view.round
        if round_ is None or round_.generation != generation:
            raise DaemonError(f"rank {rank}: generation {generation} is over, {self._view.generation} has begun")
        return round_

    def _unhealthy_steps(self, round_: Round) -> list[int]:
        """Return the steps after what `round_` restores because of which earlier generations went back."""
        earlier = {pair.step for pair in self._view.unhealthy if pair.generation < round_.generation}
        return sorted(step for step in earlier if step > round_.began_step)

    async def handle(self, trainer: Trainer, op: str, fields: Fields) -> dict[str, Any]:
        """Return the answer to what an attached trainer asks, {} to what it tells.

        Raises:
            CheckpointError: The request is refused.
        """
        match op:
            case "allocate":
                size = read_size(fields, "capacity_bytes")
                return await trainer.allocate(
                    Geometry(capacity_bytes=size, payload_offset=fields.integer("payload_offset"))
                )
            case "restore":
                return await trainer.restore()
            case "read":
                return await trainer.read(fields)
            case "allocate_replica":
                return await trainer.allocate_replica(fields.binary("header"))
            case "received":
                self._replicator.trainers.received(trainer.rank, fields.text("path"))
            case "dropped":
                self._replicator.trainers.dropped(trainer.rank, fields.text("path"))
            case "connected":
                trainer.connected(fields.integers("ranks"))
            case "restored":
                step = fields.integer("step")
                self.last_steps[trainer.rank] = step
                trainer.restored(step, fields.number("seconds"))
            case "complete":
                trainer.complete(fields.text("path"), *fields.pair())
            case "eager":
                name = fields.text("name", high=MAX_EAGER_BYTES)
                if len(self._eager) < _MAX_EAGER:
                    self._eager.add(name)
            case "missed":
                self._missed(trainer, fields.integer("next"), fields.integer("step"), late=fields.flag("late"))
            case "protection":
                told = {"step": fields.integer("step"), "steps_at_risk": fields.integer("steps_at_risk")}
                self._protection(trainer, **told, reason=fields.optional_text("reason"))
            case "progress":
                unhealthy = "unhealthy" in fields.values and fields.flag("unhealthy")
                worked_s = fields.optional_number("worked_s")
                self._progress(trainer, fields.integer("step"), worked_s, unhealthy=unhealthy)
            case "refused":
                # It fails in a way that no restart cures.
                self._refused[trainer.rank] = trainer.generation, fields.text("message", high=_MAX_TEXT_BYTES)
            case "raised":
                self._raised[trainer.rank] = trainer.generation, fields.text("digest"), fields.integer("step")
            case _:
                self._show(trainer, op, fields)
        return {}

    def detach(self, trainer: Trainer) -> None:
        """End a trainer's session: its connection is gone."""
        if self._trainers.get(trainer.rank) is trainer:
            del self._trainers[trainer.rank]
            self._hang.detached(trainer.rank)
            self._replicator.trainers.detached(trainer.rank)
            self._replicator.reader.end(trainer.rank)
            self._pacer.detach(trainer.rank)

    def describe_failures(self) -> dict[str, Any]:
        """Return why a rank of this generation failed as no restart cures; digests of what ranks raised, and steps."""
        now = self._view.generation
        return {
            "refused": next((text for generation, text in self._refused.values() if generation == now), None),
            "raised": {
                rank: [digest, step] for rank, (generation, digest, step) in self._raised.items() if generation == now
            },
        }

    def describe_protection(self) -> dict[str, Any]:
        """Return what `resilientctl status` shows of how many steps a failure would cost now."""
        (generation, done), committed = self._view.done or (0, 0), self._view.committed
        at_risk = done - (0 if committed is None else committed[1]) if generation == self._view.generation else 0
        reason, most = "", 0
        if self._unprotected is not None and self._unprotected[0] == self._view.generation and self._trainers:
            _, most, reason = self._unprotected
        return {
            "protected": not reason,
            "steps_at_risk": max(at_risk, 0),
            "most_steps": most,
            "reason": reason,
            "missed_captures": self._missed_captures,
        }

    def _show(self, trainer: Trainer, op: str, fields: Fields) -> None:
        """Let a trainer's signs of life and of its network count, unless another process has become its rank."""
        rank = trainer.rank
        match op:
            case "pause":
                count = partial(self._hang.paused, rank, fields.optional_number("limit_s"))
            case "resume":
                count = partial(self._hang.resumed, rank)
            case "collectives":
                count = partial(self._hang.communicated, rank)
            case "schedule":
                profile = {
                    "iteration_s": fields.number("iteration_s", low=1e-6),
                    "collectives": fields.integer("collectives"),
                    "spans": fields.numbers("spans", count=2 * MAX_SPANS),
                }
                count = partial(self._pacer.profiled, rank, IdleProfile.from_message(profile))
            case "iteration":
                began = fields.integer("step"), fields.number("monotonic_s")
                count = partial(self._pacer.iteration, rank, *began, fields.optional_number("quiet_s") or 0.0)
            case "link":
                count = partial(self._pacer.measured, rank, fields.number("bytes_per_s", low=1.0, high=1e15))
            case _:
                raise DaemonError(f"field 'op' names nothing that a trainer asks or tells: {op!r}")
        if self._trainers.get(rank) is trainer:
            count()

    def _progress(self, trainer: Trainer, step: int, worked_s: float | None, *, unhealthy: bool) -> None:
        if unhealthy and step > trainer.step:
            self._note_unhealthy(Pair(trainer.generation, step), Unhealthy(trainer.step, trainer.rank))
        self.last_steps[trainer.rank] = step
        # The script has caught what was refused.
        self._refused.pop(trainer.rank, None)
        if self._trainers.get(trainer.rank) is trainer:
            self._hang.progressed(trainer.rank, step)
            now_s, known = time.monotonic(), self._view.work.get(trainer.rank)
            if worked_s is not None and is_due(known, step, now_s):
                point = RankWork(step, worked_s, now_s, trainer.state_bytes)
                self._view.work = {**self._view.work, trainer.rank: point}
        self._view.done = max(Pair(trainer.generation, step), self._view.done or Pair(0, 0))
        trainer.progress(step)

    def _note_unhealthy(self, pair: Pair, found: Unhealthy) -> None:
        """Let the root hear that a rank of this host calls a step unhealthy."""
        log.warning("rank %d calls step %d unhealthy: it is not committed", found.rank, pair.step)
        committed = self._view.committed or Pair(0, 0)
        known = {other: told for other, told in self._view.unhealthy_here.items() if other > committed}
        # The first ones count: with them the run goes back as soon as the root can see to it.
        if pair in known or len(known) < _MAX_UNHEALTHY:
            self._view.unhealthy_here = joined_unhealthy(known, {pair: found})

    def _missed(self, trainer: Trainer, next_: int, step: int, *, late: bool) -> None:
        """Let the root hear that `trainer`, at `step`, will never have captured the first step from `next_` on."""
        log.debug("rank %d has missed the capture from step %d on at step %d", trainer.rank, next_, step)
        self._missed_captures += 1
        self._view.miss(Missed(next=Pair(trainer.generation, next_), step=step, late=late))

    def _protection(self, trainer: Trainer, *, step: int, steps_at_risk: int, reason: str) -> None:
        """Note that commits do not keep up with training, and why; without a reason they do again."""
        self._unprotected = (trainer.generation, steps_at_risk, reason) if reason else None
        event = "unprotected" if reason else "protected"
        self._event(event, rank=trainer.rank, step=step, steps_at_risk=steps_at_risk, reason=reason)

    def _reserve(self, estimate_bytes: int, replicas: int) -> None:
        ranks, own, slots = len(self._view.kept_ranks), len(self._view.own_ranks), self._slots
        copies = slots.copied_ranks = 0 if self._spec.policy.persist.target is None else own

        def needed_bytes(keep: int) -> int:
            return host_bytes(estimate_bytes, kept_ranks=ranks, copied_ranks=copies, keep=keep)

        keep = slots.record.keep
        if self._view.committed is not None:
            # A state that has grown since the run began goes on with fewer older steps.
            keep = next((few for few in range(keep, 1, -1) if slots.budget.has_room(slots.key, needed_bytes(few))), 1)
        persisting = f", and {copies} copies while they are persisted" if copies else ""
        slots.budget.reserve(
            slots.key,
            needed_bytes=needed_bytes(keep),
            formula=f"{keep + 1} slots * {ranks} ranks held here * {estimate_bytes} bytes{persisting}; "
            f"{own} own rank{'s' * (own != 1)}, {replicas} replica{'s' * (replicas != 1)}",
        )

    def _check(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise DaemonError(failure)
