"""How much faster than all-reduce are sparse schemes, and how near is Zen to its limit (Zen, Figure 3.13)?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each; gradients are those of
`sparse_workload.py`. In each of `--rounds` the schemes take turns: one makes a step that does not count (two in the
first round) and one that does, whose messages are then repeated with nothing computed between them, since the hosts
share this machine's processors. Ratios are between medians of the same run. "Rows" are schemes as their papers have
them, but with one index for a row of an embedding, or a bitmap, as Zen. The limit of a scheme is its formula's bytes
(docs/comm.md) at the rate of the link, of which at most 95.6 % are payload.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import sparsity
from delayed_hosts import DelayedHosts
from formulas import RECEIVED_BYTES, Sparsity
from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json
from sparse_workload import WORKLOADS, gradient

WORKER = str(Path(__file__).with_name("zen_worker.py"))
SCHEMES = (
    "dense",
    *(f"{name}{what}" for name in ("agsparse", "sparcml", "sparse-ps") for what in ("", ", rows")),
    "omnireduce",
    "zen, elements",
    "zen, gather",
    "zen",
    "index-free",
)


def run(*, ranks: int, rate: str | None, options: Any) -> list[dict[str, Any]]:
    """Return what rank 0 measured, one object for each workload and scheme.

    Args:
        ranks: Hosts of the lab.
        rate: Of their links; None where these have a delay only.
        options: Of the command.
    """
    names = ("elements", "gpus", "workloads", "schemes", "rounds")
    shared = json.dumps({name: getattr(options, name) for name in names})
    lab = DelayedHosts(ranks, delay_s=options.delay_ms / 1e3) if rate is None else NetLab(ranks, rate=rate)
    with lab:
        found = [json.loads(line) for line in lines_of(lab, [sys.executable, "-P", WORKER, shared])]
    for workload in options.workloads:
        sparse = survey(workload, ranks=ranks, options=options)
        lines = [line for line in found if line["workload"] == workload]
        dense_s = next((Summary.of(line["messages_s"]).median for line in lines if line["scheme"] == "dense"), None)
        for line in lines:
            line |= {"ranks": ranks, "rate": rate, "densities": sparse.densities, "skew": sparse.skew}
            line["messages_s"], line["step_s"] = Summary.of(line["messages_s"]), Summary.of(line["step_s"])
            line["speedup"] = None if dense_s is None else dense_s / line["messages_s"].median
            if isinstance(lab, NetLab):
                line["over_limit"] = line["messages_s"].median / limit_s(line["scheme"], sparse, lab.rate_bit_s)
    return found


def survey(workload: str, *, ranks: int, options: Any) -> Sparsity:
    """Return the sparsity of the gradients of all hosts."""
    given = [
        gradient(WORKLOADS[workload], rank, elements=options.elements, gpus=options.gpus).view(-1)
        for rank in range(ranks)
    ]
    return Sparsity(
        dense_bytes=given[0].nbytes,
        densities=sparsity.densities(given),
        skew=max(sparsity.skewness(each, ranks) for each in given),
    )


def limit_s(scheme: str, sparse: Sparsity, rate_bit_s: int) -> float:
    """Return the time of the scheme's own formula; where there is none that without indices, as for rows."""
    kind = scheme.removesuffix(", rows")
    name = {"zen, elements": "zen", "zen, gather": "index-free", "zen": "index-free"}.get(kind, kind)
    limit_bytes = RECEIVED_BYTES.get(name, RECEIVED_BYTES["index-free"])(sparse)
    # The formulas of coordinates count an index for each value.
    return 8 * limit_bytes / rate_bit_s / (1 if kind == scheme else 2)


def show(lines: list[dict[str, Any]], *, where: str) -> None:
    """Print one table for a lab."""
    table(
        f"{where}: messages of one step",
        (
            "workload, scheme",
            "ms",
            "speed-up over dense",
            "over its limit",
            "received MB",
            "step with computing, ms",
            "",
        ),
        [
            (
                f"{line['workload']} {line['scheme']}",
                f"{line['messages_s'].median * 1e3:.1f}",
                "" if line["speedup"] is None else f"{line['speedup']:.2f}",
                f"{line['over_limit']:.2f}" if "over_limit" in line else "",
                f"{line['received_bytes'] / 1e6:.2f}",
                f"{line['step_s'].median * 1e3:.0f}",
                line["chosen"] or "",
            )
            for line in lines
        ],
    )


def plot(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the figure: speed-up over dense of each scheme, by workload and hosts; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    labs = list(dict.fromkeys((line["ranks"], line["rate"]) for line in lines))
    workloads = list(dict.fromkeys(line["workload"] for line in lines))
    schemes = [scheme for scheme in dict.fromkeys(line["scheme"] for line in lines) if scheme != "dense"]
    figure, grid = plt.subplots(len(labs), 1, figsize=(10, 3 * len(labs)), squeeze=False)
    for axes, (ranks, rate) in zip(grid[:, 0], labs, strict=True):
        for place, scheme in enumerate(schemes):
            speedups = {
                line["workload"]: line["speedup"]
                for line in lines
                if (line["ranks"], line["rate"], line["scheme"]) == (ranks, rate, scheme)
            }
            positions = [index + (place + 0.5) / (len(schemes) + 1) - 0.5 for index in range(len(workloads))]
            heights = [speedups.get(name, 0) for name in workloads]
            axes.bar(positions, heights, 1 / (len(schemes) + 1), label=scheme)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(workloads)), workloads)
        axes.set_ylabel("speed-up over dense")
        axes.set_title(f"{ranks} hosts, {rate}")
    grid[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--rates", nargs="+", default=["100mbit"])
    arguments.add_argument("--delay-ms", type=float, default=0.0, metavar="MS", help="of each packet, one way")
    arguments.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    arguments.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    arguments.add_argument("--elements", type=int, default=2_000_000, help="of a gradient; ratios hardly depend on it")
    arguments.add_argument("--gpus", type=int, default=8, help="of a host, whose gradients are summed before")
    arguments.add_argument("--rounds", type=int, default=5, help="in which schemes take turns")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    lines: list[dict[str, Any]] = []
    for ranks in options.hosts:
        for rate in [None] if options.delay_ms else options.rates:
            found = run(ranks=ranks, rate=rate, options=options)
            show(found, where=f"{ranks} hosts, " + (f"{options.delay_ms:g} ms one way" if rate is None else rate))
            sys.stdout.flush()
            lines += found
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    parameters["load_average"] = os.getloadavg()[0]
    paper = {name: workload.paper_speedup for name, workload in WORKLOADS.items()}
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters=parameters,
        results={"measured": lines, "zen_speedup_in_the_thesis_16_machines": paper},
    )
    if options.plot is not None:
        plot(options.plot, lines)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
