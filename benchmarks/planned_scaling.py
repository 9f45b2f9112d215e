"""How do the contenders of the thesis scale, by one cost model (thesis, Fig. 4.12 to 4.15, 5.6, 5.7)?

Predicted, not run: each contender plans the same model for the same cluster, and the model that our planners use says
how long its iteration takes. Links and the compressor, DGC, cost what they do in `espresso_planning.py`; a host has 8
GPUs. Computation is as long as gives the best plan without compression the scaling factor (computation divided by
iteration) that the thesis reports for the whole cluster. Where it reports none, the factor is 1 over its greatest
speed-up, which is the most that it can be.

Contenders, as the thesis has them: GRACE compresses every tensor by itself; HiPress those for which that is quicker
alone; HiTopKComm all of them, with all-gathers between hosts, and BytePS-Compress all but the smallest on CPUs; Bucket
Fusion and Evenly Split fuse by size and by number; `greedy` is Algorithms 4.1 and 4.2. "FP32" is the quickest without
compression: tensor by tensor for Chapter 4, fused for Chapter 5. `espresso-fused`, of the last size only, is ours.

Figures 4.14 and 4.15 are about 64 GPUs, with each model of Chapter 4, compressor and kind of links. Both clusters have
the same GPUs, and so a model has one pace. Upper Bound is an iteration whose compression takes no time; beside it is
what the search of `espresso` proves. Restricted planners find the best plan without one dimension of the search space
(Section 4.8.6). Randomk sends no indices, and costs what DGC does otherwise.

    python benchmarks/planned_scaling.py --json FILE.json --plot FILE.svg
"""

import statistics
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from baselines.planners import CHOOSING, FUSING
from espresso_planning import LINKS_GBIT, RATIOS, affine, cluster_of, upper_bound_s
from espresso_upper_bound import paced
from report import parser, table, write_json

from resilient_run.comm.cupcake.cupcake import PLANNERS
from resilient_run.comm.cupcake.fusion import FusionProblem
from resilient_run.comm.espresso.espresso import ESPRESSO_PLANNERS, Espresso
from resilient_run.comm.espresso.fused import fused_plan
from resilient_run.comm.espresso.fusion_cluster import BETWEEN_HOSTS, FLAT, fusion_costs
from resilient_run.comm.plan.cluster import Cluster, LinkCost
from resilient_run.comm.plan.model import Model, read_model

