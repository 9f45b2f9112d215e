"""Does training with each compressor and error feedback end at the loss of training without compression?

The examples, small (`convergence_examples.py`): a GPT that learns by SGD, and an LSTM with large tables that learns by
Adagrad. One process computes the gradients of all ranks, one after the other; each has a `Memory` of its own, and what
reaches the optimizer is the mean of what the ranks' messages decode to, as in `Compressed`. Runs of one seed have the
same initial parameters and the same batches on each rank. Uncompressed training with several seeds says what noise is.
Deep Gradient Compression (`dgc`) is compared with uncompressed SGD of the same momentum and learning rate.

    python benchmarks/compressor_convergence.py gpt --json FILE.json --plot FILE.png
    python benchmarks/compressor_convergence.py lstm --runs RUNS.jsonl  # goes on where it was interrupted
"""

import json
import math
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from convergence import plot, training_pool
from convergence_examples import EXAMPLES, Example
from report import Summary, parser, table, write_json
from torch import Tensor

from resilient_run.comm.compress.compressors import NAMES, RandomK, SampledTopK, named
from resilient_run.comm.compress.feedback import ErrorFeedback, Memory, MomentumCorrection

LEAST_ELEMENTS = 1024
"""Smaller tensors (biases, norms) are summed as they are, as by the hook."""
MOMENTUM = 0.9
"""Of Deep Gradient Compression, before the compression, and of the SGD it is compared with."""
WARM_UP = 0.2
"""Share of the steps in which Deep Gradient Compression comes down to its density."""
REFERENCE: Final = "dense"
MOMENTUM_REFERENCE: Final = "dense, momentum"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What becomes of a gradient on its way to the optimizer.

    Attributes:
        compressor: One of `compressors.NAMES`; None leaves gradients as they are.
        feedback: Whether what a message leaves out is added to the next gradient.
        momentum: Whether SGD has momentum, as Deep Gradient Compression has before the compression.
        masking: Of Deep Gradient Compression: whether what is sent loses its momentum.
    """

    compressor: str | None = None
    feedback: bool = True
    momentum: bool = False
    masking: bool = False

    @property
    def reference(self) -> str:
        """The uncompressed training to compare with."""
        return MOMENTUM_REFERENCE if self.momentum else REFERENCE


VARIANTS: Final = {
    REFERENCE: Variant(),
    **{name: Variant(compressor=name, momentum=name == SampledTopK.name) for name in NAMES},
    MOMENTUM_REFERENCE: Variant(momentum=True),
    "dgc, masked": Variant(compressor=SampledTopK.name, momentum=True, masking=True),
    "topk, no feedback": Variant(compressor="topk", feedback=False),
    "efsignsgd, no feedback": Variant(compressor="efsignsgd", feedback=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What all runs have in common.

    Attributes:
        example: One of `EXAMPLES`.
        ranks: Their number.
        steps: Optimizer steps.
        every: Steps between two losses.
        density: Of topk and dgc.
        random_density: Of randomk.
        momentum_rate: Learning rate of SGD with momentum; None for the example's.
    """

    example: str
    ranks: int
    steps: int
    every: int
    density: float
    random_density: float
    momentum_rate: float | None


