"""The exact fusion planner for costs of any form: Pareto fronts over prefixes of the model."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..plan.curve import Affine, Curve
from .fusion import FusionProblem, Strategy, groups_of
from .fusion_baselines import best_bucketed, best_evenly_split, best_of, layer_wise, one_group
from .fusion_exact import ROUNDING, search

Floats = NDArray[np.float64]
# Weights of computation, against communication, of the lower bounds on what is left to do.
_WEIGHTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
# Weights of the deadline, in bounds on how much communication is left when decoding has to be done.
_DEADLINES = np.array([0.0, 1.0, 4.0])


def pareto(problem: FusionProblem) -> Strategy:
    """Return a strategy of compressed groups with the least iteration time, whatever the costs are over the bytes.

    Of two groupings of a prefix one can be left out if the other is no worse in everything that the rest can notice:
    what encoding it took, when its communication ends, when its decoding ends. It is also left out if a bound on the
    rest says that it cannot beat the best strategy known.
    """
    return _Fronts(problem).best()


def bound_s(problem: FusionProblem) -> float:
    """Return a time that no iteration beats, with groups that are compressed or, where that has a cost, are not.

    The device has to compute, encode and decode, the network to send from when the first group can be encoded. An
    iteration takes no less than any weighted mean of the two.
    """
    kinds = [_costs(problem, compressed=True)]
    if problem.system.communicate_dense is not None:
        kinds.append(_costs(problem, compressed=False))
    weights = _WEIGHTS[:, None, None]
    work = np.min([weights * (encode + decode) + (1 - weights) * send for encode, send, decode in kinds], axis=0)
    first_s = problem.backward_s[1] + min(float(encode[0, 1:].min()) for encode, _, _ in kinds)
    least = _WEIGHTS * problem.backward_s[-1] + (1 - _WEIGHTS) * first_s + _least(work)[:, 0]
    return problem.system.forward_s + float(least.max())


class _Fronts:
    """Labels are groupings of prefixes.

    A label has four times: encoding so far, end of communication, end of decoding (with an idle device), decoding so
    far. All are zero for the empty prefix.
    """

    def __init__(self, problem: FusionProblem) -> None:
        self._problem, self._count = problem, len(problem)
        self._backward = np.array(problem.backward_s)
        self._encode, self._send, self._decode = _costs(problem, compressed=True)
        self._best = best_of(problem, _candidates(problem))
        self._limit_s = problem.finish_s(self._best) * (1 - ROUNDING)
        weights, deadlines = _WEIGHTS[:, None, None], 1 + _DEADLINES[:, None, None]
        # [weight, prefix]: what the rest takes at least of the device and the network, weighted.
        self._rest = _least(weights * (self._encode + self._decode) + (1 - weights) * self._send)
        # [weight, prefix]: by how much communication of the rest, and its last decoding, exceed all its decoding.
        ahead = deadlines * self._send - self._decode
        ahead[..., -1] += deadlines[..., 0] * self._decode[..., -1]
        self._ahead = _least(ahead)

    def best(self) -> Strategy:
        labels, prefix, before = np.zeros((4, 1)), np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp)
        for end in range(1, self._count + 1):
            new = self._extended(labels, prefix, end)
            keep = np.flatnonzero(self._least_s(new, end) < self._limit_s)
            keep = keep[_front(self._felt(new[:, keep], end), self._limit_s * ROUNDING)]
            labels = np.concatenate([labels, new[:, keep]], axis=1)
            prefix = np.concatenate([prefix, np.full(len(keep), end)])
            before = np.concatenate([before, keep])
        last = np.flatnonzero(prefix == self._count)
        if not len(last):
            return self._best
        finish_s = np.maximum(labels[2, last], self._backward[-1] + labels[0, last] + labels[3, last])
        label, ends = int(last[finish_s.argmin()]), []
        while label:
            ends.append(int(prefix[label]))
            label = int(before[label])
        return groups_of(ends[::-1])

    def _extended(self, labels: Floats, prefix: NDArray[np.intp], end: int) -> Floats:
        """Return the labels with one more group up to `end`."""
        encoding_s, sent_s, decoded_s, decoding_s = labels
        encode, send, decode = (cost[prefix, end] for cost in (self._encode, self._send, self._decode))
        encoding_s = encoding_s + encode
        sent_s = np.maximum(sent_s, self._backward[end] + encoding_s) + send
        return np.stack([encoding_s, sent_s, np.maximum(decoded_s, sent_s) + decode, decoding_s + decode])

    def _least_s(self, labels: Floats, end: int) -> Floats:
        """Return what a strategy that begins like this takes at least."""
        encoding_s, sent_s, decoded_s, decoding_s = labels
        computing_s = self._backward[-1] + encoding_s + decoding_s
        weights, rest = _WEIGHTS[:, None], self._rest[:, end, None]
        bounds = weights * computing_s + (1 - weights) * sent_s + rest
        least: Floats = np.maximum(bounds.max(axis=0), decoded_s)
        return least

    def _felt(self, labels: Floats, end: int) -> Floats:
        """Return what the rest can notice of each label: times that it cannot use are raised to those that it can.

        Communication goes on when the next tensor is encoded at the earliest. Decoding that ends before all computation
        does is not felt, nor is decoding that is done so early that even the last decoding of any rest that keeps below
        the limit comes later.
        """
        encoding_s, sent_s, decoded_s, decoding_s = labels
        computing_s = encoding_s + decoding_s
        sent_s = np.maximum(sent_s, self._backward[min(end + 1, self._count)] + encoding_s)
        deadlines = _DEADLINES[:, None]
        unfelt_s = sent_s + self._ahead[:, end, None] - deadlines * (self._limit_s - sent_s)
        decoded_s = np.maximum(decoded_s, np.maximum(self._backward[-1] + computing_s, unfelt_s.max(axis=0)))
        return np.stack([encoding_s, computing_s, sent_s, decoded_s])


def _front(values: Floats, tolerance: float) -> NDArray[np.intp]:
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


def _costs(problem: FusionProblem, *, compressed: bool) -> tuple[Floats, Floats, Floats]:
    """Return what encoding, sending and decoding cost, [start, end], of the group of the tensors start … end - 1."""
    size = np.array(problem.size_bytes)
    sizes = np.maximum(size[None, :] - size[:, None], 0.0)
    system = problem.system
    if compressed:
        return system.compress.over(sizes), system.communicate.over(sizes), system.decompress.over(sizes)
    return np.zeros_like(sizes), system.dense.over(sizes), np.zeros_like(sizes)


def _least(costs: Floats) -> Floats:
    """Return the least sums of costs [weight, start, end] over the groups of each rest, [weight, start]."""
    count = costs.shape[-1] - 1
    least = np.zeros((len(costs), count + 1))
    for start in range(count - 1, -1, -1):
        least[:, start] = (costs[:, start, start + 1 :] + least[:, start + 1 :]).min(axis=1)
    return least


def _candidates(problem: FusionProblem) -> list[Strategy]:
    """Return strategies to begin with: the better they are, the sooner others are left out."""
    system = problem.system
    h, g, d = (
        _straight(cost, problem.size_bytes[-1]) for cost in (system.compress, system.communicate, system.decompress)
    )
    straight = FusionProblem(problem.tensors, replace(system, compress=h, communicate=g, decompress=d))
    plans = (one_group, layer_wise, best_bucketed, best_evenly_split)
    return [search(straight)[0], *(plan(problem) for plan in plans)]


def _straight(curve: Curve, size_bytes: float) -> Affine:
    """Return the line through the ends of a curve."""
    alpha_s = curve(0.0)
    slope = (curve(size_bytes) - alpha_s) / size_bytes if size_bytes else 0.0
    return Affine(alpha_s=alpha_s, beta_s_per_byte=max(0.0, slope))
