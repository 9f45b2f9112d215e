"""Keys of a job that are there for as long as this daemon serves it and has something to say under them."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ..etcd.client import Etcd, EtcdLeaseLost, EtcdUnavailable, Lease
from .view import JobView

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class LeasedKeys:
    """Keeps etcd as `set` wants it: written again with every new lease, and never written while nothing is set.

    Args:
        prefix: Of all keys of the run.
        view: Its `notify` wakes `run`.
    """

    def __init__(self, prefix: str, view: JobView) -> None:
        self._prefix = prefix
        self._view = view
        self._lease: Lease | None = None
        self._wanted: dict[str, Mapping[str, Any]] = {}

    @property
    def lease(self) -> Lease | None:
        """The daemon's present lease, None before the first."""
        return self._lease

    @lease.setter
    def lease(self, lease: Lease) -> None:
        self._lease = lease
        self._view.notify()

    def set(self, name: str, value: Mapping[str, Any] | None) -> None:
        """Let the key `name` hold `value` from now on; None: let there be no such key."""
        if value is None:
            self._wanted.pop(name, None)
        else:
            self._wanted[name] = value
        self._view.notify()

    async def run(self, etcd: Etcd) -> None:
        """Write what changes until cancelled; an outage of etcd only delays it."""
        written: dict[str, Mapping[str, Any] | None] = {}
        lease: Lease | None = None
        while True:
            await self._view.wait_for(
                lambda: self._lease is not None and (self._lease is not lease or self._wanted != written)  # noqa: B023
            )
            if self._lease is not lease:
                # Whatever the lease before this one held vanishes with it, but maybe not yet.
                lease, written = self._lease, dict.fromkeys(written)
            assert lease is not None
            try:
                await self._write(etcd, lease, written)
            except EtcdLeaseLost:
                lease.give_up()
                await self._view.wait_for(lambda: self._lease is not lease)  # noqa: B023
            except EtcdUnavailable as error:
                log.debug("%s; going on when etcd is back", error)
                await asyncio.sleep(_RETRY_S)

    async def _write(self, etcd: Etcd, lease: Lease, written: dict[str, Mapping[str, Any] | None]) -> None:
        """Make etcd as it is wanted; `written` is what it holds with this lease, None where that is not known."""
        for name in written.keys() - self._wanted.keys():
            await etcd.delete(self._prefix + name)
            del written[name]
        for name, value in list(self._wanted.items()):
            if written.get(name) != value:
                written[name] = None  # a write without an answer may have been applied
                await etcd.put(self._prefix + name, value, lease=lease)
                written[name] = value
