"""One job's conversation with etcd: follow the round, report what is held, stand for election as its root."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from resilient_run.ckpt.errors import DaemonError

from .base.fields import Fields
from .base.policy import Policy
from .base.supervise import Supervisor
from .comparison.digests import EqualLeaves, HostDigests
from .etcd.client import Entry, Etcd, EtcdConfig, EtcdError, EtcdLeaseLost, EtcdUnavailable, Lease, update
from .root.election import Election
from .root.operator import make_operator
from .root.root import Root
from .run import keys
from .run.commit import report_held
from .run.leased import LeasedKeys
from .run.observation import Observation
from .run.quarantine import Quarantine
from .run.records import Agreement, Introduction, parse_decisions
from .run.rounds import Round
from .run.view import JobView
from .slots.slots import JobSlots
from .tier.persist import Persister

log = logging.getLogger(__name__)

_RENDEZVOUS = (keys.JOB, keys.ROUND, keys.QUARANTINES(), keys.DONE())
_LEASE_TTL_S = 5.0
_RETRY_S = 0.5
_T = TypeVar("_T")
_GOODBYE_S = 1.0


class Coordinator:
    """Keeps a `JobView` up to date and etcd informed, for as long as `run` runs.

    Training, captures and fetches go on while etcd is away; nothing is committed until it is back. Its tasks fail and
    run again apart from each other.

    Args:
        run_id: The job.
        policy: How the root answers failures.
        digests: By which ranks are compared.
        observe: Takes in what way they differ, on the root.
        leased: Keys of this job that live as long as the daemon's lease, which is made here.
        config: How to reach etcd.
        address: Where peers reach this host's daemon.
        view: Written from what etcd says.
        slots: What this host holds.
        on_agreement: Awaited with what the launchers agree on, before anything of that incarnation is seen.
        on_round: Awaited with each new round; it makes the round the current one.
        companions: Name → what runs with our connection to etcd beside our own tasks, until cancelled.
        persister: Writes committed pairs to the persistent tier, None without one.
        supervisor: Of the job's tasks.

    Attributes:
        discard: Set when this host gives its replicas up, so that etcd forgets them too at the end.
    """

    def __init__(
        self,
        *,
        run_id: str,
        policy: Policy,
        digests: HostDigests,
        observe: Callable[[Mapping[str, Observation]], None],
        leased: LeasedKeys,
        config: EtcdConfig,
        address: tuple[str, int],
        view: JobView,
        slots: JobSlots,
        on_agreement: Callable[[Agreement], Awaitable[None]],
        on_round: Callable[[Round], Awaitable[None]],
        persister: Persister | None,
        supervisor: Supervisor,
        companions: Mapping[str, Callable[[Etcd], Coroutine[Any, Any, None]]],
    ) -> None:
        self.discard = False
        self._run_id = run_id
        self._policy = policy
        self._digests = digests
        self._observe = observe
        self._leased = leased
        self._prefix = keys.prefix(run_id)
        self._config = config
        self._address = address
        self._view = view
        self._slots = slots
        self._on_agreement = on_agreement
        self._on_round = on_round
        self._companions = companions
        self._persister = persister
        self._supervisor = supervisor
        self._known: dict[str, set[str]] = {}
        self._reported: dict[str, Any] | None = None
        self._reported_revision: int | None = None
        self._entries: dict[str, Entry] = {}

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            EtcdError: What answers is no etcd, or refuses the credentials.
            DaemonError: A key that everything depends on does not hold what it should.
        """
        etcd = await self._connect()
        try:
            async with asyncio.TaskGroup() as group:
                election = Election(etcd, self._prefix, self._view, self._leased)
                tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
                    "follow rounds": partial(self._follow, etcd, keys.RENDEZVOUS, self._rendezvous),
                    "follow commits": partial(self._follow, etcd, keys.WATERMARK, self._watermark),
                    "follow hosts": partial(self._follow, etcd, keys.HOSTS(), self._hosts),
                    "follow comparison": partial(self._follow, etcd, keys.EQUAL(), self._equal),
                    "register": partial(self._register, etcd),
                    "report": partial(self._report, etcd),
                    "leased keys": partial(self._leased.run, etcd),
                    "follow root": partial(self._follow, etcd, keys.ROOT, self._root),
                    "election": election.run,
                    "lead": partial(self._lead, etcd, group),
                    **{name: partial(companion, etcd) for name, companion in self._companions.items()},
                }
                for name, work in tasks.items():
                    group.create_task(self._supervisor.keep(name, work, essential=True))
        finally:
            await self._leave(etcd)

    async def _connect(self) -> Etcd:
        warned = False
        while True:
            try:
                return await Etcd.connect(self._config)
            except EtcdUnavailable as error:
                if not warned:
                    log.warning("%s; trying again until it answers", error)
                    warned = True
                await asyncio.sleep(_RETRY_S)

    async def _leave(self, etcd: Etcd) -> None:
        """Take back what only makes sense while this daemon serves the job; whatever fails here expires by itself."""
        try:
            with contextlib.suppress(EtcdError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    if self._leased.lease is not None:
                        await self._leased.lease.revoke()
                    if self.discard:
                        await etcd.delete(self._held_key)
        finally:
            await etcd.close()

    async def _follow(
        self, etcd: Etcd, name: str, see: Callable[[Mapping[str, Entry | None]], Awaitable[None]]
    ) -> None:
        # What vanished while this did not run counts as gone as well.
        known = self._known.setdefault(name, set())
        gone = set(known)
        async with aclosing(etcd.changes(self._prefix + name)) as states:
            async for changed in states:
                changes = {key.removeprefix(self._prefix): entry for key, entry in changed.items()}
                changes, gone = {**dict.fromkeys(gone - changes.keys()), **changes}, set()
                known |= changes.keys()
                await see(changes)
                known -= {key for key, entry in changes.items() if entry is None}

    async def _rendezvous(self, changes: Mapping[str, Entry | None]) -> None:
        for key, entry in changes.items():
            if key.startswith(keys.RECOVERED()):
                _known(entry, key, partial(self._view.recoveries.see, key))
        self._waiting(changes)
        # Every generation brings news of every launcher, which is only for the launchers and the root.
        changes = {key: entry for key, entry in changes.items() if key.startswith(_RENDEZVOUS)}
        entries = self._entries
        update(entries, changes)
        entry, found = entries.get(keys.JOB), entries.get(keys.ROUND)
        if entry is None or not changes:
            return
        job = Agreement.parse(entry.value)
        await self._on_agreement(job)
        self._view.quarantines = _quarantines(entries)
        if found is not None and (self._view.round is None or self._view.round.revision != found.revision):
            await self._on_round(Round.parse(found.value, found.revision))
        done = keys.DONE(self._view.generation, "")
        self._view.finishing = any(name.startswith(done) for name in entries)

    def _waiting(self, changes: Mapping[str, Entry | None]) -> None:
        arrivals = dict(self._view.arrivals)
        for key, entry in changes.items():
            if key.startswith(keys.MEMBERS()):
                host = key.removeprefix(keys.MEMBERS())
                arrivals.pop(host, None)
                ready = _known(entry, key, lambda value: Fields(value, keys.MEMBERS).integer("ready"))
                if entry is not None and ready:
                    arrivals[host] = entry.created
        if arrivals != self._view.arrivals:
            self._view.arrivals = arrivals

    async def _watermark(self, changes: Mapping[str, Entry | None]) -> None:
        update(self._entries, changes)
        entry, following = self._entries.get(keys.WATERMARK), self._entries.get(keys.NEXT)
        pair = None if entry is None else Fields(entry.value, keys.WATERMARK).pair()
        next_ = None if following is None else Fields(following.value, keys.NEXT).pair()
        if self._persister is not None:
            await self._persister.see(self._entries.get(keys.PERSIST))
        self._view.watermark, self._view.watermark_revision = pair, 0 if entry is None else entry.revision
        self._view.next = next_

    async def _hosts(self, changes: Mapping[str, Entry | None]) -> None:
        addresses, every, signs = dict(self._view.addresses), dict(self._view.every_elsewhere), dict(self._view.signs)
        for key, entry in changes.items():
            host = key.removeprefix(keys.HOSTS())
            if host == self._view.host:
                if entry is None and self._leased.lease is not None:
                    self._leased.lease.give_up()  # etcd lost what was put with it, and may know the lease still
                continue
            for known in (addresses, every, signs):
                known.pop(host, None)
            if (introduced := _known(entry, key, Introduction.parse)) is not None:
                addresses[host] = introduced.address
                every[host], signs[host] = introduced.every, introduced.sign
        self._view.addresses, self._view.every_elsewhere, self._view.signs = addresses, every, signs

    async def _equal(self, changes: Mapping[str, Entry | None]) -> None:
        equal = self._digests.equal = self._digests.equal or {}
        for key, entry in changes.items():
            structure = key.removeprefix(keys.EQUAL())
            equal.pop(structure, None)
            if (leaves := _known(entry, key, partial(EqualLeaves.parse, key))) is not None:
                equal[structure] = leaves
        self._view.notify()

    async def _root(self, changes: Mapping[str, Entry | None]) -> None:
        update(self._entries, changes)
        leader, decisions = self._entries.get(keys.LEADER), self._entries.get(keys.DECISIONS)
        self._view.leader_revision = 0 if leader is None else leader.revision
        self._view.leader = _known(leader, keys.LEADER, lambda value: Fields(value, keys.LEADER).text("host"))
        self._view.decisions = _known(decisions, keys.DECISIONS, parse_decisions) or ()

    async def _register(self, etcd: Etcd) -> None:
        """Keep this host registered; a new lease also means that etcd may have forgotten our report."""
        lease: Lease | None = None
        while True:
            try:
                if lease is None or lease.lost.is_set():
                    self._leased.lease = lease = await etcd.lease(_LEASE_TTL_S)
                    self._reported = self._reported_revision = None
                await self._introduce(etcd, lease)
            except EtcdLeaseLost:
                lease = None
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)

    async def _introduce(self, etcd: Etcd, lease: Lease) -> None:
        """Write what the others must know of this host, and return when that is another thing or the lease is lost."""
        (addr, port), every, sign = self._address, self._view.every_here, self._view.sign_here
        value = {"addr": addr, "port": port, "every": every, "sign": sign, "injection": self._view.injection}
        await etcd.put(self._prefix + keys.HOSTS(self._view.host), value, lease=lease)
        lost = asyncio.ensure_future(lease.lost.wait())
        other = asyncio.ensure_future(
            self._view.wait_for(lambda: (self._view.every_here, self._view.sign_here) != (every, sign))
        )
        try:
            await asyncio.wait([lost, other], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            other.cancel()

    async def _report(self, etcd: Etcd) -> None:
        """Keep this host's report equal to what is held; at most one put is under way and the newest state wins."""
        await self._slots.adopt()
        outage = False
        while True:
            await self._view.wait_for(lambda: self._report_due() is not None)
            try:
                if (report := self._report_due()) is not None:
                    await self._tell(etcd, report)
            except EtcdUnavailable as error:
                if not outage:
                    log.warning("%s; commits pause until etcd is back", error)
                outage = True
                await asyncio.sleep(_RETRY_S)
                continue
            if outage:
                log.info("etcd is back; commits go on")
            outage = False

    async def _tell(self, etcd: Etcd, report: dict[str, Any]) -> None:
        """Write what is held.

        It replaces the report that was seen last and no other: an older one that got no answer may be on its way
        still, and must not come after this one.
        """
        seen, self._reported, self._reported_revision = self._reported_revision, None, None
        if seen is None:
            seen = await etcd.revision(self._held_key)
        written = await etcd.commit({self._held_key: seen}, {self._held_key: report})
        if written:
            self._reported, self._reported_revision = report, written

    def _held(self) -> dict[str, Any]:
        return report_held(self._slots.held(), self._digests.report())

    def _report_due(self) -> dict[str, Any] | None:
        report = self._held()
        return None if report == self._reported else report

    async def _lead(self, etcd: Etcd, requests: asyncio.TaskGroup) -> None:
        """Be the root whenever this host is elected; `requests` runs what outlives that."""
        while True:
            await self._view.wait_for(lambda: self._view.is_root)
            agent = Root(
                self._run_id,
                etcd,
                view=self._view,
                slots=self._slots,
                policy=self._policy.root,
                corruption=self._policy.detect.corruption,
                digests=self._digests,
                observe=self._observe,
                operator=make_operator(self._policy.root),
                group=requests,
                supervisor=self._supervisor,
                also_commit=None if self._persister is None else self._persister.requested_with,
            )
            async with asyncio.TaskGroup() as group:
                task = group.create_task(agent.run())
                await self._view.wait_for(lambda: not self._view.is_root)
                task.cancel()

    @property
    def _held_key(self) -> str:
        return self._prefix + keys.HELD(self._view.host)


def _quarantines(entries: Mapping[str, Entry]) -> dict[str, Quarantine]:
    folder = keys.QUARANTINES()
    found = {
        key.removeprefix(folder): _known(entry, key, Quarantine.parse)
        for key, entry in entries.items()
        if key.startswith(folder)
    }
    return {host: quarantine for host, quarantine in found.items() if quarantine is not None}


def _known(entry: Entry | None, key: str, parse: Callable[[dict[str, Any]], _T]) -> _T | None:
    """Return what `parse` makes of a value; None if there is none or it is damaged, which is logged."""
    try:
        return None if entry is None else parse(entry.value)
    except DaemonError as error:
        log.error("%s counts as nothing: %s", key, error)
        return None
