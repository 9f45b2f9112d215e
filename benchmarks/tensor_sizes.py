"""How many tensors have which size, what does it save to compress one, and how many may go to CPUs (Espresso)?

Figures 4.10 and 4.11 and Table 4.6 of the thesis: counted and computed, but for the CPU time of Algorithm 4.2. The
cluster is the thesis's with NVLink, 64 GPUs, DGC (`espresso_planning.py`). The benefit of GPU compression is the
communication time that it saves over the time that compression and decompression take, of a tensor by itself: with what
is quickest without compression, and with the quickest option that GPUs compress. Tensors that Algorithm 4.1 compresses
may be offloaded; those of one size and option form a group, and Algorithm 4.2 looks at each number of each group: so
many combinations. Thousands of them are more than the 4096 up to which our `offload` tries all. How many tensors are
compressed depends on the pace of computation: 10 TFLOP/s, and the pace that gives the scaling factors of the thesis
(`planned_scaling.py`). Brute force lets each compressed tensor stay or move, with the same vectorised code; of more
than a million strategies it looks at some thousands, and its time is that of all in proportion.

    python benchmarks/tensor_sizes.py --json FILE.json --plot FILE.svg
"""

import time
from collections import Counter
from collections.abc import Mapping
from itertools import islice, product
from math import inf, prod
from pathlib import Path
from typing import Any, Final

from catalogue import latest
from espresso_planning import MIB, THESIS_MS, cluster_of
from espresso_upper_bound import paced
from report import Constant, Summary, constant, parser, table, write_json

from resilient_run.comm.espresso.cost import Costs
from resilient_run.comm.espresso.espresso import Espresso
from resilient_run.comm.espresso.greedy import best_moved, greedy, offload
from resilient_run.comm.espresso.strategy import Choice, Problem, Strategy
from resilient_run.comm.plan.constraints import gpu_only, uncompressed
from resilient_run.comm.plan.model import Model, read_model
from resilient_run.comm.plan.tree import Device, all_options

KIB: Final = 1024
SIZES_BYTES: Final = tuple(KIB << power for power in range(21))
THESIS: Final = {"vgg16": 11, "resnet101": 42, "ugatit": 32, "bert_base": 54, "gpt2": 34, "lstm": 5}
"""Tensors for offloading, Table 4.6."""
THESIS_OFFLOAD_MS: Final = {"vgg16": 1, "resnet101": 30, "ugatit": 12, "bert_base": 44, "gpt2": 18, "lstm": 1}
FIGURES: Final = {
    "bert_base": "4.12",
    "gpt2": "4.12",
    "ugatit": "4.12",
    "vgg16": "4.13",
    "lstm": "4.13",
    "resnet101": "4.13",
}
"""Where the thesis has what gives the pace of a model."""
REPETITIONS: Final = 5
MOST_STRATEGIES: Final = 1 << 20
"""That brute force looks at all of."""
AT_ONCE: Final = 1 << 13
"""Strategies."""


def model_of(name: str) -> Model:
    """Return one of the models, at the pace of `espresso_planning.py`."""
    return read_model(Path(__file__).parent / "models" / f"{name}.json", flops_per_s=1e13)


def benefits() -> dict[int, float]:
    """Return bytes → seconds of communication that compression on GPUs saves, over those that it takes."""
    cluster = cluster_of(model_of("lstm"), "nvlink-100", "dgc")
    options = [option for option in all_options() if gpu_only(option)]
    costed = Costs(cluster, SIZES_BYTES).options(options)

    def split(choice: Choice, size: int) -> tuple[float, float]:
        """Return what computes and what communicates."""
        gpu_s = sum(float(step.seconds[size]) for step in choice if step.resource.value == Device.GPU.value)
        return gpu_s, sum(float(step.seconds[size]) for step in choice) - gpu_s

    found = {}
    for place, size_bytes in enumerate(SIZES_BYTES):
        dense = [split(choice, place) for option, choice in costed if uncompressed(option)]
        less = [split(choice, place) for option, choice in costed if not uncompressed(option)]
        compress_s, communicate_s = min(less, key=sum)
        found[size_bytes] = (min(map(sum, dense)) - communicate_s) / compress_s
    return found


def paces() -> dict[str, Constant]:
    """Return model → how many times as long as at 10 TFLOP/s it computes for the scaling factors of the thesis."""
    planned = latest("planned-scaling")
    assert planned is not None
    return {
        name: constant(planned, f"{figure}, {name}", "computation_over_10_tflops") for name, figure in FIGURES.items()
    }


