"""The exact fusion planner for costs of any form, compressed groups, others, or both: Pareto fronts over prefixes."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .fusion import FoundFusion, FusionProblem, Group, Strategy
from .fusion_baselines import best_bucketed, best_evenly_split, best_of, hipress, layer_wise, one_group
from .fusion_bound import Climb, Floats, GroupCosts, single_ways

Indices = NDArray[np.intp]
# A strategy is better than another when it is by more than the rounding of its sums.
_ROUNDING = 1e-12
# Weights of the deadline, in bounds on how much communication is left when decoding has to be done.
_DEADLINES = np.array([0.0, 1.0, 4.0])
_FIRST_WIDTH = 16
_WIDENING = 4
_WIDE = 256
_WEIGHINGS = 6
# Groupings to look at; a step of a climb counts as a quarter of one for each group that there could be.
_MOST = 2_000_000
_CLIMBING = 0.25


def pareto(
    problem: FusionProblem,
    *,
    kinds: Sequence[bool] = (True,),
    known: Iterable[Strategy] = (),
    most: float = _MOST,
) -> FoundFusion:
    """Return the strategy with the least iteration time found, and what none beats; the same if the search could end.

    Of two groupings of a prefix one can be left out if the other is no worse in everything that the rest can notice:
    what encoding it took, when its communication ends, when its decoding ends. It is also left out if a bound on the
    rest says that it cannot beat the best strategy known (`fusion_bound`), and so are groups in which nothing can.

    The search first keeps few groupings of each prefix, the most promising ones, and then more. What it drops without
    proof has a bound as well: nothing takes less than the least of these, or than the strategy found. A tensor that is
    large enough to make bounds loose is settled first: all strategies that compress it are searched by themselves, and
    all others.

    Args:
        problem: Its costs may have any form.
        kinds: Whether groups may be compressed, and not.
        known: Strategies of these kinds to begin with; the result is no worse.
        most: Give up after looking at about so many groupings.
    """
    return _FrontSearch(problem, kinds, known).run(most)


class _Branch:
    """The strategies in which some tensors are in groups of a kind that is settled, and what bounds them.

    Attributes:
        costs: What their groups cost.
        bound_s: None of them takes less.
        width: How many labels of a prefix to keep when it is their turn.
        through: What each of them with a group takes at least [kind, start, end].
        effort: What it took to find the bounds, in groupings.
    """

    def __init__(self, costs: GroupCosts, climb: Climb, bound_s: float = 0.0) -> None:
        self.costs, self._climb = costs, climb
        self.bound_s = max(bound_s, climb.found[0].bound_s)
        self.width = _FIRST_WIDTH
        self.effort = len(climb.found) * len(costs) ** 2 * _CLIMBING
        weights = [*climb.found[:_WEIGHINGS], *single_ways(costs)]
        device = np.array([each.device for each in weights])[:, None]
        encoding, sending = (np.stack([getattr(each, name) for each in weights]) for name in ("encoding", "sending"))
        slopes = (device + encoding, sending - encoding, 1.0 - device - sending, np.broadcast_to(device, sending.shape))
        self._slopes = np.ascontiguousarray(np.stack(slopes).transpose(2, 1, 0))
        self._offsets = (device * costs.backward[-1] + np.stack([each.rest for each in weights])).T
        self.through = np.max([each.through(costs) for each in climb.found[:2]], axis=0)

    def least_s(self, labels: Floats, end: int) -> Floats:
        """Return what strategies of this branch take at least that begin like this, with more groups from `end` on."""
        least: Floats = (self._slopes[end] @ labels + self._offsets[end][:, None]).max(axis=0)
        return least

    def undecided(self) -> tuple[int, float]:
        """Return the tensor whose kind matters most, and about how much time the bound may be short of for it."""
        costs = self.costs
        size_bytes = np.diff(costs.size_bytes)
        share = size_bytes / max(size_bytes.sum(), 1.0) * (1 - self._climb.taken.max(axis=0))
        swing_s = max(float(np.ptp(cost[:, 0, -1])) for cost in (costs.encode, costs.send, costs.decode))
        tensor = int(share.argmax())
        return tensor, float(share[tensor]) * swing_s

    def split(self, tensor: int, known_s: float) -> "list[_Branch]":
        """Return the branches in which the group of a tensor is of one kind each."""
        settled = [self.costs.settled(tensor, kind) for kind in range(len(self.costs.kinds))]
        return [_Branch(costs, self._climb.going_on(costs, known_s), self.bound_s) for costs in settled]

    def strategies(self) -> set[Strategy]:
        """Return those that the climb passed."""
        return {weights.strategy for weights in self._climb.found}


class _FrontSearch:
    """Labels are groupings of prefixes.

    A label has four times: encoding so far, end of communication, end of decoding (with an idle device), decoding so
    far. All are zero for the empty prefix.
    """

    def __init__(self, problem: FusionProblem, kinds: Sequence[bool], known: Iterable[Strategy]) -> None:
        self._problem, self._count = problem, len(problem)
        self._costs = costs = GroupCosts(problem, kinds)
        self._best = best_of(problem, [*known, *_candidates(problem, kinds)])
        self._best_s = problem.finish_s(self._best)
        deadlines = 1 + _DEADLINES[:, None, None, None]
        # [weight, prefix]: by how much communication of the rest, and its last decoding, exceed all its decoding.
        ahead = deadlines * costs.send - costs.decode
        ahead[..., -1] += deadlines[..., 0] * costs.decode[..., -1]
        self._ahead = _least(ahead.min(axis=1))

    def run(self, most: float) -> FoundFusion:
        whole = _Branch(self._costs, Climb(self._costs, self._best_s))
        left, open_ = most, [whole]
        self._met(whole)  # not counted: what it takes grows with the square of the tensors, and every search needs it
        while left > 0:
            branch = min(open_, key=lambda branch: branch.bound_s)
            if branch.bound_s >= self._limit_s:
                break
            tensor, short_s = branch.undecided()
            worth = 0.3 if branch.width <= _WIDE else 0.1
            if branch.width > _FIRST_WIDTH and short_s > worth * (self._best_s - branch.bound_s):
                open_.remove(branch)
                halves = branch.split(tensor, self._best_s)
                left -= sum(map(self._met, halves))
                open_ += halves
            else:
                left -= self._pass(branch)
        bound_s = min(branch.bound_s for branch in open_)
        proven = bound_s >= self._limit_s
        return FoundFusion(strategy=self._best, finish_s=self._best_s, bound_s=self._best_s if proven else bound_s)

    @property
    def _limit_s(self) -> float:
        return self._best_s * (1 - _ROUNDING)

    def _met(self, branch: _Branch) -> float:
        """Look at the strategies that a new branch brings; return what it took to make it."""
        for strategy in branch.strategies():
            self._consider(strategy)
        return branch.effort

    def _consider(self, strategy: Strategy) -> None:
        finish_s = self._problem.finish_s(strategy)
        if finish_s < self._best_s:
            self._best, self._best_s = strategy, finish_s

    def _pass(self, branch: _Branch) -> float:
        """Look at the best labels of each prefix, and raise the bound of the branch; return how many were looked at."""
        costs, dropped_s, looked = branch.costs, np.inf, 0
        labels: list[Floats] = [np.zeros((4, 1))]
        trail: list[tuple[Indices, Indices, Indices]] = []
        for end in range(1, self._count + 1):
            kinds, starts = np.nonzero(branch.through[:, :end, end] < self._limit_s)
            counts = np.array([labels[start].shape[1] for start in starts], dtype=np.intp)
            before = np.concatenate([np.zeros((4, 0)), *(labels[start] for start in starts)], axis=1)
            group = np.repeat(np.arange(len(starts)), counts)
            encode, send, decode = (
                cost[kinds, starts, end][group] for cost in (costs.encode, costs.send, costs.decode)
            )
            new = self._extended(before, encode, send, decode, end)
            looked += new.shape[1]
            least_s = self._least_s(branch, new, end)
            keep = np.flatnonzero(least_s < self._limit_s)
            keep = keep[least_s[keep].argsort(kind="stable")]
            if end == self._count:
                keep = keep[:1]
            for most in (4 * branch.width, branch.width):
                if len(keep) > most:
                    dropped_s = min(dropped_s, float(least_s[keep[most]]))
                    keep = keep[:most]
                if most > branch.width:
                    keep = keep[np.sort(_front(self._felt(new[:, keep], end), self._limit_s * _ROUNDING))]
            labels.append(new[:, keep])
            firsts = counts.cumsum() - counts
            trail.append((kinds[group[keep]], starts[group[keep]], keep - firsts[group[keep]]))
        if labels[-1].shape[1]:
            self._consider(self._followed(trail))
        branch.bound_s = max(branch.bound_s, min(dropped_s, self._best_s))
        branch.width *= _WIDENING
        return looked

    def _followed(self, trail: Sequence[tuple[Indices, Indices, Indices]]) -> Strategy:
        groups, end, label = [], self._count, 0
        while end:
            kind, start, within = (int(step[label]) for step in trail[end - 1])
            groups.append(Group(start, end, self._costs.kinds[kind]))
            end, label = start, within
        return tuple(groups[::-1])

    def _extended(self, labels: Floats, encode: Floats, send: Floats, decode: Floats, end: int) -> Floats:
        """Return the labels with one more group up to `end`."""
        encoding_s, sent_s, decoded_s, decoding_s = labels
        encoding_s = encoding_s + encode
        sent_s = np.maximum(sent_s, self._costs.backward[end] + encoding_s) + send
        return np.stack([encoding_s, sent_s, np.maximum(decoded_s, sent_s) + decode, decoding_s + decode])

    def _least_s(self, branch: _Branch, labels: Floats, end: int) -> Floats:
        """Return what a strategy that begins like this takes at least; what it takes, if it ends there."""
        encoding_s, sent_s, decoded_s, decoding_s = labels
        least: Floats = np.maximum(decoded_s, self._costs.backward[-1] + encoding_s + decoding_s)
        if end < self._count:
            sent_s = np.maximum(sent_s, self._costs.backward[end + 1] + encoding_s)
            np.maximum(least, branch.least_s(np.stack([encoding_s, sent_s, decoded_s, decoding_s]), end), out=least)
        return least

    def _felt(self, labels: Floats, end: int) -> Floats:
        """Return what the rest can notice of each label: times that it cannot use are raised to those that it can.

        Communication goes on when the next tensor is encoded at the earliest. Decoding that ends before all computation
        does is not felt, nor is decoding that is done so early that even the last decoding of any rest that keeps below
        the limit comes later.
        """
        encoding_s, sent_s, decoded_s, decoding_s = labels
        computing_s = encoding_s + decoding_s
        sent_s = np.maximum(sent_s, self._costs.backward[min(end + 1, self._count)] + encoding_s)
        deadlines = _DEADLINES[:, None]
        unfelt_s = sent_s + self._ahead[:, end, None] - deadlines * (self._limit_s - sent_s)
        decoded_s = np.maximum(decoded_s, np.maximum(self._costs.backward[-1] + computing_s, unfelt_s.max(axis=0)))
        return np.stack([encoding_s, computing_s, sent_s, decoded_s])


def _front(values: Floats, tolerance: float) -> Indices:
    """Return the columns that no other column is at most equal to in every row; one of those equal but for rounding."""
    left = values.sum(axis=0).argsort()
    values = values[:, left]
    found: list[int] = []
    while len(left):
        # Nothing that is left has a smaller sum, so nothing is better than the first column in every row.
        found.append(int(left[0]))
        open_ = (values < values[:, :1] - tolerance).any(axis=0)
        left, values = left[open_], values[:, open_]
    return np.array(found, dtype=np.intp)


def _least(costs: Floats) -> Floats:
    """Return the least sums of costs [weight, start, end] over the groups of each rest, [weight, start]."""
    count = costs.shape[-1] - 1
    least = np.zeros((len(costs), count + 1))
    for start in range(count - 1, -1, -1):
        least[:, start] = (costs[:, start, start + 1 :] + least[:, start + 1 :]).min(axis=1)
    return least


def _candidates(problem: FusionProblem, kinds: Sequence[bool]) -> list[Strategy]:
    """Return strategies to begin with: the better they are, the sooner others are left out."""
    plans = (one_group, layer_wise, best_bucketed, best_evenly_split)
    found = [plan(problem, compressed=compressed) for plan in plans for compressed in kinds]
    return [*found, hipress(problem)] if len(kinds) > 1 else found
