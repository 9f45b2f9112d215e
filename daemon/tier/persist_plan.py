"""The pure part of persisting: which pair is asked for when, what hosts answer, and what may be published."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, pair_of, pair_value

from ..base.fields import Fields
from ..base.policy import PersistPolicy
from ..run import keys
from .manifest import Persisted, RankFile

_PATIENCE_S = 600.0
_RANK_DIGITS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistRequest:
    """The pair that every host was asked for last, and when."""

    pair: Pair
    unix_s: float

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return the request in the etcd value.

        Raises:
            DaemonError: The value is none.
        """
        fields = Fields(value, keys.PERSIST)
        return cls(pair=fields.pair(), unix_s=fields.number("unix_s", high=1e12))

    def to_value(self) -> dict[str, Any]:
        """Return the etcd value."""
        return {**pair_value(self.pair), "unix_s": self.unix_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistAnswer:
    """What one host wrote of a pair, or why it could not."""

    pair: Pair
    world_size: int
    ranks: Mapping[int, RankFile]
    error: str | None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return the answer in the etcd value.

        Raises:
            DaemonError: The value is none.
        """
        fields = Fields(value, keys.ANSWERS)
        files = Fields(fields.object("files"), f"{keys.ANSWERS}, files")
        return cls(
            pair=fields.pair(),
            world_size=fields.integer("world_size"),
            ranks={
                int(rank): RankFile.parse(Fields(files.object(rank), f"{keys.ANSWERS}, rank {rank}"))
                for rank in fields.object("files")
                if rank.isdecimal() and len(rank) <= _RANK_DIGITS
            },
            error=None if value.get("error") is None else fields.text("error"),
        )

    def to_value(self) -> dict[str, Any]:
        """Return the etcd value."""
        files = {str(rank): asdict(file) for rank, file in self.ranks.items()}
        return {**pair_value(self.pair), "world_size": self.world_size, "files": files, "error": self.error}


def is_due(
    policy: PersistPolicy,
    pair: Pair,
    *,
    last: PersistRequest | None,
    settled: bool,
    since_step: int,
    since_unix_s: float,
    now_unix_s: float,
) -> tuple[bool, str]:
    """Decide whether `pair`, which is about to be committed, is to be persisted; return that and why.

    Args:
        policy: How often.
        pair: The pair.
        last: The request before, None when there was none.
        settled: Nothing can come of that any more: it was published, or failed.
        since_step: Newest step that is known to be persisted, 0 for none.
        since_unix_s: When this root began.
        now_unix_s: The time.
    """
    step, unix_s = (since_step, since_unix_s) if last is None else (max(last.pair[1], since_step), last.unix_s)
    age_s = now_unix_s - unix_s
    # The clock of the host that asked may be ahead by a little.
    if last is not None and pair[0] == last.pair[0] and not settled and abs(age_s) < _PATIENCE_S:
        return False, f"step {last.pair[1]} is being persisted"
    if policy.every_steps and pair[1] - step >= policy.every_steps:
        return True, f"{pair[1] - step} steps after step {step}"
    if policy.every_s and age_s < 0:
        return True, "the one before is of a time to come"
    if policy.every_s and age_s >= policy.every_s:
        return True, f"{age_s:.0f} s after the one before"
    return False, "the next one is not due"


def merged(pair: Pair, run_id: str, answers: Mapping[str, PersistAnswer]) -> Persisted | None:
    """Return the manifest of `pair` once every rank of it is written, None before."""
    matching = [answer for answer in answers.values() if answer.pair == pair and answer.error is None]
    ranks = {rank: file for answer in matching for rank, file in answer.ranks.items()}
    world_sizes = {answer.world_size for answer in matching if answer.ranks}
    if len(world_sizes) != 1 or ranks.keys() != set(range(world_size := world_sizes.pop())):
        return None
    return Persisted(run_id=run_id, pair=pair, world_size=world_size, ranks=ranks)


def parse_published(value: Mapping[str, Any]) -> tuple[Pair, ...]:
    """Return the published pairs, oldest first.

    Raises:
        DaemonError: The value is malformed.
    """
    try:
        return tuple(map(pair_of, value["pairs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DaemonError(f"{keys.PERSISTED}: {str(value)[:200]} does not list pairs: {error!r}") from error
