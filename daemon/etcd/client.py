"""The launcher's and daemon's view of etcd: JSON objects under keys, transactions, leases, a mirror of a prefix."""

import asyncio
import json
import logging
import math
import random
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import WireError
from resilient_run.ckpt.format import wire

from .config import RUNS, EtcdConfig
from .rpc import Endpoint, EtcdAuthError, EtcdConnection, EtcdError, EtcdLeaseLost, EtcdUnavailable, grpc, rpc

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 2.0)
# What a member had forwarded to a leader that died is lost, and nobody says so; electing the next takes about 1 s.
_REQUEST_S = 2.0
# What has not even spoken the protocol by then is not etcd, or not there; electing a leader may take it longer.
_ABSENT_S = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key's value, which nobody changes, with the revisions of its last change and of its creation."""

    value: dict[str, Any]
    revision: int
    created: int = 0


def update(entries: dict[str, Entry], changed: Mapping[str, Entry | None]) -> None:
    """Bring `entries` up to date with what `Etcd.changes` yields."""
    for key, entry in changed.items():
        entries.pop(key, None)
        if entry is not None:
            entries[key] = entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What one member says of itself.

    Attributes:
        version: As "3.5.9".
        revision: Of the last change.
        used_bytes: What the values take, with all changes that it remembers.
        is_full: Whether it takes no more, also after space was made, until the alarm is disarmed.
    """

    version: str
    revision: int
    used_bytes: int
    is_full: bool


class Lease:
    """A lease that is kept alive until it is revoked or lost; keys put with it vanish with it."""

    def __init__(self, *, etcd: "Etcd", lease_id: int, ttl_s: int) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        """Set when etcd says that the lease or what was put with it is gone, or when nobody refreshes it any more."""
        self.heard_s = asyncio.get_running_loop().time()
        """When etcd confirmed the lease last, on the event loop's clock."""
        self.resumed_s = -math.inf
        """When it last did so after a silence in which leases may have expired."""
        self.answered_in_s: float | None = None
        """How long it took to do so last."""
        self._etcd = etcd
        self._keeper: asyncio.Task[None] | None = None

    @property
    def silent(self) -> bool:
        """Tell whether etcd did not confirm the lease when it should have."""
        return asyncio.get_running_loop().time() - self.heard_s > self.ttl_s * 2 / 3

    def keep_alive(self) -> None:
        """Start to refresh the lease at a third of its time to live."""
        self._keeper = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        pause_s = self.ttl_s / 3
        try:
            while True:
                await asyncio.sleep(pause_s)
                asked_s = asyncio.get_running_loop().time()
                try:
                    if await self._etcd.refresh(self.id, timeout_s=self.ttl_s / 3) <= 0:
                        log.warning("etcd let lease %x expire", self.id)
                        return
                    pause_s = self.ttl_s / 3
                    if self.silent:
                        self.resumed_s = asyncio.get_running_loop().time()
                    self.heard_s = asyncio.get_running_loop().time()
                    self.answered_in_s = self.heard_s - asked_s
                except EtcdError as error:
                    log.debug("lease %x not refreshed: %s", self.id, error)
                    pause_s = min(self.ttl_s / 6, 0.5)
        finally:
            # However this ends, nobody keeps the lease any more.
            self.lost.set()

    def give_up(self) -> None:
        """Count as lost from now on, and refresh no more: the lease lives on for at most its time to live."""
        self.lost.set()
        if self._keeper is not None:
            self._keeper.cancel()

    async def stop(self) -> None:
        """Stop refreshing; the lease lives on for at most its time to live."""
        self.give_up()
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def revoke(self) -> None:
        """Give the lease back, which deletes its keys at once.

        Raises:
            EtcdUnavailable: The keys vanish when the lease expires.
        """
        await self.stop()
        await self._etcd.revoke(self.id)


