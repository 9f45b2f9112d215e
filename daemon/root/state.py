"""The root's view of a run, brought up to date key by key: a change costs the same however many hosts there are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError

from ..base.fields import Fields
from ..comparison.comparison import ClaimTally
from ..comparison.digests import parse_claims
from ..etcd.client import Entry
from ..run.commit import MISSED_FOLDER, NEXT_KEY, Agreed, Missed, Tally, parse_held
from ..run.hang import ALIVE
from ..run.observation import parse_observations
from ..run.quarantine import Quarantine
from ..run.rounds import Pair, Round
from ..tier.persist_plan import PUBLISHED_KEY, parse_published
from .view import Failure, RootView

DECISIONS_KEY = "root/decisions"
FAILURES_KEY = "root/failures"
COMMITTED_KEY = "rdzv/committed"


class RootState:
    """What the keys of a run say, each parsed once for each value that it has.

    Args:
        host: The root's own host. Its report counts for nothing in `tally`: the root knows better what it holds.
        replicas: Copies of each checkpoint.

    Attributes:
        tally: How many replicas of each pair the hosts of the round hold, None before the first round.
        claims: What the hosts report of the digests of their ranks' captures.
        ignored: Key → why it counts as nothing.
    """

    def __init__(self, host: str, replicas: int) -> None:
        self.tally: Tally | None = None
        self.ignored: dict[str, str] = {}
        self._host = host
        self._replicas = replicas
        self._revisions: dict[str, int] = {}
        self._parsed: dict[str, Any] = {}
        self._folders: dict[str, dict[str, Any]] = {folder: {} for folder in _FOLDERS}
        self._view: RootView | None = None
        self._gone: dict[int, tuple[str, ...]] = {}
        self.claims = ClaimTally()

    def apply(self, changes: Mapping[str, Entry | None]) -> None:
        """Let keys, which have lost the run's prefix, hold these entries; None: there is no such key any more.

        Raises:
            DaemonError: The round, the watermark or the next capture, on which everything depends, has not its form.
        """
        self._view = None
        before: Round | None = self._parsed.get("rdzv/round")
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
            if folder == "ckpt/held":
                self._count(name)
                self._compare(name, entry)
        if "rdzv/round" in changes:
            self._count_anew()
            self._note_gone(before, self._parsed.get("rdzv/round"))

    @property
    def watermark(self) -> Pair | None:
        """The newest committed pair."""
        watermark: Pair | None = self._parsed.get("ckpt/watermark")
        return watermark

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the current round, None before the first."""
        round_: Round | None = self._parsed.get("rdzv/round")
        return None if round_ is None else round_.world_size

    @property
    def committed(self) -> int | None:
        """Number of ranks that `COMMITTED_KEY` says."""
        committed: int | None = self._parsed.get(COMMITTED_KEY)
        return committed

    @property
    def agreed(self) -> Agreed:
        """What is committed, and what is captured next."""
        return Agreed.of(self._parsed.get("rdzv/round"), self.watermark, self._parsed.get(NEXT_KEY))

    @property
    def missed(self) -> list[Missed]:
        """What hosts report to have missed, also of earlier captures."""
        return list(self._folders[MISSED_FOLDER].values())

    def revision(self, key: str) -> int:
        """Return the revision of the last change of `key`, 0 while there is no such key."""
        return self._revisions.get(key, 0)

    @property
    def view(self) -> RootView:
        """All of it, as it is at this moment."""
        if self._view is None:
            found, folders = self._parsed, self._folders
            round_: Round | None = found.get("rdzv/round")
            failures = folders["rdzv/failure"]
            gone = dict(self._gone)
            if round_ is not None and str(round_.generation) in failures:
                gone[round_.generation] = round_.gone(self._launchers)
            self._view = RootView(
                host=self._host,
                round=round_,
                members={host: launcher.ready for host, launcher in folders["rdzv/members"].items()},
                gone=gone,
                daemons=frozenset(folders["ckpt/hosts"]),
                alive=frozenset(host for host, value in folders["ckpt/hosts"].items() if value.get("sign") == ALIVE),
                held=dict(folders["ckpt/held"]),
                watermark=self.watermark,
                persisted=found.get(PUBLISHED_KEY, ()),
                failures={failure.generation: failure for failure in failures.values()},
                history=found.get(FAILURES_KEY, ()),
                observations=dict(sorted(folders["obs"].items())),
                quarantines=dict(folders["rdzv/quarantine"]),
                decisions=found.get(DECISIONS_KEY, ()),
                closed="rdzv/closed" in found,
                revisions=dict(self._revisions),
            )
        return self._view

    @property
    def _launchers(self) -> dict[str, str]:
        return {host: launcher.session for host, launcher in self._folders["rdzv/members"].items()}

    def _note_gone(self, before: Round | None, after: Round | None) -> None:
        """Remember who was gone when `after` was formed: from then on launchers that go do so from it."""
        if before is None or after is None or after.generation != before.generation:
            follows = before is not None and after is not None and after.generation == before.generation + 1
            self._gone = {before.generation: before.gone(self._launchers, after)} if before and follows else {}

    def _put(
        self, values: dict[str, Any], name: str, key: str, entry: Entry | None, parse: Callable[[str, Entry], Any]
    ) -> None:
        values.pop(name, None)
        if entry is None:
            return
        try:
            values[name] = parse(key, entry)
        except DaemonError as error:
            if key in ("rdzv/round", "ckpt/watermark", NEXT_KEY):
                raise
            self.ignored[key] = str(error)

    def _count(self, host: str) -> None:
        if self.tally is not None and host != self._host:
            self.tally.see(host, self._folders["ckpt/held"].get(host, {}))

    def _compare(self, host: str, entry: Entry | None) -> None:
        try:
            if host != self._host:
                self.claims.see(host, {} if entry is None else parse_claims(entry.value))
        except DaemonError as error:
            self.claims.see(host, {})
            self.ignored[f"ckpt/held/{host}"] = str(error)

    def _count_anew(self) -> None:
        round_: Round | None = self._parsed.get("rdzv/round")
        held = {host: held for host, held in self._folders["ckpt/held"].items() if host != self._host}
        self.tally = None if round_ is None else Tally(round_, self._replicas, held)


