"""One operation, one contract, three implementations: torch reference, numba on the CPU, numba on CUDA.

Some find how long their result is. On a GPU the CPU has to read that, and reads for several gradients at once.
"""

import functools
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import OpError
from .kernels import try_cuda

Backend = Literal["reference", "cpu", "cuda"]
_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)


Finding = Generator[Tensor, list[int], _R]
"""Yields 1-D integers that the CPU has to read to go on, is sent them, and returns a result."""


class Reading(Generic[_P, _R]):
    """Makes a function of one that returns a `Finding`; a call reads whenever that asks for it.

    Attributes:
        finding: The function that was given, to be carried out beside others.
    """

    def __init__(self, finding: Callable[_P, Finding[_R]]) -> None:
        self.finding = finding
        functools.update_wrapper(self, finding)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return the result."""
        return run_alone(self.finding(*args, **kwargs))


def run_alone(finding: Finding[_R]) -> _R:
    """Return the result, and read whenever it is asked for."""
    try:
        numbers = next(finding)
        while True:
            numbers = finding.send(numbers.tolist())
    except StopIteration as ended:
        found: _R = ended.value
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Op(Generic[_P, _R]):
    """An operation on tensors that runs where its first argument lives.

    All implementations have the same signature and, unless the operation says otherwise, the same result bit for bit.

    Attributes:
        name: What errors and benchmarks call it.
        reference: Plain torch, on any device: the specification.
        cpu: Numba on the memory of CPU tensors.
        cuda: Numba kernels on CUDA tensors, on torch's current stream; in numba's CUDA simulator on CPU tensors.
    """

    name: str
    reference: Callable[_P, _R]
    cpu: Callable[_P, _R]
    cuda: Callable[_P, _R]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run on the device of the first argument; where there are no kernels of ours, that is the reference."""
        first = args[0]
        if not isinstance(first, torch.Tensor):
            raise OpError(f"{self.name}: the first argument is a {type(first).__name__}; pass a tensor")
        return self.on(backend_of(first.device))(*args, **kwargs)

    def finding(self, *args: _P.args, **kwargs: _P.kwargs) -> Finding[_R]:
        """Do the same as a call, but let the CPU read together with what others find (`Finding`)."""
        implementation = self.on(backend_of(args[0].device))  # type: ignore[attr-defined]
        if isinstance(implementation, Reading):
            found: _R = yield from implementation.finding(*args, **kwargs)
            return found
        return implementation(*args, **kwargs)

    def on(self, backend: Backend) -> Callable[_P, _R]:
        """Return the implementation of `backend`."""
        implementation: Callable[_P, _R] = getattr(self, backend)
        return implementation


def backend_of(device: torch.device) -> Backend:
    """Return what runs where a tensor is."""
    match device.type:
        case "cpu":
            return "cpu"
        case "cuda":
            return _on_gpu(device)
        case _:
            return "reference"


@functools.cache
def _on_gpu(device: torch.device) -> Backend:
    try:
        try_cuda(device)
    except torch.OutOfMemoryError:
        raise  # says nothing about the next time
    except Exception as error:  # noqa: BLE001 - numba, its CUDA part and the driver each have errors of their own
        _log.warning(
            "gradients on %s are compressed by torch's operations, because kernels cannot be compiled for it (%s: %s): "
            "pip install 'resilient-run[cuda]'",
            device,
            type(error).__name__,
            error,
        )
        return "reference"
    return "cuda"
