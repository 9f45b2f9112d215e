"""Stragglers: ranks that compute for longer than others do for the same work, again and again.

In a synchronous run every step takes all ranks equally long, as the fast ones wait for the slow one in their
collectives. So the CPU time of each training thread is compared, and only with those of ranks that capture about as
much: a stage of a pipeline has other work than the next one, and is compared with its own replicas only. Waits for a
CPU do not count: on a crowded host they are longer, and vary by more, than what a slow CPU takes.
"""

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.policy import DetectPolicy
from ..run.report import Term
from ..run.rounds import Round
from ..run.work import LEAST_STEPS, RankWork
from .threshold import Measure

_WINDOWS = 5
"""So many times in a row a rank must be slow, and then fast again: what happens now and then does not count."""
_EACH = 1.05
"""How slow it must be in each of them; the factor of the policy is for their mean without the slowest one."""
_ALIKE = 1.05
"""State of ranks that do the same work, at most so many times as much as of the next smaller one."""
_SHARE = 0.05
"""What a slow rank costs the others, as a share of a step, to be worth a word."""
_SPREADS = 5.0
"""How many times as far from its peers as these are from each other."""
_KEPT = 8


class _Window(NamedTuple):
    """How one rank compared with its peers over some steps: from which step on, and how long these took."""

    factor: float
    own_s: float
    others_s: float
    step: int
    lasted_s: float


class _Slow(NamedTuple):
    """From which step on a rank has been slow, and how long the windows took in which it was."""

    step: int
    seconds: float


class Stragglers:
    """Hears what all ranks have computed, and says which are slow.

    Args:
        policy: The limits.
    """

    def __init__(self, policy: DetectPolicy) -> None:
        self._policy = policy
        self._begin((0, 0))

    def _begin(self, term: Term) -> None:
        self._term = term
        self._heard: Mapping[int, RankWork] = {}
        self._points: dict[int, dict[int, RankWork]] = {}
        self._bases: dict[tuple[int, ...], int] = {}
        self._windows: dict[int, deque[_Window]] = {}
        self._slow: dict[int, _Slow] = {}

    def hear(self, round_: Round, election: int, work: Mapping[int, RankWork]) -> None:
        """Take what ranks have computed as of their last points, and nothing of another round or election with it."""
        if self._term != (term := (round_.generation, election)):
            self._begin(term)
        # A host may report of ranks that there are not.
        work = {rank: point for rank, point in work.items() if rank < round_.world_size}
        if work == self._heard:
            return
        self._heard = work
        for rank, point in work.items():
            points = self._points.setdefault(rank, {})
            points[point.step] = point
            if len(points) > _KEPT:
                del points[min(points)]
        groups = list(_groups(work))
        self._bases = {ranks: base for ranks, base in self._bases.items() if ranks in groups}
        for ranks in groups:
            self._compare(ranks)

    def measures(self, round_: Round) -> Iterator[Measure]:
        """Yield how slow the slow ranks are."""
        factor, replace_s = self._policy.straggler_factor, self._policy.straggler_replace_s
        for rank, slow in self._slow.items():
            window = sorted(self._windows[rank])[_WINDOWS // 2]
            lasts = replace_s and slow.seconds >= replace_s
            yield Measure(
                name=f"rank {rank}",
                kind="straggler",
                rank=rank,
                generation=self._term[0],
                value=max(factor, window.factor),
                warn=factor,
                fail=factor if lasts else 0.0,
                message=f"rank {rank} on host {round_.host_of(rank)} computes {1000 * window.own_s:.0f} ms in each "
                f"step since step {slow.step}, and its peers, which wait for it, {1000 * window.others_s:.0f} ms",
            )

    def _compare(self, ranks: tuple[int, ...]) -> None:
        """Compare what `ranks` computed between two steps that all of them have noted."""
        points = [self._points[rank] for rank in ranks]
        newest = max(set(points[0]).intersection(*points[1:]), default=None)
        base = self._bases.get(ranks)
        if newest is None or (base is not None and newest < base + LEAST_STEPS):
            return
        self._bases[ranks] = newest
        if base is None or any(base not in known for known in points):
            return
        steps, lasted_s = newest - base, points[0][newest].at_s - points[0][base].at_s
        own_s = [(known[newest].worked_s - known[base].worked_s) / steps for known in points]
        for rank, seconds, (factor, others_s) in zip(ranks, own_s, slowness(own_s, lasted_s / steps), strict=True):
            windows = self._windows.setdefault(rank, deque(maxlen=_WINDOWS))
            windows.append(_Window(factor, seconds, others_s, base, lasted_s))
            *usual, worst = sorted(window.factor for window in windows)
            known = self._slow.get(rank)
            if worst < self._policy.straggler_factor:
                self._slow.pop(rank, None)
            elif factor < _EACH:
                continue
            elif known is not None:
                self._slow[rank] = known._replace(seconds=known.seconds + lasted_s)
            elif len(windows) < _WINDOWS or usual[0] < _EACH:
                continue
            elif statistics.fmean(usual) >= self._policy.straggler_factor:
                self._slow[rank] = _Slow(windows[0].step, sum(window.lasted_s for window in windows))


def slowness(own_s: Sequence[float], step_s: float) -> list[tuple[float, float]]:
    """Return for each rank how many times as long as its peers it computes, and how long these do.

    Args:
        own_s: What ranks with the same work compute in a step, seconds.
        step_s: How long that takes.

    Returns:
        1 for a rank that is no slower than its peers' median, or by too little to matter: for less than a twentieth of
        the step, or for what is usual among its peers (five times their median distance from their median).
    """
    ordered, found = sorted(own_s), []
    middle_s = statistics.median(ordered)
    # The median of the others is the same for each rank above the median: whichever of them is left out.
    others_s = statistics.median(ordered[:-1])
    away_s = sorted(abs(seconds - others_s) for seconds in ordered)
    for seconds in own_s:
        factor = 1.0
        if is_above := seconds > middle_s:
            spread_s = _median_without(away_s, bisect_left(away_s, abs(seconds - others_s)))
            if others_s > 0 and seconds - others_s > max(_SHARE * step_s, _SPREADS * spread_s):
                factor = seconds / others_s
        found.append((factor, others_s if is_above else middle_s))
    return found


def _median_without(ordered: Sequence[float], place: int) -> float:
    """Return the median of all but one."""
    last = len(ordered) - 2
    return sum(ordered[index + (index >= place)] for index in (last // 2, -(-last // 2))) / 2


def _groups(work: Mapping[int, RankWork]) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that capture about as much as each other, as far as there are several."""
    group: list[int] = []
    before = 0
    for rank in sorted(work, key=lambda rank: (work[rank].state_bytes, rank)):
        if group and work[rank].state_bytes > _ALIKE * before:
            if len(group) > 1:
                yield tuple(group)
            group = []
        group.append(rank)
        before = work[rank].state_bytes
    if len(group) > 1:
        yield tuple(group)
