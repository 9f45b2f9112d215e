"""How long does it take to plan fusion, against Algorithm 5.1, and how much faster is an iteration with the plan?

The models are those of Tables 4.5, 4.6 and 5.1 of the thesis (benchmarks/models), with a backward pass at 10 TFLOP/s
and a forward pass of half its time. 8 workers compress to 1 bit an element and gather from each other over links of
three speeds, in the rounds that the run-time makes, 15 us each; 0.3 ms + 0.1 ns a byte to encode, 0.1 ms + 0.05 ns a
byte to decode. Algorithm 5.1 does not know decoding, so planning times are compared with a free one. Goals at 314
tensors: 10 ms where all groups are compressed (the thesis: 6.6 s), and 1 s where they may stay dense. "Group by group"
is what the planner did before it searched mixtures: the best fusion of compressed groups or of others, with each group
sent in the other way if that helps.

Algorithm 5.1 is exponential, and does not end in most of these cases. Its first pruning compares with a bound that lets
what is left be one group, and so cuts only where the groups so far cost more start-ups of the encoder than the best
strategy takes longer than a backward pass with everything encoded at once. Told are these start-ups for the strategy
that it begins with, and for the optimum; how long it takes from the optimum, where no time goes into better ones; and
with single prunings (Table 5.1), where both are enough.
"""

import math
import multiprocessing
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from baselines.algorithm_5_1 import algorithm_5_1, first
from baselines.fusions import best_of, hipress
from baselines.planners import FUSING
from baselines.system import System
from report import Summary, parser, table, write_json

from resilient_run.comm.cupcake.cupcake import PLANNERS, dense, optimum
from resilient_run.comm.cupcake.fusion import FusionProblem, Strategy
from resilient_run.comm.cupcake.search import best_fusion
from resilient_run.comm.plan.collective import load
from resilient_run.comm.plan.curve import FREE, Affine
from resilient_run.comm.plan.model import Model, read_model
from resilient_run.comm.plan.tree import Routine

MODELS = ("lstm", "vgg16", "gpt2", "ugatit", "resnet50", "bert_base", "resnet101")
LINKS_GBIT = (10, 25, 100)
WORKERS = 8
PRUNINGS = {"only pruning 1": (1,), "only pruning 2": (2,), "no pruning": ()}
"""Rows of Table 5.1."""
BASELINES = ("dense", "layer-wise", "hipress", "bucket-fusion", "evenly-split")


def system_of(model: Model, link_gbit: int) -> System:
    """Return what compressing to 1 bit and gathering costs on links of this speed."""
    byte_s = 8 / (link_gbit * 1e9)

    def collective(routine: Routine, ratio: float) -> Affine:
        found = load(routine, WORKERS)
        return Affine(alpha_s=found.startups * 15e-6, beta_s_per_byte=found.adapter * ratio * byte_s)

    return System(
        forward_s=model.backward_s / 2,
        bytes_per_element=4.0,
        compress=Affine(alpha_s=3e-4, beta_s_per_byte=1e-10),
        communicate=collective(Routine.ALL_GATHER, 1 / 32),
        decompress=Affine(alpha_s=1e-4, beta_s_per_byte=5e-11),
        communicate_dense=collective(Routine.ALL_REDUCE, 1.0),
    )


def planning(
    problem: FusionProblem, repetitions: int, planner: Callable[[FusionProblem], object] = best_fusion
) -> Summary:
    """Return the CPU time of a planner in milliseconds."""
    taken = []
    for _ in range(repetitions):
        begin_s = time.process_time()
        planner(problem)
        taken.append((time.process_time() - begin_s) * 1e3)
    return Summary.of(taken)


def group_by_group(problem: FusionProblem) -> Strategy:
    """Return the better of both pure fusions with each group in the other way if that helps, or HiPress' choice."""
    best = best_of(problem, (dense(problem), best_fusion(problem).strategy))
    for index, group in enumerate(best):
        other = (*best[:index], group._replace(compressed=not group.compressed), *best[index + 1 :])
        best = best_of(problem, (best, other))
    return best_of(problem, (best, hipress(problem)))


def reference(
    problem: FusionProblem, limit_s: float, prunings: Collection[int] = (1, 2), start: Strategy | None = None
) -> tuple[float, float] | None:
    """Return the CPU time of Algorithm 5.1 and of an iteration with its plan; None if it does not end in time."""
    mine, other = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_reference, args=(problem, math.ceil(limit_s), prunings, start, other))
    process.start()
    other.close()
    try:
        found: tuple[float, float] | None = mine.recv()
    except EOFError:  # the limit ended it
        found = None
    process.join()
    return found


def _reference(
    problem: FusionProblem, limit_s: int, prunings: Collection[int], start: Strategy | None, answer: Connection
) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))  # wall time would depend on what else runs
    begin_s = time.process_time()
    strategy = algorithm_5_1(problem, prunings, start)
    answer.send((time.process_time() - begin_s, problem.iteration_s(strategy)))


