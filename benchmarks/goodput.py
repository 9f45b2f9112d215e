"""What do failures cost? Figures 6.9 to 6.12 and 6.15 of the Gemini chapter, and the same for what we measured.

No job runs: the constants of the thesis's testbed (GPT-2 100B on 16 p4d.24xlarge) and ours (the newest results
`capture-stall-1024` and `recovery-time`) go through one model, `resilient_run.daemon.base.costs` and `wasted.py`.
Figure 6.15 has software failures only, "if standby machines are used"; here it also has failures that each take a host.

    python benchmarks/reproduce.py goodput

Two jobs are compared. *The thesis's*: its iteration, checkpoint and warm-up times; `resilient-run` there keeps the
warm-up of that testbed, which we cannot measure, and replaces detection and serialization by our measured recovery.
*Ours*: 1 GiB per rank on two hosts of one machine, with torch's `async_save` and torchrun as the baselines, at the
shortest iteration in which every step is committed.
"""

import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from catalogue import RESULTS, latest
from report import Constant, constant, parser, table, write_json
from wasted import effective_ratio, expected_wasted_s, linear_ratio, sampled_survival

from resilient_run.ckpt.format.placement import placement
from resilient_run.ckpt.format.survival import survival, union_bound
from resilient_run.daemon.base.costs import DAY_S, CheckpointCost, Failures, high_frequency_s, simulate

# Sections 6.2.2 and 6.7: the iteration of GPT-2 100B, 12 bytes of state for each parameter, 20 Gbit/s altogether to the
# remote storage, and at most 3 s to fetch a checkpoint from another host's memory.
ITERATION_S, STATE_BYTES, STORE_BYTES_PER_S, FETCH_S = 62.0, 1.2e12, 2.5e9, 3.0
STRAWMAN_INTERVAL_S = 3 * 3600.0
# Section 6.7.3: overheads of one failure.
GEMINI_OVERHEAD_S, DETECT_S, SERIALIZE_TWO_S, SERIALIZE_ONE_S = 7 * 60.0, 15.0, 162.0, 81.0
# 12 minutes if a host must be replaced, of which all but 7 go by until another one is there.
REPLACE_S = 5 * 60.0
FAILING_INSTANCES_PER_DAY = 0.015
# As often as the remote storage allows, its serialization included.
HIGH_FREQUENCY_ITERATIONS = 9

