"""Trainings by the clock: when each was how good, and a figure of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
"""Seconds of training, and what was reached then."""


def seconds_to_common(
    found: Mapping[str, Sequence[Points]], is_as_good: Callable[[float, float], bool]
) -> dict[str, list[float]]:
    """Return contender → when it first was as good, in each seed, as all are in the end; `is_as_good(own, other)`."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for seed in zip(*found.values(), strict=True):
        ends = [points[-1][1] for points in seed]
        if any(map(math.isnan, ends)):
            raise ValueError(f"what trainings reached is {dict(zip(found, ends, strict=True))}: one diverged")
        worst = next(end for end in ends if all(is_as_good(other, end) for other in ends))
        for name, points in zip(found, seed, strict=True):
            seconds[name].append(next(at_s for at_s, reached in points if is_as_good(reached, worst)))
    return seconds


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
