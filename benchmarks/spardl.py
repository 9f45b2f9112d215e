"""How long do SparDL and its baselines communicate, and how near is that to the limit (SparDL, Table 1, Figure 6)?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each. Gradients have the sizes of the
paper's models; k is 1 % of them. Each scheme makes three steps; the messages of the last one are then repeated, with
nothing computed between them, since the hosts share this machine's processors. That time is compared with what
4·k·(P-1)/P words take at the rate of the link. Ratios are between medians of the same run.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from lab_job import lines_of
from report import Summary, parser, table, write_json

from resilient_run.comm.net.entries import kept_of
from resilient_run.launcher.netlab import NetLab, NetLabError

WORKER = str(Path(__file__).with_name("spardl_worker.py"))
SIZES = {"resnet20": 269_722, "lstm-imdb": 2_561_052, "vgg16": 14_728_266}
SCHEMES = ("spardl", "topk-a", "topk-dsa", "gtopk", "ok-topk", "dense")
STEPS = 3


def run(*, ranks: int, rate: str, options: Any) -> list[dict[str, Any]]:
    """Return what rank 0 measured, one object for each size and scheme, in a lab of so many hosts."""
    shared = {name: getattr(options, name) for name in ("density", "schemes", "repeats")}
    shared |= {"sizes": [SIZES[name] for name in options.models], "steps": STEPS}
    with NetLab(ranks, rate=rate) as lab:
        found = [json.loads(line) for line in lines_of(lab, [sys.executable, "-P", WORKER, json.dumps(shared)])]
        rate_bit_s = lab.rate_bit_s
    for line in found:
        kept = kept_of(line["numel"], options.density)
        limit_s = 4 * kept * (ranks - 1) / ranks * 4 * 8 / rate_bit_s
        line |= {"ranks": ranks, "rate": rate, "limit_s": limit_s}
        line["messages_s"], line["step_s"] = Summary.of(line["messages_s"]), Summary.of(line["step_s"])
        line["over_limit"] = line["messages_s"].median / limit_s
    return found


def name_of(numel: int) -> str:
    return next(name for name, size in SIZES.items() if size == numel)


def show(lines: list[dict[str, Any]], *, ranks: int, rate: str) -> None:
    """Print one table for a lab: times and what the others take over SparDL."""
    base = {line["numel"]: line["messages_s"].median for line in lines if line["scheme"] == "spardl"}
    table(
        f"{ranks} hosts at {rate}: messages of one step",
        ("model, scheme", "ms", "over 4k(P-1)/P", "over spardl", "received MB", "rounds", "step with computing, ms"),
        [
            (
                f"{name_of(line['numel'])} {line['scheme']}",
                f"{line['messages_s'].median * 1e3:.1f}",
                f"{line['over_limit']:.2f}",
                f"{line['messages_s'].median / base[line['numel']]:.2f}" if base else "",
                f"{line['received_bytes'] / 1e6:.2f}",
                str(line["rounds"]),
                f"{line['step_s'].median * 1e3:.0f}",
            )
            for line in lines
        ],
    )


def plot(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the figure: for each model and rate the time of each scheme over the limit, by hosts; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(line["numel"] for line in lines))
    rates = list(dict.fromkeys(line["rate"] for line in lines))
    figure, grid = plt.subplots(len(rates), len(models), figsize=(4 * len(models), 3 * len(rates)), squeeze=False)
    for row, rate in enumerate(rates):
        for column, numel in enumerate(models):
            axes = grid[row][column]
            for scheme in dict.fromkeys(line["scheme"] for line in lines):
                if scheme == "dense":
                    continue
                here = [
                    line for line in lines if (line["scheme"], line["numel"], line["rate"]) == (scheme, numel, rate)
                ]
                here.sort(key=lambda line: int(line["ranks"]))
                axes.plot([line["ranks"] for line in here], [line["over_limit"] for line in here], "o-", label=scheme)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_yscale("log")
            axes.set_title(f"{name_of(numel)}, {rate}")
            axes.set_xlabel("hosts")
    grid[0][0].set_ylabel("time over 4k(P-1)/P words")
    grid[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--hosts", type=int, nargs="+", default=[4, 5, 6, 8, 14])
    arguments.add_argument("--rates", nargs="+", default=["100mbit", "200mbit"])
    arguments.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    arguments.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    lines: list[dict[str, Any]] = []
    for ranks in options.hosts:
        for rate in options.rates:
            load = os.getloadavg()[0]
            found = run(ranks=ranks, rate=rate, options=options)
            show(found, ranks=ranks, rate=rate)
            sys.stdout.flush()
            lines += [{**line, "machine_load": load} for line in found]
            # After each lab: the largest take long, and what was measured until then is worth keeping.
            results = {"measured": lines}
            write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
            if options.plot is not None:
                plot(options.plot, lines)


if __name__ == "__main__":
    try:
        main()
    except NetLabError as error:
        raise SystemExit(str(error)) from error
