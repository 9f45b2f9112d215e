"""One job's conversation with etcd: follow the round, report what is held, stand for election as its root."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from operator import is_not
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from .base.fields import Fields
from .base.policy import Policy
from .base.supervise import Supervisor
from .comparison.digests import EqualLeaves, HostDigests
from .etcd.client import Entry, Etcd, EtcdConfig, EtcdError, EtcdUnavailable
from .peers.tree import ReportTree
from .root.election import Election
from .root.root import Root
from .run import keys
from .run.commit import HeldPair
from .run.leased import LeasedKeys
from .run.mirror import Mirror, host_name, of, pair_of_entry, parse_pairs
from .run.observation import Observation
from .run.records import Agreement, Introduction
from .run.report import Said
from .run.rounds import Round
from .run.view import JobView
from .slots.slots import JobSlots
from .tier.persist import Persister

log = logging.getLogger(__name__)

_RETRY_S = 0.5
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
        tree: Where reports of steps go, and what the root says comes from.
        on_agreement: Awaited with what the launchers agree on, before anything of that incarnation is seen.
        on_round: Awaited with each new round; it makes the round the current one.
        companions: Name → what runs with our connection to etcd beside our own tasks, until cancelled.
        persister: Writes committed pairs to the persistent tier, None without one.
        supervisor: Of the job's tasks.
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
        tree: ReportTree,
        on_agreement: Callable[[Agreement], Awaitable[None]],
        on_round: Callable[[Round], Awaitable[None]],
        persister: Persister | None,
        supervisor: Supervisor,
        companions: Mapping[str, Callable[[Etcd], Coroutine[Any, Any, None]]],
    ) -> None:
        self._run_id = run_id
        self._policy = policy
        self._digests = digests
        self._observe = observe
        self._leased = leased
        self._config = config
        self._address = address
        self._view = view
        self._slots = slots
        self._tree = tree
        self._on_agreement = on_agreement
        self._on_round = on_round
        self._companions = companions
        self._persister = persister
        self._supervisor = supervisor
        self._loaded = False
        self._known: set[str] = set()
        self._mirror = Mirror(
            {keys.LEADER: lambda entry: Fields(entry.value, keys.LEADER).text("host")},
            {
                keys.HOSTS: (host_name, of(Introduction)),
                keys.EQUAL: (str, lambda _, entry: EqualLeaves.parse(entry.value)),
                keys.RECOVERED: (str, lambda name, entry: view.recoveries.see(keys.RECOVERED(name), entry.value)),
            },
        )

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            EtcdError: What answers is no etcd, or refuses the credentials.
            DaemonError: A key that everything depends on does not hold what it should.
        """
        etcd = await self._connect()
        try:
            async with asyncio.TaskGroup() as group:
                election = Election(etcd, self._view, self._leased)
                tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
                    "follow etcd": partial(self._follow, etcd),
                    "follow rounds": self._rounds,
                    "follow commits": partial(self._commits, etcd),
                    "introduce": self._introduce,
                    "report what is restored": self._inventory,
                    "leased keys": partial(self._leased.run, etcd),
                    "election": election.run,
                    "report": self._tree.run,
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
                return await Etcd.connect(self._config, prefix=keys.prefix(self._run_id))
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
        finally:
            await etcd.close()

    async def _follow(self, etcd: Etcd) -> None:
        """Follow what concerns every host."""
        # What vanished while this did not run, or when it failed, counts as gone as well.
        gone: dict[str, Entry | None] = dict.fromkeys(self._known)
        async with aclosing(etcd.changes(before=keys.STATE)) as states:
            async for changed in states:
                changes = {**gone, **changed}
                gone = {}
                self._known |= changes.keys()
                self._mirror.apply(changes)
                self._see(changes)
                self._known -= {key for key, entry in changes.items() if entry is None}

    def _see(self, changes: Mapping[str, Entry | None]) -> None:
        """Show what has changed; the tasks for rounds and commits take theirs from the mirror."""
        view, mirror = self._view, self._mirror
        seen = {keys.split(key)[0] for key in changes}
        if keys.HOSTS in seen:
            self._note_hosts([key.removeprefix(keys.HOSTS()) for key in changes if key.startswith(keys.HOSTS())])
        if keys.MEMBERS in seen:
            members = mirror.folders[keys.MEMBERS].items()
            view.arrivals = {host: member.arrival for host, member in members if member.ready}
        if keys.QUARANTINES in seen:
            view.quarantines = dict(mirror.folders[keys.QUARANTINES])
        if keys.UNHEALTHY in seen:
            view.unhealthy = frozenset(mirror.get(keys.UNHEALTHY, ()))
        if keys.DECISIONS in seen:
            view.decisions = mirror.get(keys.DECISIONS, ())
        if keys.DONE in seen:
            self._note_done()
        if keys.LEADER in seen or not self._loaded:
            view.leader_revision, view.leader = mirror.revisions.get(keys.LEADER, 0), mirror.get(keys.LEADER)
        self._digests.equal = mirror.folders[keys.EQUAL]
        self._loaded = True
        view.notify()

    def _note_hosts(self, changed: Sequence[str]) -> None:
        view = self._view
        addresses, every, signs = dict(view.addresses), dict(view.every_elsewhere), dict(view.signs)
        for host in changed:
            if host == view.host:
                if keys.HOSTS(host) not in self._mirror.revisions and self._leased.lease is not None:
                    self._leased.lease.give_up()  # etcd lost what was put with it, and may know the lease still
                continue
            for known in (addresses, every, signs):
                known.pop(host, None)
            if (introduced := self._mirror.folders[keys.HOSTS].get(host)) is not None:
                addresses[host] = introduced.addr, introduced.port
                every[host], signs[host] = introduced.every, introduced.sign
        view.addresses, view.every_elsewhere, view.signs = addresses, every, signs

    def _note_done(self) -> None:
        generation = self._view.generation
        self._view.finishing = any(done == generation for done, _ in self._mirror.folders[keys.DONE])

    async def _rounds(self) -> None:
        """Make the newest round the current one.

        Raises:
            DaemonError: The job or the round is damaged.
        """
        mirror, view = self._mirror, self._view
        last: list[Any] | None = None

        def said() -> list[Any]:
            return [mirror.ignored.get(name) or mirror.get(name) for name in (keys.JOB, keys.ROUND)]

        while True:
            await view.wait_for(lambda: self._loaded and (last is None or any(map(is_not, last, said()))))  # noqa: B023
            if damaged := [mirror.ignored[name] for name in (keys.JOB, keys.ROUND) if name in mirror.ignored]:
                raise DaemonError(damaged[0])
            job, round_ = last = said()
            if job is None:
                continue
            await self._on_agreement(job)
            if round_ is not None and (view.round is None or view.round.revision != round_.revision):
                await self._on_round(round_)
            self._note_done()

    async def _commits(self, etcd: Etcd) -> None:
        """Show what the root says is committed, once what must be persisted is copied: at first what etcd has."""
        said = await self._committed(etcd)
        while True:
            if self._persister is not None:
                await self._persister.see(said.persist)
            self._view.watermark, self._view.watermark_revision = said.watermark, said.watermark_revision
            self._view.next, self._view.older = said.next, said.older
            await self._view.wait_for(lambda: self._tree.said not in (None, said))  # noqa: B023
            said = self._tree.said or said

    async def _committed(self, etcd: Etcd) -> Said:
        """Return what etcd has of commits.

        Raises:
            DaemonError: It is damaged.
        """
        while True:
            try:
                # In one answer: with what is next, but without what was committed with it, a slot could be given up.
                said = await etcd.list(keys.WATERMARK)
                break
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)
        watermark, persist = said.get(keys.WATERMARK), said.get(keys.PERSIST)
        return Said(
            term=(0, 0),
            number=0,
            watermark=pair_of_entry(watermark, keys.WATERMARK),
            watermark_revision=0 if watermark is None else watermark.revision,
            next=pair_of_entry(said.get(keys.NEXT), keys.NEXT),
            older=() if (older := said.get(keys.OLDER)) is None else parse_pairs(older.value, keys.OLDER),
            persist=None if persist is None else persist.value,
        )

    async def _introduce(self) -> None:
        """Let the others know of this host."""
        view, (addr, port) = self._view, self._address
        while True:
            every, sign = view.every_here, view.sign_here
            said = Introduction(addr=addr, port=port, every=every, sign=sign, injection=view.injection)
            self._leased.set(keys.HOSTS(view.host), said.to_value())
            await view.wait_for(lambda: (view.every_here, view.sign_here) != (every, sign))  # noqa: B023

    async def _inventory(self) -> None:
        """Let the root know what this host holds of what the round restores, until something newer is committed."""
        view = self._view
        await self._slots.adopt()

        def held() -> HeldPair | None:
            restore = None if view.round is None else view.round.restore
            return None if restore is None or view.committed != restore else HeldPair.of(self._slots.held(), restore)

        said: HeldPair | None = None
        while True:
            await view.wait_for(lambda: held() not in (None, said))  # noqa: B023
            said = held()
            self._leased.set(keys.HELD(view.host), None if said is None else said.to_value())

    async def _lead(self, etcd: Etcd, requests: asyncio.TaskGroup) -> None:
        """Be the root whenever this host is elected; `requests` runs what outlives that."""
        while True:
            await self._view.wait_for(lambda: self._view.is_root)
            agent = Root(
                self._run_id,
                etcd,
                view=self._view,
                tree=self._tree,
                policy=self._policy,
                digests=self._digests,
                observe=self._observe,
                group=requests,
                supervisor=self._supervisor,
                also_commit=None if self._persister is None else self._persister.requested_with,
                made_by=None if self._persister is None else self._persister.made_by,
            )
            async with asyncio.TaskGroup() as group:
                task = group.create_task(agent.run())
                await self._view.wait_for(lambda: not self._view.is_root)
                task.cancel()
