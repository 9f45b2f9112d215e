"""How long do SparDL and its baselines take for a sum, with how many teams (SparDL, Table 1, Figures 5 to 7)?

Hosts of a laboratory network (namespaces, links shaped by tbf) with one Gloo rank each. Gradients have the sizes of the
paper's models and of a small matrix; k is 1 % of them. In each round every contender makes one whole step; then the
messages of that step are repeated, with nothing computed between them. Whole steps of all hosts share the processors of
this machine; the messages do not need them. Contenders alternate, in an order that moves on by one from round to round,
and a ratio is the median of those of the rounds.

Messages are compared with what 4·k·(P-1)/P words take at the rate of the link. "spardl" has two teams, or one of an odd
number of hosts. The others have 1, 2, 3 and 7 teams with R-SAG and B-SAG, where the number of hosts allows it.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from baselines.cost import spardl_cost
from lab_job import lines_of
from netlab import NetLab, NetLabError
from report import Summary, parser, table, write_json

from resilient_run.comm.net.entries import kept_count

WORKER = str(Path(__file__).with_name("spardl_worker.py"))
SIZES = {"matrix": 65_536, "resnet20": 269_722, "lstm-imdb": 2_561_052, "vgg16": 14_728_266}
SCHEMES = ("spardl", "topk-a", "topk-dsa", "gtopk", "ok-topk", "dense")
GATHERS = {"recursive": "R-SAG", "bruck": "B-SAG"}
HEAD = (
    *("scheme", "messages, ms", "over 4k(P-1)/P", "over spardl"),
    *("model, ms", "MB", "rounds", "whole step, ms", "over spardl"),
)


def contenders(ranks: int, options: Any) -> dict[str, dict[str, Any]]:
    """Return name → arguments of each scheme, the schemes of which there are several by their teams."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.schemes:
        found[name] = {} if name == "dense" else {"density": options.density}
    if "spardl" in found and ranks in options.team_hosts:
        found["spardl, 1 team"] = {"density": options.density, "teams": 1}
        for teams in options.teams:
            for gather, label in GATHERS.items() if teams > 1 else ():
                name = f"spardl, {teams} teams, {label}"
                found[name] = {"density": options.density, "teams": teams, "gather": gather}
    return found


def run(*, ranks: int, rate: str, options: Any) -> list[dict[str, Any]]:
    """Return what rank 0 measured, one object for each size and contender, in a lab of so many hosts."""
    shared = {
        "contenders": contenders(ranks, options),
        "sizes": [SIZES[name] for name in options.models if not (name == "matrix" and ranks not in options.team_hosts)],
        "rounds": options.rounds,
    }
    with NetLab(ranks, rate=rate) as lab:
        found = [json.loads(line) for line in lines_of(lab, [sys.executable, "-P", WORKER, json.dumps(shared)])]
        rate_bit_s = lab.rate_bit_s
    rounds: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for line in found:
        rounds[line["numel"], line["scheme"]].append(line)
    return [
        summary(lines, rounds[numel, "spardl"], ranks=ranks, rate_bit_s=rate_bit_s, density=options.density)
        | {"ranks": ranks, "rate": rate}
        for (numel, _), lines in list(rounds.items())
    ]


def summary(
    lines: list[dict[str, Any]], spardl: list[dict[str, Any]], *, ranks: int, rate_bit_s: float, density: float
) -> dict[str, Any]:
    """Return what the rounds of one contender come to, beside those of SparDL with its default teams."""
    last = lines[-1]
    if "refused" in last:
        return last
    kept = kept_count(last["numel"], density)
    limit_s = 4 * kept * (ranks - 1) / ranks * 4 * 8 / rate_bit_s
    found = {name: last[name] for name in ("numel", "scheme", "received_bytes", "rounds", "network")}
    found["limit_s"] = limit_s
    for name in ("step_s", "messages_s"):
        taken = [line[name] for line in lines]
        found[name] = Summary.of(taken)
        found[f"{name}_samples"] = taken
        if spardl:
            ratios = (own / line[name] for own, line in zip(taken, spardl, strict=True))
            found[f"{name.removesuffix('_s')}_over_spardl"] = Summary.of(ratios)
    found["over_limit"] = found["messages_s"].median / limit_s
    if "teams" in last:
        teams, gather = last["teams"], last["gather"]
        cost = spardl_cost(ranks, kept, teams=teams, gather=gather)
        found |= {"teams": teams, "gather": gather, "model_s": cost.most_s(**last["network"])}
        if last["width"]:
            # Of the first block: what it keeps, what each team sends in the next step, and what all sent together.
            found["quota"] = kept * teams // ranks
            found["widths"] = [line["width"]["h"] for line in lines]
            found["unions"] = [line["width"]["union"] for line in lines]
    return found


def name_of(numel: int) -> str:
    return next(name for name, size in SIZES.items() if size == numel)


def show(lines: list[dict[str, Any]], *, ranks: int, rate: str) -> None:
    """Print one table for a lab: times, with their spread, and what each takes over SparDL in the same rounds."""
    measured = [line for line in lines if "refused" not in line]
    for numel in dict.fromkeys(line["numel"] for line in measured):
        network = measured[0]["network"]
        table(
            f"{ranks} hosts at {rate} (a message {network['alpha_s'] * 1e6:.0f} µs, a word "
            f"{network['beta_s'] * 1e9:.0f} ns), {name_of(numel)}: one step",
            HEAD,
            [
                (
                    line["scheme"] + (f" ({line['teams']} teams)" if line["scheme"] == "spardl" else ""),
                    f"{scaled(line['messages_s']):.1f}",
                    f"{line['over_limit']:.2f}",
                    f"{line['messages_over_spardl']:.2f}" if "messages_over_spardl" in line else "",
                    f"{line['model_s'] * 1e3:.1f}" if "model_s" in line else "",
                    f"{line['received_bytes'] / 1e6:.2f}",
                    str(line["rounds"]),
                    f"{scaled(line['step_s']):.0f}",
                    f"{line['step_over_spardl']:.2f}" if "step_over_spardl" in line else "",
                )
                for line in measured
                if line["numel"] == numel
            ],
        )
    for line in lines:
        if "refused" in line and line["numel"] == lines[0]["numel"]:
            print(f"not measured: {line['scheme']}: {line['refused']}")


def scaled(seconds: Summary) -> Summary:
    """Return milliseconds."""
    return Summary(median=seconds.median * 1e3, p10=seconds.p10 * 1e3, p90=seconds.p90 * 1e3, count=seconds.count)


def plot(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the figure: for each model and rate the time of each scheme over the limit, by hosts; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    lines = [line for line in lines if line["scheme"] in SCHEMES and "refused" not in line]
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
    arguments.add_argument("--rates", nargs="+", default=["100mbit"])
    arguments.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    arguments.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=[name for name in SCHEMES if name != "dense"]
    )
    arguments.add_argument("--teams", type=int, nargs="+", default=[2, 3, 7], help="besides one team")
    arguments.add_argument("--team-hosts", type=int, nargs="*", default=[6, 14], help="where teams are compared")
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--rounds", type=int, default=7)
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
