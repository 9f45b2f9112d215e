"""How far is Espresso's plan from the upper bound of the thesis, and what makes up the distance?

Figure 4.14 of the thesis has every plan less than 10 % below the throughput that it would have if compression took no
time. Predictions here (`espresso_planning.py`) are farther from it where 10 TFLOP/s make the computation of the small
batches short. Here the pace of computation is what gives the best plan without compression the scaling factor of
Table 4.1 (computation divided by iteration, 64 GPUs): 0.58 for GPT2 and 0.51 for BERT-base at 100 Gbit/s, 0.46 for
LSTM at 25 Gbit/s.
Then the compressor's start-ups, its time for each byte, and decompression are taken away in turn.
"""

from dataclasses import replace
from pathlib import Path

from espresso_planning import cluster_of, upper_bound_s
from report import parser, table, write_json

from resilient_run.comm.espresso.espresso import Espresso
from resilient_run.comm.plan.cluster import Cluster, Coder
from resilient_run.comm.plan.curve import FREE, Affine
from resilient_run.comm.plan.model import Model, read_model
from resilient_run.comm.plan.tree import Device

SCALING = {"gpt2": ("nvlink-100", 0.58), "bert_base": ("nvlink-100", 0.51), "lstm": ("pcie-25", 0.46)}
COMPRESSORS = ("dgc", "efsignsgd")
S_PER_BYTE = 4e-3 / (64 << 20)


def paced(model: Model, factor: float) -> Model:
    """Return the model with computation that takes so many times as long."""
    return replace(
        model, tensors=tuple(replace(tensor, backward_s=tensor.backward_s * factor) for tensor in model.tensors)
    )


def scaling(model: Model, links: str, compressor: str) -> float:
    """Return computation divided by the iteration of the best plan without compression."""
    cluster = cluster_of(model, links, compressor)
    job = Espresso(model, cluster)
    return (cluster.forward_s + model.backward_s) / (cluster.forward_s + job.best(job.without).makespan_s)


def at_scaling(model: Model, links: str, compressor: str, wanted: float) -> float:
    """Return how many times as long computation has to take for this scaling factor."""
    low, high = 0.1, 100.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if scaling(paced(model, middle), links, compressor) < wanted else (low, middle)
    return high


def planned_s(model: Model, cluster: Cluster) -> float:
    """Return the iteration of the exact plan."""
    job = Espresso(model, cluster)
    return cluster.forward_s + job.best(range(len(job.options))).makespan_s


def cheaper(cluster: Cluster) -> dict[str, Cluster]:
    """Return the cluster with compressors on GPUs that cost less."""
    gpu = cluster.compressor.coders[Device.GPU]

    def with_gpu(coder: Coder) -> Cluster:
        coders = {**cluster.compressor.coders, Device.GPU: coder}
        return replace(cluster, compressor=replace(cluster.compressor, coders=coders))

    in_proportion = replace(gpu, compress=Affine(alpha_s=0.0, beta_s_per_byte=S_PER_BYTE))
    return {
        "as assumed": cluster,
        "no start-up of compression": with_gpu(in_proportion),
        "free compression": with_gpu(replace(gpu, compress=FREE)),
        "free decompression": with_gpu(replace(gpu, decompress=FREE, accumulate=FREE)),
    }


def main() -> None:
    """Predict, print, write."""
    arguments = parser(__doc__).parse_args()
    results: dict[str, dict[str, float]] = {}
    for name, (links, wanted) in SCALING.items():
        model = read_model(Path(__file__).parent / "models" / f"{name}.json", flops_per_s=1e13)
        for compressor in COMPRESSORS:
            for factor in (1.0, at_scaling(model, links, compressor, wanted)):
                slower = paced(model, factor)
                bound_s = upper_bound_s(slower, cluster_of(slower, links, compressor))
                below = {
                    label: 1 - bound_s / planned_s(slower, cluster)
                    for label, cluster in cheaper(cluster_of(slower, links, compressor)).items()
                }
                results[f"{name}, {links}, {compressor}, computation times {factor:.2f}"] = {
                    "scaling_without_compression": scaling(slower, links, compressor),
                    "computation_s": 1.5 * slower.backward_s,
                    "upper_bound_s": bound_s,
                    **below,
                }
    columns = ("scaling_without_compression", "as assumed", *list(next(iter(results.values())))[4:])
    table(
        "Throughput below the upper bound",
        ("case", *columns),
        [(case, *(f"{found[column]:.1%}" for column in columns)) for case, found in results.items()],
    )
    write_json(
        arguments.json,
        question="How far is Espresso's plan from the upper bound of the thesis, and what makes up the distance?",
        parameters={"scaling": {name: factor for name, (_, factor) in SCALING.items()}},
        results=results,
    )


if __name__ == "__main__":
    main()
