"""How do the bytes of sparse schemes grow up to 128 ranks, over dense all-reduce's (Zen, Fig. 3.7, and ZEN, Fig. 8)?

Bytes, counted, not time: in each phase of a scheme those of the busiest adapter, of what it sends or receives, as the
thesis computes its times. Gradients are of real text, one batch for each rank (the tables of `zen_gradients.py`, after
some steps of training), and one is drawn like the embedding of NMT, the model of the figure, at its full size
(`sparse_workload.py`), and once more as sparse as with a batch of one. As there, a rank is one GPU on a machine of its
own, and messages are written as each scheme proposes: coordinates, and blocks of 256 elements for OmniReduce. Zen is
shown in three steps: Balanced Parallelism with coordinates, with whichever format is smallest, and with that by rows;
beside them is what no format can undercut, Balanced Parallelism without any index.

The imbalance of Push and Pull (Fig. 3.15) is that of the same gradients and of those drawn like other models, as many
workers as servers. DeepFM is drawn once more with rows that are touched in runs of neighbours.

    python benchmarks/zen_scaling.py --json FILE.json --plot FILE.svg
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import sparsity
import torch
from baselines.rows import Even
from report import parser, table, write_json
from sparse_workload import WIDTH, WORKLOADS, Workload, row_probability
from torch import Tensor
from zen_gradients import Bigrams, Words, gradients

from resilient_run.comm.ops.block import BLOCK
from resilient_run.comm.zen.formats import ALL, Format, cheapest, payload_bytes
from resilient_run.comm.zen.partition import Balanced

RANKS: Final = (2, 4, 8, 16, 32, 64, 128)
ITEM_BYTES: Final = 4
RUN: Final = 64
BATCH_OF_ONE: Final = 0.001
"""The density of NMT then, "less than 0.1 %" (ZEN, Section 2.4)."""
COO: Final = (Format.COO,)
PARALLEL: Final[dict[str, tuple[type[Even | Balanced], int, tuple[Format, ...]]]] = {
    "sparse-ps": (Even, 1, COO),
    "omnireduce": (Even, BLOCK, COO),
    "balanced, COO": (Balanced, 1, COO),
    "balanced, smallest format": (Balanced, 1, ALL),
    "balanced, no index": (Balanced, 1, ()),
    "zen": (Balanced, WIDTH, ALL),
}
"""Scheme with a server on each rank → who sums what, elements under one index, and formats (none: values alone)."""
SCHEMES: Final = ("agsparse", "sparcml", *PARALLEL)
BALANCES: Final = {"Sparse PS": "sparse-ps", "Zen, elements": "balanced, COO", "Zen, rows": "zen"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The bytes that each rank sends and receives before it goes on."""

    sent: Tensor
    received: Tensor

    @property
    def busiest(self) -> int:
        """What the adapter with most to do sends or receives."""
        return int(max(self.sent.max(), self.received.max()))