class Etcd:
    """A client of one etcd cluster, bound to the event loop it was made in.

    Operations raise `EtcdUnavailable` when no endpoint answers in time; leases and `follow` get over outages by
    themselves. As a guard or a deletion, a key that ends in "/" stands for every key below it.

    Args:
        connection: To the cluster.
        prefix: What every key begins with that it reads or writes; keys are given, and returned, without it.

    Attributes:
        has_forgotten: Whether etcd came back without what it had answered before: its revision went back.
    """

    def __init__(self, connection: EtcdConnection, prefix: str = "") -> None:
        self.prefix = prefix
        self.has_forgotten = False
        self._rpc = connection
        self._revision, self._losses = 0, 0
        self._leases: set[Lease] = set()

    @classmethod
    async def connect(cls, config: EtcdConfig, timeout_s: float = 5.0, *, prefix: str = "") -> Self:
        """Return a client that has read from etcd once, so endpoint, TLS and credentials are right.

        Args:
            config: Where etcd is and how to get in.
            timeout_s: How long to go on trying, seconds; 2.5 at most where nothing is that speaks as etcd does.
            prefix: See the class.

        Raises:
            EtcdUnavailable: No endpoint answered in time.
            EtcdAuthError: etcd refused the credentials, or they may not read below `RUNS`.
            EtcdError: A certificate file cannot be read.
        """
        request_s = min(timeout_s, _REQUEST_S)
        connection = EtcdConnection(config, request_s)
        etcd = cls(connection, prefix)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            connection.meet()
            while True:
                # Every endpoint is asked before the time is up; one that is slow goes on connecting meanwhile.
                left_s = began_s + min(timeout_s, _ABSENT_S) - clock()
                turn_s = max(left_s / len(config.endpoints), _BACKOFF_S[0])
                connection.timeout_s = request_s if connection.is_met else min(request_s, turn_s)
                try:
                    await connection.login()
                    await etcd.get("" if prefix else RUNS)
                    connection.timeout_s = request_s
                    return etcd
                except EtcdUnavailable:
                    if clock() - began_s >= (timeout_s if connection.is_met else min(timeout_s, _ABSENT_S)):
                        raise
                    await asyncio.sleep(_BACKOFF_S[0])
        except BaseException:
            await etcd.close()
            raise

    async def close(self) -> None:
        """Stop every lease's refreshing and close the connections; leased keys expire later."""
        await asyncio.gather(*(lease.stop() for lease in self._leases))
        await self._rpc.close()

    async def status(self) -> Status:
        """Return how the member is that is asked now."""
        request = rpc.StatusRequest()
        answer = await self._rpc.call(lambda member, options: member.maintenance.Status(request, **options))
        return Status(
            version=answer.version,
            revision=answer.header.revision,
            used_bytes=answer.dbSizeInUse,
            is_full=any("NOSPACE" in error for error in answer.errors),
        )

    async def remembers(self, revision: int) -> bool:
        """Tell whether etcd keeps what was changed since `revision`, for it was not compacted."""
        request = rpc.RangeRequest(key=RUNS.encode(), revision=revision, keys_only=True)
        try:
            await self._rpc.call(lambda member, options: member.kv.Range(request, **options))
        except (EtcdUnavailable, EtcdAuthError):
            raise
        except EtcdError:
            return False
        return True

    async def get(self, key: str) -> Entry | None:
        """Return the key's entry, None when there is no such key.

        Raises:
            EtcdError: The value is not a JSON object.
        """
        request = rpc.RangeRequest(key=self._key(key))
        answer = await self._rpc.call(lambda member, options: member.kv.Range(request, **options))
        return _entry(answer.kvs[0]) if answer.kvs else None

    async def revision(self, key: str) -> int:
        """Return the revision of the key's last change, whatever it holds; 0 when there is no such key."""
        request = rpc.RangeRequest(key=self._key(key), keys_only=True)
        answer = await self._rpc.call(lambda member, options: member.kv.Range(request, **options))
        return int(answer.kvs[0].mod_revision) if answer.kvs else 0

    async def list(self, start: str = "") -> dict[str, Entry]:
        """Return every entry whose key starts with `start`, by key, leaving out what `get` would not return."""
        entries, _ = await self._load(self._key(start), _end(self._key(start)))
        return entries

    async def put(self, key: str, value: Mapping[str, Any], lease: Lease | None = None) -> None:
        """Set the key.

        Raises:
            EtcdLeaseLost: `lease` is gone.
        """
        request = _put(self._key(key), value, lease)
        await self._rpc.call(lambda member, options: member.kv.Put(request, **options))

    async def delete(self, key: str) -> None:
        """Delete the key if it exists."""
        request = rpc.DeleteRangeRequest(key=self._key(key))
        await self._rpc.call(lambda member, options: member.kv.DeleteRange(request, **options))

    async def commit(
        self,
        guards: Mapping[str, int],
        puts: Mapping[str, Mapping[str, Any]],
        deletes: Iterable[str] = (),
        lease: Lease | None = None,
    ) -> int:
        """Apply all puts and deletes in one transaction if every guard holds.

        Args:
            guards: Key → the revision of its last change that must still be current; 0: the key does not exist.
            puts: Key → value.
            deletes: Keys to delete; of one that ends with "/" all below it.
            lease: Lease of every put.

        Returns:
            The revision of what was put, 0 if a guard did not hold.

        Raises:
            EtcdUnavailable: No answer; the transaction may have been applied, or be applied later. It is never sent
                twice.
            EtcdLeaseLost: `lease` is gone.
        """
        compares = [
            rpc.Compare(
                key=self._key(key),
                target=rpc.Compare.MOD,
                result=rpc.Compare.EQUAL,
                mod_revision=revision,
                range_end=_below(self._key(key)),
            )
            for key, revision in guards.items()
        ]
        operations = [rpc.RequestOp(request_put=_put(self._key(key), value, lease)) for key, value in puts.items()]
        operations += [
            rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=_below(key)))
            for key in map(self._key, deletes)
        ]
        request = rpc.TxnRequest(compare=compares, success=operations)
        answer = await self._rpc.call(lambda member, options: member.kv.Txn(request, **options), resend=False)
        return int(answer.header.revision) if answer.succeeded else 0

    async def lease(self, ttl_s: float, *, keep_alive: bool = True) -> Lease:
        """Return a new lease of `ttl_s` seconds, rounded up; etcd may grant more (2 s at least with its defaults)."""
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        answer = await self._rpc.call(lambda member, options: member.lease.LeaseGrant(request, **options))
        lease = Lease(etcd=self, lease_id=answer.ID, ttl_s=answer.TTL)
        if keep_alive:
            lease.keep_alive()
            self._leases = {lease, *(known for known in self._leases if not known.lost.is_set())}
        return lease

    async def refresh(self, lease_id: int, timeout_s: float) -> int:
        """Refresh a lease once and return its time to live in seconds, 0 when it is gone."""

        async def once(member: Endpoint, options: dict[str, Any]) -> Any:
            stream = member.lease.LeaseKeepAlive(**{**options, "timeout": timeout_s})
            try:
                await stream.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                return await stream.read()
            finally:
                stream.cancel()

        answer = await self._rpc.call(once)
        if answer is grpc.aio.EOF:
            raise EtcdUnavailable(f"etcd at {self._rpc.config.where} ended the keep-alive stream without an answer")
        return int(answer.TTL)

    async def revoke(self, lease_id: int) -> None:
        """Revoke a lease, which deletes its keys; one that is gone already is fine."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._rpc.call(lambda member, options: member.lease.LeaseRevoke(request, **options))
        except EtcdLeaseLost:
            return

    async def follow(self, start: str = "") -> AsyncGenerator[dict[str, Entry], None]:
        """Yield every entry whose key starts with `start`: now, and after every change; several may come as one.

        It costs time in all of these for every change: where they are many, use `changes`.
        """
        entries: dict[str, Entry] = {}
        async with aclosing(self.changes(start)) as changes:
            async for changed in changes:
                update(entries, changed)
                yield dict(entries)

    async def changes(self, start: str = "", before: str = "") -> AsyncGenerator[dict[str, Entry | None], None]:
        """Yield the entries whose key starts with `start`, maybe none, then what changes there; None for what is gone.

        With `before`, keys that go on with that, or with what is sorted after it, are left out. What one transaction
        changed comes together, and several changes may come as one. An outage, a compaction or a lost stream is
        answered by loading again; it never ends and raises nothing.
        """
        seen: dict[str, Entry] | None = None
        first_s, limit_s = _BACKOFF_S
        backoff_s = first_s
        begin = self._key(start)
        end = begin + before.encode() if before else _end(begin)
        while True:
            try:
                entries, revision = await self._load(begin, end)
                changed = _difference(seen or {}, entries)
                first, seen = seen is None, entries
                if changed or first:
                    yield changed
                async with aclosing(self._watch(begin, end, revision + 1)) as answers:
                    async for events in answers:
                        backoff_s = first_s
                        changed = dict(map(self._change, events))
                        update(seen, changed)
                        yield changed
            except EtcdError as error:
                level = logging.WARNING if backoff_s == first_s else logging.DEBUG
                log.log(level, "mirror of %s interrupted, going on when etcd answers: %s", begin.decode(), error)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))  # not all hosts of a run at the same moment
                backoff_s = min(2 * backoff_s, limit_s)

    async def _load(self, begin: bytes, end: bytes) -> tuple[dict[str, Entry], int]:
        request = rpc.RangeRequest(key=begin, range_end=end)
        before, losses = self._revision, self._losses
        answer = await self._rpc.call(lambda member, options: member.kv.Range(request, **options))
        revision = answer.header.revision
        # Other answers may have told of the loss while this one was on its way.
        if losses == self._losses:
            if revision < before:
                self._forget(revision)
            self._revision = max(revision, self._revision)
        found = (self._change(rpc.Event(type=rpc.Event.PUT, kv=kv)) for kv in answer.kvs)
        return {key: entry for key, entry in found if entry is not None}, revision

    def _forget(self, revision: int) -> None:
        """Record that etcd lost data: it is back at `revision`, older than what was seen."""
        log.error("etcd at %s lost its data: revision %d after %d", self._rpc.config.where, revision, self._revision)
        self.has_forgotten = True
        self._losses += 1
        self._revision = revision
        # It may know a lease still, but not the last that was put with it.
        for lease in self._leases:
            lease.give_up()
        self._leases.clear()

    async def _watch(self, begin: bytes, end: bytes, revision: int) -> AsyncGenerator[Any, None]:
        """Yield the events of each answer from `revision` on, until the server ends the watch or the stream breaks."""
        member, losses = self._rpc.member, self._losses
        create = rpc.WatchCreateRequest(key=begin, range_end=end, start_revision=revision)
        stream = member.watch.Watch(metadata=self._rpc.metadata)
        try:
            async with asyncio.timeout(self._rpc.timeout_s):
                await stream.write(rpc.WatchRequest(create_request=create))
                answer = await stream.read()
            if answer is not grpc.aio.EOF and answer.header.revision < revision - 1:
                # It would hide its changes until it has as many; reading again tells whether it is behind or lost them.
                raise EtcdError(f"etcd at {self._rpc.config.where} watches from {answer.header.revision}")
            while answer is not grpc.aio.EOF and not answer.canceled:
                if losses == self._losses:
                    self._revision = max(answer.header.revision, self._revision)
                if answer.events:
                    yield answer.events
                answer = await stream.read()
            if answer is grpc.aio.EOF or not answer.compact_revision:
                reason = "the stream ended" if answer is grpc.aio.EOF else answer.cancel_reason
                raise EtcdError(f"etcd at {self._rpc.config.where} cancelled the watch of {begin.decode()}: {reason}")
        except rpc.AioRpcError as error:
            raise self._rpc.failed(member, error) from error
        except TimeoutError as error:
            raise self._rpc.unavailable(member, "no answer to a watch request") from error
        finally:
            stream.cancel()

    def _key(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _change(self, event: Any) -> tuple[str, Entry | None]:
        """Return the key that an event is about and what it holds now; what `get` would not return counts as gone."""
        key = event.kv.key.decode(errors="replace").removeprefix(self.prefix)
        if event.type == rpc.Event.PUT:
            try:
                return key, _entry(event.kv)
            except EtcdError as error:
                log.warning("ignored: %s", error)
        return key, None


def _put(key: bytes, value: Mapping[str, Any], lease: Lease | None) -> Any:
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return rpc.PutRequest(key=key, value=body, lease=0 if lease is None else lease.id)


def _entry(kv: Any) -> Entry:
    key = kv.key.decode(errors="replace")
    # Names of hosts are in keys, and go to terminals from there.
    if not key.isprintable():
        raise EtcdError(f"etcd key {key!r} is not printable; delete it")
    try:
        value = wire.decode(kv.value)
    except WireError as error:
        raise EtcdError(f"etcd key {key}: {error}; delete it") from error
    return Entry(value=value, revision=kv.mod_revision, created=kv.create_revision)


def _difference(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> dict[str, Entry | None]:
    gone = dict.fromkeys(before.keys() - after.keys())
    return {**gone, **{key: entry for key, entry in after.items() if before.get(key) != entry}}


def _end(start: bytes) -> bytes:
    """Return the first key after every key that starts with `start` (keys are UTF-8 text, which has no byte 0xff)."""
    return start + b"\xff"


def _below(key: bytes) -> bytes:
    return _end(key) if key.endswith(b"/") else b""


__all__ = [
    "Entry",
    "Etcd",
    "EtcdAuthError",
    "EtcdConfig",
    "EtcdError",
    "EtcdLeaseLost",
    "EtcdUnavailable",
    "Lease",
    "update",
]
