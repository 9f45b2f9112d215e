"""How long does Espresso plan, and how much faster is an iteration with its plan than with those of other systems?

The models are those of Table 4.4 of the thesis and ResNet50 (benchmarks/models), with a backward pass at 10 TFLOP/s and
a forward pass of half its time. The clusters are the two of Section 4.8.1: 8 hosts of 8 GPUs, with NVLink (1.2 Tbit/s)
and 100 Gbit/s between hosts, and with PCIe (100 Gbit/s) and 25 Gbit/s. Compressors are like those of Section 5.2 on
GPUs: a quarter of a millisecond up to 4 MiB, then in proportion to the size; on CPUs 3 GB/s for each GPU. Planning
times are of one CPU core, so that other work on the machine does not count. The thesis gives 1 to 179 ms (Table 4.5).
"""

import time
from dataclasses import replace
from pathlib import Path

from baselines import planners
from report import Summary, parser, table, write_json

from resilient_run.comm.espresso.espresso import ESPRESSO_PLANNERS, Espresso, espresso_plan
from resilient_run.comm.plan.cluster import Cluster, Coder, CompressorCost, LinkCost
from resilient_run.comm.plan.constraints import gpu_only
from resilient_run.comm.plan.curve import FREE, Affine, Table
from resilient_run.comm.plan.model import Model, read_model
from resilient_run.comm.plan.tree import Device, all_options

THESIS_MS = {"lstm": 1, "vgg16": 17, "gpt2": 99, "ugatit": 84, "resnet50": None, "bert_base": 125, "resnet101": 179}
LINKS_GBIT = {"nvlink-100": (1200, 100), "pcie-25": (100, 25)}
RATIOS = {"dgc": 0.02, "efsignsgd": 1 / 32}
SHOWN = ("hipress", "hitopkcomm", "byteps", "myopic", "all", "greedy")
SYSTEMS = ("hipress", "hitopkcomm", "byteps")
MIB = 1 << 20


def affine(alpha_s: float, gb_per_s: float) -> Affine:
    return Affine(alpha_s=alpha_s, beta_s_per_byte=1e-9 / gb_per_s)


def cluster_of(model: Model, links: str, compressor: str) -> Cluster:
    """Return one of the clusters of the thesis, with a compressor on both devices."""
    intra_gbit, inter_gbit = LINKS_GBIT[links]
    on_gpu = Coder(
        compress=Table(sizes_bytes=(4.0 * MIB, 64.0 * MIB), seconds=(2.5e-4, 4e-3)),
        decompress=affine(5e-5, 200),
        accumulate=affine(1e-5, 800),
    )
    on_cpu = Coder(compress=affine(1e-4, 3), decompress=affine(5e-5, 6), accumulate=affine(1e-5, 20))
    return Cluster(
        hosts=8,
        gpus_per_host=8,
        intra=LinkCost(cost=affine(1e-5, intra_gbit / 8)),
        inter=LinkCost(cost=affine(3e-5, inter_gbit / 8)),
        compressor=CompressorCost(
            name=compressor,
            ratio=RATIOS[compressor],
            coders={Device.GPU: on_gpu, Device.CPU: on_cpu},
            batched=True,
        ),
        forward_s=model.backward_s / 2,
    )


def planning(model: Model, cluster: Cluster, planner: str, repetitions: int) -> Summary:
    """Return the CPU time of a planner in milliseconds, costs and tree included."""
    taken = []
    for _ in range(repetitions):
        begin_s = time.process_time()
        ESPRESSO_PLANNERS[planner](Espresso(model, cluster))
        taken.append((time.process_time() - begin_s) * 1e3)
    return Summary.of(taken)


