"""Draw the timeline of a plan: one row for each lane, one color for each kind of work; needs matplotlib.

python benchmarks/plan_picture.py plan.json model.json cluster.json timeline.svg
"""

import sys
from pathlib import Path

import matplotlib as mpl
from baselines.timeline import KINDS, Timeline, plan_timeline
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from resilient_run.comm.plan.cluster import read_cluster
from resilient_run.comm.plan.model import read_model
from resilient_run.comm.plan.plan import Plan

_COLORS = dict(zip(KINDS, ("#9aa5b1", "#e4a11b", "#2f7ed8", "#5aa469"), strict=True))


def draw(plan: Plan, timeline: Timeline, path: Path) -> None:
    """Write the picture, SVG or PNG by the suffix of the file name."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
    figure = Figure(figsize=(11, 1.6 + 0.6 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        for kind in KINDS:
            bars = [
                (span.begin_s * 1e3, (span.end_s - span.begin_s) * 1e3)
                for span in timeline.spans
                if span.lane == lane and span.kind == kind and span.end_s > span.begin_s
            ]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=_COLORS[kind], edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the backward pass began")
    title = f"{plan.model}, {plan.planner}: {plan.iteration_s * 1e3:.2f} ms for an iteration"
    axes.set_title(title, loc="left", parse_math=False)
    used = [kind for kind in KINDS if any(span.kind == kind for span in timeline.spans)]
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in used]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(used), frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    made = Plan.read(Path(sys.argv[1]))
    cluster = read_cluster(Path(sys.argv[3]), made.compressor)
    draw(made, plan_timeline(made, read_model(Path(sys.argv[2])), cluster), Path(sys.argv[4]))
