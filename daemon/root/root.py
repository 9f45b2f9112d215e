"""The root agent of one job (Gemini, Section 6.3.2): commits, decides about failures, and carries that out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, is_import, pair_value

from ..base.policy import Policy
from ..base.supervise import Supervisor
from ..comparison.comparison import Comparer
from ..comparison.digests import HostDigests
from ..etcd.client import Entry, Etcd, EtcdUnavailable
from ..peers.tree import ReportTree
from ..run import keys
from ..run.commit import Unhealthy
from ..run.life import Transaction
from ..run.observation import Observation
from ..run.records import Closed, Failure, parse_decisions
from ..run.report import Claims, Said
from ..run.view import JobView
from .committer import Committer
from .decide import (
    Action,
    Answered,
    Ask,
    Break,
    Decision,
    FallBack,
    Note,
    Overlook,
    PutInQuarantine,
    Release,
    Stop,
    decide,
    remembered,
    shortage,
)
from .operator import HostRequest, Operator
from .state import RootState
from .view import RootView

log = logging.getLogger(__name__)

_KEPT_DECISIONS = 32
_KEPT_FAILURES = 64
_KEPT_UNHEALTHY = 4096
_LOOK_AGAIN_S = 5.0
_LOOK_PAUSE_S = 0.02
_RETRY_S = 0.5


class Root:
    """Sees the whole run in one mirror, for as long as `run` runs; only the elected root runs one.

    What is decided is written in one transaction together with its entry in `root/decisions`, guarded by the revisions
    of that key and of the round: whatever happens to a root, nothing is done twice or for a generation that is gone.

    Args:
        run_id: The job.
        etcd: The job's connection.
        view: What this host knows of the job.
        tree: Through which the hosts report, and hear what is committed.
        policy: How failures are answered, and what stays in memory.
        digests: By which they are compared.
        observe: Takes in what way they differ.
        group: Runs the requests to the operator.
        supervisor: Of the job's tasks.
        also_commit: Returns what else is put when a pair is committed, by key.
        made_by: Returns how many ranks captured a pair that the persistent tier has, None if it cannot be read.
    """

    def __init__(
        self,
        run_id: str,
        etcd: Etcd,
        *,
        view: JobView,
        tree: ReportTree,
        policy: Policy,
        digests: HostDigests,
        observe: Callable[[Mapping[str, Observation]], None],
        group: asyncio.TaskGroup,
        supervisor: Supervisor,
        also_commit: Callable[[Pair], Mapping[str, Any]] | None,
        made_by: Callable[[Pair], Awaitable[int | None]] | None,
    ) -> None:
        self._run_id = run_id
        self._etcd = etcd
        self._view = view
        self._tree = tree
        self._policy = policy.root
        self._operator = Operator(policy.root)
        self._made_by = made_by
        self._group = group
        self._supervisor = supervisor
        self._state = RootState(view.host, view.replicas)
        self._news = asyncio.Event()
        self._over_in: int | None = None
        self._absent_since_s: dict[str, float] = {}
        self._short_since_s: float | None = None
        self._corruption = policy.detect.corruption
        self._comparer = Comparer(
            etcd,
            view=view,
            claims=self._claims,
            digests=digests,
            action=self._corruption,
            observe=observe,
        )
        self._committer = Committer(
            etcd,
            view=view,
            tree=tree,
            state=self._state,
            agrees=self._comparer.agrees,
            keep_every=policy.replication.keep_every,
            also=also_commit,
        )

    async def run(self) -> None:
        """Be the root until cancelled; requests to the operator live on."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mirror())
            group.create_task(self._say())
            group.create_task(self._wake_comparer())
            group.create_task(self._supervisor.keep("commit", self._committer.run, essential=True))
            group.create_task(self._supervisor.keep("compare", self._comparer.run, essential=True))
            group.create_task(self._supervisor.keep("govern", self._govern, essential=True))

    async def _mirror(self) -> None:
        async with aclosing(self._etcd.changes()) as states:
            async for changes in states:
                self._state.apply(changes)
                if self._view.left_out != self._state.left_out:
                    self._view.left_out = self._state.left_out
                self._tree.beside = self._state.spares
                self._news.set()
                self._view.notify()

    async def _wake_comparer(self) -> None:
        """Let ranks be compared again when there is another report, or another step is committed."""
        seen: tuple[object, object] = None, None
        while True:
            await self._view.wait_for(
                lambda: self._tree.report() is not seen[0] or self._view.watermark != seen[1]  # noqa: B023
            )
            seen = self._tree.report(), self._view.watermark
            self._comparer.wake()
            if self._unhealthy():
                self._news.set()

    def _unhealthy(self) -> dict[Pair, Unhealthy]:
        """Return what ranks call unhealthy and no commit has followed."""
        report, round_ = self._tree.report(), self._state.round
        if report is None or round_ is None:
            return {}
        begins = max(self._state.agreed.committed or Pair(0, 0), Pair(round_.generation, 0))
        return {pair: told for pair, told in report.unhealthy.items() if begins < pair < (round_.generation + 1,)}

    async def _say(self) -> None:
        """Let all hosts know what etcd has of commits, whenever that changes."""
        while True:
            await self._view.wait_for(lambda: self._news_of_commits() is not None)
            if (said := self._news_of_commits()) is not None:
                self._tree.say(said)

    def _news_of_commits(self) -> Said | None:
        """Return what to say now, None while this host is not the root, or has said that."""
        state, term, known = self._state, self._tree.term, self._tree.said
        if not self._view.is_root or term is None or state.round is None or state.round.generation != term[0]:
            return None
        said = Said(
            term=term,
            number=self._tree.spoken + 1,
            watermark=state.get(keys.WATERMARK),
            watermark_revision=state.revisions.get(keys.WATERMARK, 0),
            next=state.get(keys.NEXT),
            older=state.get(keys.OLDER, ()),
            persist=state.get(keys.PERSIST),
        )
        return None if known is not None and replace(said, number=known.number) == known else said

    def _claims(self) -> Claims:
        report = self._tree.report()
        return {} if report is None else report.claims

    async def _govern(self) -> None:
        await self._news.wait()
        while True:
            self._news.clear()
            seen, now_unix_s = self._state.view, time.time()
            decision = self._decide(seen, now_unix_s)
            if decision.actions:
                try:
                    applied = await self._carry_out(seen, decision, now_unix_s)
                except EtcdUnavailable as error:
                    log.warning("not decided yet: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if applied:
                    self._announce(seen, decision)
            # Deciding takes time in the number of hosts, and in every step each of them has news.
            await asyncio.sleep(_LOOK_PAUSE_S)
            # Carried out or refused, a guarded key has changed. A quarantine or an absence may also just have lasted.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._news.wait()

    def _decide(self, seen: RootView, now_unix_s: float) -> Decision:
        if seen.closed:
            # The next life has this round, too, until it forms one: nobody is lost from it meanwhile.
            self._over_in = seen.generation
        if seen.generation == self._over_in:
            return Decision(actions=(), reason="the run is over")
        seen = replace(seen, absent_s=self._absent_s(seen), unhealthy=self._unhealthy())
        seen = replace(seen, short_s=self._short_s(shortage(seen, self._policy, now_unix_s)))
        return decide(seen, self._policy, now_unix_s, corruption=self._corruption)

    def _absent_s(self, seen: RootView) -> dict[str, float]:
        now_s = time.monotonic()
        hosts = () if seen.round is None else seen.round.hosts
        since = self._absent_since_s
        self._absent_since_s = {host: since.get(host, now_s) for host in hosts if host not in seen.members}
        return {host: now_s - at_s for host, at_s in self._absent_since_s.items()}

    def _short_s(self, missing: int) -> float:
        now_s = time.monotonic()
        self._short_since_s = (self._short_since_s or now_s) if missing else None
        return 0.0 if self._short_since_s is None else now_s - self._short_since_s

    async def _carry_out(self, seen: RootView, decision: Decision, now_unix_s: float) -> bool:
        made = transaction(seen, decision, now_unix_s)
        for action in decision.actions:
            if isinstance(action, FallBack) and not is_import(action.pair) and self._made_by is not None:
                ranks = await self._made_by(action.pair)
                if ranks is not None:
                    made = made._replace(puts={**made.puts, keys.COMMITTED: {"world_size": ranks}})
        return await self._etcd.commit(*made) > 0

    def _announce(self, seen: RootView, decision: Decision) -> None:
        for action in decision.actions:
            log.log(logging.ERROR if isinstance(action, Stop) else logging.WARNING, "%s", action.reason)
            ask, hosts = self._operator.provide, tuple[str, ...]()
            match action:
                case Ask():
                    hosts = action.hosts
                case Release():
                    ask, hosts = self._operator.release, (action.host,)
            for host in hosts:
                request = HostRequest(run_id=self._run_id, host=host, generation=seen.generation, reason=action.reason)
                self._group.create_task(self._supervisor.once("operator", partial(self._request, ask, request)))

    async def _request(self, ask: Callable[[HostRequest], Awaitable[str]], request: HostRequest) -> None:
        """Let the operator answer, however long it takes, and remember what it said."""
        outcome = await ask(request)
        log.warning("%s", outcome)
        key = keys.DECISIONS
        about = {"unix_s": time.time(), "root": self._view.host, "generation": request.generation}
        entry = {**about, "kind": "operator", "hosts": _named(request.host), "reason": outcome}
        while True:
            try:
                found = await self._etcd.get(key)
                # The request was noted there, so if the key is gone the run is.
                if found is None or await self._etcd.commit(
                    {key: found.revision}, {key: _kept(_decided(found), entry)}
                ):
                    return
            except EtcdUnavailable:
                await asyncio.sleep(_RETRY_S)


def transaction(seen: RootView, decision: Decision, now_unix_s: float) -> Transaction:
    """Return what carries out `decision`, decided on `seen`."""
    life, puts = seen.life, dict[str, Any]()
    for action in decision.actions:
        match action:
            case PutInQuarantine() | Release():
                puts[keys.QUARANTINES(action.host)] = action.quarantine.to_value()
            case FallBack():
                puts[keys.WATERMARK] = pair_value(action.pair)
                if is_import(action.pair):
                    puts[keys.COMMITTED] = {"world_size": None}
            case Stop() if life is not None:
                puts |= life.end(Closed(reason=action.reason, failed=True)).puts
            case Break():
                puts[keys.FAILURES(seen.generation)] = _failure(action, seen.generation, now_unix_s).to_value()
                if action.unhealthy:
                    pairs = [*seen.went_back, *action.unhealthy][-_KEPT_UNHEALTHY:]
                    puts[keys.UNHEALTHY] = {"pairs": pairs}
    if noted := [action.failure for action in decision.actions if isinstance(action, Note)]:
        kept = seen.with_noted(noted).history[-_KEPT_FAILURES:]
        puts[keys.HISTORY] = {"failures": [failure.to_item() for failure in kept]}
    if (requests := remembered(seen, decision.actions, now_unix_s)) != seen.requests:
        puts[keys.REQUESTS] = {"requests": [request.to_value() for request in requests]}
    guards = {} if life is None else life.guard
    guards |= {key: seen.revisions.get(key, 0) for key in (keys.ROUND, keys.DECISIONS, *puts)}
    about = {"unix_s": now_unix_s, "root": seen.host, "generation": seen.generation}
    puts[keys.DECISIONS] = _kept(seen.decisions, *({**about, **_entry(action)} for action in decision.actions))
    return Transaction(guards=guards, puts=puts)


def _failure(action: Break, generation: int, now_unix_s: float) -> Failure:
    return Failure(
        generation=generation,
        host=action.host,
        kind=action.kind,
        rank=action.rank,
        step=action.step,
        unix_s=now_unix_s,
        message=action.reason,
    )


def _entry(action: Action) -> dict[str, Any]:
    """Return what `root/decisions` says of `action` alone."""
    hosts: list[str] = []
    match action:
        case Note(fault=kind, failure=failure):
            hosts = _named(failure.host)
        case PutInQuarantine(host=host):
            kind, hosts = "quarantine", [host]
        case Ask():
            hosts = [host for host in action.hosts if host]
            kind = "replace" if hosts else "add_standbys"
        case Answered(host=host):
            kind, hosts = "answered", [host]
        case Release(host=host):
            kind, hosts = "release", [host]
        case FallBack():
            kind = "fall_back"
        case Break(host=host):
            kind, hosts = "break", _named(host)
        case Overlook():
            kind = "overlook"
        case Stop():
            kind = "stop"
    return {"kind": kind, "hosts": hosts, "reason": action.reason}


def _named(host: str) -> list[str]:
    return [host] if host else []


def _decided(found: Entry) -> tuple[dict[str, Any], ...]:
    """Return the decisions that are written down, none if somebody has damaged them."""
    try:
        return parse_decisions(found.value)
    except DaemonError:
        return ()


def _kept(before: Iterable[dict[str, Any]], *entries: dict[str, Any]) -> dict[str, Any]:
    return {"decisions": [*before, *entries][-_KEPT_DECISIONS:]}
