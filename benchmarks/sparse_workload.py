"""Gradients with the densities, overlap and skew of the models in the Zen chapter's evaluation, of any size.

Rows of an embedding are touched with a probability that falls with the row's rank in frequency, min(1, c·x^-a): c gives
the density of one GPU's gradient (Table 3.1), a the skew and, with it, the overlap. For a = 1 it has the densification
that the thesis tells of BERT (38.5 over 128 GPUs), for a between 0.9 and 1.1 the share of the first of eight partitions
(over 60 %). A host's gradient is the sum of its GPUs', as dense reduce-scatter within the host leaves it.
"""

from dataclasses import dataclass

import torch
from recording import example_gradient
from torch import Tensor

WIDTH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One embedding.

    Attributes:
        millions: Elements at full size.
        density: Of one GPU's gradient.
        exponent: a; None for the greatest elements of a gradient without zeros (DGC).
        paper_speedup: Of Zen over AllReduce with 16 machines at 25 Gbit/s (thesis 3.4.2); None if not told.
    """

    millions: float
    density: float
    exponent: float | None
    paper_speedup: float | None


WORKLOADS = {
    "LSTM": Workload(millions=406, density=0.0113, exponent=1.6, paper_speedup=6.77),
    "DeepFM": Workload(millions=214, density=0.028, exponent=1.1, paper_speedup=2.10),
    "NMT": Workload(millions=112, density=0.0247, exponent=0.9, paper_speedup=1.97),
    "BERT": Workload(millions=23, density=0.0106, exponent=1.0, paper_speedup=3.0),
    "DGC 5 %": Workload(millions=110, density=0.05, exponent=None, paper_speedup=None),
}


def row_probability(workload: Workload, rows: int) -> Tensor:
    """Return with what probability one GPU touches each row."""
    assert workload.exponent is not None
    falling = ((torch.arange(rows, dtype=torch.float64) + 0.5) / rows).pow(-workload.exponent)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if (middle * falling).clamp(max=1).mean() < workload.density:
            low = middle
        else:
            high = middle
    return (high * falling).clamp(max=1)


def gradient(workload: Workload, rank: int, *, elements: int, gpus: int) -> Tensor:
    """Return the gradient of a host of `gpus` GPUs, (rows, WIDTH), scaled to `elements`; of DGC one GPU's."""
    rows = elements // WIDTH
    generator = torch.Generator().manual_seed(rank)
    if workload.exponent is None:
        values = example_gradient(rows * WIDTH, rank, 0)
        kept = values.abs().topk(round(workload.density * values.numel())).indices
        return torch.zeros_like(values).index_copy_(0, kept, values[kept]).view(rows, WIDTH)
    touched = 1 - (1 - row_probability(workload, rows)).pow(gpus)
    present = torch.rand(rows, generator=generator, dtype=torch.float64) < touched
    return torch.randn(rows, WIDTH, generator=generator) * present[:, None]