class Forgetful(ErrorFeedback):
    """Loses what compression leaves out: what error feedback is there to prevent."""

    def _compress(
        self, gradient: Tensor, dtype: torch.dtype, kept: tuple[Tensor, ...], step: int, seed: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.compressor.compress(gradient.to(dtype), seed=seed), kept


def memories(variant: Variant, training: Training) -> list[Memory]:
    """Return what each rank compresses with; nothing for uncompressed training."""
    if variant.compressor is None:
        return []
    random = variant.compressor == RandomK.name
    compressor = named(variant.compressor, density=training.random_density if random else training.density)
    if isinstance(compressor, SampledTopK):
        return [
            MomentumCorrection(
                compressor,
                ranks=training.ranks,
                momentum=MOMENTUM,
                masking=variant.masking,
                warm_up_steps=round(WARM_UP * training.steps),
            )
            for _ in range(training.ranks)
        ]
    return [(ErrorFeedback if variant.feedback else Forgetful)(compressor) for _ in range(training.ranks)]


def mean(key: str, gradients: Sequence[Tensor], memories: Sequence[Memory]) -> Tensor:
    """Return the mean of what the ranks' messages of a parameter decode to, or of the gradients themselves."""
    if not memories or gradients[0].numel() < LEAST_ELEMENTS:
        return torch.stack(list(gradients)).mean(0)
    like = gradients[0]
    sent = [memory.compress(key, own.reshape(-1)) for memory, own in zip(memories, gradients, strict=True)]
    compressor, seed = memories[0].compressor, sent[0][1]
    if (sum_dtype := compressor.summed_as(like.dtype)) is not None:
        message = sum(message.view(sum_dtype) for message, _ in sent)
        assert isinstance(message, Tensor)
        total = compressor.decompress(message.view(torch.uint8), like.numel(), like.dtype, seed=seed)
    else:
        total = torch.zeros(like.numel())
        for message, _ in sent:
            compressor.add(message, total, seed=seed)
    for memory in memories:
        memory.undo_unless_finite([key], total)
    return total.view(like.shape) / len(gradients)


def optimizer_of(example: Example, variant: Variant, rate: float | None) -> torch.optim.Optimizer:
    """Return the optimizer; with momentum only for what has none yet, which Deep Gradient Compression leaves alone."""
    if not variant.momentum:
        return example.optimizer()
    compressed = variant.compressor is not None
    groups = [
        {"params": [parameter], "momentum": 0 if compressed and parameter.numel() >= LEAST_ELEMENTS else MOMENTUM}
        for parameter in example.model.parameters()
    ]
    return torch.optim.SGD(groups, lr=example.momentum_rate if rate is None else rate)


def train(variant: Variant, training: Training, seed: int) -> list[float]:
    """Return the loss on held-out text after each `training.every` steps."""
    torch.set_num_threads(1)
    example = EXAMPLES[training.example](training.ranks, seed)
    remembered = memories(variant, training)
    parameters = dict(example.model.named_parameters())
    optimizer = optimizer_of(example, variant, training.momentum_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min((done + 1) / (0.1 * training.steps), 0.5 + 0.5 * math.cos(math.pi * done / training.steps)),
    )
    losses = []
    for step in range(1, training.steps + 1):
        own = [torch.autograd.grad(example.loss(rank), list(parameters.values())) for rank in range(training.ranks)]
        for (name, parameter), gradients in zip(parameters.items(), zip(*own, strict=True), strict=True):
            parameter.grad = mean(name, gradients, remembered)
        optimizer.step()
        scheduler.step()
        if step % training.every == 0:
            losses.append(example.held_out_loss())
    return losses


def train_all(
    labels: Sequence[str], training: Training, seeds: Sequence[int], *, processes: int, runs: Path | None
) -> dict[str, dict[int, list[float]]]:
    """Return the losses of each variant by seed; `runs` has those of earlier calls, which are not trained again."""
    known: dict[str, list[float]] = {}
    if runs is not None and runs.exists():
        known = {json.dumps(run): losses for run, losses in map(json.loads, runs.read_text().splitlines())}
    curves: dict[str, dict[int, list[float]]] = {label: {} for label in labels}
    with training_pool(processes) as pool:
        started = {}
        for seed in seeds:
            for label in labels:
                run = json.dumps([asdict(training), asdict(VARIANTS[label]), seed])
                if run in known:
                    curves[label][seed] = known[run]
                else:
                    started[pool.submit(train, VARIANTS[label], training, seed)] = (run, label, seed)
        for done in as_completed(started):
            run, label, seed = started[done]
            curves[label][seed] = done.result()
            print(f"{label}, seed {seed}: {curves[label][seed][-1]:.4f}", flush=True)
            if runs is not None:
                with runs.open("a") as file:
                    file.write(f"[{run}, {json.dumps(curves[label][seed])}]\n")
    return {label: dict(sorted(by_seed.items())) for label, by_seed in curves.items()}


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("example", choices=sorted(EXAMPLES))
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--density", type=float, default=0.01, help="of topk and dgc")
    arguments.add_argument("--random-density", type=float, default=0.1, help="of randomk: what is large waits as well")
    arguments.add_argument("--momentum-rate", type=float, help="of SGD with momentum, in place of the example's")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="LABEL")
    arguments.add_argument("--margin", type=float, default=0.01, help="of the loss, beyond the spread of dense seeds")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--runs", type=Path, metavar="FILE", help="keep finished runs here, and do not repeat them")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    training = Training(**{name: getattr(options, name) for name in Training.__slots__})
    wanted = {*options.variants, *(VARIANTS[label].reference for label in options.variants)}
    labels = [label for label in VARIANTS if label in wanted]
    curves = train_all(labels, training, options.seeds, processes=options.processes, runs=options.runs)
    last = {label: {seed: losses[-1] for seed, losses in by_seed.items()} for label, by_seed in curves.items()}
    results: dict[str, Any] = {}
    rows = []
    for label, found in last.items():
        reference = last[VARIANTS[label].reference]
        noise = (max(reference.values()) - min(reference.values())) / fmean(reference.values())
        limit = 1 + noise + options.margin
        over = Summary.of(loss / reference[seed] for seed, loss in found.items())
        reached = over.median <= limit
        results[label] = {
            "loss": curves[label],
            "last": Summary.of(found.values()),
            "reference": VARIANTS[label].reference,
            "reference_spread": noise,
            "over_reference": over,
            "limit": limit,
            "reached": reached,
        }
        rows.append((label, f"{results[label]['last']:.4f}", f"{over:.4f}", f"{limit:.4f}", "yes" if reached else "no"))
    table(
        f"{options.example}: loss after {options.steps} steps, {options.ranks} ranks, {len(options.seeds)} seeds; "
        "dgc is compared with momentum",
        ("gradients", "loss", "over dense", "limit", "reached"),
        rows,
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot", "runs"}}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        shown = {label: list(by_seed.values()) for label, by_seed in curves.items()}
        plot(options.plot, shown, options.every, dashed=[label for label in shown if "," in label])


if __name__ == "__main__":
    main()
