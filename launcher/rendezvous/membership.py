"""One launcher's place in a run: its leased member key, a mirror of the run's `rdzv/` keys, and the writes to them."""

import asyncio
import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import is_import
from resilient_run.daemon.base.fields import printable
from resilient_run.daemon.etcd.client import (
    Etcd,
    EtcdAuthError,
    EtcdConfig,
    EtcdError,
    EtcdLeaseLost,
    EtcdUnavailable,
    Lease,
)
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.commit import beside_newest
from resilient_run.daemon.run.life import Life, Transaction
from resilient_run.daemon.run.mirror import pair_of_entry, parse_pairs
from resilient_run.daemon.run.records import MAX_REASON_BYTES, Closed, Failure
from resilient_run.daemon.run.rounds import Member, Round, Seat

from .agreement import Terms, agree, look
from .patience import Impatience
from .rounds import View, broken, newcomers, rendezvous_mirror, unaware

log = logging.getLogger(__name__)

_T = TypeVar("_T", bound=int)

_POLL_S = 0.1
_RETRY_S = 0.5
_STAYS_CLOSED_S = 20.0
_RETURN_S = 5.0
"""How much longer than a lease's time to live a launcher may take to register again once etcd is back."""
_SIGN_S = 0.3
"""How long after a break a launcher says that it knows, if it is not ready yet."""
_SILENT_S = 1.0
"""For how long the others of an elastic run wait for that."""


