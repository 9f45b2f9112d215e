"""The root's part in persisting: ask for pairs, publish those that every host has written, delete old ones."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from resilient_run.ckpt.format.pair import Pair

from ..base.policy import PersistPolicy
from ..etcd.client import Etcd, EtcdUnavailable
from ..run import keys
from ..run.mirror import Mirror, of
from ..run.view import JobView
from .manifest import Persisted
from .persist_plan import PersistAnswer, PersistRequest, is_due, merged
from .tier import Tier, TierError, call

log = logging.getLogger(__name__)

_PAUSE_S = 5.0
_RETRY_S = 0.5


class Publisher:
    """What the root does for the persistent tier of one job.

    Args:
        run_id: The job.
        policy: How often, and how many pairs are kept.
        tier: Where to.
        view: What is known of the job.

    Attributes:
        error: Why a pair that every host has written cannot be published now, None while nothing is wrong.
    """

    def __init__(self, *, run_id: str, policy: PersistPolicy, tier: Tier, view: JobView) -> None:
        self.error: str | None = None
        self._run_id = run_id
        self._policy = policy
        self._tier = tier
        self._view = view
        self._began_unix_s = time.time()
        self._seen: Mirror | None = None

    def requested_with(self, pair: Pair, last: PersistRequest | None) -> dict[str, dict[str, Any]]:
        """Return what the root must put with the watermark `pair`, by key below the run: a request if one is due.

        Args:
            pair: The watermark.
            last: The request before.
        """
        if self._seen is None:
            return {}
        due, reason = is_due(
            self._policy,
            pair,
            last=last,
            settled=last is not None and self.is_settled(last.pair),
            since_step=max((step for _, step in self._published), default=0),
            since_unix_s=self._began_unix_s,
            now_unix_s=time.time(),
        )
        if not due:
            return {}
        log.debug("generation %d step %d is persisted: %s", *pair, reason)
        return {keys.PERSIST: PersistRequest(pair=pair, unix_s=time.time()).to_value()}

    async def run(self, etcd: Etcd, requested: Callable[[], PersistRequest | None]) -> None:
        """Publish what `requested` returns while this host is the root; until cancelled."""
        while True:
            await self._view.wait_for(lambda: self._view.is_root)
            self._began_unix_s = time.time()
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._mirror(etcd)), group.create_task(self._publish(etcd, requested))]
                    await self._view.wait_for(lambda: not self._view.is_root)
                    for task in tasks:
                        task.cancel()
            finally:
                self._seen, self.error = None, None

    async def _mirror(self, etcd: Etcd) -> None:
        mirror = Mirror(None, {keys.ANSWERS: (str, of(PersistAnswer))})
        async with aclosing(etcd.changes(keys.PERSISTED)) as states:
            async for changes in states:
                self._seen = mirror.apply(changes)
                self._view.notify()

    @property
    def _published(self) -> tuple[Pair, ...]:
        return () if self._seen is None else self._seen.get(keys.PERSISTED, ())

    @property
    def _revision(self) -> int:
        return 0 if self._seen is None else self._seen.revisions.get(keys.PERSISTED, 0)

    @property
    def _answers(self) -> dict[str, PersistAnswer]:
        return {} if self._seen is None else self._seen.folders[keys.ANSWERS]

    async def _publish(self, etcd: Etcd, requested: Callable[[], PersistRequest | None]) -> None:
        """Publish, and delete what is superfluous: never both at once, so that nothing of a new publication goes."""
        cleaned: Pair | None = None

        def is_new(request: PersistRequest | None) -> bool:
            return request is not None and request.pair != cleaned

        while True:
            await self._view.wait_for(lambda: is_new(requested()) or self._publishable(requested()) is not None)
            request, revision = requested(), self._revision
            if request is None:  # the run went back
                continue
            pair = request.pair
            if (persisted := self._publishable(request)) is None:
                await self._clean(cleaned := pair)
                continue
            try:
                await call(self._tier, self._tier.publish, persisted)
                pairs = await self._clean(cleaned := pair) or await call(self._tier, self._tier.published)
                key = keys.PERSISTED
                if await etcd.commit({key: revision}, {key: {"pairs": [list(known) for known in pairs]}}):
                    log.info("published generation %d step %d in %s", *pair, self._tier.shown)
                self.error = None
            except TierError as error:
                self.error = str(error)
                log.warning("generation %d step %d is not published yet, trying again: %s", *pair, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            await self._view.wait_for(lambda: self._revision != revision)  # noqa: B023

    async def _clean(self, requested: Pair) -> list[Pair]:
        """Delete what is superfluous now that `requested` is asked for.

        Returns:
            The pairs that stay published, none if something could not be deleted.
        """
        try:
            return await call(self._tier, self._tier.prune, self._policy.keep, requested)
        except TierError as error:
            log.warning("cannot delete all superfluous files in %s: %s", self._tier.shown, error)
            return []

    def is_settled(self, pair: Pair) -> bool:
        """Tell whether `pair` is published, or cannot be because a host could not write its part."""
        failed = any(answer.pair == pair and answer.error is not None for answer in self._answers.values())
        return failed or pair in self._published

    def _publishable(self, request: PersistRequest | None) -> Persisted | None:
        """Return the requested pair if every host has written its part of it and it is not published yet."""
        if self._seen is None or request is None or request.pair in self._published:
            return None
        return merged(request.pair, self._run_id, self._answers)