@dataclass(frozen=True, slots=True)
class _Launcher:
    session: str
    ready: int

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        return cls(session=fields.optional_text("session"), ready=fields.integer("ready"))


def _failure(key: str, entry: Entry) -> Failure:
    generation = key.rpartition("/")[2]
    if not generation.isdecimal():
        raise DaemonError(f"{key}: its last part must be the number of a generation")
    return Failure.parse(int(generation), entry.value)


def _history(key: str, entry: Entry) -> tuple[Failure, ...]:
    items = Fields(entry.value, key).objects("failures")
    return tuple(Failure.parse(Fields(item, key).integer("generation"), item) for item in items)


_KEYS: Mapping[str, Callable[[str, Entry], Any]] = {
    "rdzv/round": lambda _, entry: Round.parse(entry.value, entry.revision),
    "rdzv/closed": lambda _, entry: entry.value,
    COMMITTED_KEY: lambda key, entry: Fields(entry.value, key).optional_integer("world_size", low=1),
    "ckpt/watermark": lambda key, entry: Fields(entry.value, key).pair(),
    NEXT_KEY: lambda key, entry: Fields(entry.value, key).pair(),
    PUBLISHED_KEY: lambda _, entry: parse_published(entry.value),
    FAILURES_KEY: _history,
    DECISIONS_KEY: lambda key, entry: tuple(Fields(entry.value, key).objects("decisions")),
}
_FOLDERS: Mapping[str, Callable[[str, Entry], Any]] = {
    "rdzv/members": lambda key, entry: _Launcher.parse(Fields(entry.value, key)),
    "rdzv/failure": _failure,
    "rdzv/quarantine": lambda _, entry: Quarantine.parse(entry.value),
    "ckpt/hosts": lambda _, entry: entry.value,
    "ckpt/held": lambda _, entry: parse_held(entry.value),
    MISSED_FOLDER: lambda _, entry: Missed.parse(entry.value),
    "obs": lambda _, entry: parse_observations(entry.value),
}
