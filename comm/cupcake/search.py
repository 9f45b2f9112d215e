"""The best fusion for costs of any form, and a time that no fusion beats.

An iteration ends when the longest of these paths through the timeline does (`FusionProblem.finish_s`):

- The device computes, encodes and decodes everything, one after the other.
- For two tensors p <= q: the device computes and encodes up to the end of p's group, the network sends from that group
  to q's group, and the device decodes from q's group to the last.

**The bound.** Give each path a weight, all of them together 1. The weighted mean of their lengths is no more than the
longest, for every strategy. So the least mean of all strategies is no more than the least iteration. Let x be the
weight of the first path, u(j) that of the others with p >= j, v(j) that of those with q >= j, and B(j) the backward
time of the first j tensors. A group of the tensors a ... b - 1 that takes e, s, d for encoding, sending, decoding adds

    e (x + u(a)) + s (v(a) - u(b)) + d (1 - v(b)) + B(b) (u(a) - u(b))

to the mean: the paths with p >= a encode it, those with p < b and q >= a send it, those with q < b and the first one
decode it, and those with a <= p < b pass from computation to the network behind it. The first path has x B(N) beside.
Nothing in that depends on other groups, so the least mean is a shortest path over the prefixes: O(N^2). Whatever u and
v are, as long as neither rises, both begin at 1 - x and v >= u: then there are such weights of the pairs p <= q.

**The weights.** The least mean is a concave function of the weights, of which the lengths of all paths in a strategy
with the least mean are a gradient. Weights that grow by the exponential of these lengths, step by step, climb to its
top. As a path's length is a sum of what p and what q contribute, sums over p and over q are all that has to be kept.
The strategies on the way are good ones: towards the top they balance whatever is busy. Every step gives a valid bound,
so it does not matter where this stops.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .front import pareto
from .fusion import Floats, FoundFusion, FusionProblem, Group, Strategy, all_bucketed

Indices = NDArray[np.intp]
# A strategy is better than another when it is by more than the rounding of its sums.
_ROUNDING = 1e-12
_STEPS = 80
_FURTHER_STEPS = 30
_PATIENCE = 12
_GAIN = 1e-4
# A step changes no weight by more than this, as a logarithm.
_LONGEST_STEP = 20.0
_WEIGHINGS = 6
_FIRST_WIDTH = 16
_WIDENING = 4
_WIDE = 256
# Groupings to look at; a step of a climb counts as a quarter of one for each group that there could be.
_MOST = 2_000_000
_CLIMBING = 0.25


def best_fusion(
    problem: FusionProblem, *, kinds: Sequence[bool] = (True,), known: Iterable[Strategy] = (), most: float = _MOST
) -> FoundFusion:
    """Return the strategy with the least iteration time found, and what none beats; the same if the search could end.

    Of two groupings of a prefix one can be left out if the other is no worse in everything that the rest depends on:
    what encoding and decoding it took, when its communication ends, when its decoding ends. It is also left out if a
    bound on the rest says that it cannot beat the best strategy known.

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
    return _Search(problem, kinds, known).run(most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights of the paths, and what they prove.

    Attributes:
        device: x.
        encoding: u(j) for j = 0 … N.
        sending: v(j).
        rest: The least mean of what groups from tensor j on add.
        bound_s: No strategy takes less.
        strategy: One with the least mean.
    """

    device: float
    encoding: Floats
    sending: Floats
    rest: Floats
    bound_s: float
    strategy: Strategy


class Bounds:
    """What groups cost, and the bounds that weights prove.

    Attributes:
        kinds: Which of the two kinds there are: compressed, and not.
        backward: Backward time of the first j tensors.
        encode: Of each group [kind, start, end] of the tensors start … end - 1.
        send: Of each group.
        decode: Of each group.
        barred: Groups that are left out.
    """

    def __init__(self, problem: FusionProblem, kinds: Sequence[bool]) -> None:
        self.kinds = tuple(kinds)
        self.backward: Floats = np.array(problem.backward_s)
        self.size_bytes: Floats = np.array(problem.size_bytes)
        self.encode, self.send, self.decode = np.stack([problem.costs(kind) for kind in kinds], axis=1)
        self.barred: NDArray[np.bool_] = np.zeros(self.send.shape, dtype=bool)
        # Where a climb begins: weights that are all the same.
        count = len(self)
        self._top = float(np.log(count * (count + 1) / 2)), np.zeros(count), np.zeros(count)
        self._steps = _STEPS

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.backward) - 1

    def settled(self, tensor: int, kind: int) -> "Bounds":
        """Return the same without groups of other kinds that have a tensor; its climb goes on from here."""
        found = copy(self)
        found._steps = _FURTHER_STEPS
        found.barred = self.barred.copy()
        others = [other for other in range(len(self.kinds)) if other != kind]
        found.barred[others, : tensor + 1, tensor + 1 :] = True
        return found

    def mean(self, device: float, encoding: Floats, sending: Floats) -> Floats:
        """Return what each group adds to the mean with these weights; infinite for groups that are left out."""
        entering, leaving = encoding[:, None], encoding[None, :]
        mean: Floats = self.encode * (device + entering)
        mean += self.send * (sending[:, None] - leaving)
        mean += self.decode * (1.0 - sending[None, :])
        mean += self.backward * (entering - leaving)
        mean[self.barred] = np.inf
        return mean

    def proven(self, device: float, encoding: Floats, sending: Floats) -> Weights:
        """Return what these weights prove."""
        means, count = self.mean(device, encoding, sending), len(self)
        kind, mean = means.argmin(axis=0), means.min(axis=0)
        rest, behind = np.zeros(count + 1), np.zeros(count, dtype=np.intp)
        for start in range(count - 1, -1, -1):
            sums = mean[start, start + 1 :] + rest[start + 1 :]
            least = sums.argmin()
            behind[start], rest[start] = start + 1 + least, sums[least]
        groups, start = [], 0
        while start < count:
            end = int(behind[start])
            groups.append(Group(start, end, self.kinds[kind[start, end]]))
            start = end
        return Weights(
            device=device,
            encoding=encoding,
            sending=sending,
            rest=rest,
            bound_s=float(device * self.backward[-1] + rest[0]),
            strategy=tuple(groups),
        )

    def single_paths(self) -> list[Weights]:
        """Return what single paths prove: the device alone, the network from the first group on, the last group's."""
        ones, first = (np.append(1.0, np.full(len(self) - 1, value)) for value in (1.0, 0.0))
        paths = ((1.0, 0.0 * ones, 0.0 * ones), (0.0, first, ones), (0.0, ones, ones))
        return [self.proven(device, np.append(u, 0.0), np.append(v, 0.0)) for device, u, v in paths]

    def climb(self, known_s: float) -> list[Weights]:
        """Return the weights passed on the way to the best ones.

        Logarithms of the weights: `device` of the first path, `by_p[p] + by_q[q]` of the path of the tensors p <= q.

        Args:
            known_s: What some strategy takes, without the forward pass; it only sets how long steps are.
        """
        device, by_p, by_q = self._top
        found: list[Weights] = []
        best_s, since, pace = -np.inf, 0, 1.0
        for _ in range(self._steps):
            first, of_p, of_q = _normal(device, by_p, by_q)
            encoding, sending = (np.append(of[::-1].cumsum()[::-1], 0.0) for of in (of_p, of_q))
            made = self.proven(first, encoding, np.maximum(sending, encoding))
            found.append(made)
            all_s, to_p, from_q = self._lengths(made.strategy)
            known_s = min(known_s, max(all_s, float((np.maximum.accumulate(to_p) + from_q).max())))
            since = 0 if made.bound_s > best_s + _GAIN * (known_s - best_s) else since + 1
            pace *= 1.0 if since == 0 else 0.9
            best_s = max(best_s, made.bound_s)
            # About the variance of the lengths, and their range.
            p_s, q_s = ((of @ taken) / max(1 - first, 1e-300) for of, taken in ((of_p, to_p), (of_q, from_q)))
            variance = float(first * (1 - first) * (all_s - p_s - q_s) ** 2)
            variance += 2 * float(of_p @ (to_p - p_s) ** 2 + of_q @ (from_q - q_s) ** 2)
            longest = float(np.ptp(to_p) + np.ptp(from_q) + abs(all_s - p_s - q_s))
            if since > _PATIENCE or best_s >= known_s * (1 - 1e-9) or variance <= 0:
                break
            step = float(min(pace * (known_s - made.bound_s) / variance, _LONGEST_STEP / longest))
            by_p, by_q, device = by_p + step * to_p, by_q + step * from_q, device + step * all_s
            device -= by_p.max() + by_q.max()
            by_p, by_q = by_p - by_p.max(), by_q - by_q.max()
        self._top = device, by_p, by_q
        return found

    def _lengths(self, strategy: Strategy) -> tuple[float, Floats, Floats]:
        """Return how long the first path is, and for each tensor what the others have up to p and from q on."""
        start, end = np.array([group[:2] for group in strategy]).T
        kind = [self.kinds.index(group.compressed) for group in strategy]
        encode, send, decode = (cost[kind, start, end] for cost in (self.encode, self.send, self.decode))
        sent, sizes = send.cumsum(), end - start
        to_p = self.backward[end] + encode.cumsum() - (sent - send)
        from_q = sent + decode[::-1].cumsum()[::-1]
        all_s = float(self.backward[-1] + encode.sum() + decode.sum())
        return all_s, np.repeat(to_p, sizes), np.repeat(from_q, sizes)


def _normal(device: float, by_p: Floats, by_q: Floats) -> tuple[float, Floats, Floats]:
    """Return the weight of the first path, and those of the others by p and by q."""
    of_p = by_p + np.logaddexp.accumulate(by_q[::-1])[::-1]
    of_q = by_q + np.logaddexp.accumulate(by_p)
    whole = np.logaddexp(device, np.logaddexp.reduce(of_p))
    first, of_p, of_q = np.exp(device - whole), np.exp(of_p - whole), np.exp(of_q - whole)
    # What rounding leaves over would be missing in the bound.
    first /= first + of_p.sum()
    return float(first), of_p * ((1 - first) / of_p.sum()), of_q * ((1 - first) / of_q.sum())


class _Branch:
    """The strategies in which some tensors are in groups of a kind that is settled, and what bounds them.

    Attributes:
        bounds: What their groups cost.
        bound_s: None of them takes less.
        width: How many labels of a prefix to keep when it is their turn.
        effort: What it took to find the bounds, in groupings.
        strategies: Some of them.
    """

    def __init__(self, bounds: Bounds, known_s: float, bound_s: float) -> None:
        self.bounds, self.width = bounds, _FIRST_WIDTH
        climbed = bounds.climb(known_s)
        self._late = climbed[len(climbed) // 2 :]
        self.strategies = {weights.strategy for weights in climbed}
        self.effort = len(climbed) * len(bounds) ** 2 * _CLIMBING
        climbed.sort(key=lambda weights: -weights.bound_s)
        self.bound_s = max(bound_s, climbed[0].bound_s)
        weights = [*climbed[:_WEIGHINGS], *bounds.single_paths()]
        device = np.array([each.device for each in weights])[:, None]
        encoding, sending = (np.stack([getattr(each, name) for each in weights]) for name in ("encoding", "sending"))
        slopes = (device + encoding, sending - encoding, 1.0 - device - sending, np.broadcast_to(device, sending.shape))
        self._slopes = np.ascontiguousarray(np.stack(slopes).transpose(2, 1, 0))
        self._offsets = (device * bounds.backward[-1] + np.stack([each.rest for each in weights])).T

    def least_s(self, labels: Floats, end: int) -> Floats:
        """Return what strategies of this branch take at least that begin like this, with more groups from `end` on."""
        least: Floats = (self._slopes[end] @ labels + self._offsets[end][:, None]).max(axis=0)
        return least

    def undecided(self) -> tuple[int, float]:
        """Return the tensor whose kind matters most, and about how much time the bound may be short of for it."""
        bounds = self.bounds
        taken = np.zeros((len(bounds.kinds), len(bounds)))
        for group in (group for weights in self._late for group in weights.strategy):
            taken[bounds.kinds.index(group.compressed), group.start : group.end] += 1 / len(self._late)
        size_bytes = np.diff(bounds.size_bytes)
        share = size_bytes / max(size_bytes.sum(), 1.0) * (1 - taken.max(axis=0))
        swing_s = max(float(np.ptp(cost[:, 0, -1])) for cost in (bounds.encode, bounds.send, bounds.decode))
        tensor = int(share.argmax())
        return tensor, float(share[tensor]) * swing_s


class _Search:
    """Labels are groupings of prefixes.

    A label has four times: encoding so far, end of communication, end of decoding (with an idle device), decoding so
    far. All are zero for the empty prefix.
    """

    def __init__(self, problem: FusionProblem, kinds: Sequence[bool], known: Iterable[Strategy]) -> None:
        self._problem, self._count = problem, len(problem)
        self._bounds = Bounds(problem, kinds)
        starts = [
            *known,
            *(each for kind in kinds for each in all_bucketed(problem.size_bytes, compressed=kind)),
        ]
        self._best = min(starts, key=problem.finish_s)
        self._best_s = problem.finish_s(self._best)

    def run(self, most: float) -> FoundFusion:
        # The first branch is not counted: what it takes grows with the square of the tensors, and all need it.
        left, open_ = most, [self._branch(self._bounds)]
        while left > 0:
            branch = min(open_, key=lambda branch: branch.bound_s)
            if branch.bound_s >= self._limit_s:
                break
            tensor, short_s = branch.undecided()
            worth = 0.3 if branch.width <= _WIDE else 0.1
            if branch.width > _FIRST_WIDTH and short_s > worth * (self._best_s - branch.bound_s):
                open_.remove(branch)
                for kind in range(len(branch.bounds.kinds)):
                    open_.append(self._branch(branch.bounds.settled(tensor, kind), branch.bound_s))
                    left -= open_[-1].effort
            else:
                left -= self._pass(branch)
        bound_s = min(branch.bound_s for branch in open_)
        return FoundFusion(
            strategy=self._best,
            finish_s=self._best_s,
            bound_s=bound_s if bound_s < self._limit_s else self._best_s,
        )

    @property
    def _limit_s(self) -> float:
        return self._best_s * (1 - _ROUNDING)

    def _branch(self, bounds: Bounds, bound_s: float = 0.0) -> _Branch:
        made = _Branch(bounds, self._best_s, bound_s)
        for strategy in made.strategies:
            self._consider(strategy)
        return made

    def _consider(self, strategy: Strategy) -> None:
        finish_s = self._problem.finish_s(strategy)
        if finish_s < self._best_s:
            self._best, self._best_s = strategy, finish_s

    def _pass(self, branch: _Branch) -> float:
        """Look at the best labels of each prefix, and raise the bound of the branch; return how many were looked at."""
        bounds, width, dropped_s, looked = self._bounds, branch.width, np.inf, 0
        labels: list[Floats] = [np.zeros((4, 1))]
        trail: list[tuple[Indices, Indices, Indices]] = []
        for end in range(1, self._count + 1):
            kinds, starts = np.nonzero(~branch.bounds.barred[:, :end, end])
            counts = np.array([labels[start].shape[1] for start in starts], dtype=np.intp)
            before = np.concatenate([np.zeros((4, 0)), *(labels[start] for start in starts)], axis=1)
            group = np.repeat(np.arange(len(starts)), counts)
            encode, send, decode = (
                cost[kinds, starts, end][group] for cost in (bounds.encode, bounds.send, bounds.decode)
            )
            new = self._extended(before, encode, send, decode, end)
            looked += new.shape[1]
            least_s = self._least_s(branch, new, end)
            keep = np.flatnonzero(least_s < self._limit_s)
            keep = keep[least_s[keep].argsort(kind="stable")]
            if end == self._count:
                keep = keep[:1]
            for most in (4 * width, width):
                if len(keep) > most:
                    dropped_s = min(dropped_s, float(least_s[keep[most]]))
                    keep = keep[:most]
                if most > width:
                    keep = keep[pareto(new[:, keep].T, self._limit_s * _ROUNDING)]
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
            groups.append(Group(start, end, self._bounds.kinds[kind]))
            end, label = start, within
        return tuple(groups[::-1])

    def _extended(self, labels: Floats, encode: Floats, send: Floats, decode: Floats, end: int) -> Floats:
        """Return the labels with one more group up to `end`."""
        encoding_s, sent_s, decoded_s, decoding_s = labels
        encoding_s = encoding_s + encode
        sent_s = np.maximum(sent_s, self._bounds.backward[end] + encoding_s) + send
        return np.stack([encoding_s, sent_s, np.maximum(decoded_s, sent_s) + decode, decoding_s + decode])

    def _least_s(self, branch: _Branch, labels: Floats, end: int) -> Floats:
        """Return what a strategy that begins like this takes at least; what it takes, if it ends there."""
        encoding_s, sent_s, decoded_s, decoding_s = labels
        least: Floats = np.maximum(decoded_s, self._bounds.backward[-1] + encoding_s + decoding_s)
        if end < self._count:
            sent_s = np.maximum(sent_s, self._bounds.backward[end + 1] + encoding_s)
            np.maximum(least, branch.least_s(np.stack([encoding_s, sent_s, decoded_s, decoding_s]), end), out=least)
        return least
