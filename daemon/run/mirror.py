"""What the keys of a run say, brought up to date key by key: a change costs the same however many hosts there are."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, pair_of

from ..base.codec import Record
from ..base.fields import Fields
from ..etcd.client import Entry
from . import keys
from .quarantine import Quarantine
from .records import Agreement, Failure, parse_decisions
from .rounds import Member, Round

log = logging.getLogger(__name__)

Keys = Mapping[str, Callable[[Entry], Any]]
Folders = Mapping[str, tuple[Callable[[str], Any], Callable[[Any, Entry], Any]]]


class Mirror:
    """The values of a run's keys, each parsed once for each value that it has; `Etcd.changes` feeds it.

    Args:
        more_keys: Key → what makes its value of an entry, beside what launchers and daemons read.
        more_folders: Folder → what makes a name of what follows it in a key, and a value of that name and the entry.

    Attributes:
        folders: Folder → name → value.
        revisions: Key → revision of its last change, also where the value is damaged or nobody parses it.
        ignored: Key → why it counts as nothing.
    """

    def __init__(self, more_keys: Keys | None = None, more_folders: Folders | None = None) -> None:
        self._keys, self._parsers = {**_KEYS, **(more_keys or {})}, {**_FOLDERS, **(more_folders or {})}
        self._values: dict[str, Any] = {}
        self.folders: dict[str, dict[Any, Any]] = {folder: {} for folder in self._parsers}
        self.revisions: dict[str, int] = {}
        self.ignored: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def apply(self, changes: Mapping[str, Entry | None]) -> Self:
        """Let keys hold these entries; None: there is no such key any more."""
        for key, entry in changes.items():
            self.ignored.pop(key, None)
            self.revisions.pop(key, None)
            if entry is None:
                self._told.pop(key, None)
            else:
                self.revisions[key] = entry.revision
            try:
                self._see(key, entry)
            except (ValueError, DaemonError) as error:
                if entry is not None:
                    self.ignore(key, error)
        return self

    def ignore(self, key: str, error: Exception) -> None:
        """Note that `key` counts as nothing; log each cause once."""
        self.ignored[key] = f"{key}: {error}"
        if self._told.get(key) != str(error):
            self._told[key] = str(error)
            log.error("ignoring %s: %s", key, error)

    def get(self, key: str, default: Any = None) -> Any:
        """Return what `key` says, `default` where it is absent or damaged."""
        return self._values.get(key, default)

    def _see(self, key: str, entry: Entry | None) -> None:
        folder, *names = keys.split(key)
        if key in self._keys:
            self._hold(self._values, key, entry, self._keys[key])
        elif names and folder in self._parsers:
            parse_name, parse = self._parsers[folder]
            name = parse_name("/".join(names))
            self._hold(self.folders[folder], name, entry, partial(parse, name))

    @staticmethod
    def _hold(values: dict[Any, Any], name: Any, entry: Entry | None, parse: Callable[[Entry], Any]) -> None:
        """Let `values` have what an entry says; nothing if it is damaged, and as before if its parser fails."""
        try:
            value = None if entry is None else parse(entry)
        except (ValueError, DaemonError):
            values.pop(name, None)
            raise
        if entry is None:
            values.pop(name, None)
        else:
            values[name] = value


def host_name(name: str) -> str:
    """Return the host in the name of a key; ValueError when it is none."""
    if not name or "/" in name:
        raise ValueError(f"{name[:80]!r} is not the name of a host")
    return name


def generation_and_host(name: str) -> tuple[int, str]:
    """Return both from the name of a key."""
    number, _, rest = name.partition("/")
    return _generation(number), host_name(rest)


def _generation(name: str) -> int:
    """Return the generation in the name of a key; ValueError when there is none, or it is written in another way."""
    if not name.isdecimal() or len(name) > _DIGITS or name != str(int(name)):
        raise ValueError(f"{name[:80]!r} is not the number of a generation")
    return int(name)


def _store(_: int, entry: Entry) -> tuple[str, int]:
    fields = Fields(entry.value, keys.STORES)
    return fields.text("addr"), fields.integer("port", low=1, high=65535)


def of(kind: type[Record]) -> Callable[..., Any]:
    """Return what makes a record of this kind of an entry, whose name it does not need."""
    return lambda *named: kind.parse(named[-1].value)


def pair_of_entry(entry: Entry | None, what: str = "pair") -> Pair | None:
    """Return the generation and the step that an entry says, None where there is none."""
    return None if entry is None else Fields(entry.value, what).pair()


def parse_pairs(value: Mapping[str, Any], what: str = "pairs") -> tuple[Pair, ...]:
    """Return the pairs that a value lists; DaemonError when it is malformed."""
    return Fields(value, what).made("pairs", "a list of pairs", lambda pairs: tuple(map(pair_of, pairs)))


_DIGITS = 19
_KEYS: Keys = {
    keys.JOB: of(Agreement),
    keys.ROUND: lambda entry: Round.parse(entry.value, revision=entry.revision),
    keys.COMMITTED: lambda entry: Fields(entry.value, keys.COMMITTED).optional_integer("world_size", low=1),
    keys.UNHEALTHY: lambda entry: parse_pairs(entry.value),
    keys.PERSISTED: lambda entry: parse_pairs(entry.value),
    keys.DECISIONS: lambda entry: parse_decisions(entry.value),
}
_FOLDERS: Folders = {
    keys.MEMBERS: (host_name, lambda name, entry: Member.parse(entry.value, host=name, arrival=entry.created)),
    keys.STORES: (_generation, _store),
    keys.FAILURES: (_generation, lambda number, entry: Failure.parse(entry.value, generation=number)),
    keys.DONE: (generation_and_host, lambda *_: True),
    keys.QUARANTINES: (host_name, of(Quarantine)),
}
