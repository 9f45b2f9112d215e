"""Trainings by the clock: when each was how good, and a figure of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
"""Seconds of training, and what was reached then."""


def plot(path: Path, found: Mapping[str, Sequence[Points]], *, reached: str) -> None:
    """Write the figure: what each contender had `reached` by seconds, a line for each seed; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for index, (name, runs) in enumerate(found.items()):
        for place, run in enumerate(runs):
            axes.plot(*zip(*run, strict=True), color=f"C{index}", linewidth=1, label=None if place else name)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(reached)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
