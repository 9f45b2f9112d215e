"""Reports of steps on their way up to the root, and what it says on its way down: each host talks to the one above.

A link is one connection between daemons, dialled from below, with reports in one direction and what the root says in
the other one. Both ends repeat themselves, so whatever was lost with a link comes with the next one. Who cannot reach
the host above it reports to the one above that, and the host between leaves it out of its own report.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from heapq import nlargest

from resilient_run.ckpt.errors import DaemonError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.pair import Pair

from ..base.supervise import first
from ..run.report import MAX_REPORT_BYTES, Claims, Report, Said, Term, Tree, added, complete
from ..run.view import JobView
from ..run.work import RankWork
from ..slots.slots import JobSlots
from ..trust.secure import SecureSocket
from .fetch import PeerError

log = logging.getLogger(__name__)

_REPEAT_S = 1.5
_SILENT_S = 5.0
"""So long without a word, a link is broken: as long as a lease of etcd."""
_AVOIDED_S = 10.0
_RETRY_S = 0.3
_WORK_S = 0.25
"""Half of what is between two notes of a rank's work, of which none is to be lost on the way."""


_Link = tuple[str, SecureSocket]
"""A host above, and a connection to it."""


class ReportTree:
    """One host's place in the tree of reports of one job.

    Args:
        view: What is known of the job.
        slots: What this host holds of it.
        claims: Returns the digests of these pairs of this host's ranks.
        dial: Returns a connection to the daemon of a host; raises `PeerError`.

    Attributes:
        beside: At the root: hosts without a seat for whose reports it waits, too.
        spoken: The greatest number of what roots have said, in any term.
    """

    def __init__(
        self,
        *,
        view: JobView,
        slots: JobSlots,
        claims: Callable[[Iterable[Pair]], Claims],
        dial: Callable[[str], Awaitable[SecureSocket]],
    ) -> None:
        self.beside: frozenset[str] = frozenset()
        self.spoken = 0
        self._view = view
        self._slots = slots
        self._claims = claims
        self._dial = dial
        self._reports: dict[str, Report] = {}
        self._heard = 0
        self._added: tuple[object, Report | None] = None, None
        self._links: dict[str, object] = {}
        self._said: Said | None = None
        self._reported_in: Tree | None = None
        self._avoided: dict[str, float] = {}
        self._closed = False

    @property
    def term(self) -> Term | None:
        """The generation and the election that this host knows, None while there is no root in the round."""
        if self._tree() is None or not self._view.leader_revision:
            return None
        return self._view.generation, self._view.leader_revision

    @property
    def said(self) -> Said | None:
        """What the root of the present term has said last, None while it is not known."""
        return self._said if self._said is not None and self._said.term == self.term else None

    def report(self) -> Report | None:
        """Return what is known here of this host and all below it, None while there is no root."""
        view, term, tree = self._view, self.term, self._tree()
        if term is None or tree is None:
            return None
        if tree != self._reported_in:
            self._reported_in = tree
            for host in self._reports.keys() - self._links.keys():
                del self._reports[host]
            self._heard += 1
        pairs = complete(tree.round, view.kept_ranks, self._slots.held()) if self._slots.adopted else frozenset()
        missed = view.missed if view.missed is not None and view.missed.next == view.agreed.next else None
        # Older ones that stay in memory are compared no more.
        claims = self._claims(pair for pair in nlargest(2, pairs) if pair[0] == view.generation)
        unhealthy = {pair: told for pair, told in view.unhealthy_here.items() if pair.generation == view.generation}
        keep = self._slots.keep
        own = Report(term=term, complete=pairs, missed=missed, claims=claims, unhealthy=unhealthy, keep=keep)
        below = (*tree.below(view.host), *(sorted(self.beside) if view.is_root else ()))
        if (own, below, self._heard) != self._added[0]:
            self._added = (own, below, self._heard), added(own, below, self._reports)
        return self._added[1]

    def work(self) -> dict[int, RankWork]:
        """Return what the ranks of this host and of all below it have computed, by rank, as far as that is known."""
        found, term = dict(self._view.work), self.term
        for report in self._reports.values():
            # Of a host that has gone over to another one, what it said here last is known, too.
            for rank, point in report.work.items() if report.term == term else ():
                if rank not in found or point.step > found[rank].step:
                    found[rank] = point
        return found

    def say(self, said: Said) -> None:
        """Let this host, and all below it, know what the root says."""
        known = self._said
        if known is None or known.term != said.term or known.number < said.number:
            self._said, self.spoken = said, max(self.spoken, said.number)
            self._view.notify()

    def close(self) -> None:
        """End all links from below: the job ends here."""
        self._closed = True
        self._view.notify()

    async def run(self) -> None:
        """Report to the nearest host above that can be reached, until cancelled."""
        found: _Link | None = None
        while True:
            if found is None:
                await self._view.wait_for(lambda: bool(self._above()))
                found = await self._reach(self._above())
            else:
                found = await self._report_on(*found)

    async def serve(self, host: str, sock: SecureSocket) -> None:
        """Hear the reports of `host` on its link, until that ends.

        Raises:
            OSError: The connection broke, or said nothing for too long.
            WireError: What comes is no message.
            DaemonError: It is no report, or this host does not hear any any more.
        """
        link = self._links[host] = object()
        try:
            await first(self._hear_reports(host, link, sock), self._push(host, link, sock))
        except TimeoutError as error:
            raise ConnectionError(f"host {host} no longer reports") from error
        finally:
            if self._links.get(host) is link:
                del self._links[host]
                if not self._view.is_root:
                    # It may report to another host now, which would not be asked for what is still known here.
                    self._take(host, None)
        raise ConnectionError(f"the link of host {host} has ended")

    async def _hear_reports(self, host: str, link: object, sock: SecureSocket) -> None:
        while (message := await sock.receive_message(MAX_REPORT_BYTES, _SILENT_S)) is not None:
            if self._links.get(host) is not link:
                return
            report, known = Report.parse(message), self._reports.get(host)
            if known is not None and known.term == report.term and not report.work:
                report = replace(report, work=known.work)
            if known != report:
                self._take(host, report)

    def _take(self, host: str, report: Report | None) -> None:
        """Let `report` be what `host` has said last."""
        self._heard += 1
        if report is None:
            self._reports.pop(host, None)
        else:
            self._reports[host] = report
        self._view.notify()

    async def _push(self, host: str, link: object, sock: SecureSocket) -> None:
        """Tell `host` what the root says: whenever that is something new, and again and again."""
        told: Said | None = None
        while True:
            await self._news(lambda: self._closed or self._links.get(host) is not link or self.said is not told)  # noqa: B023
            if self._closed or self._links.get(host) is not link:
                return
            told = self.said
            await sock.send_message({} if told is None else told.to_value())

    async def _report_on(self, host: str, sock: SecureSocket) -> _Link | None:
        """Report to `host` for as long as it is the one to tell, and return the link to a nearer one once there is."""
        try:
            await sock.send_message({"op": "report"})
            return await first(self._nearer(host), self._send_reports(host, sock), self._hear(host, sock))
        except (OSError, TimeoutError, WireError, DaemonError) as error:
            log.info("the link to host %s has ended: %s", host, error or "it sends nothing any more")
            self._avoided[host] = asyncio.get_running_loop().time() + _AVOIDED_S
            await asyncio.sleep(_RETRY_S)
            return None
        finally:
            sock.close()

    async def _send_reports(self, host: str, sock: SecureSocket) -> None:
        """Report whenever there is more to say, and again and again.

        What ranks have computed is long and in no hurry: no step waits for it.
        """
        told: Report | None = None
        clock, sent, sent_s = asyncio.get_running_loop().time, dict[int, RankWork](), 0.0
        address = self._view.addresses.get(host)

        def is_over() -> bool:
            return host not in self._above() or self._view.addresses.get(host) != address

        def is_due() -> bool:
            report = self.report()
            if report is None or is_over():
                return True
            # While those below are still arriving, what they all say is awaited.
            is_whole = told is None or not report.absent or report.absent == told.absent
            return is_whole and report.says_more_than(told)

        while True:
            await self._news(is_due)
            told = self.report()
            if told is None or is_over():
                return
            message = told
            if clock() >= sent_s + _WORK_S and (work := self.work()) != sent:
                message, sent, sent_s = replace(told, work=work), work, clock()
            await sock.send_all(wire.encode(message.to_value(), MAX_REPORT_BYTES))

    async def _nearer(self, host: str) -> _Link:
        """Return a link to a host above that is nearer than `host`, as soon as one can be reached."""

        def nearer() -> tuple[str, ...]:
            above = self._above()
            return above[: above.index(host)] if host in above else ()

        while True:
            await self._view.wait_for(lambda: bool(nearer()))
            if (found := await self._reach(nearer(), insist=False)) is not None:
                return found

    async def _reach(self, hosts: Sequence[str], *, insist: bool = True) -> _Link | None:
        """Return a link to the first of `hosts` that can be reached, None, after a while, if none can.

        Those that were out of reach a moment ago are passed by, but for the last one with `insist`.
        """
        now_s = asyncio.get_running_loop().time()
        for host in hosts:
            if self._avoided.get(host, 0.0) > now_s and not (insist and host == hosts[-1]):
                continue
            try:
                async with asyncio.timeout(_SILENT_S):
                    return host, await self._dial(host)
            except (PeerError, TimeoutError) as error:
                if self._avoided.get(host, 0.0) < now_s:
                    log.warning("cannot report to host %s, commits may pause: %s", host, error or "it does not answer")
                self._avoided[host] = now_s + _AVOIDED_S
        await asyncio.sleep(_RETRY_S)
        return None

    async def _hear(self, host: str, sock: SecureSocket) -> None:
        while (message := await sock.receive_message(wire.MAX_FRAME_BYTES, _SILENT_S)) is not None:
            if message:
                self.say(Said.parse(message))
        raise ConnectionError(f"host {host} ended the link")

    async def _news(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` holds, or when it is time to say the same again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPEAT_S):
                await self._view.wait_for(condition)

    def _tree(self) -> Tree | None:
        round_, root = self._view.round, self._view.leader
        return None if round_ is None or root is None or root not in round_ else Tree(round_, root)

    def _above(self) -> tuple[str, ...]:
        tree = self._tree()
        return () if tree is None or not self._view.leader_revision else tree.above(self._view.host)
