"""The best fusion of tensors into groups that each take an option of the tree, or a time that none beats.

**The bound.** A state of the queues is as in `maxplus`, and so is what a group does to it. Every way through the queues
is no longer than an iteration, and so is a weighted mean of one way and of what single queues are busy with in all. The
ways here go from group to group on the GPU, pass to a link with one of them, stay on it, and leave it in the last group
for whatever that ends with. From the last group back to the first,

    linked(a)    = min over b of: what a group a ... b - 1 adds on the link at least + linked(b)
    computing(a) = min over b of: the larger of what it adds at least on the GPU + computing(b)
                                             and on the way from the GPU to the link + linked(b)

where "at least" is over the options, for each of the three by itself, with what the group keeps the weighed queues busy
with. By induction these are no more than what the rest of any fusion adds: its first group is one of those that the
minimum is over, each way on from it is no longer than the longest, and an option adds no less than the least option.
So the value for the whole model is a bound, for any weights; those that prove most are looked for.

**Sizes.** Costs depend on the bytes of a group, of which hundreds of tensors have tens of thousands of sums. Where
there are too many, those from x to y = 1.03 x at most count as one, with steps that take no longer than any of them.
Between x and y a rooted collective begins to cut into more blocks once at most (`collective.segments`). Before that its
time rises with the bytes, so that it is no less than at x. From there on it is so much and so much for each byte, up to
y, so that it is no less than x/y of the time at y. Measured costs that fall are replaced by lower ones that do not.

**The search** goes through the prefixes as `exact` does, with the groups that may end there. It ends with the optimum
for small models. Others are left to buckets, and only their bound is needed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..plan.cluster import Cluster, Coder, LinkCost
from ..plan.curve import Curve, Table
from ..plan.model import Model, Tensor
from ..plan.tree import Option
from . import maxplus
from .espresso import Espresso
from .maxplus import GPU, Array
from .strategy import CostedStep, Problem

Indices = NDArray[np.intp]
Numels = NDArray[np.int64]
_MOST_SIZES = 300
_BIN = 1.03
_MOST_WORK = 4_000_000
_WIDTH = 256
_TRIES = 6
_ROUNDING = 1e-12
_BUSY = (maxplus.BUSY, maxplus.CPU, maxplus.CPU_LATE)
_LINKS = (maxplus.INTER, maxplus.INTRA)


class Fusions:
    """All fusions of a model on a cluster.

    Args:
        model: The tensors, in ready order.
        cluster: Hosts, links and the compressor.
        options: What groups may take.

    Attributes:
        bound_s: No fusion takes less, whatever options its groups take; without the forward pass.

    Raises:
        NoPlanError: There is no option to choose from.
    """

    def __init__(self, model: Model, cluster: Cluster, options: Sequence[Option]) -> None:
        self._groups = _Groups(model, cluster, options)
        self._rests = self._weigh()
        self.bound_s = max(rest.bound_s for rest in self._rests)

    def search(self, known_s: float) -> tuple[int, ...] | None:
        """Return before which tensors the groups of the best fusion end, if it takes less than `known_s`.

        Raises `bound_s` to what the search proves. Models that are too large are not searched.
        """
        groups = self._groups
        if groups.work * _WIDTH > _MOST_WORK:
            return None
        limit_s, dropped_s = known_s * (1 - _ROUNDING), np.inf
        states, trail = [np.zeros((1, maxplus.WIDTH))], [np.zeros((1, 2), dtype=np.intp)]
        for end in range(1, groups.count + 1):
            found, origins = [], []
            for start in range(end):
                after = groups.applied(states[start], start, end)
                found.append(after.reshape(-1, maxplus.WIDTH))
                before = np.repeat(np.arange(len(after)), after.shape[1])
                origins.append(np.stack([np.full_like(before, start), before], axis=1))
            new, origin = np.concatenate(found), np.concatenate(origins)
            least_s = np.max([rest.least_s(new, end) for rest in self._rests], axis=0)
            kept = np.flatnonzero(least_s < limit_s)
            kept = kept[least_s[kept].argsort(kind="stable")]
            if len(kept):
                kept = kept[maxplus.pareto(new[kept])]
            if len(kept) > _WIDTH and end < groups.count:
                dropped_s = min(dropped_s, float(least_s[kept[_WIDTH]]))
                kept = kept[:_WIDTH]
            states.append(new[kept])
            trail.append(origin[kept])
        times_s = states[-1].max(axis=1)
        best_s = min(known_s, float(times_s.min(initial=np.inf)))
        self.bound_s = max(self.bound_s, min(dropped_s, best_s))
        if best_s >= limit_s:
            return None
        ends, end, state = [], groups.count, int(times_s.argmin())
        while end:
            ends.append(end)
            end, state = (int(place) for place in trail[end][state])
        return tuple(ends[::-1])

    def _weigh(self) -> "list[_Rest]":
        """Return what was found on the way to the best weights, for each link that every option uses."""
        found = []
        for link in self._groups.links or [GPU]:
            best = _Rest(self._groups, link, np.zeros(len(self._groups.works)))
            found.append(best)
            for work in (*range(len(best.shares)), *(range(len(best.shares)) if len(best.shares) > 1 else ())):
                # The bound is a concave function of a queue's share.
                start, low, high = best.shares, 0.0, 1.0
                for _ in range(_TRIES):
                    places = [low + (high - low) * at for at in (0.4, 0.6)]
                    tried = [_Rest(self._groups, link, _moved(start, work, place)) for place in places]
                    low, high = (places[0], high) if tried[0].bound_s < tried[1].bound_s else (low, places[1])
                    best = max([best, *tried], key=lambda rest: rest.bound_s)
            found.append(best)
        return found


class _Groups:
    """What each group may do to the queues.

    Attributes:
        count: N, the number of tensors.
        backward: Backward time of the first j tensors.
        works: The queues that tensors can be moved between, of which some option makes use.
        links: Those that all options use.
        work: How many pairs of a group and an option there are; infinite if sizes are not exact.
    """

    def __init__(self, model: Model, cluster: Cluster, options: Sequence[Option]) -> None:
        numels: Numels = np.cumsum([0, *(tensor.numel for tensor in model.tensors)], dtype=np.int64)
        self.count = len(model.tensors)
        self.backward: Array = np.cumsum([0.0, *(tensor.backward_s for tensor in model.tensors)])
        within = numels[None, :] - numels[:, None]
        real = np.triu(np.ones_like(within, dtype=bool), 1)
        sums = np.unique(within[real])
        exact = len(sums) <= _MOST_SIZES
        first = np.arange(len(sums)) if exact else _bins(sums)
        # [start, end]: the place of each group's size.
        self._kinds = np.maximum(np.searchsorted(sums[first], within, side="right") - 1, 0)
        if exact:
            problem = Espresso(_of_sizes(sums), cluster, options).problem
        else:
            last = np.append(first[1:], len(sums)) - 1
            problem = _no_longer(sums[first], sums[last], _rising(cluster), options)
        fronts = problem.fronts(range(len(problem.choices)))
        self._matrices = [problem.matrices(kind, front) for kind, front in enumerate(fronts)]
        self._stacked = np.concatenate(self._matrices)
        self._firsts = np.cumsum([0, *map(len, fronts)])[:-1]
        self.work = np.array([len(front) for front in fronts])[self._kinds[real]].sum() if exact else np.inf
        own = np.diagonal(self._stacked, axis1=1, axis2=2)
        self.works = [queue for queue in _BUSY if (own[:, queue] > 0).any()]
        self.links = [queue for queue in _LINKS if np.isfinite(self._stacked[:, queue, GPU]).all()]
        self._own = own[:, self.works]

    def applied(self, states: Array, start: int, end: int) -> Array:
        """Return each state behind a group, for each of its options."""
        ready = maxplus.compute(states, self.backward[end] - self.backward[start])
        return maxplus.apply(ready, self._matrices[self._kinds[start, end]])

    def least(self, out: int | None, into: int, on_way: float, shares: Array) -> Array:
        """Return what groups [start, end] add at least to the mean, on the way from one queue to another.

        `out`: None for the queue that is free last.
        """
        way = self._stacked[:, :, into].max(axis=1) if out is None else self._stacked[:, out, into]
        found: Array = np.minimum.reduceat(on_way * way + self._own @ shares, self._firsts)[self._kinds]
        return found


class _Rest:
    """What is proven by weights: shares of what queues are busy with, and the rest on ways through one link.

    Attributes:
        shares: Of each queue that is weighed.
        bound_s: No fusion takes less.
    """

    def __init__(self, groups: _Groups, link: int, shares: Array) -> None:
        self.shares, self._groups, self._link, self._on_way = shares, groups, link, 1.0 - float(shares.sum())
        count, backward = groups.count, self._on_way * groups.backward
        computing, passing, travelling, passing_last, last = (
            groups.least(out, into, self._on_way, shares)
            for out, into in ((GPU, GPU), (link, GPU), (link, link), (None, GPU), (None, link))
        )
        self._linked, self._computing = np.zeros(count + 1), np.zeros(count + 1)
        for start in range(count - 1, -1, -1):
            inner = slice(start + 1, count)
            on_link = travelling[start, inner] + self._linked[inner]
            self._linked[start] = min(on_link.min(initial=np.inf), last[start, count])
            on_gpu = computing[start, inner] + self._computing[inner]
            ways = np.maximum(on_gpu, passing[start, inner] + self._linked[inner]) + backward[inner]
            least_s = min(ways.min(initial=np.inf), passing_last[start, count] + backward[count])
            self._computing[start] = least_s - backward[start]
        self.bound_s = float(self.least_s(np.zeros((1, maxplus.WIDTH)), 0)[0])

    def least_s(self, states: Array, end: int) -> Array:
        """Return what fusions take at least of which the groups up to a prefix leave these states behind."""
        if end == self._groups.count:
            ended: Array = states.max(axis=1)
            return ended
        left_s = self._groups.backward[-1] - self._groups.backward[end]
        of_gpu = sum(share for share, work in zip(self.shares, self._groups.works, strict=True) if work == maxplus.BUSY)
        busy = states[:, self._groups.works] @ self.shares + of_gpu * left_s
        on_gpu = self._on_way * states[:, GPU] + self._computing[end]
        found: Array = busy + np.maximum(on_gpu, self._on_way * states[:, self._link] + self._linked[end])
        return found


def _moved(shares: Array, place: int, share: float) -> Array:
    """Return the shares with one changed to this, and the others in proportion."""
    moved = shares * (1.0 - share)
    moved[place] += share
    return moved


def _of_sizes(numels: Numels) -> Model:
    """Return a model with a tensor of each size."""
    tensors = (Tensor(name=str(place), numel=int(numel), backward_s=0.0) for place, numel in enumerate(numels))
    return Model(name="sizes", tensors=tuple(tensors))


def _bins(sums: Numels) -> Indices:
    """Return which sums begin a bin of about equal ones."""
    first = [0]
    while (after := int(np.searchsorted(sums, sums[first[-1]] * _BIN, side="right"))) < len(sums):
        first.append(max(after, first[-1] + 1))
    return np.array(first, dtype=np.intp)


def _no_longer(least: Numels, most: Numels, cluster: Cluster, options: Sequence[Option]) -> Problem:
    """Return the problem of sizes whose steps take no longer than those of any size from `least` to `most`."""
    sizes = np.unique(np.concatenate([least, most]))
    problem = Espresso(_of_sizes(sizes), cluster, options).problem
    at_least, at_most = np.searchsorted(sizes, least), np.searchsorted(sizes, most)
    share = np.divide(least, most, out=np.ones(len(least)), where=most > 0)
    steps = {id(step): step for choice in problem.choices for step in choice}
    shorter = {
        key: CostedStep(
            resource=step.resource,
            seconds=np.minimum(step.seconds[at_least], share * step.seconds[at_most]),
            label=step.label,
        )
        for key, step in steps.items()
    }
    return Problem(
        names=[str(place) for place in range(len(least))],
        backward_s=[0.0] * len(least),
        kinds=range(len(least)),
        choices=[tuple(shorter[id(step)] for step in choice) for choice in problem.choices],
        overlap=problem.overlap,
    )


def _rising(cluster: Cluster) -> Cluster:
    """Return the cluster with measured costs that never fall, nowhere above what they were."""

    def curve(cost: Curve) -> Curve:
        return cost.rising() if isinstance(cost, Table) else cost

    def link(costs: LinkCost) -> LinkCost:
        changed = (
            {routine: curve(cost) for routine, cost in each.items()} for each in (costs.routines, costs.compressed)
        )
        routines, compressed = changed
        return LinkCost(cost=curve(costs.cost), routines=routines, compressed=compressed)

    def coder(costs: Coder) -> Coder:
        return Coder(
            compress=curve(costs.compress),
            decompress=curve(costs.decompress),
            accumulate=curve(costs.accumulate),
        )

    coders = {device: coder(costs) for device, costs in cluster.compressor.coders.items()}
    return replace(
        cluster,
        intra=link(cluster.intra),
        inter=link(cluster.inter),
        flat=cluster.flat and link(cluster.flat),
        compressor=replace(cluster.compressor, coders=coders),
    )
