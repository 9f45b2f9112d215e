"""A time that no fusion beats: what the best fusion takes when only the average over ways through the timeline counts.

An iteration ends when the longest of these ways does (`FusionProblem.timeline`):

- The device computes, encodes and decodes everything, one after the other.
- For two tensors p <= q: the device computes and encodes up to the end of p's group, the network sends from that group
  to q's group, and the device decodes from q's group to the last.

**The bound.** Give each way a weight, all of them together 1. The weighted mean of their lengths is no more than the
longest, for every strategy. So the least mean of all strategies is no more than the least iteration. Let x be the
weight of the first way, u(j) that of the others with p >= j, v(j) that of those with q >= j, and B(j) the backward time
of the first j tensors. A group of the tensors a ... b - 1 that takes e, s, d for encoding, sending, decoding adds

    e (x + u(a)) + s (v(a) - u(b)) + d (1 - v(b)) + B(b) (u(a) - u(b))

to the mean: the ways with p >= a encode it, those with p < b and q >= a send it, those with q < b and the first one
decode it, and those with a <= p < b pass from computation to the network behind it. The first way has x B(N) beside.
Nothing in that depends on other groups, so the least mean is a shortest path over the prefixes: O(N^2). Whatever u and
v are, as long as neither rises, both begin at 1 - x and v >= u: then there are such weights of the pairs p <= q.

**The weights.** The least mean is a concave function of the weights, of which the lengths of all ways in a strategy
with the least mean are a gradient. Weights that grow by the exponential of these lengths, step by step, climb to its
top. As a way's length is a sum of what p and what q contribute, sums over p and over q are all that has to be kept. The
strategies on the way are good ones: towards the top they balance whatever is busy. Every step gives a valid bound, so
it does not matter where this stops.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .fusion import FusionProblem, Group, Strategy

Floats = NDArray[np.float64]
_STEPS = 80
_FURTHER_STEPS = 30
_PATIENCE = 12
_GAIN = 1e-4
# A step changes no weight by more than this, as a logarithm.
_LONGEST_STEP = 20.0


class GroupCosts:
    """What groups cost, as arrays [kind, start, end] for the tensors start … end - 1.

    Attributes:
        kinds: Which of the two kinds there are: compressed, and not.
        backward: Backward time of the first j tensors.
        encode: Of each group.
        send: Of each group.
        decode: Of each group.
    """

    def __init__(self, problem: FusionProblem, kinds: Iterable[bool]) -> None:
        self.kinds = tuple(kinds)
        self.backward: Floats = np.array(problem.backward_s)
        self.size_bytes: Floats = np.array(problem.size_bytes)
        sizes = np.maximum(self.size_bytes[None, :] - self.size_bytes[:, None], 0.0)
        system = problem.system
        free = np.zeros_like(sizes)
        made = [
            (system.compress.over(sizes), system.communicate.over(sizes), system.decompress.over(sizes))
            if compressed
            else (free, system.dense.over(sizes), free)
            for compressed in self.kinds
        ]
        self.encode, self.send, self.decode = (np.stack(costs) for costs in zip(*made, strict=True))
        self._barred: NDArray[np.bool_] = np.zeros(self.send.shape, dtype=bool)

    def settled(self, tensor: int, kind: int) -> "GroupCosts":
        """Return the same without groups of other kinds that have a tensor."""
        found = copy(self)
        found._barred = self._barred.copy()
        others = [other for other in range(len(self.kinds)) if other != kind]
        found._barred[others, : tensor + 1, tensor + 1 :] = True
        return found

    def mean(self, device: float, encoding: Floats, sending: Floats) -> Floats:
        """Return what each group adds to the mean with these weights; infinite for groups that are left out."""
        entering, leaving = encoding[:, None], encoding[None, :]
        mean: Floats = self.encode * (device + entering)
        mean += self.send * (sending[:, None] - leaving)
        mean += self.decode * (1.0 - sending[None, :])
        mean += self.backward * (entering - leaving)
        mean[self._barred] = np.inf
        return mean

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.backward) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights of the ways, and what they prove.

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

    def through(self, costs: GroupCosts) -> Floats:
        """Return what strategies with a group take at least [kind, start, end]."""
        mean = costs.mean(self.device, self.encoding, self.sending)
        least, before = mean.min(axis=0), np.zeros(len(costs) + 1)
        before[0] = self.device * costs.backward[-1]
        for end in range(1, len(costs) + 1):
            before[end] = (before[:end] + least[:end, end]).min()
        return mean + before[:, None] + self.rest


def weighed(costs: GroupCosts, device: float, encoding: Floats, sending: Floats) -> Weights:
    """Return what these weights prove; of a strategy with the least mean each group is of the kind with the least."""
    means = costs.mean(device, encoding, sending)
    kind, mean, count = means.argmin(axis=0), means.min(axis=0), len(costs)
    rest, behind = np.zeros(count + 1), np.zeros(count, dtype=np.intp)
    for start in range(count - 1, -1, -1):
        sums = mean[start, start + 1 :] + rest[start + 1 :]
        least = sums.argmin()
        behind[start], rest[start] = start + 1 + least, sums[least]
    groups, start = [], 0
    while start < count:
        end = int(behind[start])
        groups.append(Group(start, end, costs.kinds[kind[start, end]]))
        start = end
    return Weights(
        device=device,
        encoding=encoding,
        sending=sending,
        rest=rest,
        bound_s=float(device * costs.backward[-1] + rest[0]),
        strategy=tuple(groups),
    )


def single_ways(costs: GroupCosts) -> list[Weights]:
    """Return what single ways prove: the device alone, the network from the first group on, the last group's way."""
    ones = np.append(np.ones(len(costs)), 0.0)
    first = np.append(1.0, np.zeros(len(costs)))
    ways = ((1.0, 0.0 * ones, 0.0 * ones), (0.0, first, ones), (0.0, ones, ones))
    return [weighed(costs, *way) for way in ways]


