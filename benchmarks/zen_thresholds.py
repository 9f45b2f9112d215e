"""How even do servers stay whose shares were cut by an earlier step's gradients (thesis, Section 3.3.2)?

The data-dependent strawman of the thesis: sort the indices of a step, cut them into as many even parts as there are
servers, and keep the boundaries for the steps after it. Counted is the imbalance ratio (Definition 3.6): how much more
than its even share the fullest server gets. `union` cuts the indices of the sum, each once, which makes Pull even;
`pushed` cuts those of all workers together, each as often as it is pushed, which makes Push as even as boundaries can.
"of this step" are boundaries of the very step, which nobody has in time; the others are those of the first one. Even
ranges (Sparse PS) and Zen, whose shares depend on no gradient, are beside them.

16 workers as in the thesis, with 64 windows of 20 words each (NMT there has batches of 64): the rows of an embedding
whose gradient is not zero are the words of the batch. Words are those of Python's standard library, windows are drawn
anywhere or follow each other, a sixteenth of the text for each worker. Beside it, rows drawn like those of NMT.

    python benchmarks/zen_thresholds.py --json FILE.json
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import sparsity
import torch
from report import parser, table, write_json
from sparse_workload import WIDTH, WORKLOADS, row_probability
from torch import Tensor

from resilient_run.comm.zen.partition import Balanced

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from lstm_lm import LSTM, read_words
from train_gpt import Windows

WORKERS: Final = 16
WORDS: Final = 20_000
BATCH: Final = 64
CONTEXT: Final = 20
DRAWN_ELEMENTS: Final = 14_000_000

Servers = Callable[[Tensor], Tensor]
"""Rows → the server of each."""


def anywhere(text: Tensor) -> Iterator[list[Tensor]]:
    """Yield the inputs of all workers, step by step: windows drawn from the whole text."""
    loaders = [Windows(text, batch=BATCH, context=CONTEXT, seed=worker) for worker in range(WORKERS)]
    while True:
        yield [loader.next_batch()[0] for loader in loaders]


def in_order(text: Tensor) -> Iterator[list[Tensor]]:
    """Yield the inputs of all workers, step by step: each reads its part of the text once."""
    parts = text[: len(text) // WORKERS * WORKERS].view(WORKERS, -1)
    for batch in parts.split(BATCH * CONTEXT, dim=1):
        if batch.shape[1] == BATCH * CONTEXT:
            yield list(batch.reshape(WORKERS, BATCH, CONTEXT))


def drawn(rows: int, probability: Tensor) -> Iterator[list[Tensor]]:
    """Yield the rows that all workers touch, step by step, drawn with these probabilities."""
    random = torch.Generator().manual_seed(0)
    while True:
        yield [
            (torch.rand(rows, generator=random, dtype=torch.float64) < probability).nonzero().view(-1)
            for _ in range(WORKERS)
        ]


def check_rows(inputs: Tensor) -> None:
    """Make sure that the rows of the embedding's gradient are the words of the batch."""
    model = LSTM(words=WORDS, width=WIDTH, hidden=32, sparse=False)
    model(inputs, inputs, model.sample(256, torch.Generator().manual_seed(0))).backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert torch.equal(sparsity.nonzero(gradient, WIDTH), torch.unique(inputs))


def boundaries(indices: Tensor) -> Servers:
    """Return servers whose parts of these ascending indices are even; equal ones stay together."""
    places = torch.arange(1, WORKERS) * indices.numel() // WORKERS
    bounds = indices[places]
    return lambda rows: torch.searchsorted(bounds, rows, right=True)


def cuts(touched: Sequence[Tensor]) -> dict[str, Servers]:
    """Return both ways to cut by the rows that all workers touch in a step."""
    pushed = torch.cat(list(touched))
    return {"union": boundaries(torch.unique(pushed)), "pushed": boundaries(pushed.sort().values)}


def imbalances(steps: Iterator[list[Tensor]], rows: int) -> dict[str, Any]:
    """Return of each way to choose servers the least, median and greatest imbalance of the steps after the first."""
    first = next(steps)
    balanced = Balanced(length=rows * WIDTH, servers=WORKERS)
    by_rows = Balanced(length=rows, servers=WORKERS)
    fixed: dict[str, Servers] = {f"{name} of the first step": cut for name, cut in cuts(first).items()}
    fixed["even ranges"] = lambda indices: indices * WORKERS // rows
    fixed["Zen, rows"] = lambda indices: by_rows.spread.owners(indices.int()).long()
    push: dict[str, list[float]] = {}
    pull: dict[str, list[float]] = {}
    densities, count = [], 0
    for touched in steps:
        count += 1
        densities += [each.numel() / rows for each in touched]
        now: Mapping[str, Servers] = {f"{name} of this step": cut for name, cut in cuts(touched).items()} | fixed
        for name, servers in now.items():
            push.setdefault(name, []).append(sparsity.push_imbalance(touched, WORKERS, servers))
            pull.setdefault(name, []).append(sparsity.pull_imbalance(touched, WORKERS, servers))
        elements = [_elements(each) for each in touched]
        name = "Zen, elements"
        push.setdefault(name, []).append(
            sparsity.push_imbalance(elements, WORKERS, lambda indices: balanced.spread.owners(indices).long())
        )
        union = _elements(torch.unique(torch.cat(touched)))
        pull.setdefault(name, []).append(
            sparsity.pull_imbalance([union], WORKERS, lambda indices: balanced.spread.owners(indices).long())
        )
    return {
        "steps": count,
        "density": statistics.fmean(densities),
        "push": {name: _range(values) for name, values in push.items()},
        "pull": {name: _range(values) for name, values in pull.items()},
    }


def _elements(rows: Tensor) -> Tensor:
    return (rows.int()[:, None] * WIDTH + torch.arange(WIDTH, dtype=torch.int32)).view(-1)


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def main() -> None:
    """Count, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1000, help="after those that chose (the thesis: 1000)")
    arguments.add_argument("--drawn-steps", type=int, default=50, help="of rows drawn independently in each step")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = read_words(WORDS)
    check_rows(next(anywhere(text))[0])

    def words_of(batches: Iterator[list[Tensor]]) -> Iterator[list[Tensor]]:
        return ([torch.unique(inputs) for inputs in batch] for batch in batches)

    rows = DRAWN_ELEMENTS // WIDTH
    probability = row_probability(WORKLOADS["NMT"], rows)
    results = {
        "windows anywhere": imbalances(words_of(islice(anywhere(text), options.steps + 1)), WORDS),
        "windows in order": imbalances(words_of(islice(in_order(text), options.steps + 1)), WORDS),
        "NMT, drawn": imbalances(islice(drawn(rows, probability), options.drawn_steps + 1), rows),
    }
    for case, found in results.items():
        table(
            f"{case}: imbalance over {found['steps']} steps, {WORKERS} servers, density {found['density']:.2%}",
            ("servers", "Push: least", "median", "most", "Pull: least", "median", "most"),
            [
                (name, *(f"{found[phase][name][key]:.2f}" for phase in ("push", "pull") for key in found[phase][name]))
                for name in found["push"]
            ],
        )
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={
            "steps": options.steps,
            "drawn_steps": options.drawn_steps,
            "workers": WORKERS,
            "batch": BATCH,
            "context": CONTEXT,
        },
        results=results,
    )


if __name__ == "__main__":
    main()
