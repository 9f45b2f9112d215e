"""The root's view of a run, brought up to date key by key: a change costs the same however many hosts there are."""

from collections.abc import Mapping
from typing import Any

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair

from ..base.codec import parse_all
from ..etcd.client import Entry
from ..run import keys
from ..run.commit import Agreed, HeldPair
from ..run.hang import ALIVE
from ..run.life import Life
from ..run.mirror import Folders, Keys, Mirror, host_name, of, pair_of_entry, parse_pairs
from ..run.observation import parse_observations
from ..run.records import Failure
from ..run.rounds import Round
from .requests import Request
from .view import RootView


class RootState:
    """What the keys of a run say, each parsed once for each value that it has.

    Args:
        host: The root's own host.
        replicas: Copies of each checkpoint.

    Attributes:
        spares: Standbys that commits wait for: they keep replicas of every rank.
        left_out: Standbys that would keep replicas and that commits do not wait for: they, or who sends to them, report
            that they cannot.
    """

    def __init__(self, host: str, replicas: int) -> None:
        self.spares: frozenset[str] = frozenset()
        self.left_out: frozenset[str] = frozenset()
        self._host = host
        self._replicas = replicas
        self._mirror = Mirror(_KEYS, _FOLDERS)
        self._folders = self._mirror.folders
        self._view: RootView | None = None
        self._gone: dict[int, tuple[str, ...]] = {}

    def apply(self, changes: Mapping[str, Entry | None]) -> None:
        """Let keys hold these entries; None: there is no such key any more.

        Raises:
            DaemonError: The round, the watermark or the next capture, on which everything depends, has not its form.
        """
        self._view = None
        before = self.round
        self._mirror.apply(changes)
        for key in (keys.ROUND, keys.WATERMARK, keys.NEXT):
            if (cause := self.ignored.get(key)) is not None:
                raise DaemonError(cause)
        self._find_spares()
        if keys.ROUND in changes:
            self._note_gone(before, self.round)

    @property
    def ignored(self) -> dict[str, str]:
        """Key → why it counts as nothing."""
        return self._mirror.ignored

    @property
    def round(self) -> Round | None:
        """The current round, None before the first."""
        round_: Round | None = self._mirror.get(keys.ROUND)
        return round_

    @property
    def life(self) -> Life | None:
        """The life of the run."""
        return Life.of(self._mirror)

    @property
    def watermark(self) -> Pair | None:
        """The newest committed pair."""
        watermark: Pair | None = self._mirror.get(keys.WATERMARK)
        return watermark

    @property
    def next(self) -> Pair | None:
        """What `keys.NEXT` says."""
        following: Pair | None = self._mirror.get(keys.NEXT)
        return following

    @property
    def older(self) -> tuple[Pair, ...]:
        """The committed pairs before the newest that stay in memory, as etcd says it."""
        older: tuple[Pair, ...] = self._mirror.get(keys.OLDER, ())
        return older

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the current round, None before the first."""
        return None if self.round is None else self.round.world_size

    @property
    def committed(self) -> int | None:
        """The only number of ranks that can restore what is committed, as etcd says it."""
        committed: int | None = self._mirror.get(keys.COMMITTED)
        return committed

    @property
    def agreed(self) -> Agreed:
        """What is committed, and what is captured next."""
        return Agreed.of(self.round, self.watermark, self.next, self.older)

    @property
    def persist(self) -> Mapping[str, Any] | None:
        """The newest request to persist a pair, None before the first."""
        request: Mapping[str, Any] | None = self._mirror.get(keys.PERSIST)
        return request

    def revision(self, key: str) -> int:
        """Return the revision of the last change of `key`, 0 while there is no such key."""
        return self._mirror.revisions.get(key, 0)

    @property
    def view(self) -> RootView:
        """All of it, as it is at this moment."""
        if self._view is None:
            found, folders, round_ = self._mirror, self._folders, self.round
            failures = folders[keys.FAILURES]
            gone = dict(self._gone)
            if round_ is not None and round_.generation in failures:
                gone[round_.generation] = round_.gone(folders[keys.MEMBERS])
            self._view = RootView(
                host=self._host,
                round=round_,
                members={host: member.ready for host, member in folders[keys.MEMBERS].items()},
                nprocs={host: member.nproc for host, member in folders[keys.MEMBERS].items()},
                gone=gone,
                daemons=frozenset(folders[keys.HOSTS]),
                alive=frozenset(host for host, value in folders[keys.HOSTS].items() if value.get("sign") == ALIVE),
                held={
                    host: held.ranks
                    for host, held in folders[keys.HELD].items()
                    if round_ and held.pair == round_.restore
                },
                replicas=self._replicas,
                watermark=self.watermark,
                persisted=found.get(keys.PERSISTED, ()),
                failures=dict(failures),
                history=found.get(keys.HISTORY, ()),
                observations=dict(sorted(folders[keys.OBSERVATIONS].items())),
                quarantines=dict(folders[keys.QUARANTINES]),
                decisions=found.get(keys.DECISIONS, ()),
                went_back=found.get(keys.UNHEALTHY, ()),
                requests=found.get(keys.REQUESTS, ()),
                life=self.life,
                revisions=dict(found.revisions),
            )
        return self._view

    def _note_gone(self, before: Round | None, after: Round | None) -> None:
        """Remember who was gone when `after` was formed: from then on launchers that go do so from it."""
        if before is None or after is None or after.generation != before.generation:
            follows = before is not None and after is not None and after.generation == before.generation + 1
            members = self._folders[keys.MEMBERS]
            self._gone = {before.generation: before.gone(members, after)} if before and follows else {}

    def _find_spares(self) -> None:
        """Learn which standbys commits wait for."""
        round_ = self.round
        members, seen = self._folders[keys.MEMBERS], self._folders[keys.OBSERVATIONS]
        self.spares = self.left_out = frozenset()
        if round_ is None or not round_.lacks_machines(self._replicas):
            return
        arrivals = {host: member.arrival for host, member in members.items() if member.ready}
        spares = round_.spares(arrivals, self._folders[keys.HOSTS], self._replicas)
        kinds = {host: {item.kind for item in seen.get(host, ())} for host in (*round_.hosts, *spares)}
        cut_off = any("peer_unreachable" in found for found in kinds.values())
        self.left_out = frozenset(host for host in spares if cut_off or "memory" in kinds[host])
        self.spares = frozenset(spares) - self.left_out


_KEYS: Keys = {
    keys.WATERMARK: pair_of_entry,
    keys.NEXT: pair_of_entry,
    keys.OLDER: lambda entry: parse_pairs(entry.value),
    keys.PERSIST: lambda entry: entry.value,
    keys.HISTORY: lambda entry: parse_all(Failure, entry.value, "failures"),
    keys.REQUESTS: lambda entry: parse_all(Request, entry.value, "requests"),
}
_FOLDERS: Folders = {
    keys.HOSTS: (host_name, lambda _, entry: entry.value),
    keys.HELD: (host_name, of(HeldPair)),
    keys.OBSERVATIONS: (host_name, lambda _, entry: parse_observations(entry.value)),
}
