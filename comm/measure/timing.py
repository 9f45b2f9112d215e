"""How long a scheme takes on one gradient."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compress.powersgd import PowerSGD
from ..compress.quantized import TwoStep
from ..net.entries import kept_count
from ..net.scheme import Dense, Scheme
from ..net.transport import Transport
from ..ops.coo import coo_decode
from ..ops.topk import topk
from ..schemes import named
from ..spardl.sparse_scheme import SparseScheme

_SHARED, _OWN = 0.5, 1.0
_KEY = "gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one scheme did on one rank, or on the rank with the greatest number.

    Attributes:
        step_s: Seconds of each step, computing included; of the slowest rank.
        received_bytes: In the last step; of the rank that received most.
        header_bytes: Sizes announced in the last step; likewise.
        rounds: Exchanges in the last step that had to follow each other; likewise.
    """

    step_s: list[float]
    received_bytes: int
    header_bytes: int
    rounds: int


def example_gradient(numel: int, rank: int, step: int) -> Tensor:
    """Return heavy-tailed values, in part at the same places on all ranks and in consecutive steps; seeded."""

    def normal(seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    return (_SHARED * normal(0) + _OWN * normal(1 + 1000 * rank + step)) ** 3


def scheme_at(name: str, transport: Transport, density: float) -> Scheme:
    """Return a scheme of that name; one that sparsifies sends `density` of each gradient."""
    scheme = named(name, transport)
    if isinstance(scheme, SparseScheme):
        scheme.density = density
    return scheme


def inputs_for(scheme: Scheme, gradients: Sequence[Tensor], density: float) -> Iterator[Tensor]:
    """Return what the scheme is to sum in each step: the gradients, if it sparsifies them itself or takes all.

    Others get only the greatest elements of the first one, in every step: as if a sparsifier had gone before, or an
    embedding had few rows in use.
    """
    dense = isinstance(scheme, SparseScheme | TwoStep | PowerSGD | Dense)
    first = gradients[0]
    sparse = first if dense else coo_decode(*topk(first, kept_count(first.numel(), density)), first.numel())
    return (gradient.clone() if dense else sparse.clone() for gradient in gradients)


def measure(scheme: Scheme, transport: Transport, gradients: Iterable[Tensor], *, warm_up: int = 1) -> Measurement:
    """Reduce gradients, one in each step, and return what that took; all ranks call it and get the same.

    Args:
        scheme: On `transport`.
        transport: The ranks.
        gradients: At least one.
        warm_up: First steps that are not measured where others follow, because they allocate memory or plan.
    """
    step_s: list[float] = []
    for gradient in gradients:
        transport.traffic.reset()
        began_s = started_together(transport)
        scheme.reduce(_KEY, gradient)
        step_s.append(seconds_since(began_s, transport))
    traffic = transport.traffic
    received_bytes, header_bytes, rounds = greatest(
        transport, [traffic.received_bytes, traffic.header_bytes, traffic.rounds]
    )
    step_s = greatest(transport, step_s)
    return Measurement(
        step_s=step_s[warm_up:] or step_s,
        received_bytes=round(received_bytes),
        header_bytes=round(header_bytes),
        rounds=round(rounds),
    )


def started_together(transport: Transport) -> float:
    """Return the time at which all ranks have come here."""
    greatest(transport, [0.0])
    return time.monotonic()


def seconds_since(began_s: float, transport: Transport) -> float:
    """Return how long ago that was, once this rank's GPU has done its work."""
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)
    return time.monotonic() - began_s


def greatest(transport: Transport, numbers: Sequence[float]) -> list[float]:
    """Return the greatest of each number over all ranks, which is not counted as traffic."""
    with transport.uncounted():
        found: list[float] = transport.gather_numbers(torch.tensor(numbers, dtype=torch.float64)).amax(0).tolist()
    return found