class Climb:
    """The way to the best weights.

    Logarithms of the weights: `_device` of the first way, `_p[p] + _q[q]` of the way of the tensors p <= q.

    Args:
        costs: What groups cost.
        known_s: What some strategy takes, without the forward pass; it only sets how long steps are.

    Attributes:
        found: The weights passed, the best first; the strategies of all of them are worth a look.
        taken: In which share of the late ones a tensor is in a group of each kind [kind, tensor].
    """

    def __init__(self, costs: GroupCosts, known_s: float) -> None:
        count = len(costs)
        self._device = float(np.log(count * (count + 1) / 2))
        self._p, self._q = np.zeros(count), np.zeros(count)
        self._climb(costs, known_s, _STEPS)

    def going_on(self, costs: GroupCosts, known_s: float) -> "Climb":
        """Return the way on from the end of this one for fewer groups."""
        found = copy(self)
        found._climb(costs, known_s, _FURTHER_STEPS)
        return found

    def _climb(self, costs: GroupCosts, known_s: float, steps: int) -> None:
        self._costs = costs
        self.found = self._run(known_s, steps)
        self.taken = np.zeros((len(costs.kinds), len(costs)))
        late = self.found[len(self.found) // 2 :]
        for group in (group for weights in late for group in weights.strategy):
            self.taken[costs.kinds.index(group.compressed), group.start : group.end] += 1 / len(late)
        self.found.sort(key=lambda weights: -weights.bound_s)

    def _run(self, known_s: float, steps: int) -> list[Weights]:
        found: list[Weights] = []
        best_s, since, pace = -np.inf, 0, 1.0
        for _ in range(steps):
            device, of_p, of_q = self._weights()
            encoding, sending = (np.append(of[::-1].cumsum()[::-1], 0.0) for of in (of_p, of_q))
            made = weighed(self._costs, device, encoding, np.maximum(sending, encoding))
            found.append(made)
            all_s, to_p, from_q = self._lengths(made.strategy)
            known_s = min(known_s, max(all_s, float((np.maximum.accumulate(to_p) + from_q).max())))
            since = 0 if made.bound_s > best_s + _GAIN * (known_s - best_s) else since + 1
            pace *= 1.0 if since == 0 else 0.9
            best_s = max(best_s, made.bound_s)
            spread = self._spread(device, of_p, of_q, all_s, to_p, from_q)
            if since > _PATIENCE or best_s >= known_s * (1 - 1e-9) or spread[0] <= 0:
                break
            step = min(pace * (known_s - made.bound_s) / spread[0], _LONGEST_STEP / spread[1])
            self._p, self._q = self._p + step * to_p, self._q + step * from_q
            self._device += step * all_s - float(self._p.max() + self._q.max())
            self._p, self._q = self._p - self._p.max(), self._q - self._q.max()
        return found

    def _weights(self) -> tuple[float, Floats, Floats]:
        """Return the weight of the first way, and those of the others by p and by q."""
        by_p = self._p + np.logaddexp.accumulate(self._q[::-1])[::-1]
        by_q = self._q + np.logaddexp.accumulate(self._p)
        whole = np.logaddexp(self._device, np.logaddexp.reduce(by_p))
        device, of_p, of_q = np.exp(self._device - whole), np.exp(by_p - whole), np.exp(by_q - whole)
        # What rounding leaves over would be missing in the bound.
        device /= device + of_p.sum()
        return float(device), of_p * ((1 - device) / of_p.sum()), of_q * ((1 - device) / of_q.sum())

    def _lengths(self, strategy: Strategy) -> tuple[float, Floats, Floats]:
        """Return how long the first way is, and for each tensor what the others have up to p and from q on."""
        costs = self._costs
        start, end = np.array([group[:2] for group in strategy]).T
        kind = [costs.kinds.index(group.compressed) for group in strategy]
        encode, send, decode = (cost[kind, start, end] for cost in (costs.encode, costs.send, costs.decode))
        sent, sizes = send.cumsum(), end - start
        to_p = costs.backward[end] + encode.cumsum() - (sent - send)
        from_q = sent + decode[::-1].cumsum()[::-1]
        all_s = float(costs.backward[-1] + encode.sum() + decode.sum())
        return all_s, np.repeat(to_p, sizes), np.repeat(from_q, sizes)

    def _spread(
        self, device: float, of_p: Floats, of_q: Floats, all_s: float, to_p: Floats, from_q: Floats
    ) -> tuple[float, float]:
        """Return about the variance of the lengths, and their range."""
        others = 1.0 - device
        p_s, q_s = (float(of @ s) / others if others > 0 else 0.0 for of, s in ((of_p, to_p), (of_q, from_q)))
        mean_s = device * all_s + others * (p_s + q_s)
        variance = device * (all_s - mean_s) ** 2 + others * (p_s + q_s - mean_s) ** 2
        variance += 2 * float(of_p @ (to_p - p_s) ** 2 + of_q @ (from_q - q_s) ** 2)
        return variance, float(np.ptp(to_p) + np.ptp(from_q) + abs(all_s - mean_s))
