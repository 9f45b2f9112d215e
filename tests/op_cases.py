"""What the tests of operations share: backends, gradients that are hard to handle, and equality of bits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import pytest
import torch
from torch import Tensor

from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.ops.kernels import bits
from resilient_run.comm.ops.op import Backend, Op
from resilient_run.comm.zen.histogram import Parts

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs operations on one backend with tensors of the CPU, and returns tensors of the CPU."""

    backend: Backend
    device: str = "cpu"

    @property
    def simulated(self) -> bool:
        """Whether a thread of the kernels takes about a millisecond."""
        return self.backend == "cuda" and self.device == "cpu"

    def __call__(self, op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        moved: list[Any] = [arg.to(self.device) if isinstance(arg, Tensor) else arg for arg in args]
        run = op.on(self.backend) if isinstance(op, Op) else op
        result: R = _to_cpu(run(*moved, **kwargs))  # type: ignore[arg-type]
        return result


def _to_cpu(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(_to_cpu, result))
    return result


# With a GPU numba has no simulator, and nothing to simulate.
RUNNERS = pytest.mark.parametrize(
    "run",
    [
        pytest.param(Runner(backend="reference"), id="reference"),
        pytest.param(Runner(backend="cpu"), id="cpu"),
        *(
            (
                pytest.param(Runner(backend="cuda", device="cuda"), id="gpu", marks=pytest.mark.gpu),
                pytest.param(Runner(backend="reference", device="cuda"), id="reference-gpu", marks=pytest.mark.gpu),
            )
            if torch.cuda.is_available()
            else (pytest.param(Runner(backend="cuda"), id="simulator"),)
        ),
    ],
)


def lists(found: Parts) -> list[Coo]:
    """Return the places and values of each part."""
    each = zip(found.places.split(found.counts), found.values.split(found.counts), strict=True)
    return [Coo(indices, values) for indices, values in each]


def sparse(numel: int, density: float, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers with zeros between them."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=random)
    return torch.where(torch.rand(numel, generator=random) < density, values, 0).to(dtype)


def mixed(dtype: torch.dtype) -> Tensor:
    """Return all that a gradient can hold."""
    numbers = [0.0, 1.0, -0.0, -2.5, 0.0, float("inf"), float("nan"), -float("inf"), 1.0, -1.0, 1.0, 6e-8, 0.0, 3.0]
    return torch.tensor(numbers, dtype=dtype)


GRADIENTS = {
    "empty": torch.empty(0),
    "empty 2-D": torch.empty(3, 0),
    "scalar": torch.tensor(2.0),
    "one": torch.tensor([-3.0]),
    "one zero": torch.zeros(1),
    "all zero": torch.zeros(19),
    "dense": torch.arange(1.0, 35.0),
    "equal": torch.full((33,), -1.0),
    "sparse": sparse(35, 0.2),
    "last only": torch.nn.functional.one_hot(torch.tensor(32), 33).float(),
    "2-D": sparse(35, 0.5).view(5, 7),
    "transposed": sparse(35, 0.5).view(5, 7).t(),
    "strided": sparse(66, 0.5)[::2],
    "requires grad": sparse(9, 0.5).requires_grad_(),
} | {str(dtype): mixed(dtype) for dtype in DTYPES}

EACH_GRADIENT = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS.keys())


def same(found: Iterable[Any], expected: Iterable[Any]) -> None:
    """Assert that tuples are equal, tensors in dtype, shape and bits."""
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert torch.equal(bits(ours.detach().contiguous()), bits(theirs.detach().contiguous()))
        else:
            assert ours == theirs


def huge() -> Tensor:
    """Return a tensor of 2^31 elements that takes no memory."""
    return torch.zeros(1).expand(2**31)