def planning_times(models: list[Model], repetitions: int) -> dict[str, dict[str, Summary]]:
    found = {}
    for model in models:
        cluster = cluster_of(model, "nvlink-100", "dgc")
        gpus = replace(
            cluster,
            compressor=replace(cluster.compressor, coders={Device.GPU: cluster.compressor.coders[Device.GPU]}),
        )
        found[model.name] = {
            "greedy": planning(model, gpus, "espresso-greedy", repetitions),
            "exact": planning(model, gpus, "espresso", repetitions),
            "greedy, CPUs": planning(model, cluster, "espresso-greedy", repetitions),
            "exact, CPUs": planning(model, cluster, "espresso", repetitions),
        }
    return found


def upper_bound_s(model: Model, cluster: Cluster) -> float:
    """Return an iteration time that no strategy beats: compression takes no time (thesis, Section 4.8.1)."""
    free = Coder(compress=FREE, decompress=FREE, accumulate=FREE)
    coders = dict.fromkeys(cluster.compressor.coders, free)
    costless = replace(cluster, compressor=replace(cluster.compressor, coders=coders))
    job = Espresso(model, costless, [option for option in all_options() if gpu_only(option)])
    return cluster.forward_s + job.best(range(len(job.options))).bound_s


def iterations(model: Model, links: str, compressor: str) -> dict[str, float]:
    """Return the iteration times of all planners, the proven bound, and the upper bound of the thesis, seconds."""
    cluster = cluster_of(model, links, compressor)
    plan = espresso_plan(model, cluster)
    job = Espresso(model, cluster)
    rivals = {name: job.problem.iteration_s(made(job)) for name, made in planners.CHOOSING.items()}
    found = {**plan.baselines_s} | {name: cluster.forward_s + time_s for name, time_s in rivals.items()}
    times_s = {name.removeprefix("espresso-"): time_s for name, time_s in found.items()}
    return times_s | {
        "exact": plan.iteration_s,
        "bound": plan.bound_s,
        "upper bound": upper_bound_s(model, cluster),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repetitions", type=int, default=5, metavar="N", help="measurements of each planning time")
    arguments = made.parse_args()
    folder = Path(__file__).parent / "models"
    models = [read_model(folder / f"{name}.json", flops_per_s=1e13) for name in THESIS_MS]

    planned = planning_times(models, arguments.repetitions)
    columns = ("greedy", "exact", "greedy, CPUs", "exact, CPUs")
    table(
        "CPU time of planning, ms: GPU options, and all 4341 of them (nvlink-100, dgc)",
        ("model", "tensors", "thesis", *columns),
        [
            (
                model.name,
                str(len(model.tensors)),
                str(THESIS_MS[model.name] or "-"),
                *(f"{planned[model.name][column]:.0f}" for column in columns),
            )
            for model in models
        ],
    )

    results: dict[str, dict[str, dict[str, float]]] = {}
    for links in LINKS_GBIT:
        for compressor in RATIOS:
            found = {model.name: iterations(model, links, compressor) for model in models}
            results[f"{links} {compressor}"] = found
            table(
                f"Speed against the best without compression: {links}, {compressor}",
                ("model", "dense ms", *SHOWN, "exact", "over systems", "not proven", "to upper bound"),
                [
                    (
                        name,
                        f"{times['dense'] * 1e3:.1f}",
                        *(f"{times['dense'] / times[planner]:.2f}" for planner in (*SHOWN, "exact")),
                        f"{min(times[system] for system in SYSTEMS) / times['exact'] - 1:+.0%}",
                        f"{times['exact'] / times['bound'] - 1:.2%}",
                        f"{times['exact'] / times['upper bound'] - 1:.1%}",
                    )
                    for name, times in found.items()
                ],
            )

    write_json(
        arguments.json,
        question="How long does Espresso plan, and how much faster is an iteration with its plan?",
        parameters={"links_gbit": LINKS_GBIT, "ratios": RATIOS, "repetitions": arguments.repetitions},
        results={"planning_cpu_ms": planned, "thesis_ms": THESIS_MS, "iteration_s": results},
    )


if __name__ == "__main__":
    main()
