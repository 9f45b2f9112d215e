"""Faults on purpose: carries out the orders of `resilient-inject` on a host whose launcher allows it."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from ..base.fields import printable
from ..etcd.client import Entry, Etcd, EtcdError, EtcdUnavailable
from ..run import keys
from ..run.faults import Order
from .acts import DETACHED, LOCAL, Scene
from .detached import Detached

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_WHAT_LENGTH = 1000
_KIND_LENGTH = 64
_MOST_UNDER_WAY = 16
_MOST_ORDER_LETTERS = 1 << 14
_ID = re.compile(r"[A-Za-z0-9.-]{1,64}")


class Injector:
    """Follows the orders for one job and writes the outcome of each before its blow.

    Whoever can write to etcd can order faults, but not allow them: this runs where the launcher said so in `open_job`,
    and strikes while a launcher holds the job open. An outcome is written once, in a transaction with the job key and
    the order, so an order is carried out at most once, and never after it was taken back.

    Args:
        run_id: The job.
        scene: What can be struck.
    """

    def __init__(self, *, run_id: str, scene: Scene) -> None:
        self._scene = scene
        self._begun: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Task[None]] = {}

    async def run(self, etcd: Etcd) -> None:
        """Carry orders out until cancelled."""
        log.warning("faults may be injected into this job")
        async with asyncio.TaskGroup() as group, aclosing(etcd.follow(keys.INJECTION)) as states:
            async for entries in states:
                self._let_go(entries)
                for number, entry in self._new(entries).items():
                    self._begun.add(number)
                    if len(self._tasks) < _MOST_UNDER_WAY:
                        task = group.create_task(self._obey(etcd, number, entry))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                    else:
                        what = f"{_MOST_UNDER_WAY} orders are under way on host {self._scene.view.host}: take one back"
                        await self._refuse(etcd, number, entry, what)

    def _let_go(self, entries: Mapping[str, Entry]) -> None:
        """Forget the orders that are not there any more, and wait no longer for the moment of one."""
        gone = {number for number in self._begun if keys.ORDERS(number) not in entries}
        self._begun -= gone
        for number in gone & self._waiting.keys():
            self._waiting[number].cancel()
            self._tasks.discard(self._waiting[number])

    def _new(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return the orders for this host, by id, that are neither carried out nor begun."""
        orders, done = keys.ORDERS(), keys.OUTCOMES()
        return {
            number: entry
            for key, entry in entries.items()
            if key.startswith(orders)
            and entry.value.get("host") == self._scene.view.host
            and _ID.fullmatch(number := key.removeprefix(orders))
            and number not in self._begun
            and f"{done}{number}" not in entries
        }

    async def _obey(self, etcd: Etcd, number: str, entry: Entry) -> None:
        try:
            if len(json.dumps(entry.value)) > _MOST_ORDER_LETTERS:
                raise DaemonError(f"order {number} is longer than {_MOST_ORDER_LETTERS} letters")
            order = Order.parse(entry.value, f"order {number}")
            if order.kind in LOCAL:
                await self._moment(number, order)
                await self._strike(etcd, number, entry, *LOCAL[order.kind](self._scene, order))
                return
            async with Detached.start() as helper:
                await self._moment(number, order)
                what = await helper.prepare(DETACHED[order.kind](self._scene, order))
                await self._strike(etcd, number, entry, what, helper.go)
        except (DaemonError, OSError, ValueError) as error:
            await self._refuse(etcd, number, entry, str(error) or type(error).__name__)

    async def _refuse(self, etcd: Etcd, number: str, entry: Entry, what: str) -> None:
        log.warning("order %s refused: %s", number, _line(what))
        await self._record(etcd, number, entry, ok=False, what=what)

    async def _strike(self, etcd: Etcd, number: str, entry: Entry, what: str, blow: Callable[[], None]) -> None:
        self._scene.launcher()  # without which nobody allows it any more
        if await self._record(etcd, number, entry, ok=True, what=what):
            log.warning("injected fault: %s", what)
            blow()

    async def _moment(self, number: str, order: Order) -> None:
        """Wait until the order's step, then its seconds; ends the task when the order is taken back meanwhile."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in one"
        self._waiting[number] = task
        try:
            if order.at_step is not None:
                at_step = order.at_step
                await self._scene.view.wait_for(lambda: self._step(order.rank) >= at_step)
            await asyncio.sleep(order.after_s)
        finally:
            del self._waiting[number]

    def _step(self, rank: int | None) -> int:
        view, last_steps = self._scene.view, self._scene.sessions.last_steps
        ranks = view.own_ranks if rank is None or rank not in view.own_ranks else range(rank, rank + 1)
        watermark = 0 if view.watermark is None else view.watermark[1]
        return max((last_steps.get(rank, 0) for rank in ranks), default=watermark)

    async def _record(self, etcd: Etcd, number: str, entry: Entry, *, ok: bool, what: str) -> bool:
        """Write the outcome and tell whether the order may be carried out."""
        key, view = keys.OUTCOMES(number), self._scene.view
        outcome: dict[str, Any] = {
            "host": view.host,
            "kind": printable(str(entry.value.get("kind")), _KIND_LENGTH),
            "ok": ok,
            "what": _line(what),
            "unix_s": time.time(),
            "generation": view.generation,
            "step": self._step(None),
        }
        while True:
            try:
                job = await etcd.get(keys.JOB)
                if job is None:
                    log.warning("order %s dropped: its run is over", number)
                    return False
                guards = {
                    keys.JOB: job.revision,
                    keys.ORDERS(number): entry.revision,
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


def _line(what: str) -> str:
    return printable(" ".join(what.split()), _WHAT_LENGTH)
