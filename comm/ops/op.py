"""One operation, one contract, three implementations: torch reference, numba on the CPU, numba on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, ParamSpec, TypeVar

import torch

from ..errors import OpError

Backend = Literal["reference", "cpu", "cuda"]
_P = ParamSpec("_P")
_R = TypeVar("_R")


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
        """Run on the device of the first argument; devices without kernels of ours take the reference."""
        first = args[0]
        if not isinstance(first, torch.Tensor):
            raise OpError(f"{self.name}: the first argument is a {type(first).__name__}; pass a tensor")
        return self.on(_BACKEND_OF.get(first.device.type, "reference"))(*args, **kwargs)

    def on(self, backend: Backend) -> Callable[_P, _R]:
        """Return the implementation of `backend`."""
        implementation: Callable[_P, _R] = getattr(self, backend)
        return implementation


_BACKEND_OF: dict[str, Backend] = {"cpu": "cpu", "cuda": "cuda"}
