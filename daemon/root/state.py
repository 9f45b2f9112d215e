"""The root's view of a run, brought up to date key by key: a change costs the same however many hosts there are."""

from collections.abc import Callable, Mapping
from typing import Any

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair

from ..base.fields import Fields
from ..comparison.comparison import ClaimTally
from ..comparison.digests import parse_claims
from ..etcd.client import Entry
from ..run import keys
from ..run.commit import Agreed, Missed, Tally, parse_held
from ..run.hang import ALIVE
from ..run.observation import parse_observations
from ..run.quarantine import Quarantine
from ..run.records import Failure, parse_decisions
from ..run.rounds import Member, Round
from ..tier.persist_plan import parse_published
from .requests import parse_requests
from .view import RootView


class RootState:
    """What the keys of a run say, each parsed once for each value that it has.

    Args:
        host: The root's own host. Its report counts for nothing in `tally`: the root knows better what it holds.
        replicas: Copies of each checkpoint.

    Attributes:
        tally: How many replicas of each pair the hosts of the round hold, None before the first round.
        left_out: Standbys that would keep replicas and that commits do not wait for: they, or who sends to them, report
            that they cannot.
        claims: What the hosts report of the digests of their ranks' captures.
        ignored: Key → why it counts as nothing.
    """

    def __init__(self, host: str, replicas: int) -> None:
        self.tally: Tally | None = None
        self.left_out: frozenset[str] = frozenset()
        self.ignored: dict[str, str] = {}
        self._host = host
        self._replicas = replicas
        self._revisions: dict[str, int] = {}
        self._parsed: dict[str, Any] = {}
        self._folders: dict[str, dict[str, Any]] = {folder: {} for folder in _FOLDERS}
        self._view: RootView | None = None
        self._spares: frozenset[str] = frozenset()
        self._gone: dict[int, tuple[str, ...]] = {}
        self.claims = ClaimTally()

    def apply(self, changes: Mapping[str, Entry | None]) -> None:
        """Let keys, which have lost the run's prefix, hold these entries; None: there is no such key any more.

        Raises:
            DaemonError: The round, the watermark or the next capture, on which everything depends, has not its form.
        """
        self._view = None
        before: Round | None = self._parsed.get(keys.ROUND)
        for key, entry in changes.items():
            self.ignored.pop(key, None)
            self._revisions.pop(key, None)
            if entry is not None:
                self._revisions[key] = entry.revision
            folder, _, name = key.rpartition("/")
            if key in _KEYS:
                self._put(self._parsed, key, key, entry, _KEYS[key])
            elif folder in _FOLDERS:
                self._put(self._folders[folder], name, key, entry, _FOLDERS[folder])
            if folder == keys.HELD:
                self._count(name)
                self._compare(name, entry)
        before_spares = self._spares
        self._find_spares()
        if keys.ROUND in changes or self._spares != before_spares:
            self._count_anew()
        if keys.ROUND in changes:
            self._note_gone(before, self._parsed.get(keys.ROUND))

    @property
    def watermark(self) -> Pair | None:
        """The newest committed pair."""
        watermark: Pair | None = self._parsed.get(keys.WATERMARK)
        return watermark

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the current round, None before the first."""
        round_: Round | None = self._parsed.get(keys.ROUND)
        return None if round_ is None else round_.world_size

    @property
    def committed(self) -> int | None:
        """The only number of ranks that can restore what is committed, as etcd says it."""
        committed: int | None = self._parsed.get(keys.COMMITTED)
        return committed

    @property
    def agreed(self) -> Agreed:
        """What is committed, and what is captured next."""
        return Agreed.of(self._parsed.get(keys.ROUND), self.watermark, self._parsed.get(keys.NEXT))

    @property
    def missed(self) -> list[Missed]:
        """What hosts report to have missed, also of earlier captures."""
        return list(self._folders[keys.MISSED].values())

    def revision(self, key: str) -> int:
        """Return the revision of the last change of `key`, 0 while there is no such key."""
        return self._revisions.get(key, 0)

    @property
    def view(self) -> RootView:
        """All of it, as it is at this moment."""
        if self._view is None:
            found, folders = self._parsed, self._folders
            round_: Round | None = found.get(keys.ROUND)
            failures = folders[keys.FAILURES]
            gone = dict(self._gone)
            if round_ is not None and str(round_.generation) in failures:
                gone[round_.generation] = round_.gone(folders[keys.MEMBERS])
            self._view = RootView(
                host=self._host,
                round=round_,
                members={host: member.ready for host, member in folders[keys.MEMBERS].items()},
                gone=gone,
                daemons=frozenset(folders[keys.HOSTS]),
                alive=frozenset(host for host, value in folders[keys.HOSTS].items() if value.get("sign") == ALIVE),
                held=dict(folders[keys.HELD]),
                watermark=self.watermark,
                persisted=found.get(keys.PERSISTED, ()),
                failures={failure.generation: failure for failure in failures.values()},
                history=found.get(keys.HISTORY, ()),
                observations=dict(sorted(folders[keys.OBSERVATIONS].items())),
                quarantines=dict(folders[keys.QUARANTINES]),
                decisions=found.get(keys.DECISIONS, ()),
                requests=found.get(keys.REQUESTS, ()),
                closed=keys.CLOSED in found,
                revisions=dict(self._revisions),
            )
        return self._view

    def _note_gone(self, before: Round | None, after: Round | None) -> None:
        """Remember who was gone when `after` was formed: from then on launchers that go do so from it."""
        if before is None or after is None or after.generation != before.generation:
            follows = before is not None and after is not None and after.generation == before.generation + 1
            members = self._folders[keys.MEMBERS]
            self._gone = {before.generation: before.gone(members, after)} if before and follows else {}

    def _put(
        self, values: dict[str, Any], name: str, key: str, entry: Entry | None, parse: Callable[[str, Entry], Any]
    ) -> None:
        values.pop(name, None)
        if entry is None:
            return
        try:
            values[name] = parse(key, entry)
        except (ValueError, DaemonError) as error:
            if key in (keys.ROUND, keys.WATERMARK, keys.NEXT):
                raise
            self.ignored[key] = str(error)

    def _count(self, host: str) -> None:
        if self.tally is not None and host != self._host:
            self.tally.see(host, self._folders[keys.HELD].get(host, {}))

    def _compare(self, host: str, entry: Entry | None) -> None:
        try:
            if host != self._host:
                self.claims.see(host, {} if entry is None else parse_claims(entry.value))
        except DaemonError as error:
            self.claims.see(host, {})
            self.ignored[keys.HELD(host)] = str(error)

    def _count_anew(self) -> None:
        round_: Round | None = self._parsed.get(keys.ROUND)
        held = {host: held for host, held in self._folders[keys.HELD].items() if host != self._host}
        self.tally = None if round_ is None else Tally(round_, self._replicas, held, self._spares)

    def _find_spares(self) -> None:
        """Learn which standbys commits wait for."""
        round_: Round | None = self._parsed.get(keys.ROUND)
        members, seen = self._folders[keys.MEMBERS], self._folders[keys.OBSERVATIONS]
        self._spares = self.left_out = frozenset()
        if round_ is None or not round_.lacks_machines(self._replicas):
            return
        arrivals = {host: member.arrival for host, member in members.items() if member.ready}
        spares = round_.spares(arrivals, self._folders[keys.HOSTS], self._replicas)
        kinds = {host: {item.kind for item in seen.get(host, ())} for host in (*round_.hosts, *spares)}
        cut_off = any("peer_unreachable" in found for found in kinds.values())
        self.left_out = frozenset(host for host in spares if cut_off or "memory" in kinds[host])
        self._spares = frozenset(spares) - self.left_out


def _failure(key: str, entry: Entry) -> Failure:
    return Failure.parse(int(key.rpartition("/")[2]), entry.value)


def _history(key: str, entry: Entry) -> tuple[Failure, ...]:
    items = Fields(entry.value, key).objects("failures")
    return tuple(Failure.parse(Fields(item, key).integer("generation"), item) for item in items)


_KEYS: Mapping[str, Callable[[str, Entry], Any]] = {
    keys.ROUND: lambda _, entry: Round.parse(entry.value, entry.revision),
    keys.CLOSED: lambda _, entry: entry.value,
    keys.COMMITTED: lambda key, entry: Fields(entry.value, key).optional_integer("world_size", low=1),
    keys.WATERMARK: lambda key, entry: Fields(entry.value, key).pair(),
    keys.NEXT: lambda key, entry: Fields(entry.value, key).pair(),
    keys.PERSISTED: lambda _, entry: parse_published(entry.value),
    keys.HISTORY: _history,
    keys.DECISIONS: lambda _, entry: parse_decisions(entry.value),
    keys.REQUESTS: lambda _, entry: parse_requests(entry.value),
}
_FOLDERS: Mapping[str, Callable[[str, Entry], Any]] = {
    keys.MEMBERS: lambda key, entry: Member.parse(key.rpartition("/")[2], entry.value, entry.created),
    keys.FAILURES: _failure,
    keys.QUARANTINES: lambda _, entry: Quarantine.parse(entry.value),
    keys.HOSTS: lambda _, entry: entry.value,
    keys.HELD: lambda _, entry: parse_held(entry.value),
    keys.MISSED: lambda _, entry: Missed.parse(entry.value),
    keys.OBSERVATIONS: lambda _, entry: parse_observations(entry.value),
}
