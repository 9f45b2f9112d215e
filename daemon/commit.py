"""The pure part of the commit protocol: which pair is committed, and which replicas may be given up."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from .rounds import Pair, Round

Held = Mapping[int, AbstractSet[Pair]]
"""Rank → pairs of which one host has complete, verified replicas."""


def parse_held(value: Mapping[str, Any]) -> dict[int, frozenset[Pair]]:
    """Return what a host reports under `ckpt/held/<host>`.

    Raises:
        DaemonError: The value is not such a report.
    """
    try:
        return {
            _natural(int(rank)): frozenset((_natural(generation), _natural(step)) for generation, step in pairs)
            for rank, pairs in value["held"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DaemonError(f"ckpt/held: {str(value)[:200]} is not a report of replicas: {error!r}") from error


def report_held(held: Held) -> dict[str, Any]:
    """Return the etcd value that `parse_held` reads."""
    return {"held": {str(rank): sorted(list(pair) for pair in pairs) for rank, pairs in sorted(held.items())}}


class Tally:
    """Counts how many of the replicas that a round wants are held of each pair.

    One report costs time in what its host holds, however many hosts there are.

    Args:
        round_: The current generation.
        replicas: Copies wanted of each rank; more than there are hosts means one on each.
        held: Host → what it reports.
    """

    def __init__(self, round_: Round, replicas: int, held: Mapping[str, Held]) -> None:
        self._round = round_
        self._ranks: dict[str, list[int]] = {}
        for owner, keepers in zip(round_.hosts, round_.keepers(replicas), strict=True):
            for keeper in keepers:
                self._ranks.setdefault(keeper, []).extend(round_.ranks(owner))
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


def advance(current: Pair | None, tally: Tally) -> Pair | None:
    """Return the pair to commit next, None when nothing is newer than `current`."""
    newest = tally.newest
    return None if newest is None or (current is not None and newest <= current) else newest


def is_dead(pair: Pair, round_: Round) -> bool:
    """Tell whether `pair` belongs to a timeline that `round_` left: neither made in it nor exactly what it restored."""
    return pair[0] != round_.generation and pair != round_.restore


def may_overwrite(pair: Pair | None, committed: Pair | None) -> bool:
    """Tell whether a slot that holds `pair` (None: nothing) may be given up, when `committed` is the watermark.

    A pair newer than the known watermark must stay: the root may be committing it at this moment.
    """
    return pair is None or (committed is not None and pair < committed)


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of a rank, generation or step")
    return value