def phases(scheme: str, touched: Sequence[Tensor], rows: int) -> Iterator[Phase]:
    """Yield the phases of a scheme.

    Args:
        scheme: One of `SCHEMES`; `sparcml` for a power of two ranks only.
        touched: Of each rank, the rows of its gradient that are not zero, ascending; all of their elements count.
        rows: Of the table, of `WIDTH` elements each.
    """
    ranks = len(touched)
    if scheme == "agsparse":
        own = torch.tensor([_message(each, rows, 1, COO) for each in touched])
        yield Phase(sent=(ranks - 1) * own, received=own.sum() - own)
    elif scheme == "sparcml":
        for distance in (1 << turn for turn in range(ranks.bit_length() - 1)):
            sizes = [
                _message(_union(touched[start : start + distance]), rows, 1, COO) for start in range(0, ranks, distance)
            ]
            sent = torch.tensor([sizes[rank // distance] for rank in range(ranks)])
            partners = torch.tensor([rank ^ distance for rank in range(ranks)])
            yield Phase(sent=sent, received=sent[partners])
    else:
        cut, unit, formats = _servers(scheme, rows, ranks)
        sizes = [cut.size(server) for server in range(ranks)]

        def shares(rows_of: Tensor) -> Tensor:
            counts: list[int] = _loads(cut, rows_of, unit).tolist()
            return torch.tensor([_bytes(count, size, unit, formats) for count, size in zip(counts, sizes, strict=True)])

        pushed = torch.stack([shares(each) for each in touched]).fill_diagonal_(0)
        yield Phase(sent=pushed.sum(1), received=pushed.sum(0))
        pulled = shares(_union(touched))
        yield Phase(sent=(ranks - 1) * pulled, received=pulled.sum() - pulled)


def over_dense(scheme: str, touched: Sequence[Tensor], rows: int) -> float:
    """Return the bytes of the busiest adapters over those of an all-reduce round a ring."""
    ranks = len(touched)
    dense = 2 * (ranks - 1) / ranks * rows * WIDTH * ITEM_BYTES
    return sum(phase.busiest for phase in phases(scheme, touched, rows)) / dense


def imbalance(scheme: str, touched: Sequence[Tensor], rows: int) -> dict[str, float]:
    """Return how many times its even share the fullest server gets (thesis, Definition 3.6)."""
    servers = len(touched)
    cut, unit, _ = _servers(scheme, rows, servers)

    def fullest(rows_of: Tensor) -> float:
        loads = _loads(cut, rows_of, unit)
        return servers * int(loads.max()) / int(loads.sum())

    return {"push": max(map(fullest, touched)), "pull": fullest(_union(touched))}


def _servers(scheme: str, rows: int, servers: int) -> tuple[Even | Balanced, int, tuple[Format, ...]]:
    kind, unit, formats = PARALLEL[scheme]
    return kind(length=-(-rows * WIDTH // unit), servers=servers), unit, formats


def _message(touched: Tensor, rows: int, unit: int, formats: tuple[Format, ...]) -> int:
    return _bytes(touched.numel() * WIDTH // unit, rows * WIDTH // unit, unit, formats)


def _bytes(count: int, length: int, unit: int, formats: tuple[Format, ...]) -> int:
    if not formats:
        return count * unit * ITEM_BYTES
    form = cheapest(formats, count=count, length=length, row_bytes=unit * ITEM_BYTES)
    return payload_bytes(form, count=count, length=length, row_bytes=unit * ITEM_BYTES) if count else 0


def _union(touched: Sequence[Tensor]) -> Tensor:
    return torch.unique(torch.cat(list(touched)))


def _loads(cut: Even | Balanced, rows: Tensor, unit: int) -> Tensor:
    """Return how many units of so many elements each server has of these rows, which are ascending."""
    if isinstance(cut, Even):
        ends = torch.tensor([cut.size(server) for server in range(cut.servers)]).cumsum(0)
        return _before(rows, ends, unit).diff(prepend=torch.zeros(1, dtype=torch.long))
    if unit == 1:
        # Each stripe of as many elements as there are servers has one of each (`Spread`), and rows are whole stripes.
        assert WIDTH % cut.servers == 0
        return torch.full((cut.servers,), rows.numel() * WIDTH // cut.servers)
    return torch.bincount(cut.spread.owners(rows.int()).long(), minlength=cut.servers)


def _before(rows: Tensor, ends: Tensor, unit: int) -> Tensor:
    """Return how many units that have something of these rows come before each of `ends`."""
    if unit > WIDTH:
        return torch.searchsorted(torch.unique_consecutive(rows // (unit // WIDTH)), ends)
    begun, rest = ends // WIDTH, ends % WIDTH
    return torch.searchsorted(rows, begun) * WIDTH + torch.isin(begun, rows) * rest


def real(ranks: int, steps: int) -> Iterator[tuple[str, int, list[Tensor]]]:
    """Train each model of real text for so many steps of 16 ranks; yield its tables, and what each rank touches."""
    for kind in (Words, Bigrams):
        model = kind(ranks)
        gradients(model, 16, steps)
        touched: dict[str, list[Tensor]] = {name: [] for name in model.tables}
        for rank in range(ranks):
            model.module.zero_grad()
            model.loss(rank).backward()
            for name, parameter in model.tables.items():
                assert parameter.grad is not None
                touched[name].append(sparsity.nonzero(parameter.grad, WIDTH))
        yield from ((name, len(parameter), touched[name]) for name, parameter in model.tables.items())


def drawn(workload: Workload, ranks: int, run: int = 1) -> tuple[int, list[Tensor]]:
    """Return the rows of a workload at its full size, and those that each rank touches, in runs of so many."""
    runs = round(workload.millions * 1e6) // WIDTH // run
    probability = row_probability(workload, runs)
    random = torch.Generator().manual_seed(0)
    present = (torch.rand(runs, generator=random, dtype=torch.float64) < probability for _ in range(ranks))
    return runs * run, [each.repeat_interleave(run).nonzero().view(-1) for each in present]


def describe(rows: int, touched: Sequence[Tensor]) -> dict[str, Any]:
    """Return by ranks how dense sums are, and each scheme's bytes over all-reduce's."""
    return {
        "rows": rows,
        "density": sum(each.numel() for each in touched) / len(touched) / rows,
        "density_of_sum": {ranks: _union(touched[:ranks]).numel() / rows for ranks in RANKS},
        "over_dense": {
            scheme: {ranks: over_dense(scheme, touched[:ranks], rows) for ranks in RANKS} for scheme in SCHEMES
        },
    }


def balance(rows: int, touched: Sequence[Tensor]) -> dict[str, dict[int, dict[str, float]]]:
    """Return who → servers → imbalance of Push and Pull."""
    return {
        who: {ranks: imbalance(scheme, touched[:ranks], rows) for ranks in RANKS} for who, scheme in BALANCES.items()
    }


def plot(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the figure; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(1, len(results), figsize=(3.5 * len(results), 3.5), sharey=True)
    for axes, (name, found) in zip(grid, results.items(), strict=True):
        for scheme, by_ranks in found["over_dense"].items():
            axes.plot(list(by_ranks), list(by_ranks.values()), "o-", markersize=3, label=scheme)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axes.set_ylim(0, 2.5)
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("ranks")
    grid[0].set_ylabel("bytes over dense all-reduce's")
    grid[0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Count, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=20, help="of training, before the gradients are taken")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nmt = WORKLOADS["NMT"]
    gradients_of = {
        "NMT, drawn": drawn(nmt, RANKS[-1]),
        "NMT, drawn, batch of one": drawn(replace(nmt, density=BATCH_OF_ONE), RANKS[-1]),
    }
    gradients_of |= {name: (rows, touched) for name, rows, touched in real(RANKS[-1], options.steps)}
    results = {name: describe(*of) for name, of in gradients_of.items()}
    balances = {name: balance(*of) for name, of in gradients_of.items()}
    balances |= {f"{name}, drawn": balance(*drawn(WORKLOADS[name], RANKS[-1])) for name in ("LSTM", "DeepFM", "BERT")}
    balances[f"DeepFM, drawn, runs of {RUN}"] = balance(*drawn(WORKLOADS["DeepFM"], RANKS[-1], RUN))
    for name, found in results.items():
        table(
            f"{name}, {found['rows']:,} rows, density {found['density']:.2%}: bytes over dense all-reduce's",
            ("ranks", "density of the sum", *SCHEMES),
            [
                (
                    str(ranks),
                    f"{found['density_of_sum'][ranks]:.1%}",
                    *(f"{found['over_dense'][scheme][ranks]:.2f}" for scheme in SCHEMES),
                )
                for ranks in RANKS
            ],
        )
    table(
        "Imbalance of Push and Pull",
        ("gradient, servers", *(f"{who}, {side}" for who in BALANCES for side in ("push", "pull"))),
        [
            (f"{name}, {ranks}", *(f"{value:.2f}" for who in BALANCES for value in found[who][ranks].values()))
            for name, found in balances.items()
            for ranks in RANKS
        ],
    )
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={"ranks": RANKS, "steps": options.steps},
        results=results | {"imbalance": balances},
    )
    if options.plot is not None:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
