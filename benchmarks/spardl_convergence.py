"""Does SparDL learn as fast as top-k all-gather, and what do its residuals do for that (SparDL, Figure 8)?

A small model of real text (`tests/byte_model.py`) is trained with plain SGD by ranks in threads, whose gradients go
through real Gloo connections. All runs have the same seeds, so they differ in the scheme alone. The time axis is steps:
how long a step takes is the question of `spardl.py`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from convergence import plot
from report import Summary, parser, table, write_json

from resilient_run.comm.baselines.gtopk import GTopk
from resilient_run.comm.baselines.ok_topk import OkTopk
from resilient_run.comm.baselines.topk_a import TopkA
from resilient_run.comm.net.scheme import Dense, Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.spardl.spardl import SparDL

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from byte_model import train


def variants(density: float) -> dict[str, Callable[[Transport], Scheme]]:
    """Return the schemes to compare; those of SparDL by teams and residuals."""
    return {
        "dense": Dense,
        "topk-a": lambda transport: TopkA(transport, density=density),
        "spardl": lambda transport: SparDL(transport, density=density),
        "spardl, one team": lambda transport: SparDL(transport, density=density, teams=1),
        "spardl, B-SAG": lambda transport: SparDL(transport, density=density, gather="bruck"),
        "spardl, partial": lambda transport: SparDL(transport, density=density, residuals="partial"),
        "spardl, local": lambda transport: SparDL(transport, density=density, residuals="local"),
        "gtopk": lambda transport: GTopk(transport, density=density),
        "ok-topk": lambda transport: OkTopk(transport, density=density),
    }


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=8, help="a power of two, for gtopk")
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--learning-rate", type=float, default=0.2)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    curves = {}
    for name, scheme_of in variants(options.density).items():
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
        mean = [sum(losses) / len(losses) for losses in zip(*curves[name], strict=True)]
        results[name] = {"loss": mean, "last": Summary.of(curve[-1] for curve in curves[name])}
        print(f"{name}: {results[name]['last']:.4f}", flush=True)
    reference = results["topk-a"]["last"].median
    table(
        f"Loss after {options.steps} steps, {options.ranks} ranks, density {options.density:g}",
        ("scheme", "loss", "over topk-a"),
        [(name, f"{found['last']:.4f}", f"{found['last'].median - reference:+.4f}") for name, found in results.items()],
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        plot(options.plot, curves, options.every, dashed=("gtopk", "ok-topk"))


if __name__ == "__main__":
    main()
