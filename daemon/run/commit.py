"""The pure part of the commit protocol: which pair is committed, which one is captured next, what may be given up."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Self

from resilient_run.ckpt.format.pair import Pair

from ..base.codec import Record, limited
from .rounds import Round

_FIRST_PATIENCE = 4
_MOST_PATIENCE = 64

Held = Mapping[int, AbstractSet[Pair]]
"""Rank → pairs of which one host has complete, verified replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPair(Record):
    """The ranks of which a host holds a pair."""

    pair: Pair = limited(inline=True)
    ranks: frozenset[int]

    @classmethod
    def of(cls, held: Held, pair: Pair) -> Self:
        """Return the part of `held` that is of `pair`."""
        return cls(pair=pair, ranks=frozenset(rank for rank in held if pair in held[rank]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed(Record):
    """What the root has said to everybody, at one moment.

    Every rank captures the first step that it makes from `next` on, and no other until it hears of another `next`. The
    root commits nothing older than `next`, so what was captured before and is not committed never will be.

    Attributes:
        committed: The newest committed pair.
        next: Generation and step of the next capture.
        older: The committed pairs before it that stay in memory, too.
    """

    committed: Pair | None = limited(None, key="watermark")
    next: Pair
    older: tuple[Pair, ...] = ()

    @classmethod
    def of(cls, round_: Round | None, watermark: Pair | None, next_: Pair | None, older: tuple[Pair, ...] = ()) -> Self:
        """Return what is agreed in the generation of `round_`.

        Args:
            round_: The current generation, None before the first.
            watermark: What `WATERMARK` says.
            next_: What `NEXT` says. Of an earlier generation it says nothing, and what follows the restored step is
                captured first; of a later one, that nothing more of this one is committed (`resilientctl rollback`).
            older: What `OLDER` says, with `watermark` and `next_`: of an earlier generation nothing, either.
        """
        if round_ is None:
            return cls(committed=watermark, next=Pair(0, 0), older=older)
        # A watermark of an earlier generation is what the round restores, or was seen before it was set back to that.
        is_here = watermark is not None and watermark[0] >= round_.generation
        committed = watermark if is_here else round_.restore
        if not is_here and (next_ is None or next_[0] != round_.generation):
            older = round_.older  # else the root has spoken in this generation
        following = Pair(round_.generation, 1 if committed is None else committed[1] + 1)
        return cls(committed=committed, next=following if next_ is None else max(next_, following), older=older)

    def or_later(self, other: "Agreed") -> "Agreed":
        """Return which of the two was said later, of the same generation."""
        # Older pairs that are given up between two commits are not taken back.
        return max(self, other, key=lambda agreed: (agreed.next, agreed.committed or Pair(0, 0), -len(agreed.older)))

    def may_overwrite(self, pair: Pair | None) -> bool:
        """Tell whether a slot that holds `pair` (None: nothing) may be given up.

        From `next` on the root may be committing it at this moment.
        """
        return pair is None or (pair != self.committed and pair < self.next and pair not in self.older)

    def older_after(self, complete: AbstractSet[Pair], *, keep: int, every: int) -> tuple[Pair, ...]:
        """Return which older pairs stay once another one is committed.

        Whoever has not heard of that yet protects all of them: they are older ones or the newest to it, or not older
        than what it takes for the next capture.

        Args:
            complete: Pairs of which every host holds all replicas that it must.
            keep: How many committed pairs stay, the newest included.
            every: Steps between the older ones.
        """
        older = [pair for pair in self.older if pair in complete]
        newest = self.committed
        if newest is not None and newest in complete and (not older or newest.step - older[-1].step >= every):
            older.append(newest)
        return beside_newest(older, keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed(Record):
    """A rank will never have captured the first step from `next` on: `step` has passed without that.

    It heard of it too `late`, or the capture failed.
    """

    next: Pair = limited(
        inline=True,
        read=lambda values, _: Pair(values.integer("generation"), values.integer("next")),
        write=lambda pair: {"generation": pair[0], "next": pair[1]},
    )
    step: int
    late: bool


class Unhealthy(NamedTuple):
    """A rank would not go on from its state after a step, of all its steps the one after `before`."""

    before: int
    rank: int


def joined_unhealthy(*many: Mapping[Pair, Unhealthy]) -> dict[Pair, Unhealthy]:
    """Return what all of these say, of each step what one rank says."""
    found: dict[Pair, Unhealthy] = {}
    for some in many:
        for pair, told in some.items():
            # A rank that attached anew does not know which step came before.
            found[pair] = max(found.get(pair, told), told, key=lambda each: (each.before, -each.rank))
    return found


def unhealthy_row(unhealthy: Mapping[Pair, Unhealthy], count: int) -> tuple[Pair, ...]:
    """Return the first `count` steps in a row that are unhealthy, none where there is no such row."""
    rows: dict[Pair, tuple[Pair, ...]] = {}
    for pair in sorted(unhealthy):
        rows[pair] = (*rows.get(Pair(pair.generation, unhealthy[pair].before), ()), pair)
        if len(rows[pair]) == count:
            return rows[pair]
    return ()


class Lead:
    """How many steps after the newest one known to be completed the next capture is to be made.

    One, while every rank hears of a commit before its next step. When a rank hears of it too late the lead doubles, and
    it is halved again after a few commits without that; after more and more of them if that was too early. News take
    about as long to the ranks as from them, so the steps that a commit took bound it.

    Captures may fail at every second or third step, as the script has it. So while they fail the lead is longer by one
    now and then, for as long as 2, 4, 8 … failures: whatever the interval is, another part of it is met.
    """

    def __init__(self) -> None:
        """Start by assuming that a commit takes less time than a step."""
        self._steps = 1
        self._patience = _FIRST_PATIENCE
        self._kept = 0
        self._failures = 0

    def kept(self, commit_steps: int) -> None:
        """Record that all ranks captured in time, and that so many steps passed until the commit."""
        self._kept += 1
        self._failures = 0
        self._steps = min(self._steps, 2 * commit_steps + 1)
        if self._kept >= self._patience and self._steps > 1:
            self._steps, self._kept = self._steps // 2, 0

    def missed(self) -> None:
        """Record that a rank did not."""
        again = self._kept < self._patience
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if again else _FIRST_PATIENCE
        self._steps, self._kept = 2 * self._steps, 0

    def failed(self) -> None:
        """Record that a capture failed, of a rank that heard of it in time."""
        self._failures += 1

    def after(self, step: int, *, every: int) -> int:
        """Return the step to capture next, a multiple of `every`, when `step` is the newest that was completed."""
        longer = self._failures > 1 and self._failures.bit_length() % 2 == 0
        return -(-(step + self._steps + longer) // every) * every


def beside_newest(older: Sequence[Pair], keep: int) -> tuple[Pair, ...]:
    """Return which of `older` stay where `keep` pairs do, one of them newer than all of these."""
    return tuple(older[max(0, len(older) - keep + 1) :])


def advance(agreed: Agreed, complete: AbstractSet[Pair]) -> Pair | None:
    """Return the pair to commit next, None while there is none.

    Args:
        agreed: What the root has said.
        complete: Pairs of which every host holds all replicas that it must.
    """
    newest = max(complete, default=None)
    return None if newest is None or newest < agreed.next else newest


def is_dead(pair: Pair, round_: Round) -> bool:
    """Tell whether `pair` belongs to a timeline that `round_` left: neither made in it nor at hand when it began."""
    return pair[0] != round_.generation and pair != round_.restore and pair not in round_.older
