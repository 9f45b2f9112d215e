"""The root's view of a run, brought up to date key by key: a change costs the same however many hosts there are."""

from collections.abc import Mapping
from typing import Self

from resilient_run.ckpt.errors import DaemonError

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


class RootState(Mirror):
    """What the keys of a run say to its root.

    Args:
        host: The root's own host.
        replicas: Copies of each checkpoint.

    Attributes:
        spares: Standbys that commits wait for: they keep replicas of every rank.
        left_out: Standbys that would keep replicas and that commits do not wait for: they, or who sends to them, report
            that they cannot.
    """

    def __init__(self, host: str, replicas: int) -> None:
        super().__init__(_KEYS, _FOLDERS)
        self.spares: frozenset[str] = frozenset()
        self.left_out: frozenset[str] = frozenset()
        self._host = host
        self._replicas = replicas
        self._view: RootView | None = None
        self._gone: dict[int, tuple[str, ...]] = {}

    def apply(self, changes: Mapping[str, Entry | None]) -> Self:
        """Let keys hold these entries; None: there is no such key any more.

        Raises:
            DaemonError: The round, the watermark or the next capture, on which everything depends, has not its form.
        """
        self._view = None
        before = self.round
        super().apply(changes)
        for key in (keys.ROUND, keys.WATERMARK, keys.NEXT):
            if (cause := self.ignored.get(key)) is not None:
                raise DaemonError(cause)
        self._find_spares()
        if keys.ROUND in changes:
            self._note_gone(before, self.round)
        return self

    @property
    def round(self) -> Round | None:
        """The current round, None before the first."""
        round_: Round | None = self.get(keys.ROUND)
        return round_

    @property
    def life(self) -> Life | None:
        """The life of the run."""
        return Life.of(self)

    @property
    def agreed(self) -> Agreed:
        """What is committed, and what is captured next."""
        return Agreed.of(self.round, self.get(keys.WATERMARK), self.get(keys.NEXT), self.get(keys.OLDER, ()))

    @property
    def view(self) -> RootView:
        """All of it, as it is at this moment."""
        if self._view is None:
            folders, round_ = self.folders, self.round
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
                watermark=self.get(keys.WATERMARK),
                persisted=self.get(keys.PERSISTED, ()),
                failures=dict(failures),
                history=self.get(keys.HISTORY, ()),
                observations=dict(sorted(folders[keys.OBSERVATIONS].items())),
                quarantines=dict(folders[keys.QUARANTINES]),
                decisions=self.get(keys.DECISIONS, ()),
                went_back=self.get(keys.UNHEALTHY, ()),
                requests=self.get(keys.REQUESTS, ()),
                life=self.life,
                revisions=dict(self.revisions),
            )
        return self._view

    def _note_gone(self, before: Round | None, after: Round | None) -> None:
        """Remember who was gone when `after` was formed: from then on launchers that go do so from it."""
        if before is None or after is None or after.generation != before.generation:
            follows = before is not None and after is not None and after.generation == before.generation + 1
            members = self.folders[keys.MEMBERS]
            self._gone = {before.generation: before.gone(members, after)} if before and follows else {}

    def _find_spares(self) -> None:
        """Learn which standbys commits wait for."""
        round_ = self.round
        members, seen = self.folders[keys.MEMBERS], self.folders[keys.OBSERVATIONS]
        self.spares = self.left_out = frozenset()
        if round_ is None or not round_.lacks_machines(self._replicas):
            return
        arrivals = {host: member.arrival for host, member in members.items() if member.ready}
        spares = round_.spares(arrivals, self.folders[keys.HOSTS], self._replicas)
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