def offloading(model: Model) -> dict[str, Any]:
    """Return how many tensors Algorithm 4.1 compresses, what Algorithm 4.2 has to look at, and how long it does."""
    job = Espresso(model, cluster_of(model, "nvlink-100", "dgc"))
    fronts = job.problem.fronts(job.among(gpu_only))
    found = greedy(job.problem, fronts, job.problem.quickest(job.among(uncompressed)), job.sizes_bytes)
    on_cpu = {choice: job.on_cpu(choice) for choice in set(found)}
    taken_ms = []
    for _ in range(REPETITIONS):
        began_s = time.process_time()
        moved = offload(job.problem, found, on_cpu)
        taken_ms.append((time.process_time() - began_s) * 1e3)
    groups = Counter(
        (kind, choice)
        for kind, choice in zip(job.problem.kinds, found, strict=True)
        if not uncompressed(job.options[choice])
    )
    return {
        "tensors": len(model.tensors),
        "sizes": len(set(job.sizes_bytes)),
        "compressed": groups.total(),
        "groups": len(groups),
        "combinations": prod(count + 1 for count in groups.values()),
        "offloaded": sum(before != after for before, after in zip(found, moved, strict=True)),
        "offload_cpu_ms": Summary.of(taken_ms),
        "offload_iteration_s": job.problem.iteration_s(moved),
        "brute_force": brute_force(job.problem, found, on_cpu),
    }


def brute_force(problem: Problem, strategy: Strategy, on_cpu: Mapping[int, int]) -> dict[str, Any]:
    """Return how many strategies there are, the CPU time of looking at all of them, and the best one's iteration."""
    able = [[place] for place, choice in enumerate(strategy) if on_cpu[choice] != choice]
    strategies = 2 ** len(able)
    tried = product(range(2), repeat=len(able))
    most = strategies if strategies <= MOST_STRATEGIES else AT_ONCE
    best_s, looked_at = inf, 0
    began_s = time.process_time()
    while looked_at < most:
        some = list(islice(tried, AT_ONCE))
        best_s = min(best_s, problem.iteration_s(best_moved(problem, strategy, on_cpu, able, iter(some))))
        looked_at += len(some)
    taken_s = time.process_time() - began_s
    return {
        "strategies": strategies,
        "looked_at": looked_at,
        "cpu_s": taken_s * (strategies / looked_at),
        "best_iteration_s": best_s if looked_at == strategies else None,
    }


def better(found: Mapping[str, Any]) -> str:
    """Return by how much an iteration is shorter with what brute force finds than with what Algorithm 4.2 finds."""
    best_s = found["brute_force"]["best_iteration_s"]
    return "" if best_s is None else f"{1 - best_s / found['offload_iteration_s']:.1%} better"


def duration(seconds: float) -> str:
    """Return a time in words."""
    for unit, of_it in (("years", 365.25 * 86400), ("h", 3600), ("s", 1)):
        if seconds >= of_it:
            return f"{seconds / of_it:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def plot(path: Path, by_size: dict[int, float], counts: dict[str, dict[int, int]]) -> None:
    """Write the figure; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot([size / MIB for size in by_size], list(by_size.values()), "o-", markersize=3)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("MiB of a tensor")
    left.set_ylabel("communication saved over compression")
    for name, found in counts.items():
        right.plot([size / MIB for size in found], list(found.values()), "o", markersize=3, label=name)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("MiB of a tensor")
    right.set_ylabel("tensors of this size")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Count, compute, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    models = [model_of(name) for name in THESIS_MS]
    counts = {
        model.name: dict(sorted(Counter(4 * tensor.numel for tensor in model.tensors if tensor.numel).items()))
        for model in models
    }
    by_size = benefits()
    table(
        "What GPU compression saves over what it takes, 64 GPUs, NVLink and 100 Gbit/s, DGC",
        ("KiB", "ratio"),
        [(f"{size // KIB}", f"{ratio:.2f}") for size, ratio in by_size.items()],
    )
    pace = paces()
    found = {model.name: offloading(model) for model in models}
    found_at_pace = {name: offloading(paced(model_of(name), factor.value)) for name, factor in pace.items()}
    columns = ("tensors", "sizes", "compressed", "groups", "combinations", "offloaded")
    for title, by_model in (("10 TFLOP/s", found), ("the pace of the thesis", found_at_pace)):
        table(
            f"Offloading at {title}, 64 GPUs, NVLink and 100 Gbit/s, DGC",
            (
                "model",
                *columns,
                "thesis: compressed",
                "most of one size",
                "CPU ms",
                "thesis: ms",
                "brute force",
                "finds",
            ),
            [
                (
                    name,
                    *(f"{each[column]:,}" for column in columns),
                    str(THESIS.get(name, "")),
                    str(max(counts[name].values())),
                    f"{each['offload_cpu_ms']:.1f}",
                    str(THESIS_OFFLOAD_MS.get(name, "")),
                    duration(each["brute_force"]["cpu_s"]),
                    better(each),
                )
                for name, each in by_model.items()
            ],
        )
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={"links": "nvlink-100", "compressor": "dgc", "repetitions": REPETITIONS},
        results={
            "benefit_by_bytes": by_size,
            "tensors_by_bytes": counts,
            "offloading": found,
            "offloading_at_the_pace_of_the_thesis": found_at_pace,
            "thesis": THESIS,
            "thesis_offload_ms": THESIS_OFFLOAD_MS,
        },
        constants={f"pace of {name}": factor for name, factor in pace.items()},
    )
    if options.plot is not None:
        plot(options.plot, by_size, counts)


if __name__ == "__main__":
    main()
