"""Gradients for tests of sparse schemes, what one rank saw of a few steps, and the laws that it must obey."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resilient_run.comm.spardl.sparse_scheme import SparseScheme


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """Make heavy-tailed values whose places overlap between ranks in part."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shared = torch.randn(numel, generator=torch.Generator().manual_seed(step))
    return (shared + torch.randn(numel, generator=generator)) ** 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one rank had and got, step by step; words and rounds are of the last step."""

    inputs: list[Tensor]
    totals: list[Tensor]
    residuals: list[Tensor]
    received_words: float
    rounds: int


def run_steps(scheme: SparseScheme, inputs: Iterable[Tensor]) -> Run:
    """Reduce the inputs one after the other."""
    given, totals, residuals = [], [], []
    for tensor in inputs:
        scheme.transport.traffic.reset()
        given.append(tensor.clone())
        totals.append(scheme.reduce("w", tensor.clone()))
        residual = scheme.state_dict()["residuals"].get("w")
        residuals.append(torch.zeros(tensor.numel()) if residual is None else residual.clone())
    traffic = scheme.transport.traffic
    return Run(
        inputs=given,
        totals=totals,
        residuals=residuals,
        received_words=traffic.received_bytes / 4,
        rounds=traffic.rounds,
    )


def check_all_agree(runs: Sequence[Run]) -> None:
    """All ranks have the same sums, bit for bit."""
    for run in runs[1:]:
        assert all(torch.equal(found, first) for found, first in zip(run.totals, runs[0].totals, strict=True))


def lost_share(runs: Sequence[Run]) -> float:
    """Return how far the sums so far and the residuals of all ranks are from all that was put in, relative to it."""
    put = sum(torch.stack(run.inputs).double().view(len(run.inputs), -1).sum(0) for run in runs)
    got = torch.stack(runs[0].totals).double().view(len(runs[0].totals), -1).sum(0)
    left = sum(run.residuals[-1].double() for run in runs)
    assert isinstance(put, Tensor)
    return float((got + left - put).norm() / put.norm().clamp(min=1e-300))


def check_nothing_lost(runs: Sequence[Run]) -> None:
    """The sums so far and the residuals of all ranks are all that was put in."""
    assert lost_share(runs) <= 1e-6
