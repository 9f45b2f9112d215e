"""The timeline of a plan as a picture, SVG or PNG by the suffix of the file name."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CommError
from .plan import KINDS, Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = dict(zip(KINDS, ("#9aa5b1", "#e4a11b", "#2f7ed8", "#5aa469"), strict=True))


SUFFIXES = (".svg", ".png")


class PictureError(CommError):
    """The picture cannot be made; says what to do."""


def load_figure() -> "type[Figure]":
    """Return matplotlib's `Figure`, set up to write files that depend on their content only.

    Raises:
        PictureError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PictureError(
            "a picture needs matplotlib: pip install 'resilient-run[benchmarks]', or leave out --picture"
        ) from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import figure

    return figure.Figure


def draw(plan: Plan, path: Path) -> None:
    """Write the timeline of a plan: one row for each lane, one color for each kind of work.

    Raises:
        PictureError: matplotlib is missing, or the file cannot be written.
    """
    figure_type = load_figure()
    from matplotlib.patches import Patch

    lanes = list(dict.fromkeys(span.lane for span in plan.timeline))
    figure = figure_type(figsize=(11, 1.6 + 0.6 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for row, lane in enumerate(lanes):
        for kind in KINDS:
            bars = [
                (span.begin_s * 1e3, (span.end_s - span.begin_s) * 1e3)
                for span in plan.timeline
                if span.lane == lane and span.kind == kind and span.end_s > span.begin_s
            ]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=_COLORS[kind], edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the backward pass began")
    title = f"{plan.model}, {plan.planner}: {plan.iteration_s * 1e3:.2f} ms for an iteration"
    axes.set_title(title, loc="left", parse_math=False)
    used = [kind for kind in KINDS if any(span.kind == kind for span in plan.timeline)]
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in used]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(used), frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise PictureError(f"{path}: {error.strerror}: name a file that can be written") from error