def startups(problem: FusionProblem, strategy: Strategy) -> float:
    """Return how many start-ups of the encoder longer it takes than backward with everything encoded at once."""
    assert isinstance(problem.system, System)
    encode = problem.system.compress
    return (problem.finish_s(strategy) - problem.backward_s[-1] - encode(problem.size_bytes[-1])) / encode(0)


def seconds(found: tuple[float, float] | None) -> float | None:
    """Return the CPU time of Algorithm 5.1."""
    return found and found[0]


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repetitions", type=int, default=20)
    options.add_argument("--limit-s", type=float, default=10.0, help="of Algorithm 5.1, for each search")
    args = options.parse_args()

    def told(taken_s: float | None) -> str:
        return f"> {args.limit_s:.0f} s" if taken_s is None else f"{taken_s * 1e3:.1f} ms"

    results, planning_rows, pruning_rows, iteration_rows = {}, [], [], []
    for name in MODELS:
        model = read_model(Path(__file__).parent / "models" / f"{name}.json", flops_per_s=1e13)
        for link_gbit in LINKS_GBIT:
            system = system_of(model, link_gbit)
            problem = FusionProblem(model.tensors, system)
            undecoded = FusionProblem(model.tensors, replace(system, decompress=FREE))
            plan_ms, undecoded_ms = planning(problem, args.repetitions), planning(undecoded, args.repetitions)
            printed = reference(undecoded, args.limit_s)
            best = best_fusion(undecoded).strategy
            exact_s = undecoded.iteration_s(best)
            from_best = seconds(reference(undecoded, args.limit_s, start=best))
            over = {"begun_with": startups(undecoded, first(undecoded)), "optimum": startups(undecoded, best)}
            single = {
                what: seconds(reference(undecoded, args.limit_s, prunings)) if printed else None
                for what, prunings in PRUNINGS.items()
            }
            iteration_s = {planner: problem.iteration_s((PLANNERS | FUSING)[planner](problem)) for planner in BASELINES}
            fusion = best_fusion(problem).strategy
            found = optimum(problem)
            plan_s = problem.iteration_s(found.strategy)
            mixed_ms = planning(problem, args.repetitions, optimum)
            gap = plan_s / (system.forward_s + found.bound_s) - 1
            ours = {"group by group": group_by_group(problem), "all compressed": fusion}
            iteration_s = {"plan": plan_s, **{way: problem.iteration_s(ours[way]) for way in ours}, **iteration_s}
            results[f"{name}, {link_gbit} Gbit/s"] = {
                "tensors": len(model.tensors),
                "groups_all_compressed": len(fusion),
                "planning_ms": plan_ms,
                "planning_without_decoding_ms": undecoded_ms,
                "planning_mixed_ms": mixed_ms,
                "gap": gap,
                "algorithm_5_1_s": seconds(printed),
                "algorithm_5_1_from_the_optimum_s": from_best,
                "startups_over_the_bound": over,
                "single_prunings_s": single,
                "algorithm_5_1_iteration_s": printed and printed[1],
                "iteration_without_decoding_s": exact_s,
                "iteration_s": iteration_s,
            }
            start = [name, str(len(model.tensors)), str(link_gbit)]
            equal = "" if printed is None else f"{printed[1] / exact_s - 1:.0e}"
            row = (
                f"{undecoded_ms:.1f}",
                told(seconds(printed)),
                equal,
                f"{plan_ms:.1f}",
                f"{mixed_ms:.0f}",
                f"{gap:.2%}",
            )
            planning_rows.append([*start, *row])
            pruned = [told(each) if printed else "" for each in single.values()]
            pruning_rows.append(
                [*start, *(f"{each:.2f}" for each in over.values()), told(seconds(printed)), told(from_best), *pruned]
            )
            ratios = [f"{iteration_s[planner] / plan_s:.3f}" for planner in (*ours, *BASELINES)]
            iteration_rows.append([*start, f"{plan_s * 1e3:.1f}", *ratios])

    columns = ["model", "tensors", "Gbit/s"]
    table(
        "Planning: CPU milliseconds, median (p10..p90); Algorithm 5.1 and how much worse its plan is",
        [
            *columns,
            "free decoding",
            "Algorithm 5.1",
            "worse by",
            "with decoding",
            "groups may stay dense",
            "not proven",
        ],
        planning_rows,
    )
    table(
        "Algorithm 5.1: start-ups over the bound, CPU time, and with single prunings where both are enough",
        [*columns, "begun with", "optimum", "Algorithm 5.1", "from the optimum", *PRUNINGS],
        pruning_rows,
    )
    table(
        "Predicted iteration: milliseconds with the plan (groups may stay dense), and the others in relation to it",
        [*columns, "plan", *ours, *BASELINES],
        iteration_rows,
    )
    write_json(
        args.json,
        question="cupcake_planning",
        parameters={"repetitions": args.repetitions, "limit_s": args.limit_s, "workers": WORKERS},
        results=results,
    )


if __name__ == "__main__":
    main()
