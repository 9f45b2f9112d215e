"""Faults on purpose: carries out the orders of `resilient-inject` on this host, in jobs that allow it."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from ..etcd.client import Entry, Etcd, EtcdError, EtcdUnavailable
from ..run import keys
from ..run.faults import Order
from ..run.records import Agreement
from .acts import DETACHED, LOCAL, Scene
from .detached import Detached

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_WHAT_LENGTH = 1000


class Injector:
    """Follows the orders for one job and writes the outcome of each before its blow.

    An outcome is written once, in a transaction with the job key and the order, so an order is carried out at most
    once, never after it was taken back, and never in a job that does not allow it.

    Args:
        run_id: The job.
        scene: What can be struck.
    """

    def __init__(self, *, run_id: str, scene: Scene) -> None:
        self._prefix = keys.prefix(run_id)
        self._scene = scene
        self._begun: set[str] = set()

    async def run(self, etcd: Etcd) -> None:
        """Carry orders out until cancelled."""
        await self._scene.view.wait_for(lambda: self._scene.view.injection)
        log.warning("faults may be injected into this job")
        async with asyncio.TaskGroup() as group, aclosing(etcd.follow(self._prefix + keys.INJECTION)) as states:
            async for entries in states:
                for number, entry in self._new(entries).items():
                    self._begun.add(number)
                    group.create_task(self._obey(etcd, number, entry))

    def _new(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the orders for this host, by id, that are neither carried out nor begun."""
        orders, done = self._prefix + keys.ORDERS(), self._prefix + keys.OUTCOMES()
        return {
            number: entry
            for key, entry in entries.items()
            if key.startswith(orders)
            and entry.value.get("host") == self._scene.view.host
            and (number := key.removeprefix(orders)) not in self._begun
            and f"{done}{number}" not in entries
        }

    async def _obey(self, etcd: Etcd, number: str, entry: Entry) -> None:
        try:
            order = Order.parse(entry.value, f"order {number}")
            if order.kind in LOCAL:
                await self._moment(order)
                await self._strike(etcd, number, entry, *LOCAL[order.kind](self._scene, order))
                return
            async with Detached.start() as helper:
                await self._moment(order)
                what = await helper.prepare(DETACHED[order.kind](self._scene, order))
                await self._strike(etcd, number, entry, what, helper.go)
        except (DaemonError, OSError, ValueError) as error:
            log.warning("order %s refused: %s", number, error)
            await self._record(etcd, number, entry, ok=False, what=str(error) or type(error).__name__)

    async def _strike(self, etcd: Etcd, number: str, entry: Entry, what: str, blow: Callable[[], None]) -> None:
        if await self._record(etcd, number, entry, ok=True, what=what):
            log.warning("injected fault: %s", what)
            blow()

    async def _moment(self, order: Order) -> None:
        """Wait until the order's step, then its seconds."""
        if order.at_step is not None:
            at_step = order.at_step
            await self._scene.view.wait_for(lambda: self._step(order.rank) >= at_step)
        await asyncio.sleep(order.after_s)

    def _step(self, rank: int | None) -> int:
        view, last_steps = self._scene.view, self._scene.sessions.last_steps
        ranks = view.own_ranks if rank is None or rank not in view.own_ranks else range(rank, rank + 1)
        watermark = 0 if view.watermark is None else view.watermark[1]
        return max((last_steps.get(rank, 0) for rank in ranks), default=watermark)

    async def _record(self, etcd: Etcd, number: str, entry: Entry, *, ok: bool, what: str) -> bool:
        """Write the outcome and tell whether the order may be carried out."""
        key, view = self._prefix + keys.OUTCOMES(number), self._scene.view
        outcome: dict[str, Any] = {
            "host": view.host,
            "kind": entry.value.get("kind"),
            "ok": ok,
            "what": " ".join(what.split())[:_WHAT_LENGTH],
            "unix_s": time.time(),
            "generation": view.generation,
            "step": self._step(None),
        }
        while True:
            try:
                job = await etcd.get(self._prefix + keys.JOB)
                if job is None or not Agreement.parse(job.value).injection:
                    log.warning("order %s dropped: its job does not allow it", number)
                    return False
                guards = {
                    self._prefix + keys.JOB: job.revision,
                    self._prefix + keys.ORDERS(number): entry.revision,
                    key: 0,
                }
                if await etcd.commit(guards, {key: outcome}):
                    return True
                # Ours all the same if the answer to an earlier attempt was lost.
                written = await etcd.get(key)
                return written is not None and written.value == outcome
            except EtcdUnavailable as error:
                log.warning("order %s waits: %s", number, error)
                await asyncio.sleep(_RETRY_S)
            except (EtcdError, DaemonError) as error:
                # A fault that cannot be ordered must not be one for the job.
                log.error("order %s dropped: %s", number, error)
                return False
