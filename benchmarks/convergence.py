"""What convergence benchmarks share: processes for their trainings, and the figure of losses by steps."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from math import isfinite
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean


@contextmanager
def training_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield new processes; if the block fails, or the script is told to end, what they do ends at once."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            for child in active_children():
                child.kill()
            raise


def plot(
    path: Path, curves: Mapping[str, Sequence[Sequence[float]]], every: int, *, dashed: Collection[str] = ()
) -> None:
    """Write the figure, the mean of each curve's runs and the range they cover; needs matplotlib.

    Args:
        path: Of the figure; its suffix is the format.
        curves: Label → of each run, the loss after each `every` steps.
        every: Steps between two points.
        dashed: Labels of curves that are drawn with a dashed line; only their ends must be in the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    means = {name: [fmean(losses) for losses in zip(*runs, strict=True)] for name, runs in curves.items()}
    for name, mean in means.items():
        steps = [every * (point + 1) for point in range(len(mean))]
        (line,) = axes.plot(steps, mean, "--" if name in dashed else "-", label=name)
        at_least, at_most = zip(
            *((min(losses), max(losses)) for losses in zip(*curves[name], strict=True)), strict=True
        )
        axes.fill_between(steps, at_least, at_most, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss on held-out text")
    shown = (mean[-1 if name in dashed else len(mean) // 6] for name, mean in means.items())
    axes.set_ylim(top=1.02 * max(filter(isfinite, shown)))
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
