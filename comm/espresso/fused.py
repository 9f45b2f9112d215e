"""Espresso on Cupcake's idea: paths of the tree for groups of tensors, where single ones would pay for many latencies.

Tensors are fused into buckets before a path is chosen for each; the best of several bucket sizes counts, and of no
fusion, with and without compression. Not in the thesis, whose chapters 4 and 5 treat the two apart.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ..cupcake.fusion import all_bucketed
from ..plan.cluster import Cluster
from ..plan.constraints import uncompressed
from ..plan.model import Model, Tensor, fused
from ..plan.plan import ALL_REDUCE, CLOSE, DOES_NOT_PAY, FEW_GROUPS, Plan
from ..plan.tree import Option, all_options
from .espresso import espresso_plan

_Groups = tuple[tuple[Tensor, ...], ...]


def fused_plan(model: Model, cluster: Cluster, *, options: Sequence[Option] | None = None) -> Plan:
    """Return the plan with the least predicted iteration among those of all bucket sizes; compression has to pay.

    Sizes are 64 KiB, 128 KiB, … up to one bucket for all.

    Args:
        model: The tensors, in ready order.
        cluster: Hosts, links and the compressor.
        options: What may be used; all of the tree by default.

    Raises:
        NoPlanError: There is no option to choose from.
    """
    alone, best, plans, _ = _best(model, cluster, options, fuse=True)
    return replace(
        best,
        planner="espresso-fused",
        bound_s=min(best.iteration_s, *(plan.bound_s for plan in plans)),
        baselines_s={"espresso": alone.iteration_s, **alone.baselines_s},
        reason=f"{len(best.groups)} groups of {len(model.tensors)} tensors; {best.reason}",
    )


def alone_or_dense(model: Model, cluster: Cluster, *, options: Sequence[Option] | None = None) -> Plan:
    """Return Espresso's plan for single tensors, unless compression gains nothing over buckets without it.

    Raises:
        NoPlanError: There is no option to choose from.
    """
    alone, best, plans, simpler = _best(model, cluster, options, fuse=False)
    bound_s = min(best.iteration_s, *(plan.bound_s for plan in (*plans, *simpler)))
    return replace(best, planner=alone.planner, bound_s=bound_s, baselines_s=alone.baselines_s)


def _best(
    model: Model, cluster: Cluster, options: Sequence[Option] | None, *, fuse: bool
) -> tuple[Plan, Plan, list[Plan], list[Plan]]:
    """Return the plan for single tensors, the best one, those with all options, and those without compression."""
    alone = espresso_plan(model, cluster, options=options)
    begin_s = time.perf_counter()
    allowed = all_options() if options is None else options
    single, *buckets = _fusions(model, cluster)
    plans = [alone, *(_plan(model, groups, cluster, allowed) for groups in buckets if fuse)]
    without = [option for option in allowed if uncompressed(option)]
    plain = [option for option in without if str(option) == ALL_REDUCE]
    # Those that only all-reduce, and those that do anything but compress, if the options allow it.
    simpler = [
        _plan(model, groups, cluster, left) for left in (plain, without) if left for groups in (single, *buckets)
    ]
    best = _if_it_pays(plans, simpler)
    return alone, replace(best, planning_s=alone.planning_s + time.perf_counter() - begin_s), plans, simpler


def _if_it_pays(plans: Sequence[Plan], simpler: Sequence[Plan]) -> Plan:
    """Return a plan that is predicted to be about as quick as the quickest: one that all-reduces rather than others.

    Where none compresses, it has few groups.

    Args:
        plans: Made with all options.
        simpler: Made with those without compression.
    """
    possible = [*plans, *simpler]
    limit_s = (1 + CLOSE) * min(plan.iteration_s for plan in possible)
    close = [plan for plan in possible if plan.iteration_s <= limit_s]
    best = min(close, key=lambda plan: (plan.compress, not plan.plain, plan.iteration_s))
    if best.compress:
        return best
    limit_s = (1 + FEW_GROUPS) * best.iteration_s
    alike = [plan for plan in close if not plan.compress and plan.plain == best.plain and plan.iteration_s <= limit_s]
    best = min(alike, key=lambda plan: (len(plan.groups), plan.iteration_s))
    # Its own reason knows of no compression; those of the others do, where it was possible.
    return replace(best, reason=next((plan.reason for plan in plans if not plan.compress), DOES_NOT_PAY))


def _fusions(model: Model, cluster: Cluster) -> list[_Groups]:
    """Return the tensors one by one, and in buckets of 64 KiB, 128 KiB, … up to one."""
    sizes = (tensor.numel * cluster.bytes_per_element for tensor in model.tensors)
    found = all_bucketed([*accumulate(sizes, initial=0.0)])
    return [*dict.fromkeys(tuple(model.tensors[group.start : group.end] for group in each) for each in found)]


def _plan(model: Model, groups: _Groups, cluster: Cluster, options: Sequence[Option]) -> Plan:
    plan = espresso_plan(fused(model, groups), cluster, options=options, baselines=False)
    names = [tuple(tensor.name for tensor in group) for group in groups]
    return replace(
        plan,
        groups=tuple(replace(group, tensors=tensors) for tensors, group in zip(names, plan.groups, strict=True)),
    )
