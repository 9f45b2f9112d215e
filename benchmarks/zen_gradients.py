"""How sparse are gradients of real text, how much do they overlap, and where do they lie (Zen, Fig. 3.1 and 3.2)?

Two models of the source of Python's standard library have three tables whose gradients are mostly zero by nature: the
word-level LSTM of `examples/lstm_lm.py` (embedding and sampled softmax, 20,000 words), and a bag of hashed bigrams that
tells whether a line is in a class (100,000 rows, as models of clicks have them). Each of the ranks draws batches of its
own; after some steps of training together, their gradients of one step are compared, row by row.

    python benchmarks/zen_gradients.py --json FILE.json --plot FILE.svg
"""

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import sparsity
import torch
from report import Summary, parser, table, write_json
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from lstm_lm import LSTM, read_words
from train_gpt import Windows

PARTS: Final = (8, 16, 64, 128)
WORDS: Final = 20_000
BIGRAMS: Final = 100_000


class Model(ABC):
    """What is trained, with its tables."""

    module: nn.Module
    tables: dict[str, nn.Parameter]

    @abstractmethod
    def loss(self, rank: int) -> Tensor:
        """Return the loss of the rank's next batch."""


class Words(Model):
    """The LSTM of the example: 8 windows of 20 words, and 256 sampled ones."""

    def __init__(self, ranks: int) -> None:
        lstm = LSTM(words=WORDS, width=128, hidden=256, sparse=False)
        self.module = self._lstm = lstm
        self.tables = {"LSTM, embedding": lstm.embedding.weight, "LSTM, softmax": lstm.softmax.weight}
        text = read_words(WORDS)
        self._loaders = [Windows(text, batch=8, context=20, seed=rank) for rank in range(ranks)]

    def loss(self, rank: int) -> Tensor:
        loader = self._loaders[rank]
        loss: Tensor = self._lstm(*loader.next_batch(), self._lstm.sample(256, loader.generator))
        return loss


class Bigrams(Model):
    """A bag of hashed bigrams of 64 words, which tells whether `self` is among the 16 that follow."""

    def __init__(self, ranks: int) -> None:
        bag = nn.EmbeddingBag(BIGRAMS, 128, mode="mean")
        self.module = nn.Sequential(bag, nn.Linear(128, 1))
        self.tables = {"bag of bigrams": bag.weight}
        text = read_words(WORDS)
        self._word = int(text.bincount().argsort(descending=True)[8])
        self._loaders = [Windows(text, batch=16, context=80, seed=rank) for rank in range(ranks)]

    def loss(self, rank: int) -> Tensor:
        windows, _ = self._loaders[rank].next_batch()
        bigrams = (windows[:, :63] * 1_000_003 + windows[:, 1:64] * 7919) % BIGRAMS
        follows = (windows[:, 64:] == self._word).any(1).float()
        return F.binary_cross_entropy_with_logits(self.module(bigrams)[:, 0], follows)


def gradients(model: Model, ranks: int, steps: int) -> dict[str, list[Tensor]]:
    """Train for so many steps, and return table → each rank's gradient of the last one."""
    optimizer = torch.optim.Adagrad(model.module.parameters(), lr=0.1, initial_accumulator_value=0.1)
    found: dict[str, list[Tensor]] = {}
    for step in range(1, steps + 1):
        sums = [torch.zeros_like(parameter) for parameter in model.module.parameters()]
        for rank in range(ranks):
            model.module.zero_grad()
            model.loss(rank).backward()
            for total, parameter in zip(sums, model.module.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad / ranks
            if step == steps:
                for name, parameter in model.tables.items():
                    assert parameter.grad is not None
                    found.setdefault(name, []).append(parameter.grad.clone())
        for total, parameter in zip(sums, model.module.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
    return found


def describe(given: list[Tensor]) -> dict[str, Any]:
    """Return the characteristics of one table's gradients."""
    one, ranks = given[0], len(given)
    overlaps = [sparsity.overlap_ratio(given[i], given[j]) for i in range(ranks) for j in range(i)]
    return {
        "rows": one.shape[0],
        "density": Summary.of(map(sparsity.density, given)),
        "overlap": Summary.of(overlaps),
        "densification": sparsity.densification(given),
        "skewness": {parts: max(sparsity.skewness(each, parts) for each in given) for parts in PARTS},
        # The heat map of Figure 3.2: a line for each rank, a column for each of 128 even ranges.
        "heat": [
            [round(sparsity.density(part), 5) for part in torch.tensor_split(each.view(-1), PARTS[-1])]
            for each in given
        ],
    }


def plot(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the figure; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(1, 1 + len(results), figsize=(4 * (1 + len(results)), 3.5))
    for name, found in results.items():
        densification = found["densification"]
        grid[0].plot(range(1, len(densification) + 1), densification, "o-", markersize=3, label=name)
    grid[0].set_xlabel("ranks")
    grid[0].set_ylabel("densification ratio")
    grid[0].legend(fontsize="small")
    for axes, (name, found) in zip(grid[1:], results.items(), strict=True):
        shown = axes.imshow(found["heat"], aspect="auto", cmap="magma", norm=mpl.colors.LogNorm(1e-4, 1, clip=True))
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("even ranges of the table")
        axes.set_ylabel("rank")
        figure.colorbar(shown, ax=axes, label="density")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Train, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {}
    for kind in (Words, Bigrams):
        found = gradients(kind(options.ranks), options.ranks, options.steps)
        results |= {name: describe(given) for name, given in found.items()}
    table(
        f"Gradients of step {options.steps}, {options.ranks} ranks",
        ("table", "density", "overlap of two", f"densification, {options.ranks}", *(f"skew, {p}" for p in PARTS)),
        [
            (
                name,
                f"{found['density'].median:.2%}",
                f"{found['overlap']:.2f}",
                f"{found['densification'][-1]:.1f}",
                *(f"{found['skewness'][parts]:.1f}" for parts in PARTS),
            )
            for name, found in results.items()
        ],
    )
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={"ranks": options.ranks, "steps": options.steps},
        results=results,
    )
    if options.plot is not None:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
