"""The pure part of persisting: which pair is asked for when, what hosts answer, and what may be published."""

from collections.abc import Mapping
from dataclasses import dataclass

from resilient_run.ckpt.format.pair import Pair

from ..base.codec import UNIX_S, Record, limited
from ..base.policy import PersistPolicy
from .manifest import Persisted, RankFile, files_value, read_files

_PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistRequest(Record):
    """The pair that every host was asked for last, and when."""

    pair: Pair = limited(inline=True)
    unix_s: float = limited(high=UNIX_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistAnswer(Record):
    """What one host wrote of a pair, or why it could not."""

    pair: Pair = limited(inline=True)
    world_size: int
    ranks: Mapping[int, RankFile] = limited(key="files", read=read_files, write=files_value)
    error: str | None = limited(None, shown=True)


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
