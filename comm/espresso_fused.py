"""Espresso on Cupcake's idea: paths of the tree for groups of tensors, where single ones would pay for many latencies.

Tensors are fused into buckets before a path is chosen for each; the best of several bucket sizes counts, and of no
fusion. Not in the thesis, whose chapters 4 and 5 treat the two apart.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from .cluster import Cluster
from .curve import FREE
from .espresso import espresso_plan
from .fusion import FusionProblem
from .fusion_baselines import bucketed
from .model import Model, Tensor
from .plan import DENSE, Plan, PlanGroup
from .system import System
from .tree import Option, all_options

BUCKETS_BYTES = tuple(1 << exponent for exponent in range(16, 27))
"""64 KiB to 64 MiB."""

_ALL_REDUCE = "all_reduce@flat"


def fused_plan(model: Model, cluster: Cluster, *, options: Sequence[Option] | None = None) -> Plan:
    """Return the plan with the least predicted iteration among those of all bucket sizes.

    Args:
        model: The tensors, in ready order.
        cluster: Hosts, links and the compressor.
        options: What may be used; all of the tree by default.

    Raises:
        NoPlanError: There is no option to choose from.
    """
    begin_s = time.perf_counter()
    allowed = all_options() if options is None else options
    plans = [_plan(model, groups, cluster, allowed) for groups in _fusions(model, cluster)]
    best = min(plans, key=lambda plan: plan.iteration_s)
    planning_s = time.perf_counter() - begin_s
    unfused = espresso_plan(model, cluster, options=options)
    return replace(
        best,
        planner="espresso-fused",
        planning_s=planning_s,
        bound_s=min(plan.bound_s for plan in plans),
        baselines_s={"espresso": unfused.iteration_s, **unfused.baselines_s},
        reason=f"{len(best.groups)} groups of {len(model.tensors)} tensors; {best.reason}",
    )


def _fusions(model: Model, cluster: Cluster) -> list[tuple[tuple[Tensor, ...], ...]]:
    sizes = System(forward_s=0.0, bytes_per_element=cluster.bytes_per_element, compress=FREE, communicate=FREE)
    problem = FusionProblem(model.tensors, sizes)
    fusions: dict[tuple[tuple[Tensor, ...], ...], None] = {tuple((tensor,) for tensor in model.tensors): None}
    for size_bytes in BUCKETS_BYTES:
        groups = bucketed(problem, size_bytes)
        fusions[tuple(model.tensors[group.start : group.end] for group in groups)] = None
    return list(fusions)


def _plan(model: Model, groups: Sequence[Sequence[Tensor]], cluster: Cluster, options: Sequence[Option]) -> Plan:
    fused = Model(
        name=model.name,
        tensors=tuple(
            Tensor(
                name=group[0].name,
                numel=sum(tensor.numel for tensor in group),
                backward_s=sum(tensor.backward_s for tensor in group),
            )
            for group in groups
        ),
    )
    plan = espresso_plan(fused, cluster, options=options, baselines=False)
    all_reduce = [option for option in options if str(option) == _ALL_REDUCE]
    if not plan.compress and all_reduce:
        # That is what the run-time does with a group that a plan leaves dense.
        plan = replace(espresso_plan(fused, cluster, options=all_reduce, baselines=False), bound_s=plan.bound_s)
    names = [tuple(tensor.name for tensor in group) for group in groups]
    return replace(
        plan,
        groups=tuple(
            PlanGroup(tensors=tensors, option=DENSE if group.option == _ALL_REDUCE else group.option)
            for tensors, group in zip(names, plan.groups, strict=True)
        ),
    )
