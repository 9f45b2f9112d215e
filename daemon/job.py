"""One job's life on this host, from the launcher's `open_job` until it is closed or nobody came back for it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from resilient_run.ckpt.errors import CheckpointError, DaemonError, SlotError
from resilient_run.ckpt.format.pair import Pair, is_import, pair_value

from .base.spec import JobSpec
from .base.supervise import Supervisor, leaves
from .comparison.digests import HostDigests
from .coordination import Coordinator
from .etcd.client import Etcd, EtcdError
from .inject.acts import Scene
from .inject.inject import Injector
from .observer import Observer
from .peers.daemon_transport import Offer
from .peers.pacing import Pacer
from .peers.replication import Replicator
from .peers.sources import Sources
from .peers.tree import ReportTree
from .run import keys
from .run.leased import LeasedKeys
from .run.records import Agreement
from .run.rounds import Round
from .run.view import JobView
from .slots.slots import JobSlots, SlotFile
from .tier.fetch import TierSource
from .tier.persist import Persister
from .tier.tier import Tier, TierError, call
from .trainers.sessions import Sessions
from .trust.identity import Identity
from .trust.secure import SecureSocket

log = logging.getLogger(__name__)


class Job:
    """One job on this host.

    Args:
        spec: From the launcher.
        slots: What is held of the job.
        disks: Directories of this host that need room.

    Attributes:
        launcher_pid: The launcher that holds the job open, None while nobody does.
        orphaned_s: Monotonic time since when nobody does.
        failure: Why the job cannot go on, None while it can.
        sessions: The trainers.
        identity: Who this host is to its peers, None while the run's secret is not known.
    """

    def __init__(self, spec: JobSpec, slots: JobSlots, disks: Sequence[Path] = ()) -> None:
        self.spec = spec
        self.slots = slots
        slots.budget.limit(slots.key, spec.memory_limit_bytes)
        self.view = JobView(host=spec.host, replicas=spec.replicas, injection=spec.injection)
        self.launcher_pid: int | None = None
        self.orphaned_s = time.monotonic()
        self.failure: str | None = None
        self.identity: Identity | None = None
        self._agreement: Agreement | None = None
        self._notify_launcher: Callable[[dict[str, Any]], None] | None = None
        self._group = asyncio.TaskGroup()
        self._supervisor = supervisor = Supervisor(f"run {spec.run_id!r}")
        self._pacer = Pacer(spec.policy.replication, changed=self._every_changed)
        policy = spec.policy.persist
        self._tier: Tier | None = None
        self._persister: Persister | None = None
        tier_source: TierSource | None = None
        if policy.target is not None:
            self._tier = tier = Tier(policy.target, spec.run_id, level=policy.level, host=spec.host)
            self._persister = Persister(
                run_id=spec.run_id, policy=policy, tier=tier, view=self.view, slots=slots, supervisor=supervisor
            )
            tier_source = TierSource(tier, self.view, self._persister.refuse)
        self._sources = Sources(
            run_id=spec.run_id, view=self.view, slots=slots, tier=tier_source, identity=lambda: self.identity
        )
        self._replicator = Replicator(
            run_id=spec.run_id,
            view=self.view,
            slots=slots,
            pacer=self._pacer,
            in_flight=spec.policy.replication.in_flight,
            group=self._group,
            supervisor=supervisor,
            sources=self._sources,
            tier=tier_source,
            observe=lambda found: self._observer.update("replicas", found),
        )
        self._digests = HostDigests(self.view, slots, self._sources.peer)
        self._tree = ReportTree(view=self.view, slots=slots, claims=self._digests.claims, dial=self._sources.dial)
        self._protected_by: tuple[int, list[str]] = (0, [])
        self._commits = 0
        self._leased = leased = LeasedKeys(self.view)
        self._observer = Observer(
            policy=spec.policy,
            view=self.view,
            keys=leased,
            tmpfs=slots.directory,
            disks=disks,
            ask_peer=self._sources.ask,
            work=self._tree.work,
            supervisor=supervisor,
        )
        self._coordinator = Coordinator(
            run_id=spec.run_id,
            policy=spec.policy,
            digests=self._digests,
            observe=partial(self._observer.update, "corruption"),
            leased=leased,
            config=spec.etcd,
            address=spec.address,
            view=self.view,
            slots=slots,
            tree=self._tree,
            on_agreement=self._on_agreement,
            on_round=self._on_round,
            companions=({"inject": self._inject} if spec.injection else {})
            | ({} if self._persister is None else {"persist": self._persister.run}),
            persister=self._persister,
            supervisor=supervisor,
        )
        self.sessions = Sessions(
            spec=spec,
            view=self.view,
            slots=slots,
            replicator=self._replicator,
            pacer=self._pacer,
            failure=lambda: self.failure,
            event=self._event,
            hang=self._observer.hang,
        )

    async def run(self) -> None:
        """Live until cancelled.

        Raises:
            ExceptionGroup: What answers is no etcd, or a key that it depends on is damaged. What else fails in it is
                tried again.
        """
        try:
            await self._supervisor.keep("adopt", self.slots.adopt)
            async with self._group as group:
                keep = self._supervisor.keep
                group.create_task(keep("coordinate", self._coordinator.run, essential=True))
                group.create_task(keep("offer again", self._replicator.run))
                group.create_task(keep("follow watermark", self._follow_watermark))
                group.create_task(keep("observe", self._observer.run))
                group.create_task(keep("follow pace", self._follow_pace))
        finally:
            self._tree.close()
            await self._replicator.abort()
            await self._sources.close()

    def fail(self, error: BaseException) -> None:
        """Remember why `run` ended; whoever waits for the job hears it."""
        self.failure = f"job {self.spec.run_id!r} failed on host {self.spec.host}: {_cause(error)}"
        self.sessions.end()
        self.view.notify()

    def open(self, pid: int, notify: Callable[[dict[str, Any]], None]) -> None:
        """Let the launcher `pid` hold the job open and hear its events."""
        self.launcher_pid = pid
        self._notify_launcher = notify

    def release(self) -> None:
        """Begin to wait for a launcher to come back: the one that held the job open is gone."""
        self.launcher_pid = None
        self._notify_launcher = None
        self.orphaned_s = time.monotonic()
        self.slots.update_record(launcher_pid=None)

    # What the peer server needs.

    async def find(self, rank: int, pair: Pair) -> SlotFile | None:
        """Return the file that holds `pair` of `rank`, once the slots are verified."""
        await self.slots.adopt()
        return self.slots.find(rank, pair)

    def offered(self, host: str, offer: Offer) -> None:
        """Fetch what `host` offers, if it is ours to keep."""
        if self.failure is None:
            self._replicator.daemons.offered(host, offer)

    def digests(self, rank: int, pair: Pair, structure: str, wanted: Sequence[int]) -> dict[str, Any] | None:
        """Return the digests of a structure at `pair` of the own `rank` and the names of the `wanted`, None if gone."""
        return self._digests.answer(rank, pair, structure, wanted)

    def pacer(self, rank: int, pair: Pair) -> Pacer | None:
        """Return what says when `pair` of `rank` may leave, None when that is at once: only new captures are paced."""
        committed = self.view.committed
        new = pair[0] == self.view.generation and (committed is None or pair > committed)
        return self._pacer if self._pacer.is_on and new and rank in self.view.own_ranks else None

    async def reports(self, host: str, sock: SecureSocket) -> None:
        """Hear the reports of `host` on its link, until that ends."""
        await self._tree.serve(host, sock)

    # What the launcher asks.

    def status(self) -> dict[str, Any]:
        """Return the answer to `job_status`.

        Raises:
            DaemonError: The job has failed.
        """
        self._check()
        return {
            "attached": self.slots.record.attached,
            "watermark": pair_value(self.view.watermark),
            "last_steps": self.sessions.last_steps,
            "idle_s": self._observer.hang.idle_s(self.view.generation),
            **self.sessions.describe_failures(),
        }

    async def settle(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the newest capture that all own ranks hold is committed, up to `timeout_s`; return the watermark.

        Raises:
            DaemonError: The job has failed.
        """
        self._pacer.release()
        if self.slots.refresh(self.view.own_ranks):
            # A trainer died between the end of its capture and its word to us.
            self.view.notify()
            for rank in self.view.own_ranks:
                self._replicator.bring(rank)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.view.wait_for(lambda: self.failure is not None or self._settled())
        self._check()
        return {"watermark": pair_value(self.view.watermark)}

    async def persisted(self) -> dict[str, Any]:
        """Return the pairs that are published in the persistent tier, oldest first, and how many ranks made the newest.

        An import is before all others, and of no number of ranks.

        Raises:
            DaemonError: The storage does not answer, or what is left is an import that cannot be read.
        """
        if self._tier is None:
            return {"pairs": [], "world_size": None}
        world_size: int | None = None
        try:
            pairs = await call(self._tier, self._tier.published)
            while pairs:
                if is_import(pairs[-1]):
                    await call(self._tier, self._tier.check_whole, pairs[-1])
                    break
                try:
                    world_size = (await call(self._tier, self._tier.manifest, pairs[-1])).world_size
                    break
                except SlotError as error:
                    log.error("generation %d step %d cannot be restored: %s", *pairs.pop(), error)
        except (TierError, SlotError) as error:
            raise DaemonError(str(error)) from error
        return {"pairs": pairs, "world_size": world_size}

    # What the daemon asks before it ends.

    @property
    def persists(self) -> bool:
        """Tell whether the newest committed step is to be written to the persistent tier before the job is left."""
        return self._persister is not None and self.spec.policy.persist.grace_s > 0 and self.failure is None

    async def persist(self) -> None:
        """Write the newest committed step to the persistent tier, if it is not there, within the job's grace."""
        if self._persister is None or not self.persists:
            return
        grace_s = self.spec.policy.persist.grace_s
        try:
            async with asyncio.timeout(grace_s):
                await self._persister.finish()
        except TimeoutError:
            log.warning("run %r: its last step was not persisted within %.0f s", self.spec.run_id, grace_s)

    # What `resilientctl` asks.

    def describe(self) -> dict[str, Any]:
        """Return the job as `resilientctl status` shows it."""
        return {
            **describe_slots(self.slots),
            "launcher_pid": self.launcher_pid,
            "etcd": self.spec.etcd.where,
            "etcd_silent_s": self._etcd_silent_s,
            "etcd_answered_in_s": None if self._leased.lease is None else self._leased.lease.answered_in_s,
            "generation": self.view.generation,
            "hosts": [] if self.view.round is None else list(self.view.round.hosts),
            "world_size": 0 if self.view.round is None else self.view.round.world_size,
            "own_ranks": list(self.view.own_ranks),
            "holders": self._holders(self.view.own_ranks),
            "attached_ranks": self.sessions.ranks,
            "last_steps": self.sessions.last_steps,
            "watermark": pair_value(self.view.watermark),
            "commits": self._commits,
            "received_bytes": self.slots.received_bytes,
            "goodput": self.view.recoveries.describe(self._pacer.iteration_s),
            "replication": self._pacer.describe(),
            "protection": self.sessions.describe_protection(),
            "failure": self.failure,
            "observations": self._observer.describe(),
            "root": {
                "host": self.view.leader,
                "quarantines": {host: found.to_value() for host, found in self.view.quarantines.items()},
                "decisions": list(self.view.decisions),
            },
            "persist": None if self._persister is None else self._persister.describe(),
            "tasks": self._supervisor.describe(),
        }

    @property
    def _etcd_silent_s(self) -> float | None:
        """For how long etcd has not confirmed that this daemon lives, seconds; None before it ever did."""
        lease = self._leased.lease
        return None if lease is None else round(asyncio.get_running_loop().time() - lease.heard_s, 3)

    def _holders(self, ranks: Sequence[int]) -> list[str]:
        """Return the hosts that keep the replicas of any of these ranks, in the order of their own."""
        return list(dict.fromkeys(host for rank in ranks for host in self.view.holders(rank)))

    async def _on_agreement(self, agreement: Agreement) -> None:
        """Drop what another life of the run id left: its steps have nothing to do with this one's."""
        known, incarnation = self.slots.record.incarnation, agreement.incarnation
        if known is not None and known != incarnation:
            log.info("run %r starts over; removing the slots of its earlier life", self.spec.run_id)
            await self._replicator.abort()
            self.sessions.end()
            # Else a rank of its first generation, which may attach before the round is read, would seem to be late.
            self.view.round = None
            # Its generations are counted from 1 again.
            self.view.done = self.view.missed = None
            self._digests.clear()
            self._protected_by = (0, [])
            await self.slots.clear()
            self.slots.update_record(attached=False, generation=0, round_revision=0)
        self.slots.update_record(incarnation=incarnation)
        self.view.elastic = agreement.elastic_s is not None
        if agreement != self._agreement:
            secret = self.spec.run_key or agreement.token
            self.identity = Identity(secret, run_id=self.spec.run_id, incarnation=incarnation, host=self.spec.host)
            self._agreement = agreement
            self.view.notify()

    async def _on_round(self, round_: Round) -> None:
        """Make `round_` the current one: end its predecessor's trainers and fetches, clear dead slots, repair.

        Raises:
            DaemonError: It is no later generation than the last one. Steps of two that have one number would be mixed.
        """
        known = self.slots.record
        if round_.generation <= known.generation and round_.revision != known.round_revision:
            raise DaemonError(
                f"{keys.ROUND} in etcd is another generation {round_.generation}, and this host has seen generation "
                f"{known.generation} of the run: somebody has written there, or etcd lost data; choose another "
                "--rdzv-id"
            )
        self.slots.update_record(generation=round_.generation, round_revision=round_.revision)
        await self._replicator.abort()
        self.sessions.end(except_generation=round_.generation)
        self._pacer.reset()
        self.slots.clear_dead(round_)
        self.view.work = {}
        self.view.round = round_
        log.info(
            "generation %d: ranks %s of %d here, restores %s",
            round_.generation,
            list(self.view.own_ranks),
            round_.world_size,
            round_.restore,
        )
        self._replicator.repair()

    async def _inject(self, etcd: Etcd) -> None:
        """Carry out faults that were ordered on purpose, which this host's launcher allows."""
        scene = Scene(view=self.view, slots=self.slots, sessions=self.sessions, launcher_pid=lambda: self.launcher_pid)
        await Injector(run_id=self.spec.run_id, scene=scene).run(etcd)

    async def _follow_watermark(self) -> None:
        """Push to the trainers what is agreed, and let go of what nobody needs any more."""
        pushed = self.view.agreed
        while True:
            await self.view.wait_for(lambda: self.view.agreed != pushed)  # noqa: B023
            self._commits += self.view.agreed.committed != pushed.committed
            pushed = self.view.agreed
            self.sessions.notify({"op": "watermark", **pushed.to_value()})
            if pushed.committed is not None and pushed.committed[0] == self.view.generation:
                self._tell_first_commit(pushed.committed)
                self.slots.trim(self.view.kept_ranks, pushed)
            else:
                # Who holds what the round restores may still have to hand it over.
                self.slots.trim({*self.view.kept_ranks, *self.slots.held()}, pushed)
            self.view.notify()

    def _tell_first_commit(self, pair: Pair) -> None:
        """Let the launcher of rank 0 know, once for each generation and each change of the hosts, what protects it."""
        # A daemon that has just begun may not hold what was committed before.
        if 0 not in self.view.own_ranks or self.view.round is None or self.slots.find(0, pair) is None:
            return
        absent = self.view.left_out
        hosts = [host for host in (*self.view.round.hosts, *self.view.spares) if host not in absent]
        if self._protected_by != (pair[0], hosts):
            self._protected_by = pair[0], hosts
            replicas = len([host for host in self._holders([0]) if host not in absent])
            shown = {"hosts": hosts, "replicas": replicas, "every": self.view.every}
            shown["caveats"] = self.slots.budget.caveats(self.slots.key)
            self._event("first_commit", rank=0, step=pair[1], **shown)

    async def _follow_pace(self) -> None:
        """Send the trainers of how many steps one is to be captured, whenever the hosts agree on another number."""
        told = 1
        while True:
            await self.view.wait_for(lambda: self.view.every != told)  # noqa: B023
            told = self.view.every
            self.sessions.notify({"op": "pace", "every": told})

    def _every_changed(self) -> None:
        self.view.every_here = self._pacer.every

    def _settled(self) -> bool:
        if not self.slots.adopted or not self.view.knows(1):
            # A daemon that was just restarted does not know yet what it holds.
            return False
        held, own = self.slots.held(), self.view.own_ranks
        common = set.intersection(*(held.get(rank, set()) for rank in own)) if own else set()
        return not any(pair >= self.view.agreed.next for pair in common)

    def _event(self, event: str, **fields: Any) -> None:
        if self._notify_launcher is not None:
            message = {"monotonic_s": time.monotonic(), "source": None, "seconds": None, "step": None, **fields}
            self._notify_launcher(
                {
                    "op": "event",
                    "event": event,
                    "run_id": self.spec.run_id,
                    "generation": self.view.generation,
                    **message,
                }
            )

    def _check(self) -> None:
        if self.failure is not None:
            raise DaemonError(self.failure)


def describe_slots(slots: JobSlots) -> dict[str, Any]:
    """Return what is held of a job, whether it is open or not."""
    files = [file.describe() for file in slots.files()]
    return {
        "run_id": slots.record.run_id,
        "host": slots.record.host,
        "replicas": slots.record.replicas,
        "directory": str(slots.directory),
        "bytes": sum(file["bytes"] for file in files),
        "slots": files,
    }


def _cause(error: BaseException) -> str:
    """Return the first message of what really went wrong inside of exception groups."""
    leaf = next(leaves(error))
    known = isinstance(leaf, CheckpointError | EtcdError)
    return str(leaf) if known else f"{type(leaf).__name__}: {leaf} (see the daemon's log)"