GPUS: Final = (8, 16, 32, 64)
PER_HOST: Final = 8
COMPRESSOR: Final = "dgc"
ALL_RATIOS: Final = RATIOS | {"randomk": 0.01}
NVLINK, PCIE = 1200, 100
TENSOR_BY_TENSOR: Final = {
    "FP32": "espresso-dense",
    "HiPress": "espresso-hipress",
    "HiTopKComm": "espresso-hitopkcomm",
    "BytePS-Compress": "espresso-byteps",
    "greedy": "espresso-greedy",
    "espresso": "espresso",
}
RESTRICTED: Final = {
    "All": "espresso-all",
    "Myopic": "espresso-myopic",
    "GPU": "espresso-gpu",
    "CPU": "espresso-cpu",
    "Inter Allgather": "espresso-inter-allgather",
    "Inter Alltoall": "espresso-inter-alltoall",
    "Alltoall+Alltoall": "espresso-alltoall-twice",
}
UPPER_BOUND: Final = "Upper Bound"
PROVEN: Final = "no plan is above"
FUSED: Final = {
    "FP32, fused": "dense",
    "GRACE": "layer-wise",
    "HiPress, flat": "hipress",
    "Bucket Fusion": "bucket-fusion",
    "Evenly Split": "evenly-split",
    "cupcake": "cupcake",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One part of a figure of the thesis.

    Attributes:
        figure: Which.
        model: A file of benchmarks/models.
        intra_gbit: Of each GPU's link in a host.
        inter_gbit: Of each host's adapter.
        gpus: The sizes of the cluster; the scaling factor is that of the last one.
        scaling: Without compression; known, or at most so.
        ours: Which contender the thesis compares with the others.
        fp32: Which one is without compression.
        thesis: Contender → how many times as fast as it the thesis's own one is, at the last size; "up to".
    """

    figure: str
    model: str
    intra_gbit: float
    inter_gbit: float
    scaling: float
    thesis: Mapping[str, float]
    gpus: tuple[int, ...] = GPUS
    ours: str = "espresso"
    fp32: str = "FP32"

    @property
    def name(self) -> str:
        """The figure and the model."""
        return f"{self.figure}, {self.model}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cupcake(Case):
    """A part of a figure of Chapter 5."""

    ours: str = "cupcake"
    fp32: str = "FP32, fused"


CASES: Final = (
    Case(
        figure="4.12",
        model="bert_base",
        intra_gbit=NVLINK,
        inter_gbit=100,
        scaling=0.51,
        thesis={"BytePS-Compress": 1.31, "HiTopKComm": 1.54, "HiPress": 1.40},
    ),
    Case(
        figure="4.12",
        model="gpt2",
        intra_gbit=NVLINK,
        inter_gbit=100,
        scaling=0.58,
        thesis={"BytePS-Compress": 1.42, "HiPress": 1.33},
    ),
    Case(
        figure="4.12",
        model="ugatit",
        intra_gbit=NVLINK,
        inter_gbit=100,
        scaling=1 / 2.49,
        thesis={"FP32": 2.49, "BytePS-Compress": 3.05, "HiTopKComm": 1.50, "HiPress": 1.35},
    ),
    Case(
        figure="4.13",
        model="vgg16",
        intra_gbit=PCIE,
        inter_gbit=25,
        scaling=1 / 3.69,
        thesis={"FP32": 3.69, "BytePS-Compress": 4.57, "HiPress": 1.55},
    ),
    Case(
        figure="4.13",
        model="lstm",
        intra_gbit=PCIE,
        inter_gbit=25,
        scaling=0.46,
        thesis={"BytePS-Compress": 2.01, "HiTopKComm": 1.73, "HiPress": 1.77},
    ),
    Case(
        figure="4.13",
        model="resnet101",
        intra_gbit=PCIE,
        inter_gbit=25,
        scaling=0.70,
        thesis={"FP32": 1.20, "BytePS-Compress": 1.18, "HiPress": 1.24},
    ),
    *(
        Cupcake(
            figure=figure,
            model=model,
            intra_gbit=intra_gbit,
            inter_gbit=25,
            scaling=1 / thesis["FP32, fused"],
            thesis=thesis,
            gpus=gpus,
        )
        for figure, intra_gbit, gpus, by_model in (
            (
                "5.6",
                PCIE,
                (8,),
                {
                    "resnet50": {"FP32, fused": 1.72, "GRACE": 2.30, "HiPress, flat": 1.64},
                    "resnet101": {"FP32, fused": 1.39, "GRACE": 1.70, "HiPress, flat": 1.37},
                    "bert_base": {"FP32, fused": 1.65, "GRACE": 2.06, "HiPress, flat": 1.61},
                },
            ),
            (
                "5.7",
                NVLINK,
                GPUS,
                {
                    "resnet50": {"FP32, fused": 1.93, "HiPress, flat": 1.79},
                    "resnet101": {"FP32, fused": 1.46, "HiPress, flat": 1.37},
                    "bert_base": {"FP32, fused": 2.03, "HiPress, flat": 1.58},
                },
            ),
        )
        for model, thesis in by_model.items()
    ),
)


def cluster(case: Case, model: Model, gpus: int) -> Cluster:
    """Return the cluster of a case with so many GPUs."""
    return replace(
        cluster_of(model, "nvlink-100", COMPRESSOR),
        hosts=gpus // PER_HOST,
        gpus_per_host=PER_HOST,
        intra=LinkCost(cost=affine(1e-5, case.intra_gbit / 8)),
        inter=LinkCost(cost=affine(3e-5, case.inter_gbit / 8)),
    )


def planned_s(job: Espresso, planners: Mapping[str, str]) -> dict[str, float]:
    """Return name → iteration of a planner by its name."""
    return {
        name: job.cluster.forward_s + job.problem.iteration_s((ESPRESSO_PLANNERS | CHOOSING)[planner](job))
        for name, planner in planners.items()
    }


def tensor_by_tensor_s(model: Model, of: Cluster, contenders: Collection[str]) -> dict[str, float]:
    """Return the iterations of contenders that choose for each tensor."""
    return planned_s(Espresso(model, of), {name: TENSOR_BY_TENSOR[name] for name in contenders})


def fused_s(model: Model, of: Cluster, contenders: Collection[str]) -> dict[str, float]:
    """Return the iterations of contenders that fuse; compressed groups take the better of both ways."""
    ways = (FLAT, BETWEEN_HOSTS) if of.hosts > 1 else (FLAT,)
    problems = [FusionProblem(model.tensors, fusion_costs(of, way)) for way in ways]
    return {
        name: min(problem.iteration_s((PLANNERS | FUSING)[FUSED[name]](problem)) for problem in problems)
        for name in contenders
    }


def computation_s(model: Model) -> float:
    """Return what forward and backward passes take; a forward pass takes half as long."""
    return 1.5 * model.backward_s


def model_of(case: Case) -> Model:
    """Return the model of a case at 10 TFLOP/s."""
    return read_model(Path(__file__).parent / "models" / f"{case.model}.json", flops_per_s=1e13)


def paced_for(case: Case, model: Model) -> tuple[float, Model]:
    """Return how many times as long computation takes for the scaling factor of a case, and the model with that."""
    low, high = 1e-2, 1e3
    without_s = tensor_by_tensor_s if case.fp32 in TENSOR_BY_TENSOR else fused_s
    for _ in range(25):
        middle = (low * high) ** 0.5
        slower = paced(model, middle)
        taken_s = without_s(slower, cluster(case, slower, case.gpus[-1]), [case.fp32])[case.fp32]
        low, high = (low, middle) if computation_s(slower) >= case.scaling * taken_s else (middle, high)
    return high, paced(model, high)


def describe(case: Case) -> dict[str, Any]:
    """Return GPUs → contender → seconds of an iteration, and how computation was paced."""
    factor, slower = paced_for(case, model_of(case))
    iterations: dict[int, dict[str, float]] = {}
    for gpus in case.gpus:
        of = cluster(case, slower, gpus)
        iterations[gpus] = tensor_by_tensor_s(slower, of, TENSOR_BY_TENSOR) | fused_s(slower, of, FUSED)
    last = cluster(case, slower, case.gpus[-1])
    iterations[case.gpus[-1]]["espresso-fused"] = fused_plan(slower, last).iteration_s
    return {
        "scaling_without_compression": case.scaling,
        "computation_s": computation_s(slower),
        "computation_over_10_tflops": factor,
        "iteration_s": iterations,
        "thesis": case.thesis,
    }


def with_64_gpus(model: Model) -> dict[str, dict[str, dict[str, float]]]:
    """Return links → compressor → contender, restricted planner, `PROVEN` and `UPPER_BOUND` → scaling factor."""
    found: dict[str, dict[str, dict[str, float]]] = {links: {} for links in LINKS_GBIT}
    for links, by_compressor in found.items():
        like = cluster_of(model, links, COMPRESSOR)
        for name, ratio in ALL_RATIOS.items():
            of = replace(like, compressor=replace(like.compressor, name=name, ratio=ratio))
            job = Espresso(model, of)
            times_s = planned_s(job, TENSOR_BY_TENSOR | RESTRICTED)
            times_s[PROVEN] = of.forward_s + job.optimum.bound_s
            times_s[UPPER_BOUND] = upper_bound_s(model, of)
            by_compressor[name] = {each: computation_s(model) / time_s for each, time_s in times_s.items()}
    return found


def plot(path: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the figure: scaling factors over GPUs; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    shown = [case for case in CASES if len(case.gpus) > 1]
    figure, grid = plt.subplots(3, 3, figsize=(12, 9), sharex=True, sharey=True)
    for axes, case in zip(grid.flat, shown, strict=True):
        found = results[case.name]
        for name in TENSOR_BY_TENSOR if case.fp32 in TENSOR_BY_TENSOR else FUSED:
            factors = [found["computation_s"] / found["iteration_s"][gpus][name] for gpus in case.gpus]
            axes.plot(range(len(case.gpus)), factors, "o-", markersize=3, label=name)
        axes.set_xticks(range(len(case.gpus)), [str(gpus) for gpus in case.gpus])
        axes.set_ylim(0, 1)
        axes.set_title(f"Fig. {case.name}", fontsize="medium")
        axes.legend(fontsize="xx-small")
    for axes in grid[-1]:
        axes.set_xlabel("GPUs")
    for axes in grid[:, 0]:
        axes.set_ylabel("scaling factor")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def show(case: Case, found: Mapping[str, Any]) -> None:
    """Print how much faster each contender is than FP32, and ours at the last size than each."""
    by_gpus = found["iteration_s"]
    last = by_gpus[case.gpus[-1]]
    table(
        f"Fig. {case.name}: speed over {case.fp32}, whose scaling factor is {case.scaling:.2f}",
        ("contender", *(f"{gpus} GPUs" for gpus in case.gpus), f"{case.ours} over it", "thesis"),
        [
            (
                name,
                *(
                    f"{by_gpus[gpus][case.fp32] / by_gpus[gpus][name]:.2f}" if name in by_gpus[gpus] else ""
                    for gpus in case.gpus
                ),
                f"{last[name] / last[case.ours]:.2f}",
                f"{case.thesis[name]:.2f}" if name in case.thesis else "",
            )
            for name in last
        ],
    )
    sys.stdout.flush()


def show_64_gpus(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> None:
    """Print how far contenders are below the upper bound, and the scaling factors of restricted planners."""
    for links in LINKS_GBIT:
        below = {
            name: [
                1 - factors[name] / factors[UPPER_BOUND]
                for by_links in results.values()
                for factors in by_links[links].values()
            ]
            for name in TENSOR_BY_TENSOR
        }
        table(
            f"Fig. 4.14: throughput below the upper bound, {links}, {len(below['espresso'])} cases",
            ("contender", "least", "median", "most"),
            [
                (name, *(f"{share:.0%}" for share in (min(shares), statistics.median(shares), max(shares))))
                for name, shares in below.items()
            ],
        )
        columns = ("espresso", "greedy", *RESTRICTED, PROVEN)
        table(
            f"Fig. 4.15: scaling factors, {links}",
            ("model, compressor", *columns),
            [
                (f"{model}, {compressor}", *(f"{factors[column]:.2f}" for column in columns))
                for model, by_links in results.items()
                for compressor, factors in by_links[links].items()
            ],
        )


def main() -> None:
    """Predict, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    results, factors = {}, {}
    for case in CASES:
        results[case.name] = describe(case)
        show(case, results[case.name])
        if not isinstance(case, Cupcake):
            factors[case.model] = with_64_gpus(paced(model_of(case), results[case.name]["computation_over_10_tflops"]))
    show_64_gpus(factors)
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={
            "gpus_per_host": PER_HOST,
            "compressor": COMPRESSOR,
            "ratios": ALL_RATIOS,
            "links_gbit": LINKS_GBIT,
        },
        results=results | {"scaling_with_64_gpus": factors},
    )
    if options.plot is not None:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
