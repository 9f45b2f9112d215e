"""How torch tensors become arguments of numba kernels: on the CPU, on CUDA, and in numba's CUDA simulator."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from numba import config, cuda, njit
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OpError

_F = TypeVar("_F", bound=Callable[..., Any])

MAX_NUMEL = 2**31 - 1
"""Indices are int32, so no tensor may have more elements."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_THREADS_PER_BLOCK = 256
_SIMULATED_THREADS_PER_BLOCK = 4


def flat(name: str, dense: Tensor) -> Tensor:
    """Return the elements of a floating-point tensor of any shape in row-major order, without a copy where possible.

    Raises:
        OpError: It is not floating point, or has more than `MAX_NUMEL` elements.
    """
    if not dense.is_floating_point():
        raise OpError(f"{name}: a gradient is floating point, this tensor is {dense.dtype}; convert it")
    check_numel(name, dense.numel())
    return dense.detach().reshape(-1).contiguous()


def check_numel(name: str, numel: int) -> None:
    """Raise OpError when the elements of a tensor cannot be numbered with int32."""
    if not 0 <= numel <= MAX_NUMEL:
        raise OpError(f"{name}: {numel} elements are not between 0 and {MAX_NUMEL}; split the tensor")


def check_list(name: str, indices: Tensor, values: Tensor | None = None, *, most_dims: int = 1) -> None:
    """Raise OpError unless `indices` is a list of int32, and `values` has as many elements, or rows if it may."""
    if indices.dtype != torch.int32 or indices.dim() != 1:
        raise OpError(f"{name}: indices are 1-D int32, these are {indices.dim()}-D {indices.dtype}; convert them")
    if values is not None and (values.shape[:1] != indices.shape or values.dim() > most_dims):
        raise OpError(f"{name}: {indices.numel()} indices come with values of shape {tuple(values.shape)}; pass pairs")


def check_range(name: str, indices: Tensor, numel: int) -> None:
    """Raise OpError when an index is not in [0, numel): what came from elsewhere is never written past a tensor."""
    low, high = bounds(indices)
    if low < 0 or high >= numel:
        raise OpError(
            f"{name}: indices from {low} to {high} do not fit {numel} elements; pass the tensor they were made from"
        )


def bounds(indices: Tensor) -> tuple[int, int]:
    """Return the least and the greatest of these integers; of none 0 and -1."""
    if not indices.numel():
        return 0, -1
    low, high = torch.stack(torch.aminmax(indices)).tolist()
    return low, high


def bits(tensor: Tensor) -> Tensor:
    """Return the elements as signed integers of their size: kernels move values without knowing their type."""
    return tensor.view(_BITS[tensor.element_size()])


def magnitude_mask(tensor: Tensor) -> int:
    """Return what removes the sign from `bits`: zero of either sign becomes 0, nothing else does."""
    return int(torch.iinfo(_BITS[tensor.element_size()]).max)


def host(tensor: Tensor) -> NDArray[Any]:
    """Return a CPU tensor as the argument of a CPU kernel that calculates: its memory where it is contiguous."""
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


def host_bits(tensor: Tensor) -> NDArray[Any]:
    """Return the `bits` of a CPU tensor as the argument of a CPU kernel: its memory where it is contiguous."""
    return host(bits(tensor.detach().contiguous()))


def cpu_kernel(function: _F) -> _F:
    """Compile `function` for the CPU at its first call; it runs without the interpreter's lock.

    Its machine code is kept on disk, except where no directory can be written and where it calls functions of other
    files: numba looks for changes in the kernel's own file only.
    """
    options = {"nogil": True, "error_model": "numpy"}
    if not _calls_other_files(function):
        try:
            kept: _F = njit(cache=True, **options)(function)
            return kept
        except RuntimeError:  # numba found no directory for its cache
            pass
    compiled: _F = njit(**options)(function)
    return compiled


def cuda_function(function: _F) -> _F:
    """Make `function` callable from CUDA kernels."""
    compiled: _F = cuda.jit(device=True)(function)
    return compiled


class CudaKernel:
    """A numba CUDA kernel, compiled at its first launch; decorates a function that takes arrays and numbers."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._kernel = cuda.jit(function)

    def launch(self, threads: int, *arguments: Tensor | float) -> None:
        """Run at least `threads` threads on torch's current stream (does not wait); nothing when there are none.

        Args:
            threads: How many, at least.
            arguments: Contiguous tensors on one CUDA device, or on the CPU in the simulator, and numbers; half
                precision as `bits`.
        """
        if threads == 0:
            return
        # Numba warns of small grids, which small tensors have by nature.
        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
        per_block = _SIMULATED_THREADS_PER_BLOCK if config.ENABLE_CUDASIM else _THREADS_PER_BLOCK
        blocks = -(-threads // per_block)
        if config.ENABLE_CUDASIM:
            self._kernel[blocks, per_block](*(a if not isinstance(a, Tensor) else host(a) for a in arguments))
            return
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        with torch.cuda.device(device):
            stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
            views = [cuda.as_cuda_array(a.detach()) if isinstance(a, Tensor) else a for a in arguments]
            self._kernel[blocks, per_block, stream](*views)


@CudaKernel
def _nothing_kernel(numbers):  # type: ignore[no-untyped-def]
    pass


def try_cuda(device: torch.device) -> None:
    """Compile a kernel and launch it on a GPU.

    Raises:
        Exception: Whatever numba raises where it cannot be done.
    """
    _nothing_kernel.launch(1, torch.zeros(1, device=device))


def _calls_other_files(function: Callable[..., Any]) -> bool:
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    sources = [getattr(getattr(each, "py_func", None), "__code__", None) for each in called]
    return any(source is not None and source.co_filename != function.__code__.co_filename for source in sources)
