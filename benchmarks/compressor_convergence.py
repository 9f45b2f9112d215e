"""Does training with each compressor and error feedback end at the loss of training without compression?

The GPT of `examples/train_gpt.py`, small, learns its text by SGD. One process computes the gradients of all ranks, one
after the other; each has a `Memory` of its own, and what reaches the optimizer is the mean of what the ranks' messages
decode to, as in `Compressed`. Runs of one seed have the same initial parameters and the same batches on each rank.
Uncompressed training with several seeds says what noise is. Deep Gradient Compression (`dgc`) is compared with
uncompressed SGD that has the same momentum and learning rate.

    python benchmarks/compressor_convergence.py --json FILE.json --plot FILE.png
"""

import math
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from convergence import plot
from report import Summary, parser, table, write_json
from torch import Tensor
from torch.nn import functional as F

from resilient_run.comm.compressors import NAMES, RandomK, SampledTopK, named
from resilient_run.comm.feedback import ErrorFeedback, Memory, MomentumCorrection

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from train_gpt import GPT, Windows, read_corpus

HELD_OUT_BYTES = 400_000
HELD_OUT_WINDOWS = 512
LEAST_ELEMENTS = 1024
"""Smaller tensors (biases, norms) are summed as they are, as by the hook."""
MOMENTUM = 0.9
"""Of Deep Gradient Compression, before the compression."""
MOMENTUM_RATE = 0.3
"""Its learning rate over that of plain SGD: between 1 - MOMENTUM, for elements that wait long and gather all their
momentum, and 1, for those that are sent, and lose it, in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What becomes of a gradient on its way to the optimizer.

    Attributes:
        label: How the table calls it.
        compressor: One of `compressors.NAMES`; None leaves gradients as they are.
        feedback: Whether what a message leaves out is added to the next gradient.
        momentum: Whether SGD has momentum, as Deep Gradient Compression has before the compression.
        density: Of compressors that send a part.
        learning_rate: Of the optimizer.
    """

    label: str
    compressor: str | None = None
    feedback: bool = True
    momentum: bool = False
    density: float = 0.01
    learning_rate: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What all runs have in common."""

    ranks: int
    steps: int
    every: int
    batch: int
    context: int
    layers: int
    width: int


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
    compressor = named(variant.compressor, density=variant.density)
    if isinstance(compressor, SampledTopK):
        return [
            MomentumCorrection(compressor, ranks=training.ranks, momentum=MOMENTUM, warm_up_steps=training.steps // 5)
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
    return total.view(like.shape) / len(gradients)


def parameter_groups(parameters: Iterable[Tensor], variant: Variant) -> list[dict[str, Any]]:
    """Return the groups of SGD: what Deep Gradient Compression leaves alone has the learning rate of plain SGD."""
    rate = variant.learning_rate
    if variant.momentum:
        return [{"params": list(parameters), "lr": MOMENTUM_RATE * rate, "momentum": MOMENTUM}]
    if variant.compressor != SampledTopK.name:
        return [{"params": list(parameters), "lr": rate}]
    small, large = [], []
    for parameter in parameters:
        (small if parameter.numel() < LEAST_ELEMENTS else large).append(parameter)
    return [{"params": small, "lr": rate}, {"params": large, "lr": MOMENTUM_RATE * rate}]


def train(variant: Variant, training: Training, seed: int) -> list[float]:
    """Return the loss on held-out text after each `training.every` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    # Without dropout, which ranks would have to draw in the order of one process.
    model = GPT(context=training.context, layers=training.layers, width=training.width).eval()
    corpus = read_corpus()
    text, held_out = corpus[:-HELD_OUT_BYTES], corpus[-HELD_OUT_BYTES:]
    shape = {"batch": training.batch, "context": training.context}
    loaders = [Windows(text, **shape, seed=1000 * seed + rank) for rank in range(training.ranks)]
    remembered = memories(variant, training)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameter_groups(parameters.values(), variant))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min((done + 1) / (0.1 * training.steps), 0.5 + 0.5 * math.cos(math.pi * done / training.steps)),
    )
    losses = []
    for step in range(1, training.steps + 1):
        own = [
            torch.autograd.grad(loss_of(model, *loader.next_batch()), list(parameters.values())) for loader in loaders
        ]
        for (name, parameter), gradients in zip(parameters.items(), zip(*own, strict=True), strict=True):
            parameter.grad = mean(name, gradients, remembered)
        optimizer.step()
        scheduler.step()
        if step % training.every == 0:
            windows = Windows(held_out, batch=HELD_OUT_WINDOWS, context=training.context, seed=0)
            with torch.no_grad():
                losses.append(float(loss_of(model, *windows.next_batch())))
    return losses


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next bytes."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def variants(density: float, random_density: float, learning_rate: float) -> list[Variant]:
    """Return what is compared, uncompressed training first."""

    def variant(label: str, compressor: str | None, **options: bool) -> Variant:
        share = random_density if compressor == RandomK.name else density
        return Variant(label=label, compressor=compressor, density=share, learning_rate=learning_rate, **options)

    return [
        variant("dense", None),
        *(variant(name, name) for name in NAMES),
        *(variant(f"{name}, no feedback", name, feedback=False) for name in ("topk", "efsignsgd")),
        variant("dense, momentum", None, momentum=True),
    ]


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--every", type=int, default=50)
    arguments.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    arguments.add_argument("--context", type=int, default=32, help="bytes per window")
    arguments.add_argument("--layers", type=int, default=1)
    arguments.add_argument("--width", type=int, default=64, help="a multiple of 64")
    arguments.add_argument("--density", type=float, default=0.01, help="of topk and dgc")
    arguments.add_argument("--random-density", type=float, default=0.1, help="of randomk: what is large waits as well")
    arguments.add_argument("--learning-rate", type=float, default=1.0)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of uncompressed training")
    arguments.add_argument(
        "--compressed-seeds", type=int, nargs="+", default=[0], help="of all others; some of --seeds"
    )
    arguments.add_argument("--margin", type=float, default=0.01, help="of the loss, beyond the spread of dense seeds")
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    training = Training(**{field.name: getattr(options, field.name) for field in fields(Training)})
    compared = variants(options.density, options.random_density, options.learning_rate)
    curves: dict[str, dict[int, list[float]]] = {variant.label: {} for variant in compared}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        runs = {
            pool.submit(train, variant, training, seed): (variant.label, seed)
            for variant in compared
            for seed in (options.seeds if variant.label == "dense" else options.compressed_seeds)
        }
        for done in as_completed(runs):
            label, seed = runs[done]
            curves[label][seed] = done.result()
            print(f"{label}, seed {seed}: {curves[label][seed][-1]:.4f}", flush=True)
    dense = {seed: losses[-1] for seed, losses in curves["dense"].items()}
    noise = (max(dense.values()) - min(dense.values())) / fmean(dense.values())
    limit = 1 + noise + options.margin
    results: dict[str, Any] = {"noise": noise, "limit": limit, "variants": {}}
    rows = []
    for label, by_seed in curves.items():
        last = Summary.of(losses[-1] for losses in by_seed.values())
        reference = curves["dense, momentum" if label == SampledTopK.name else "dense"]
        ratio = fmean(losses[-1] / reference[seed][-1] for seed, losses in by_seed.items())
        reached = ratio <= limit
        results["variants"][label] = {"loss": by_seed, "last": last, "over_dense": ratio, "reached": reached}
        rows.append((label, f"{last:.4f}", f"{ratio:.4f}", "yes" if reached else "no"))
    table(
        f"Loss after {options.steps} steps, {options.ranks} ranks; dense seeds spread by {noise:.2%}",
        ("gradients", "loss", "over dense", f"at most {limit:.4f}"),
        rows,
    )
    parameters = {name: value for name, value in vars(options).items() if name not in {"json", "plot"}}
    write_json(options.json, question=(__doc__ or "").splitlines()[0], parameters=parameters, results=results)
    if options.plot is not None:
        first = options.compressed_seeds[0]
        shown = {label: by_seed[first] for label, by_seed in curves.items()}
        plot(options.plot, shown, options.every, dashed=[label for label in shown if "," in label])


if __name__ == "__main__":
    main()
