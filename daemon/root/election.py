"""Which host is the root: one leased key that any member of the round takes when no member has it (Gemini, 6.3.2)."""

import asyncio
import logging

from ..etcd.client import Etcd, EtcdLeaseLost, EtcdUnavailable, Lease
from ..run import keys
from ..run.leased import LeasedKeys
from ..run.view import JobView

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class Election:
    """Candidate for one job, for as long as `run` runs.

    The key carries its holder's host name, so a daemon that was killed and restarted leads again at once instead of
    waiting for the lease of its earlier life to expire; it only moves the key to its new lease. A leader that is no
    longer in the round needs no farewell: the first member that sees it takes its place.

    Args:
        etcd: The job's connection.
        view: What is known of the job.
        leased: Has this daemon's lease.
    """

    def __init__(self, etcd: Etcd, view: JobView, leased: LeasedKeys) -> None:
        self._etcd = etcd
        self._view = view
        self._leased = leased
        self._won_with: Lease | None = None

    async def run(self) -> None:
        """Stand for election until cancelled."""
        while True:
            await self._view.wait_for(lambda: self._claim() is not None)
            round_, seen = self._view.round, self._view.leader_revision
            reason, lease = self._claim(), self._leased.lease
            if round_ is None or seen is None or lease is None or reason is None:
                continue
            # The guard on the round keeps a host out that does not know yet that it was replaced.
            guards = {keys.LEADER: seen, keys.ROUND: round_.revision}
            try:
                puts = {keys.LEADER: {"host": self._view.host}}
                won = await self._etcd.commit(guards, puts, lease=lease)
            except EtcdLeaseLost:
                lease.give_up()
                await asyncio.sleep(0)
                continue
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            if won:
                self._won_with = lease
                log.info("this host is the root: %s", reason)
            await self._view.wait_until_shown(
                lambda: self._view.leader_revision != seen or self._view.round is not round_  # noqa: B023
            )

    def _claim(self) -> str | None:
        """Return why this host should take the key now, None when it should not."""
        view, lease = self._view, self._leased.lease
        if view.round is None or not view.is_member or view.leader_revision is None:
            return None
        if lease is None or lease.lost.is_set():
            return None
        if view.leader is None:
            return "there was none"
        if view.leader not in view.round:
            return f"host {view.leader} is not in generation {view.generation}"
        if view.leader == view.host and lease is not self._won_with:
            return "it was before it lost its lease or was restarted"
        return None
