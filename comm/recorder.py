"""Keeps the gradients of a training job's first steps in files, each rank its own, before they are summed."""

import os
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import FileError
from .sparsity import density

_SPARSE_BELOW = 1 / 4


class GradientRecorder:
    """Writes `rank<r>-step<n>.pt` for the first steps: a dict of name → gradient, which `resilient-comm stats` reads.

    It hooks on the parameters, so under DDP it sees what this rank computed, not the average.

    Args:
        model: Bare, or in DistributedDataParallel.
        directory: Made if it is not there; one for all ranks, or one on each host.
        steps: How many to keep; after them it does nothing.
        rank: Part of the file names; by default the environment's RANK, or 0.
    """

    def __init__(self, model: nn.Module, directory: Path, *, steps: int = 3, rank: int | None = None) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._steps = steps
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._step = 0
        self._found: dict[str, Tensor] = {}
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._handles = [self._watch(name, parameter) for name, parameter in inner.named_parameters()]

    def step(self) -> None:
        """Record that a step is done: writes what its backward passes have left in the gradients."""
        if self._step == self._steps:
            return
        self._step += 1
        torch.save(self._found, self._directory / f"rank{self._rank}-step{self._step}.pt")
        self._found = {}
        if self._step == self._steps:
            for handle in self._handles:
                handle.remove()

    def _watch(self, name: str, parameter: Tensor) -> RemovableHandle:
        def keep(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            gradient = gradient.detach().cpu()
            if gradient.is_sparse:
                self._found[name] = gradient.coalesce().clone()
            elif gradient.dim() and density(gradient) < _SPARSE_BELOW:
                self._found[name] = gradient.to_sparse(1)
            else:
                self._found[name] = gradient.clone()

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
        return handle


def read_gradients(path: Path) -> dict[str, Tensor]:
    """Return name → gradient of a file of `torch.save`: a dict of tensors, or one tensor, which is named "gradient".

    Raises:
        FileError: It is none, or holds something else.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise FileError(f"{path} cannot be read as tensors; save a dict of them with torch.save: {error}") from error
    gradients = {"gradient": found} if isinstance(found, Tensor) else found
    if not isinstance(gradients, dict) or not gradients:
        raise FileError(f"{path} holds a {type(found).__name__}; save a dict of tensors with torch.save")
    for name, gradient in gradients.items():
        if not isinstance(name, str) or not isinstance(gradient, Tensor) or not gradient.is_floating_point():
            raise FileError(f"{path}: {name!r} is not a gradient; save a dict of floating-point tensors")
    return gradients
