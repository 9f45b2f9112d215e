"""The figure of convergence benchmarks: losses by steps."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from pathlib import Path


def plot(path: Path, curves: Mapping[str, Sequence[float]], every: int, *, dashed: Collection[str] = ()) -> None:
    """Write the figure; needs matplotlib.

    Args:
        path: Of the figure; its suffix is the format.
        curves: Label → loss after each `every` steps.
        every: Steps between two points.
        dashed: Labels of curves that are drawn with a dashed line; only their ends must be in the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    for name, losses in curves.items():
        style = "--" if name in dashed else "-"
        axes.plot([every * (point + 1) for point in range(len(losses))], losses, style, label=name)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss on held-out text")
    shown = (losses[-1 if name in dashed else len(losses) // 6] for name, losses in curves.items())
    axes.set_ylim(top=1.02 * max(filter(isfinite, shown)))
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
