"""Does training in 8 bits, in low rank and with local steps end at the loss of all-reduce?

An example, small (`convergence_examples.py`), trained by ranks in threads that talk over real Gloo connections. `int8`,
`fp8` and `powersgd` sum the gradients of its optimizer (GPT: SGD, LSTM: Adagrad), as under DDP with `register`. `local`
trains replicas by AdamW, which meet every so many steps (`LocalSteps`, DiLoCo), `streaming` in four fragments and while
training goes on. Each is compared with all-reduce of the same optimizer, rate, seed and batches. What noise is, the
seeds of all-reduce say. How long a step takes is no question of this.

    python benchmarks/slow_network_convergence.py --example lstm --json FILE.json --plot FILE.png
"""

import math
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from convergence import plot, training_pool
from convergence_examples import EXAMPLES, Example
from report import Summary, parser, table, write_json
from torch import Tensor

from resilient_run.comm.local_steps import LocalSteps
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.runtime.bucket import BucketSum
from resilient_run.comm.runtime.choice import scheme_of

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from ranks import run_ranks

LEAST_ELEMENTS = 1024
"""Smaller tensors (biases, norms) are all-reduced together."""
ADAMW_RATE = 3e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How ranks train together.

    Attributes:
        scheme: What sums gradients or, with local steps, pseudo-gradients.
        options: Of the scheme.
        local: Steps of a round; 0 sums the gradients of each step.
        fragments: Of the model, whose rounds end one after the other (Streaming DiLoCo).
        delay: Steps from the end of a round to its outer step.
        averaged: Whether a round ends with the mean of the replicas, without outer momentum.
        adamw: Whether the optimizer is AdamW, else the example's.
    """

    scheme: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)
    local: int = 0
    fragments: int = 1
    delay: int = 0
    averaged: bool = False
    adamw: bool = False

    @property
    def reference(self) -> str:
        """The all-reduce to compare with."""
        return "dense, AdamW" if self.adamw else "dense"


VARIANTS: Final = {
    "dense": Variant(),
    "int8": Variant(scheme="int8"),
    "int8, stochastic": Variant(scheme="int8", options={"rounding": "stochastic"}),
    "fp8": Variant(scheme="fp8"),
    "powersgd": Variant(scheme="powersgd"),
    "dense, AdamW": Variant(adamw=True),
    "local 10": Variant(local=10, adamw=True),
    "local 50": Variant(local=50, adamw=True),
    "local 10, int8": Variant(scheme="int8", local=10, adamw=True),
    "streaming 50": Variant(local=50, fragments=4, delay=5, adamw=True),
    "local 10, averaged": Variant(local=10, averaged=True, adamw=True),
    "local 50, averaged": Variant(local=50, averaged=True, adamw=True),
}


def train(variant: Variant, *, example: str, ranks: int, steps: int, every: int, seed: int) -> list[float]:
    """Return the loss on held-out text after each `every` steps; all ranks must end with the same parameters."""
    torch.set_num_threads(1)
    examples = [EXAMPLES[example](ranks, seed) for _ in range(ranks)]

    def work(transport: Transport) -> tuple[list[float], Tensor]:
        return _train_rank(examples[transport.rank], transport, variant, steps=steps, every=every)

    found = run_ranks(ranks, work)
    assert all(torch.equal(parameters, found[0][1]) for _, parameters in found), "ranks differ"
    return found[0][0]


def _train_rank(
    example: Example, transport: Transport, variant: Variant, *, steps: int, every: int
) -> tuple[list[float], Tensor]:
    model = example.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAMW_RATE) if variant.adamw else example.optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * done / steps))
    )
    local = together = None
    if variant.local:
        local = LocalSteps(
            model,
            every=variant.local,
            fragments=variant.fragments,
            delay=variant.delay,
            scheme=variant.scheme,
            group=transport._group,
            least_elements=LEAST_ELEMENTS,
            **({"outer_lr": 1.0, "outer_momentum": 0.0} if variant.averaged else {}),
            **variant.options,
        )
    else:
        scheme = scheme_of(variant.scheme, transport, **variant.options)
        together = BucketSum(scheme=scheme, world=transport, least_elements=LEAST_ELEMENTS)
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        example.loss(transport.rank).backward()
        if together is not None:
            average(together, dict(model.named_parameters()))
        optimizer.step()
        scheduler.step()
        if local is not None:
            local.step()
        if step % every == 0 and transport.rank == 0:
            losses.append(example.held_out_loss())
    # Replicas of which parts travel while training goes on are never equal: the outer parameters are.
    shared: Iterable[Tensor] = model.parameters()
    if local is not None and variant.delay:
        local.close()
        shared = local.state_dict()["outer"].values()
    return losses, torch.cat([each.detach().reshape(-1) for each in shared])


def average(together: BucketSum, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Average all gradients as one bucket."""
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    bucket = torch.cat([each.reshape(-1) for each in gradients.values()]) / together.world.size
    parts = torch.split(bucket, [each.numel() for each in gradients.values()])
    views = {name: part.view_as(each) for (name, each), part in zip(gradients.items(), parts, strict=True)}
    together.sum_bucket(bucket, list(views.items()))
    for name, view in views.items():
        parameters[name].grad = view


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--example", choices=sorted(EXAMPLES), default="gpt")
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=600, help="a multiple of 50, the steps of the longest round")
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="LABEL")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    wanted = {*options.variants, *(VARIANTS[label].reference for label in options.variants)}
    curves: dict[str, dict[int, list[float]]] = {label: {} for label in VARIANTS if label in wanted}
    shape = {"example": options.example, "ranks": options.ranks, "steps": options.steps, "every": options.every}
    with training_pool(options.processes) as pool:
        started = {
            pool.submit(train, VARIANTS[label], **shape, seed=seed): (label, seed)
            for seed in options.seeds
            for label in curves
        }
        for done in as_completed(started):
            label, seed = started[done]
            curves[label][seed] = done.result()
            print(f"{label}, seed {seed}: {curves[label][seed][-1]:.4f}", flush=True)
    last = {label: {seed: losses[-1] for seed, losses in found.items()} for label, found in curves.items()}
    results: dict[str, Any] = {}
    for label, found in last.items():
        reference = last[VARIANTS[label].reference]
        results[label] = {
            "loss": dict(sorted(curves[label].items())),
            "last": Summary.of(found.values()),
            "reference": VARIANTS[label].reference,
            "reference_spread": (max(reference.values()) - min(reference.values())) / fmean(reference.values()),
            "over_reference": Summary.of(loss / reference[seed] for seed, loss in found.items()),
        }
    table(
        f"Loss after {options.steps} steps, {options.ranks} ranks, {len(options.seeds)} seeds",
        ("sum", "loss", "over all-reduce", "spread of its seeds"),
        [
            (label, f"{each['last']:.4f}", f"{each['over_reference']:.4f}", f"{each['reference_spread']:.4f}")
            for label, each in results.items()
        ],
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        shown = {label: list(found.values()) for label, found in curves.items()}
        plot(options.plot, shown, options.every, dashed=[label for label in shown if VARIANTS[label].adamw])


if __name__ == "__main__":
    main()
