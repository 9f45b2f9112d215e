"""Cupcake: which gradients to fuse for compression and communication, and whether to compress at all (Chapter 5)."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from ..plan.curve import FREE
from ..plan.model import Model
from ..plan.plan import CLOSE, COMPRESSED, DENSE, DOES_NOT_PAY, FEW_GROUPS, BusySpan, Plan, PlanGroup
from ..plan.system import System
from .fusion import FoundFusion, FusionProblem, Strategy
from .fusion_baselines import all_bucketed, best_bucketed, best_evenly_split, hipress, layer_wise
from .fusion_front import pareto

Planner = Callable[[FusionProblem], Strategy]


def optimum(problem: FusionProblem) -> FoundFusion:
    """Return the best fusion found, and what none beats; groups may stay dense where that has a cost.

    Without `communicate_dense` all groups are compressed. With it each may be or not, and the result is no slower than
    the best fusion of compressed groups, the best one without compression, and HiPress' choice.
    """
    best = fused(problem)
    if problem.system.communicate_dense is None:
        return best
    return pareto(problem, kinds=(True, False), known=(best.strategy, dense(problem)))


def cupcake(problem: FusionProblem) -> Strategy:
    """Return the best fusion found; where it has a cost, groups may stay without compression."""
    return optimum(problem).strategy


def fused(problem: FusionProblem) -> FoundFusion:
    """Return the best fusion of compressed groups."""
    return pareto(problem)


def dense(problem: FusionProblem) -> Strategy:
    """Return the best fusion of groups that are not compressed.

    Raises:
        FileError: Nobody knows what communication without compression costs.
    """
    system = replace(problem.system, compress=FREE, communicate=problem.system.dense, decompress=FREE)
    best = fused(FusionProblem(problem.tensors, system)).strategy
    return tuple(group._replace(compressed=False) for group in best)


PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "cupcake": cupcake,
        "layer-wise": layer_wise,
        "hipress": hipress,
        "bucket-fusion": best_bucketed,
        "evenly-split": best_evenly_split,
        "dense": dense,
    }
)
_NEEDS_DENSE = ("hipress", "dense")


def fusion_plan(
    model: Model, system: System, *, planner: str = "cupcake", compressor: str | None = None, option: str = COMPRESSED
) -> Plan:
    """Return the plan that one of `PLANNERS` makes; that of `cupcake` compresses nothing if that gains next to nothing.

    Args:
        model: The tensors, in ready order.
        system: What operations on groups cost.
        planner: Its name.
        compressor: The name of what the costs are for.
        option: What the plan says of compressed groups.

    Raises:
        FileError: The system does not say what the planner needs.
    """
    problem = FusionProblem(model.tensors, system)
    begin_s = time.perf_counter()
    best = optimum(problem)
    if planner != "cupcake":
        begin_s = time.perf_counter()
    strategy = _if_it_pays(problem, best.strategy) if planner == "cupcake" else PLANNERS[planner](problem)
    planning_s = time.perf_counter() - begin_s
    baselines_s = {
        name: problem.iteration_s(best.strategy if name == "cupcake" else plan(problem))
        for name, plan in PLANNERS.items()
        if name != planner and (system.communicate_dense or name not in _NEEDS_DENSE)
    }
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
        reason=_reason(problem, strategy, planner, baselines_s),
        iteration_s=problem.iteration_s(strategy),
        planning_s=planning_s,
        bound_s=min(system.forward_s + best.bound_s, problem.iteration_s(strategy)),
        baselines_s=baselines_s,
        timeline=tuple(_spans(problem, strategy)),
    )


def _if_it_pays(problem: FusionProblem, best: Strategy) -> Strategy:
    """Return the best strategy, or one without compression and with few groups if that is predicted to be as quick."""
    if problem.system.communicate_dense is None:
        return best
    without = dense(problem) if any(group.compressed for group in best) else best
    limit_s = (1 + CLOSE) * problem.iteration_s(best)
    if problem.iteration_s(without) > limit_s:
        return best
    limit_s = min(limit_s, (1 + FEW_GROUPS) * problem.iteration_s(without))
    quick = (each for each in all_bucketed(problem, compressed=False) if problem.iteration_s(each) <= limit_s)
    return min([without, *quick], key=len)


def _reason(problem: FusionProblem, strategy: Strategy, planner: str, baselines_s: dict[str, float]) -> str:
    iteration_s = problem.iteration_s(strategy)
    if problem.system.communicate_dense is None:
        gain = "the system file has no communicate_dense, so it is not known whether compression pays"
    elif not any(group.compressed for group in strategy):
        chosen = planner == "cupcake"
        gain = DOES_NOT_PAY if chosen else "this planner compresses nothing here"
    elif iteration_s and "dense" in baselines_s:
        gain = f"{baselines_s['dense'] / iteration_s:.2f} times as fast as the best fusion without compression"
    else:
        gain = "an iteration takes no time"
    return f"{len(strategy)} groups of {len(problem)} tensors; {gain}"


def _spans(problem: FusionProblem, strategy: Strategy) -> Iterator[BusySpan]:
    """Yield what the device and the network are busy with, in seconds since the backward pass began."""
    busy_until_s = 0.0
    for index, times in enumerate(problem.timeline(strategy)):
        steps = (
            ("device", "backward", (busy_until_s, times.encode_s[0])),
            ("device", "compress", times.encode_s),
            ("network", "communicate", times.communicate_s),
            ("device", "decompress", times.decode_s),
        )
        busy_until_s = times.encode_s[1]
        for lane, kind, (begin_s, end_s) in steps:
            if end_s > begin_s:
                yield BusySpan(lane=lane, kind=kind, group=index, begin_s=begin_s, end_s=end_s)
