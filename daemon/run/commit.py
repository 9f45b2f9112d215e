"""The pure part of the commit protocol: which pair is committed, which one is captured next, what may be given up."""

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, natural, pair_of, pair_value

from ..base.fields import Fields
from . import keys
from .rounds import Round

_FIRST_PATIENCE = 4
_MOST_PATIENCE = 64

Held = Mapping[int, AbstractSet[Pair]]
"""Rank → pairs of which one host has complete, verified replicas."""


def parse_held(value: Mapping[str, Any]) -> dict[int, frozenset[Pair]]:
    """Return what a host reports that it holds.

    Raises:
        DaemonError: The value is not such a report.
    """
    try:
        return {natural(int(rank)): frozenset(map(pair_of, pairs)) for rank, pairs in value["held"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DaemonError(f"{keys.HELD}: {str(value)[:200]} is not a report of replicas: {error!r}") from error


def report_held(held: Held, digests: Mapping[str, Any]) -> dict[str, Any]:
    """Return the etcd value that `parse_held` reads, with what `digests.parse_claims` reads."""
    ranks = {str(rank): sorted(list(pair) for pair in pairs) for rank, pairs in sorted(held.items())}
    return {"held": ranks, "digests": digests}


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What the root has said to everybody, at one moment.

    Every rank captures the first step that it makes from `next` on, and no other until it hears of another `next`. The
    root commits nothing older than `next`, so what was captured before and is not committed never will be.

    Attributes:
        committed: The newest committed pair.
        next: Generation and step of the next capture.
    """

    committed: Pair | None
    next: Pair

    @classmethod
    def of(cls, round_: Round | None, watermark: Pair | None, next_: Pair | None) -> Self:
        """Return what is agreed in the generation of `round_`.

        Args:
            round_: The current generation, None before the first.
            watermark: What `WATERMARK` says.
            next_: What `NEXT` says; of another generation it says nothing, and what follows the restored step is
                captured first.
        """
        if round_ is None:
            return cls(committed=watermark, next=(0, 0))
        # A watermark of an earlier generation is what the round restores, or was seen before it was set back to that.
        committed = watermark if watermark is not None and watermark[0] >= round_.generation else round_.restore
        following = (round_.generation, 1 if committed is None else committed[1] + 1)
        ours = next_ is not None and next_[0] == round_.generation
        return cls(committed=committed, next=max(next_, following) if next_ is not None and ours else following)

    @classmethod
    def parse(cls, fields: Fields) -> Self:
        """Return what a peer says is agreed.

        Raises:
            DaemonError: It says nothing of that form.
        """
        next_ = fields.optional_pair("next")
        if next_ is None:
            raise DaemonError("field 'next' must be a generation and a step")
        return cls(committed=fields.optional_pair("watermark"), next=next_)

    def message(self) -> dict[str, Any]:
        """Return the fields of a message that says so."""
        return {"watermark": pair_value(self.committed), "next": pair_value(self.next)}

    def or_later(self, other: "Agreed") -> "Agreed":
        """Return which of the two was said later, of the same generation."""
        return max(self, other, key=lambda agreed: (agreed.next, agreed.committed or (0, 0)))

    def may_overwrite(self, pair: Pair | None) -> bool:
        """Tell whether a slot that holds `pair` (None: nothing) may be given up.

        From `next` on the root may be committing it at this moment.
        """
        return pair is None or (pair != self.committed and pair < self.next)


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """A rank will never have captured the first step from `next` on: `step` has passed without that.

    It heard of it too `late`, or the capture failed.
    """

    next: Pair
    step: int
    late: bool

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return what a host reports to have missed.

        Raises:
            DaemonError: The value is no such report.
        """
        fields = Fields(value, keys.MISSED)
        next_ = fields.integer("generation"), fields.integer("next")
        return cls(next=next_, step=fields.integer("step"), late=fields.flag("late"))

    def to_value(self) -> dict[str, Any]:
        """Return the etcd value."""
        return {"generation": self.next[0], "next": self.next[1], "step": self.step, "late": self.late}


class Lead:
    """How many steps after the newest one known to be completed the next capture is to be made.

    One, while every rank hears of a commit before its next step. When a rank hears of it too late the lead doubles, and
    it is halved again after a few commits without that; after more and more of them if that was too early. News take
    about as long to the ranks as from them, so the steps that a commit took bound it.

    Captures may fail at every second or third step, as the script has it. So while they fail the lead is longer by one
    now and then, for as long as 2, 4, 8 … failures: whatever the interval is, another part of it is met.
    """

    def __init__(self) -> None:
        """Begin as if commits were faster than steps."""
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


class Tally:
    """Counts how many of the replicas that a round wants are held of each pair.

    One report costs time in what its host holds, however many hosts there are.

    Args:
        round_: The current generation.
        replicas: Copies wanted of each rank; more than there are machines means one on each.
        held: Host → what it reports.
        spares: Hosts without a seat that must hold replicas of every rank, too.
    """

    def __init__(self, round_: Round, replicas: int, held: Mapping[str, Held], spares: Collection[str] = ()) -> None:
        self._round = round_
        self._ranks: dict[str, list[int]] = {}
        for owner, holders in zip(round_.hosts, round_.holders_by_host(replicas), strict=True):
            for holder in holders:
                self._ranks.setdefault(holder, []).extend(round_.ranks(owner))
        self._ranks |= {spare: [*range(round_.world_size)] for spare in spares}
        self._wanted = sum(map(len, self._ranks.values()))
        self._found: Counter[Pair] = Counter()
        self._found_on: dict[str, list[Pair]] = {}
        for host, reported in held.items():
            self.see(host, reported)

    def see(self, host: str, held: Held) -> None:
        """Let `held` be all that `host` holds."""
        for pair in self._found_on.pop(host, ()):
            self._found[pair] -= 1
            if not self._found[pair]:
                del self._found[pair]
        found = [pair for rank in self._ranks.get(host, ()) for pair in held.get(rank, ())]
        self._found_on[host] = found = [pair for pair in found if not is_dead(pair, self._round)]
        self._found.update(found)

    @property
    def newest(self) -> Pair | None:
        """The newest pair of this generation, or else the one it restored, that every rank has all replicas of."""
        return max((pair for pair, found in self._found.items() if found == self._wanted), default=None)


def advance(agreed: Agreed, tally: Tally) -> Pair | None:
    """Return the pair to commit next, None while there is none."""
    newest = tally.newest
    return None if newest is None or newest < agreed.next else newest


def is_dead(pair: Pair, round_: Round) -> bool:
    """Tell whether `pair` belongs to a timeline that `round_` left: neither made in it nor exactly what it restored."""
    return pair[0] != round_.generation and pair != round_.restore