FAILURES_PER_DAY = (0, 1, 2, 4, 6, 8)
INSTANCES = (4, 16, 64, 128, 256, 512, 1000)
HOSTS = (8, 16, 32, 64, 128)
BANDWIDTHS_GBIT = (100, 200, 400)
RATIOS = {
    "exact": "exact",
    "linear": "as the thesis adds",
    "simulated": "simulated",
    "hosts, 0 standbys": "hosts lost, no standby",
    "hosts, 1 standby": "hosts lost, 1 standby",
}
LINES = {"exact": "o-", "hosts, 0 standbys": ":", "hosts, 1 standby": "--"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Our constants: medians of the newest results, and the state of a rank that they are for."""

    recovery_s: float
    torchrun_recovery_s: float
    stall_s: float
    committed_s: float
    async_stall_s: float
    async_committed_s: float
    copy_s: float
    state_bytes: float


def measured(folder: Path) -> dict[str, Constant]:
    """Return our constants from the results in a folder, by the names that `Measured` has."""
    ours, theirs = ("plain, 1024 MiB", "resilient-run, 2 hosts"), ("plain, 1024 MiB", "async_save")
    wanted = {
        "recovery_s": ("recovery-time", "seconds", "resilient-run", "median"),
        "torchrun_recovery_s": ("recovery-time", "seconds", "torchrun", "median"),
        "stall_s": ("capture-stall-1024", *ours, "stall_s", "median"),
        "committed_s": ("capture-stall-1024", *ours, "committed_s", "median"),
        "async_stall_s": ("capture-stall-1024", *theirs, "stall_s", "median"),
        "async_committed_s": ("capture-stall-1024", *theirs, "committed_s", "median"),
        "copy_s": ("capture-stall-1024", *ours, "memcpy_s", "median"),
        "state_bytes": ("capture-stall-1024", *ours, "bytes"),
    }
    found = {}
    for name, (result, *at) in wanted.items():
        path = latest(result, folder)
        if path is None:
            sys.exit(f"no result {result} in {folder}: run python benchmarks/reproduce.py {result} first")
        found[name] = constant(path, *at)
    return found


def thesis_schemes(ours: Measured) -> dict[str, CheckpointCost]:
    """Return the schemes of the thesis's job, software failures (Section 6.7)."""
    remote_s = STATE_BYTES / STORE_BYTES_PER_S
    # The baselines serialize at every checkpoint and not after a failure.
    baseline_overhead_s = GEMINI_OVERHEAD_S - SERIALIZE_TWO_S
    strawman = CheckpointCost(
        interval_s=STRAWMAN_INTERVAL_S,
        checkpoint_s=remote_s,
        retrieval_s=remote_s,
        stall_s=SERIALIZE_ONE_S,
        overhead_s=baseline_overhead_s,
    )
    gemini = CheckpointCost(
        # 1.5 iterations are wasted: a checkpoint counts once the iteration that carries it is over.
        interval_s=ITERATION_S,
        checkpoint_s=ITERATION_S,
        retrieval_s=0.0,
        overhead_s=GEMINI_OVERHEAD_S,
    )
    per_rank_bytes = STATE_BYTES / 128
    scale = per_rank_bytes / ours.state_bytes
    return {
        "Strawman": strawman,
        "HighFreq": replace(strawman, interval_s=HIGH_FREQUENCY_ITERATIONS * ITERATION_S),
        "Gemini": gemini,
        "resilient-run": replace(
            gemini,
            stall_s=ours.stall_s * scale,
            retrieval_s=ours.copy_s * scale,
            overhead_s=GEMINI_OVERHEAD_S - DETECT_S - SERIALIZE_TWO_S + ours.recovery_s,
        ),
    }


def our_schemes(ours: Measured) -> dict[str, CheckpointCost]:
    """Return the schemes of our own job; the baselines restart as torchrun does."""
    iteration_s = ours.committed_s
    baseline = CheckpointCost(
        interval_s=STRAWMAN_INTERVAL_S,
        checkpoint_s=ours.async_committed_s,
        retrieval_s=0.0,
        stall_s=ours.async_stall_s,
        overhead_s=ours.torchrun_recovery_s,
    )
    return {
        "Strawman": baseline,
        "HighFreq": replace(baseline, interval_s=high_frequency_s(ours.async_committed_s, iteration_s)),
        "resilient-run": CheckpointCost(
            interval_s=iteration_s,
            checkpoint_s=ours.committed_s,
            retrieval_s=ours.copy_s,
            stall_s=ours.stall_s,
            overhead_s=ours.recovery_s,
        ),
    }


def figure_6_9() -> dict[str, Any]:
    """Survival against the number of hosts: exact, by the bound, and sampled through the placement."""
    rows = []
    for hosts in HOSTS:
        for failures in (2, 3):
            for strategy in ("mixed", "ring"):
                plan = placement(hosts, 2, strategy="ring" if strategy == "ring" else "mixed")
                rows.append(
                    {
                        "hosts": hosts,
                        "failures": failures,
                        "strategy": strategy,
                        "exact": float(survival(plan, failures)),
                        "bound": float(union_bound(plan, failures)),
                        "sampled": sampled_survival(plan, failures, samples=5000, rng=random.Random(hosts + failures)),
                    }
                )
    return {"rows": rows, "thesis": {"16 hosts, k=2": 0.933, "16 hosts, k=3": 0.80, "ring, k=3": 0.60}}


def figure_6_10(schemes: dict[str, CheckpointCost], fetch_s: float) -> dict[str, Any]:
    """Average wasted time with 0, 1 and 2 replaced instances; from a peer's memory it takes `fetch_s` to retrieve."""
    rows: dict[str, dict[str, float]] = {}
    for name, scheme in schemes.items():
        memory = name in ("Gemini", "resilient-run")
        fetched = replace(scheme, retrieval_s=fetch_s) if memory else scheme
        rows[name] = {"0": scheme.wasted_s, "1": fetched.wasted_s, "2, survived": fetched.wasted_s}
        rows[name]["2, lost"] = schemes["Strawman"].wasted_s if memory else scheme.wasted_s
        chance = float(survival(placement(16, 2), 2)) if memory else 1.0
        rows[name]["2, expected"] = expected_wasted_s(fetched, schemes["Strawman"], chance)
    ratio = rows["HighFreq"]["1"] / rows["resilient-run"]["1"]
    return {"seconds": rows, "HighFreq / resilient-run": ratio, "thesis": {"HighFreq / Gemini": "more than 13"}}


def figure_6_11() -> dict[str, Any]:
    """Checkpoint time to remote storage over that to the memory of one other host, at the full link rate."""
    remote_s = STATE_BYTES / STORE_BYTES_PER_S
    rows = {
        f"{gbit} Gbit/s": {str(hosts): remote_s / (STATE_BYTES / hosts / (gbit * 1e9 / 8)) for hosts in (4, 8, 12, 16)}
        for gbit in BANDWIDTHS_GBIT
    }
    return {"reduction": rows, "thesis": {"100 Gbit/s, 16": 65, "400 Gbit/s, 16": "more than 250"}}


def figure_6_12(schemes: dict[str, CheckpointCost]) -> dict[str, Any]:
    """Checkpoints per hour."""
    return {
        "per_hour": {name: 3600 / scheme.interval_s for name, scheme in schemes.items()},
        "over HighFreq": schemes["HighFreq"].interval_s / schemes["resilient-run"].interval_s,
        "over Strawman": schemes["Strawman"].interval_s / schemes["resilient-run"].interval_s,
        "thesis": {"over HighFreq": 8, "over Strawman": "more than 170"},
    }


def figure_6_15(
    schemes: dict[str, CheckpointCost], xs: tuple[float, ...], per_day: float, *, hosts: int | None, fetch_s: float
) -> dict[str, Any]:
    """Effective training time ratio at x · `per_day` failures a day: exact, as the thesis adds up, and simulated.

    Simulated also with failures that all take one of `hosts` hosts (x if None), and 0 or 1 standbys.
    """

    def simulated(scheme: CheckpointCost, x: float, standbys: int | None) -> float:
        count = max(1, int(x)) if hosts is None else hosts
        rate = x * per_day / count
        failures = Failures(hosts=count, software=rate)
        if standbys is not None:
            failures = Failures(hosts=count, host=rate, replace_s=REPLACE_S, fetch_s=fetch_s)
        return simulate(scheme, failures, standbys=standbys or 0, days=1000, rng=random.Random(17)).ratio

    return {
        name: {
            f"{x:g}": {
                "exact": effective_ratio(scheme, x * per_day),
                "linear": linear_ratio(scheme, x * per_day),
                "simulated": simulated(scheme, x, None),
                "hosts, 0 standbys": simulated(scheme, x, 0),
                "hosts, 1 standby": simulated(scheme, x, 1),
            }
            for x in xs
        }
        for name, scheme in schemes.items()
    }


def print_tables(results: dict[str, Any]) -> None:
    """Print every figure as a table, with the thesis's numbers where it states any."""
    rows = [
        [
            f"{r['hosts']}, k={r['failures']}, {r['strategy']}",
            *(f"{r[name]:.1%}" for name in ("exact", "bound", "sampled")),
        ]
        for r in results["6.9"]["rows"]
    ]
    note = "thesis: 93.3 % and 80.0 % at 16 hosts; ring k=3: 25 % lower, which is the bound"
    table(f"Figure 6.9, survival with 2 replicas ({note})", ["hosts", "exact", "bound", "sampled"], rows)
    for job, figure in results["6.10"].items():
        columns = list(figure["seconds"]["Strawman"])
        rows = [[name, *(f"{row[column]:.1f}" for column in columns)] for name, row in figure["seconds"].items()]
        table(f"Figure 6.10, wasted seconds by replaced instances, {job}", ["scheme", *columns], rows)
        note = " (thesis: more than 13)" if job == "thesis's job" else ""
        print(f"HighFreq / resilient-run, 1 replaced: {figure['HighFreq / resilient-run']:.1f}{note}")
    rows = [[rate, *(f"{value:.0f}" for value in row.values())] for rate, row in results["6.11"]["reduction"].items()]
    note = "thesis, 16 hosts: 65 at 100 Gbit/s, more than 250 at 400"
    table(f"Figure 6.11, checkpoint time reduction at full link rate ({note})", ["link", "4", "8", "12", "16"], rows)
    rows = []
    for job, figure in results["6.12"].items():
        rows += [[f"{job}, {name}", f"{value:.2f}"] for name, value in figure["per_hour"].items()]
    table(
        "Figure 6.12, checkpoints per hour (thesis: 8 times HighFreq, 174 times Strawman)", ["scheme", "per hour"], rows
    )
    for figure_name, what in (("6.15a", "failures per day"), ("6.15b", "instances, 1.5 % fail per day")):
        for job, schemes in results[figure_name].items():
            xs = list(schemes["Strawman"])
            rows = []
            for name, row in schemes.items():
                rows += [[f"{name}, {label}", *(f"{row[x][kind]:.1%}" for x in xs)] for kind, label in RATIOS.items()]
            table(f"Figure {figure_name}, effective training time ratio, {job}", [what, *xs], rows)
    print(
        "thesis, 6.15: HighFreq 85.5 % without failures; 1000 instances: Gemini 91 %, 54 % above HighFreq, Strawman ~0"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Write a picture of all figures (png, svg); needs matplotlib (`pip install resilient-run[benchmarks]`)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(3, 3, figsize=(16, 13))
    axes = list(panels.flat)
    for strategy, line in (("mixed", "-"), ("ring", "--")):
        for failures in (2, 3):
            rows = [r for r in results["6.9"]["rows"] if (r["strategy"], r["failures"]) == (strategy, failures)]
            axes[0].plot(
                [r["hosts"] for r in rows], [r["exact"] for r in rows], line, label=f"{strategy}, k={failures}"
            )
    axes[0].set(title="6.9 survival, m = 2", xlabel="hosts", ylabel="probability")
    for axis, (job, shown) in zip(axes[1:3], results["6.10"].items(), strict=True):
        for name, row in shown["seconds"].items():
            axis.plot(list(row), list(row.values()), "o-", label=name)
        axis.set(title=f"6.10 wasted time, {job}", xlabel="replaced instances", ylabel="seconds", yscale="log")
    for rate, row in results["6.11"]["reduction"].items():
        axes[3].plot(list(row), list(row.values()), "o-", label=rate)
    axes[3].set(title="6.11 checkpoint time reduction", xlabel="hosts", ylabel="times")
    for offset, (job, shown) in enumerate(results["6.12"].items()):
        names = [f"{name}\n{job}" for name in shown["per_hour"]]
        axes[4].bar([f"{name}" for name in names], list(shown["per_hour"].values()), color=f"C{offset}", label=job)
    axes[4].set(title="6.12 checkpoints per hour", ylabel="per hour", yscale="log")
    axes[4].tick_params(axis="x", labelrotation=90, labelsize=7)
    places = iter(axes[5:])
    for name, what in (("6.15a", "failures per day"), ("6.15b", "instances")):
        for job, schemes in results[name].items():
            axis = next(places)
            for number, (scheme, row) in enumerate(schemes.items()):
                for kind, line in LINES.items():
                    label = scheme if kind == "exact" else RATIOS[kind] if not number else None
                    ratios = [value[kind] for value in row.values()]
                    axis.plot([float(x) for x in row], ratios, line, color=f"C{number}", label=label)
            axis.set(title=f"{name} effective ratio, {job}", xlabel=what, ylabel="ratio", ylim=(0, 1.02))
    for axis in axes:
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Compute, print and write everything."""
    options = parser(__doc__)
    options.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="our measurements")
    options.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    arguments = options.parse_args()
    constants = measured(arguments.results)
    ours = Measured(**{name: each.value for name, each in constants.items()})
    jobs = {"thesis's job": thesis_schemes(ours), "our job": our_schemes(ours)}
    # Between our hosts a fetch moves the same bytes the same way as the replication before a commit.
    fetches_s = {"thesis's job": FETCH_S, "our job": ours.committed_s}
    results: dict[str, Any] = {
        "6.9": figure_6_9(),
        "6.10": {job: figure_6_10(schemes, fetches_s[job]) for job, schemes in jobs.items()},
        "6.11": figure_6_11(),
        "6.12": {job: figure_6_12(schemes) for job, schemes in jobs.items()},
        "6.15a": {
            job: figure_6_15(schemes, FAILURES_PER_DAY, 1.0, hosts=16, fetch_s=fetches_s[job])
            for job, schemes in jobs.items()
        },
        "6.15b": {
            job: figure_6_15(schemes, INSTANCES, FAILING_INSTANCES_PER_DAY, hosts=None, fetch_s=fetches_s[job])
            for job, schemes in jobs.items()
        },
    }
    print_tables(results)
    write_json(
        arguments.json,
        question="goodput",
        parameters={"schemes": jobs, "day_s": DAY_S},
        results=results,
        constants=constants,
    )
    if arguments.plot is not None:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
