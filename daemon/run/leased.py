"""What a host says of itself in etcd: keys that live as long as this daemon serves the job, kept as they are wanted."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ..base.supervise import first
from ..etcd.client import Etcd, EtcdLeaseLost, EtcdUnavailable, Lease
from .view import JobView

log = logging.getLogger(__name__)

_TTL_S = 5.0
_RETRY_S = 0.5
_UNKNOWN: Mapping[str, Any] = {}
"""What may have been written: nobody wants a key to hold that."""


class LeasedKeys:
    """Keeps etcd as `set` wants it, and the lease of these keys alive; after an outage everything is written again.

    A key is replaced only as it was seen last: a write that got no answer may be on its way still, and must not come
    after a later one.

    Args:
        view: Its `notify` wakes `run`.

    Attributes:
        lease: The daemon's present lease, None before the first.
    """

    def __init__(self, view: JobView) -> None:
        self.lease: Lease | None = None
        self._view = view
        self._wanted: dict[str, Mapping[str, Any]] = {}
        self._written: dict[str, tuple[Mapping[str, Any], int | None]] = {}

    def set(self, name: str, value: Mapping[str, Any] | None) -> None:
        """Let the key `name` hold `value` from now on; None: let there be no such key."""
        if value is None:
            self._wanted.pop(name, None)
        else:
            self._wanted[name] = value
        self._view.notify()

    async def run(self, etcd: Etcd) -> None:
        """Write what changes until cancelled; an outage of etcd only delays it."""
        while True:
            try:
                if self.lease is None or self.lease.lost.is_set():
                    # Whatever the lease before this one held vanishes with it, but maybe not yet.
                    self._written = {}
                    self.lease = await etcd.lease(_TTL_S)
                    self._view.notify()
                if self._unwritten():
                    await self._write(etcd, self.lease)
                else:
                    await first(self._view.wait_for(lambda: bool(self._unwritten())), self.lease.lost.wait())
            except EtcdLeaseLost:
                assert self.lease is not None
                self.lease.give_up()
            except EtcdUnavailable as error:
                log.debug("%s; going on when etcd is back", error)
                await asyncio.sleep(_RETRY_S)

    def _unwritten(self) -> list[str]:
        written = {name: value for name, (value, _) in self._written.items()}
        return [name for name in written | self._wanted if written.get(name) != self._wanted.get(name)]

    async def _write(self, etcd: Etcd, lease: Lease) -> None:
        """Make etcd as it is wanted; what is not known to be written is read first."""
        for name in self._unwritten():
            value = self._wanted.get(name)
            _, revision = self._written.get(name, (_UNKNOWN, None))
            self._written[name] = _UNKNOWN, None
            if revision is None:
                revision = await etcd.revision(name)
            if value is None:
                if not revision or await etcd.commit({name: revision}, {}, deletes=[name]):
                    del self._written[name]
            elif written := await etcd.commit({name: revision}, {name: value}, lease=lease):
                self._written[name] = value, written
