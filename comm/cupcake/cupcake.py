"""Cupcake: which gradients to fuse for compression and communication, and whether to compress at all (Chapter 5)."""

import time
from collections.abc import Callable

from ..plan.model import Model
from ..plan.plan import CLOSE, COMPRESSED, DENSE, DOES_NOT_PAY, FEW_GROUPS, Plan, PlanGroup
from .fusion import FoundFusion, FusionProblem, GroupCosts, Strategy, all_bucketed
from .search import best_fusion


def optimum(problem: FusionProblem, without: Strategy | None = None) -> FoundFusion:
    """Return the best fusion found, and what none beats, each group compressed or not.

    It is no slower than the best fusion of compressed groups and the best one `without` compression.
    """
    known = best_fusion(problem).strategy, without or dense(problem)
    return best_fusion(problem, kinds=(True, False), known=known)


def cupcake(problem: FusionProblem) -> Strategy:
    """Return the best fusion found."""
    return optimum(problem).strategy


def dense(problem: FusionProblem) -> Strategy:
    """Return the best fusion of groups that are not compressed."""
    return best_fusion(problem, kinds=(False,)).strategy


PLANNERS: dict[str, Callable[[FusionProblem], Strategy]] = {"cupcake": cupcake, "dense": dense}
"""Benchmarks add those that papers compare with."""


def fusion_plan(
    model: Model,
    costs: GroupCosts,
    *,
    planner: str = "cupcake",
    compressor: str | None = None,
    option: str = COMPRESSED,
) -> Plan:
    """Return the plan that one of `PLANNERS` makes; that of `cupcake` compresses nothing if that gains next to nothing.

    Args:
        model: The tensors, in ready order.
        costs: What groups cost.
        planner: Its name.
        compressor: The name of what the costs are for.
        option: What the plan says of compressed groups.
    """
    problem = FusionProblem(model.tensors, costs)
    begin_s = time.perf_counter()
    without = dense(problem)
    best = optimum(problem, without)
    if planner == "cupcake":
        strategy = _if_it_pays(problem, best.strategy, without)
    else:
        begin_s = time.perf_counter()
        strategy = PLANNERS[planner](problem)
    planning_s, iteration_s = time.perf_counter() - begin_s, problem.iteration_s(strategy)
    count = f"{len(strategy)} groups of {len(problem)} tensors"
    others = {"cupcake": best.strategy, "dense": without}
    baselines_s = {name: problem.iteration_s(found) for name, found in others.items() if name != planner}
    return Plan(
        planner=planner,
        model=model.name,
        compressor=compressor,
        groups=tuple(
            PlanGroup(
                tensors=tuple(tensor.name for tensor in model.tensors[group.start : group.end]),
                option=option if group.compressed else DENSE,
            )
            for group in strategy
        ),
        reason=f"{count}; {_gain(strategy, iteration_s, planner, baselines_s)}",
        iteration_s=iteration_s,
        planning_s=planning_s,
        bound_s=min(costs.forward_s + best.bound_s, iteration_s),
        baselines_s=baselines_s,
    )


def _if_it_pays(problem: FusionProblem, best: Strategy, without: Strategy) -> Strategy:
    """Return the best strategy, or one without compression and with few groups if that is predicted to be as quick."""
    without = without if any(group.compressed for group in best) else best
    limit_s = (1 + CLOSE) * problem.iteration_s(best)
    if problem.iteration_s(without) > limit_s:
        return best
    limit_s = min(limit_s, (1 + FEW_GROUPS) * problem.iteration_s(without))
    buckets = all_bucketed(problem.size_bytes, compressed=False)
    return min([without, *(each for each in buckets if problem.iteration_s(each) <= limit_s)], key=len)


def _gain(strategy: Strategy, iteration_s: float, planner: str, baselines_s: dict[str, float]) -> str:
    if not any(group.compressed for group in strategy):
        return DOES_NOT_PAY if planner == "cupcake" else "this planner compresses nothing here"
    if not iteration_s:
        return "an iteration takes no time"
    return f"{baselines_s['dense'] / iteration_s:.2f} times as fast as the best fusion without compression"
