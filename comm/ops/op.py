"""One operation, one contract, up to three implementations: torch reference, numba on the CPU, numba on CUDA."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

from ..errors import OpError
from .kernels import try_cuda

Backend = Literal["reference", "cpu", "cuda"]
_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op(Generic[_P, _R]):
    """An operation on tensors that runs where its first argument lives.

    All implementations take the same and have, unless the operation says otherwise, the same result bit for bit.

    Attributes:
        name: What errors and benchmarks call it.
        check: Has the signature and the contract; checks the arguments, and returns those of the implementations.
        reference: Plain torch, on any device: the specification.
        cpu: Numba on the memory of CPU tensors; None where torch is as fast.
        cuda: Numba kernels on CUDA tensors, on torch's current stream; in numba's CUDA simulator on CPU tensors. None
            where torch is as fast.
    """

    name: str
    check: Callable[_P, tuple[Any, ...]]
    reference: Callable[..., _R]
    cpu: Callable[..., _R] | None = None
    cuda: Callable[..., _R] | None = None

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run on the device of the first argument; where there are no kernels of ours, that is the reference."""
        first = args[0]
        if not isinstance(first, torch.Tensor):
            raise OpError(f"{self.name}: the first argument is a {type(first).__name__}; pass a tensor")
        return self.on(backend_of(first.device))(*args, **kwargs)

    def on(self, backend: Backend) -> Callable[_P, _R]:
        """Return the implementation of `backend`; the reference where it has none of its own."""
        run = getattr(self, backend) or self.reference

        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            result: _R = run(*self.check(*args, **kwargs))
            return result

        return checked


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
            "pip install 'numba-cuda>=0.20' 'numpy<2.5'",
            device,
            type(error).__name__,
            error,
        )
        return "reference"
    return "cuda"
