"""Does SparDL learn as fast as top-k all-gather, with its residuals and by its teams (SparDL, Figures 5, 7 and 8)?

A small model of real text (`tests/byte_model.py`) is trained with plain SGD by ranks in threads, whose gradients go
through real Gloo connections. All runs have the same seeds, so they differ in the scheme alone. The time axis is steps:
how long a step takes is the question of `spardl.py`.

Of B-SAG it also says, for the first block, how many elements all teams sent together, over how many the block keeps,
and which share of those a team sent: means of `--every` steps, and of the first the least and the most.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from baselines import GTopk, OkTopk
from baselines.residuals import LocalResiduals, PartialResiduals
from convergence import plot
from report import Summary, parser, table, write_json
from torch import Tensor

from resilient_run.comm.net.entries import kept_count
from resilient_run.comm.net.scheme import Dense, Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.spardl.spardl import SparDL
from resilient_run.comm.spardl.teams import Width, default_gather
from resilient_run.comm.spardl.topk_a import TopkA

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from byte_model import train


class Watched(SparDL):
    """SparDL with B-SAG that notes after each step what that did with the first block.

    Args:
        transport: As of `SparDL`.
        seen: Gets, from rank 0, the union of all teams' elements and what a team sent, both over what is kept.
        options: As of `SparDL`.
    """

    def __init__(self, transport: Transport, *, seen: list[tuple[float, float]], **options: Any) -> None:
        super().__init__(transport, **options)
        self._seen = seen

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Sum as `SparDL` does."""
        before = self.state_dict()["memories"].get(key)
        total = super().reduce(key, gradient)
        after = self.state_dict()["memories"][key]
        if self.transport.rank == 0:
            quota = kept_count(gradient.numel(), self.density) * after["teams"] // self.transport.size
            width = Width.first(quota, after["teams"]) if before is None else Width(**before["width"])
            self._seen.append((after["width"]["union"] / quota, round(width.h) / quota))
        return total


def variants(density: float, ranks: int, seen: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the schemes to compare; those of SparDL by teams and residuals. B-SAG is noted in `seen`."""
    found: dict[str, Callable[[Transport], Scheme]] = {
        "dense": Dense,
        "topk-a": lambda transport: TopkA(transport, density=density),
        "spardl": lambda transport: SparDL(transport, density=density),
    }
    for teams in (teams for teams in range(1, ranks + 1) if ranks % teams == 0):
        if default_gather(teams) == "recursive":
            found[f"spardl, {teams} teams, R-SAG"] = partial(SparDL, density=density, teams=teams)
        if teams > 1:
            name = f"spardl, {teams} teams, B-SAG"
            watch = seen.setdefault(name, [])
            found[name] = partial(Watched, seen=watch, density=density, teams=teams, gather="bruck")
    pair = 1 if ranks % 2 else 2
    found["spardl, partial"] = partial(PartialResiduals, density=density, teams=pair)
    found["spardl, local"] = partial(LocalResiduals, density=density, teams=pair)
    if default_gather(ranks) == "recursive":
        found["gtopk"] = lambda transport: GTopk(transport, density=density)
    found["ok-topk"] = lambda transport: OkTopk(transport, density=density)
    return found


def plot_unions(path: Path, results: Mapping[str, Mapping[str, Any]], every: int) -> None:
    """Write the figure of what all teams of B-SAG sent together: means, and from the least to the most."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3))
    for name, found in results.items():
        if "union_over_kept" in found:
            steps = [every * (part + 1) for part in range(len(found["union_over_kept"]))]
            (line,) = axes.plot(steps, found["union_over_kept"], label=name)
            least, most = zip(*found["union_between"], strict=True)
            axes.fill_between(steps, least, most, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("steps")
    axes.set_ylabel("union over what is kept")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8, help="gtopk needs a power of two")
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--learning-rate", type=float, default=0.2)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--schemes", nargs="+", metavar="NAME", help="all if not given")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    arguments.add_argument("--plot-unions", type=Path, metavar="FILE", help="write one of B-SAG's unions here")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    curves = {}
    seen: dict[str, list[tuple[float, float]]] = {}
    known = variants(options.density, options.ranks, seen)
    if unknown := set(options.schemes or ()) - known.keys():
        arguments.error(f"{options.ranks} ranks have no {', '.join(sorted(unknown))}; known are {'; '.join(known)}")
    for name in options.schemes or known:
        scheme_of = known[name]
        curves[name] = [
            train(
                scheme_of,
                ranks=options.ranks,
                steps=options.steps,
                every=options.every,
                learning_rate=options.learning_rate,
                seed=seed,
            )
            for seed in options.seeds
        ]
        results[name] = {
            "loss": [mean(losses) for losses in zip(*curves[name], strict=True)],
            "last": Summary.of(curve[-1] for curve in curves[name]),
        }
        print(f"{name}: {results[name]['last']:.4f}", flush=True)
        if watched := seen.get(name):
            parts = [
                [each for index, each in enumerate(watched) if index % options.steps // options.every == part]
                for part in range(-(-options.steps // options.every))
            ]
            unions = [[union for union, _ in part] for part in parts]
            results[name]["union_over_kept"] = list(map(mean, unions))
            results[name]["union_between"] = [(min(part), max(part)) for part in unions]
            results[name]["sent_over_kept"] = [mean(sent for _, sent in part) for part in parts]
    reference = next(iter(results))
    table(
        f"Loss after {options.steps} steps, {options.ranks} ranks, density {options.density:g}",
        ("scheme", "loss", f"over {reference}", "union over kept", "sent over kept"),
        [
            (
                name,
                f"{found['last']:.4f}",
                f"{found['last'].median - results[reference]['last'].median:+.4f}",
                *(
                    f"{Summary.of(found[key]):.2f}" if key in found else ""
                    for key in ("union_over_kept", "sent_over_kept")
                ),
            )
            for name, found in results.items()
        ],
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot", "plot_unions"}}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        plot(options.plot, curves, options.every, dashed=("gtopk", "ok-topk"))
    if options.plot_unions is not None:
        plot_unions(options.plot_unions, results, options.every)


if __name__ == "__main__":
    main()