class Membership:
    """Lives in one event loop. `view` is the newest state of the run; `on_change` is called in the loop after a change.

    A lost lease is replaced in the background. When a member of this launcher's round is lost, the first launcher
    that sees it breaks the generation for all. After an outage of etcd everybody's lease may have expired though nobody
    is lost: a launcher that was cut off itself keeps the absent members of its round in the view until they have had
    time to register again.

    An elastic run does not wait for the lease of a host that is lost, once its generation is broken: launchers that
    are not ready soon say that they know of the break, and those that do not are left out of the view.

    A call that does not go on trying raises `EtcdError` when etcd cannot be reached or refuses.
    """

    def __init__(self, etcd: Etcd, *, run_id: str, member: Member, on_change: Callable[[], None]) -> None:
        self._etcd = etcd
        self._run_id = run_id
        self._member = member
        self._key = keys.MEMBERS(member.host)
        self._on_change = on_change
        self._keys = rendezvous_mirror()
        self._view = View.of(self._keys)
        self._closing: Closed | None = None
        self._over: Closed | None = None
        self._ended: Life | None = None
        self._is_begun = False
        self._life: Life | None = None
        self._nobody_since_s = math.inf
        self._is_listed = False
        self._seat_revision = 0
        self._standbys: set[str] = set()
        self._lease_ttl_s = 0.0
        self._lease: Lease | None = None
        self._replaced_s = -math.inf
        self._looking_again: asyncio.Task[None] | None = None
        self._broken = 0, 0.0  # the generation, and when that was seen
        self._writing = asyncio.Lock()
        self._announced = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._insisting: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, config: EtcdConfig, *, run_id: str, member: Member, on_change: Callable[[], None]
    ) -> "Membership":
        """Connect to etcd and return once the mirror is there; the launcher is not a member yet."""
        membership = cls(
            await Etcd.connect(config, prefix=keys.prefix(run_id)), run_id=run_id, member=member, on_change=on_change
        )
        loaded = asyncio.Event()
        membership._start(membership._mirror(loaded), membership._tasks)
        await loaded.wait()
        return membership

    @property
    def view(self) -> View:
        """The newest state of the run."""
        return self._view

    @property
    def closed(self) -> Closed | None:
        """The end of the run that this launcher is or was a member of, None while it goes on.

        Until etcd has answered, it is what this launcher asked for.
        """
        return self.ended or self._closing or self._over

    @property
    def ended(self) -> Closed | None:
        """The end of the run as etcd has it: that of whoever was first. None while nobody knows."""
        return None if self._ended is None else self._ended.job.closed

    async def register(self, terms: Terms, host: str, addr: str, nproc: int, role: str, *, lease_ttl_s: float) -> None:
        """Become a member, ready for nothing yet.

        Waits for the end of an earlier run with this id to pass, and for the key of a launcher that was just killed to
        expire; one that was killed on this very host is replaced at once.

        Raises:
            RendezvousStateError: The run goes on with other terms, or has another live launcher with this host id.
            RendezvousClosedError: The run stays closed.
        """
        self._member = replace(self._member, host=host, addr=addr, nproc=nproc, role=role)
        self._key = keys.MEMBERS(host)
        self._lease_ttl_s = lease_ttl_s
        clock = asyncio.get_running_loop().time
        started_s = clock()
        while not await self._enter(terms, waited_s=clock() - started_s):
            await asyncio.sleep(_POLL_S)
        self._start(self._hold(), self._tasks)

    async def _enter(self, terms: Terms, *, waited_s: float) -> bool:
        """Tell whether this launcher is a member now; what may yet pass is in the way if not."""
        # Known before its terms are read: a run that becomes abandoned meanwhile is asked again.
        abandoned = self._abandoned
        try:
            life = await agree(self._etcd, self._run_id, terms, abandoned=abandoned)
            if life is not None and await self._write(life):
                self._life = life
                self._follow_life(self._view, life)
                return True
        except RendezvousStateError:
            # What is in the way may be a launcher that was just killed: its key expires.
            if waited_s > self._lease_ttl_s + 1 and (self._view.members or abandoned):
                raise
            return False
        if life is None and waited_s > _STAYS_CLOSED_S + self._lease_ttl_s:
            hosts = ", ".join(sorted(self._view.members)) or "other hosts"
            raise RendezvousClosedError(
                f"run {self._run_id!r} stays closed: wait until its launchers on {hosts} are gone"
            )
        return False

    @property
    def _abandoned(self) -> bool:
        """Whether nobody is in the run and comes back: an outage of etcd is no reason any more."""
        nobody_s = asyncio.get_running_loop().time() - self._nobody_since_s
        return not self._view.members and nobody_s > self._lease_ttl_s + _RETURN_S

    async def offer(self, ready: int) -> None:
        """Announce which generation this launcher could join, 0 for none.

        Raises:
            RendezvousStateError: Another launcher has taken this host id.
        """
        self._member = replace(self._member, ready=ready)
        assert self._life is not None, "it is registered"
        while not await self._write(self._life):
            if await self._is_over():
                return
            await asyncio.sleep(_POLL_S)

    async def form(self, view: View, members: tuple[Seat, ...]) -> bool:
        """Form the generation after that of `view`.

        Unless someone was first, whoever is left out gives a sign after all, or watermark, end or another run came.

        Raises:
            RendezvousStateError: The watermark, or what stays beside it, is not of its form.
        """
        key, older_key = keys.WATERMARK, keys.OLDER
        found = await self._etcd.list(key)
        watermark, older_entry = found.get(key), found.get(older_key)
        try:
            restore = pair_of_entry(watermark)
            key = older_key
            older = () if older_entry is None else parse_pairs(older_entry.value)
        except DaemonError as error:
            raise RendezvousStateError(f"etcd key {self._etcd.prefix}{key} is damaged ({error}); delete it") from error
        elastic = view.elastic_s is not None
        if restore is not None and not is_import(restore) and view.bound is None and view.round and not elastic:
            # Committed after `members` were chosen: they may be more or fewer ranks than can restore it.
            await self._create(keys.COMMITTED, {"world_size": view.round.world_size})
            return False
        formed = Round(generation=view.generation + 1, seats=members, restore=restore, made_by=view.made_by(restore))
        if restore is not None and view.job is not None and not formed.reshapes:
            # Only what was committed before it, and as much as this life has room for.
            before = [pair for pair in older if pair < restore]
            formed = replace(formed, older=beside_newest(before, view.job.keep))
        watermark_revision = 0 if watermark is None else watermark.revision
        # Only now is it certain who of the generation before is gone. A root that comes later can no longer see it.
        broke, why = view.failures.get(view.generation), None
        if broke is not None and view.round is not None:
            why = broke.explained(view.round.gone(view.members, formed))
        lost = None if why is broke else why
        return await self._commit(lambda life: life.form(formed, view.round, watermark_revision, lost, view.silent))

    async def publish_store(self, generation: int, addr: str, port: int) -> None:
        """Publish the address of the generation's store."""
        puts = {keys.STORES(generation): {"addr": addr, "port": port}}
        await self._commit(lambda life: Transaction(guards=life.guard, puts=puts))

    async def fail(self, failure: Failure) -> None:
        """Break its generation for everyone, unless it is broken or over; goes on trying while etcd is away."""
        await self._insist(partial(self._break, failure))

    async def done(self, generation: int) -> None:
        """Announce that all workers of this host succeeded; goes on trying while etcd is away."""
        await self._insist(partial(self._create, keys.DONE(generation, self._member.host), {}))

    async def tell_recovery(self, event: Mapping[str, Any]) -> None:
        """Show a recovery event of this host to everybody; goes on trying while etcd is away."""
        event = {**event, "cause": printable(event["cause"], MAX_REASON_BYTES)}
        await self._insist(partial(self._create, keys.RECOVERED(event["generation"], self._member.host), event))

    async def close(self, closed: Closed) -> None:
        """End the run for everyone, unless it has ended or goes on without this launcher; goes on trying likewise."""
        self._closing = closed
        await self._insist(partial(self._end, closed))

    async def leave(self) -> None:
        """Give up the membership and disconnect; the last one to leave a run that has ended removes its keys.

        After a failure with something committed, the job, the round and the `ckpt/` keys stay, so that the same run id
        can be started again and resumes from memory, with a generation number that was never used before.

        Raises:
            EtcdError: etcd cannot be reached: the member key expires, and keys of the run may stay.
        """
        try:
            if self._insisting:
                await asyncio.wait(self._insisting, timeout=_RETRY_S)
            await _cancel(self._tasks | self._insisting)
            if self._lease is not None:
                try:
                    if self._closing is not None and self.ended is None:
                        await self._end(self._closing)
                finally:
                    await self._lease.revoke()
                if self._ended is not None:
                    await self._etcd.commit(*self._ended.clear())
        finally:
            await self._etcd.close()

    async def _mirror(self, loaded: asyncio.Event) -> None:
        async with aclosing(self._etcd.changes(keys.RENDEZVOUS)) as states:
            async for changes in states:
                view = View.of(self._keys.apply(changes))
                if self._looking_again is not None:
                    self._looking_again.cancel()
                self._see(view)
                loaded.set()

    def _see(self, view: View) -> None:
        now_s = asyncio.get_running_loop().time()
        self._nobody_since_s = math.inf if view.members else min(self._nobody_since_s, now_s)
        was_listed, self._is_listed = self._is_listed, self._member.host in view.members
        if was_listed and not self._is_listed and self._lease is not None:
            self._lease.give_up()  # etcd lost what was put with it, and may know the lease still
        doubt_s = self._doubt_s()
        self._view = view.keeping(self._view) if doubt_s > 0 else view
        if self._view is not view:
            absent = ", ".join(sorted(self._view.members.keys() - view.members.keys()))
            log.warning("etcd was unavailable; giving %s %.1f s to register again", absent, doubt_s)
            self._looking_again = self._start(self._look_again(view, doubt_s), self._tasks)
        elif silent := unaware(view):
            self._heed_break(view, silent, in_doubt=doubt_s > 0)
        if self._life is not None:
            self._follow_life(view, self._life)
        if self._lease is not None:
            self._note_loss(self._view)
            self._note_standbys(self._view)
        self._on_change()

    async def _look_again(self, view: View, after_s: float) -> None:
        """Look at `view` again when this time has passed without news."""
        await asyncio.sleep(after_s)
        self._see(view)

    def _heed_break(self, view: View, silent: set[str], *, in_doubt: bool) -> None:
        """Show that this launcher knows of the break, and leave those out of the view that do not in time."""
        now_s, generation, own = asyncio.get_running_loop().time(), view.generation, self._member.host
        if self._broken[0] != generation:
            self._broken = generation, now_s
        broken_s = now_s - self._broken[1]
        if self._life is not None and own in silent and self._member.ready <= generation and broken_s >= _SIGN_S:
            self._member = replace(self._member, ready=generation)
            self._start(self._give_sign(self._life), self._tasks)
        if left_s := [at_s - broken_s for at_s in (_SIGN_S, _SILENT_S) if at_s > broken_s]:
            self._looking_again = self._start(self._look_again(view, left_s[0]), self._tasks)
        elif not in_doubt:
            gone = silent - {own}
            left_out = {keys.MEMBERS(host): self._keys.revisions[keys.MEMBERS(host)] for host in gone}
            kept = {host: member for host, member in view.members.items() if host not in gone}
            self._view = replace(view, members=kept, silent=left_out)

    async def _give_sign(self, life: Life) -> None:
        with suppress(EtcdError, RendezvousStateError):  # they will not see it
            await self._write(life)

    def _doubt_s(self) -> float:
        """Return for how long the absence of other launchers still says nothing, because etcd was away from here."""
        if self._lease is None:
            return 0.0
        patience_s = self._lease.ttl_s + _RETURN_S
        if self._lease.lost.is_set() or self._lease.silent:
            return patience_s
        back_s = max(self._replaced_s, self._lease.resumed_s)
        return max(0.0, back_s + patience_s - asyncio.get_running_loop().time())

    def _follow_life(self, view: View, ours: Life) -> None:
        """See in the mirror that our life is over, once it has shown that it began."""
        self._is_begun = self._is_begun or (view.life is not None and view.life.job.name == ours.job.name)
        if self._is_begun:
            self._note_end(view.life)

    def _note_end(self, now: Life | None) -> None:
        """Remember why our life is over, if it is: whoever comes next removes or replaces what says so."""
        if self._life is not None and now != self._life and self._over is None:
            self._over = self._life.why_over(now, forgotten=self._etcd.has_forgotten)
            self._ended = now if now is not None and self._over is now.job.closed else None
            self._on_change()

    async def _is_over(self) -> bool:
        """Ask etcd whether our life is over."""
        self._note_end(Life.of(await look(self._etcd)))
        return self._over is not None

    def _note_loss(self, view: View) -> None:
        """Break our generation for everyone when one of its members is lost."""
        if view.round is None or view.round.rank_of(self._member.host, self._member.session) is None:
            return
        self._seat_revision = view.round.revision
        if self.closed is not None or view.round.generation == self._announced:
            return
        failure = broken(view, view.round.generation)
        if failure is not None and view.round.generation not in view.failures:
            self._announced = view.round.generation
            log.warning("generation %d is broken: %s", view.round.generation, failure.message)
            self._start(self.fail(replace(failure, unix_s=time.time())), self._tasks)

    def _note_standbys(self, view: View) -> None:
        """Log, once for each host that would make the run larger, that it cannot."""
        if not self._seat_revision or view.job is None or view.round is None or view.bound is None:
            return
        free = replace(view, committed=None, round=replace(view.round, restore=None))
        standbys = set(newcomers(free, view.job.max_nodes, time.time()))
        if new := sorted(standbys - self._standbys):
            why = f"no number of ranks but {view.bound} can restore what is committed"
            log.warning("%s: %s waits as a standby", why, ", ".join(new))
        self._standbys |= standbys

    async def _write(self, life: Life) -> bool:
        """Set our member key in a life, with a new lease if need be, and tell whether it is set."""
        async with self._writing:
            entry = await self._etcd.get(self._key)
            if entry is not None:
                self._refuse_rival(Member.parse(entry.value, host=self._member.host, arrival=entry.created))
            if self._lease is None:
                self._lease = await self._etcd.lease(self._lease_ttl_s)
            elif self._lease.lost.is_set():
                self._lease = await self._etcd.lease(self._lease_ttl_s)
                self._replaced_s = asyncio.get_running_loop().time()
            guards = {**life.guard, self._key: 0 if entry is None else entry.revision}
            try:
                return await self._etcd.commit(guards, {self._key: self._member.to_value()}, lease=self._lease) > 0
            except EtcdLeaseLost:
                self._lease.give_up()
                return False

    def _refuse_rival(self, other: Member) -> None:
        if other.session == self._member.session:
            return
        same_host = other.session.partition(".")[0] == self._member.session.partition(".")[0]
        if same_host and not _alive(other.pid):
            return
        raise RendezvousStateError(
            f"run id {self._run_id!r} already has a live launcher on host {other.host} (pid {other.pid} at "
            f"{other.addr}): choose another --rdzv-id, or give each launcher its own RESILIENT_HOST_ID"
        )

    async def _hold(self) -> None:
        """Replace the lease whenever it is lost, until our life is over."""
        held = True
        while True:
            assert self._lease is not None
            assert self._life is not None
            if held:
                await self._lease.lost.wait()
            held = False
            try:
                if await self._is_over():
                    return
                if held := await self._write(self._life):
                    log.warning("host %s had lost its lease and has registered again", self._member.host)
                else:
                    await asyncio.sleep(_RETRY_S)
            except RendezvousStateError as error:
                log.error("%s", error)
                return
            except EtcdError as error:
                log.debug("not registered again yet: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _commit(self, made: Callable[[Life], Transaction]) -> bool:
        """Commit what `made` returns for our life, and tell whether its guards held."""
        return self._life is not None and await self._etcd.commit(*made(self._life)) > 0

    async def _insist(self, write: Callable[[], Awaitable[object]]) -> None:
        async def written() -> None:
            impatience = Impatience()
            while True:
                try:
                    await write()
                    return
                except (EtcdUnavailable, EtcdAuthError) as error:
                    impatience.tell("%s; going on when etcd accepts this launcher's reports", error)
                    await asyncio.sleep(_RETRY_S)

        # The caller may stop waiting; the write must not stop with it.
        await asyncio.shield(self._start(written(), self._insisting))

    async def _break(self, failure: Failure) -> None:
        round_ = self._view.round
        if round_ is not None and round_.generation == failure.generation:
            # Forming a later round removes it; nobody would remove it afterwards.
            name, revision = keys.FAILURES(failure.generation), round_.revision
            await self._commit(lambda life: life.create(name, failure.to_value(), revision))

    async def _create(self, name: str, value: Mapping[str, Any]) -> None:
        """Set a key that is not there."""
        await self._commit(lambda life: life.create(name, value))

    async def _end(self, closed: Closed) -> None:
        """End our life unless it has ended, or is in a round without this launcher, and look how it ended."""
        await self._commit(lambda life: life.end(closed, self._seat_revision or None))
        await self._is_over()

    def _start(self, coroutine: Any, tasks: "set[asyncio.Task[None]]") -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task


def new_session() -> str:
    """Return a unique name of this launcher that begins with the same words for all in this boot and PID namespace."""
    try:
        where = Path("/proc/sys/kernel/random/boot_id").read_text() + str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        where = secrets.token_hex(16)
    return f"{hashlib.sha256(where.encode()).hexdigest()[:12]}.{secrets.token_hex(8)}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _cancel(tasks: "set[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
