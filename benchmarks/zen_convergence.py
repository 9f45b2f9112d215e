"""What does a hash that loses gradients cost training, beside Zen, which loses none (Zen, Fig. 3.14)?

The LSTM of `convergence_examples.py`, whose tables are most of it, is trained by ranks in threads that talk over real
Gloo connections. The strawman has one hash into a memory over |G|, the elements of a gradient; the second of two
indices at one place is lost, always the same one. Each run is compared with all-reduce of the same seed and batches.

    python benchmarks/zen_convergence.py --json FILE.json --plot FILE.png
"""

import math
import sys
from collections.abc import Mapping
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from baselines import Strawman, named
from convergence import plot, training_pool
from convergence_examples import LstmExample
from report import Summary, parser, table, write_json
from slow_network_convergence import LEAST_ELEMENTS, average

from resilient_run.comm.net.transport import Transport
from resilient_run.comm.runtime.bucket import BucketSum

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from ranks import run_ranks

VARIANTS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "all-reduce": ("dense", {}),
    "zen": ("zen", {}),
    **{f"strawman, {memory:g} |G|": ("strawman", {"memory": memory}) for memory in (8.0, 2.0, 0.5, 0.125)},
}
"""Label → scheme, and its options."""


def train(variant: str, *, ranks: int, steps: int, every: int, seed: int) -> tuple[list[float], float]:
    """Return the loss on held-out text after each `every` steps, and the share of non-zeros that rank 0 lost."""
    torch.set_num_threads(1)
    examples = [LstmExample(ranks, seed) for _ in range(ranks)]
    found = run_ranks(ranks, partial(_train_rank, examples, variant, steps=steps, every=every))
    return found[0]


def _train_rank(
    examples: list[LstmExample], variant: str, transport: Transport, *, steps: int, every: int
) -> tuple[list[float], float]:
    example = examples[transport.rank]
    name, options = VARIANTS[variant]
    scheme = named(name, transport, **options)
    together = BucketSum(scheme=scheme, world=transport, least_elements=LEAST_ELEMENTS)
    optimizer = example.optimizer()
    # As in slow_network_convergence.py: without a warm-up the first steps of Adagrad decide where a run ends.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * done / steps))
    )
    losses, elements, lost = [], 0, 0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        example.loss(transport.rank).backward()
        average(together, dict(example.model.named_parameters()))
        optimizer.step()
        scheduler.step()
        if isinstance(scheme, Strawman):
            elements += sum(loss.elements for loss in scheme.losses.values())
            lost += sum(loss.lost for loss in scheme.losses.values())
        if step % every == 0 and transport.rank == 0:
            losses.append(example.held_out_loss())
    return losses, lost / elements if elements else 0.0


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    curves: dict[str, dict[int, list[float]]] = {variant: {} for variant in VARIANTS}
    lost: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    if options.steps < options.every:
        arguments.error(f"--steps {options.steps} is less than --every {options.every}: nothing would be measured")
    shape = {"ranks": options.ranks, "steps": options.steps, "every": options.every}
    with training_pool(options.processes) as pool:
        started = {
            pool.submit(train, variant, **shape, seed=seed): (variant, seed)
            for seed in options.seeds
            for variant in VARIANTS
        }
        for done in as_completed(started):
            variant, seed = started[done]
            curves[variant][seed], share = done.result()
            lost[variant].append(share)
            print(f"{variant}, seed {seed}: {curves[variant][seed][-1]:.4f}", flush=True)
    reference = curves["all-reduce"]
    results = {
        variant: {
            "loss": dict(sorted(found.items())),
            "last": Summary.of(losses[-1] for losses in found.values()),
            "over_all_reduce": Summary.of(losses[-1] / reference[seed][-1] for seed, losses in found.items()),
            "lost": Summary.of(lost[variant]),
        }
        for variant, found in curves.items()
    }
    table(
        f"Loss after {options.steps} steps, {options.ranks} ranks, {len(options.seeds)} seeds",
        ("sum", "lost elements", "loss", "over all-reduce"),
        [
            (
                variant,
                f"{each['lost'].median:.2%}",
                f"{each['last']:.4f}",
                f"{each['over_all_reduce']:.4f}",
            )
            for variant, each in results.items()
        ],
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        plot(options.plot, {variant: list(found.values()) for variant, found in curves.items()}, options.every)


if __name__ == "__main__":
    main()
