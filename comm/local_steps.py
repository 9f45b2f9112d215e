"""Local steps with an outer optimizer: replicas train by themselves and meet only every so many steps (DiLoCo)."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .errors import CommError
from .net.collectives import broadcast_from
from .net.entries import all_finite
from .net.scheme import Scheme
from .net.transport import Transport, from_bytes, to_bytes
from .runtime.bucket import LEAST_ELEMENTS, BucketSum
from .runtime.chosen import Choice, chosen


class LocalSteps:
    """Lets each rank train a replica of its own, and every so many steps moves all of them to where they agree.

    Example:
        ```
        local = LocalSteps(model, every=100)  # the module itself, not under DDP
        checkpointer = Checkpointer(model=model, optimizer=optimizer, local=local)
        for n in range(checkpointer.restore(), steps):
            train_one_step()  # ends with optimizer.step()
            local.step()
            checkpointer.step(n + 1)
        ```

    A round is DiLoCo's (Douillard et al., 2023, Algorithm 1). The mean of how far the replicas have come in it is the
    pseudo-gradient of an outer SGD with Nesterov momentum, and every replica goes on from the outer parameters. The
    inner optimizer and the buffers of the model stay each replica's own. Outer parameters, momentum and the sum are in
    float32 (float64 if a parameter is).

    The state is that of the outer optimizer, how far the round is, and what the scheme remembers: register this object
    with the `Checkpointer`, and a run that is killed within a round goes on bit for bit.

    Args:
        model: Its trainable parameters, and its buffers, become those of the first rank. A DistributedDataParallel,
            over the ranks of one replica, is looked through.
        every: Steps of a round.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum; 0 for none. With it 0 and `outer_lr` 1, a round ends with the mean of the
            replicas' parameters.
        scheme: What sums the pseudo-gradients, as of `hook.register`.
        group: One rank of each replica, the same place in all of them; None for all ranks, a replica each.
        least_elements: Smaller tensors are all-reduced together.
        options: Of the scheme, if it is a name.

    Raises:
        CommError: An argument is out of its range, there is no such scheme, or the model has sharded parameters or none
            to train.

    Attributes:
        scheme: As given or made; `scheme.transport.traffic` has its bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        scheme: Choice = "dense",
        group: ProcessGroup | None = None,
        least_elements: int = LEAST_ELEMENTS,
        **options: Any,
    ) -> None:
        if every < 1 or not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise CommError(
                f"every {every}, outer_lr {outer_lr}, outer_momentum {outer_momentum}: give at least one step, a "
                f"positive learning rate, and a momentum in [0, 1)"
            )
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        if not self._parameters or any(isinstance(each, DTensor) for each in self._parameters.values()):
            raise CommError("local steps need trainable parameters, whole on each rank: give a module without sharding")
        self._every, self._outer_lr, self._outer_momentum = every, outer_lr, outer_momentum
        world = group or dist.group.WORLD
        assert world is not None
        device = next(iter(self._parameters.values())).device
        ranks = Transport(world, device)
        self._sum = BucketSum(scheme=chosen(scheme, ranks, **options), world=ranks, least_elements=least_elements)
        self._done = 0
        with torch.no_grad():
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                _take_first(tensor, ranks)
            exact = torch.float32
            for parameter in self._parameters.values():
                exact = torch.promote_types(exact, parameter.dtype)
            self._outer = {name: each.detach().to(exact, copy=True) for name, each in self._parameters.items()}
            self._momentum = {name: torch.zeros_like(each) for name, each in self._outer.items() if outer_momentum}

    @property
    def scheme(self) -> Scheme:
        """What sums the pseudo-gradients."""
        return self._sum.scheme

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step that this replica has made; all ranks call it after each step of their inner optimizers.

        The last step of a round ends with the outer step. If the sum has an inf or a NaN, because a replica has
        diverged, all of them go back to where the round began, and a warning says so.

        Returns:
            Whether a round has ended, so that all replicas are equal now.
        """
        self._done += 1
        if self._done % self._every:
            return False
        moved = [(self._outer[name] - each).reshape(-1) for name, each in self._parameters.items()]
        pseudo = torch.cat(moved).div_(self._sum.world.size)
        parts = torch.split(pseudo, [each.numel() for each in moved])
        gradients = {name: part.view_as(self._outer[name]) for name, part in zip(self._outer, parts, strict=True)}
        self._sum.sum_bucket(pseudo, list(gradients.items()))
        if all_finite(pseudo):
            self._descend(gradients)
        else:
            warnings.warn(
                f"local steps: the round that ended with step {self._done} is given up, because the mean of the "
                f"replicas is not finite; all go back to where it began. Look at the inner learning rate",
                RuntimeWarning,
                stacklevel=2,
            )
        for name, parameter in self._parameters.items():
            parameter.copy_(self._outer[name])
        return True

    def differs_between_ranks(self) -> tuple[nn.Module]:
        """Return what replicas hold each in its own way within a round: the `Checkpointer` has it not compared."""
        return (self._model,)

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state, the steps made, and what the scheme remembers; nothing is copied."""
        return {
            "steps": self._done,
            "outer": dict(self._outer),
            "momentum": dict(self._momentum),
            "scheme": self._sum.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        Raises:
            CommError: It is of other parameters, of an outer optimizer with or without momentum where this one is the
                other, or of another scheme.
        """
        match state:
            case {"steps": int(steps), "outer": dict(outer), "momentum": dict(momentum), "scheme": dict(scheme)} if (
                _shapes(outer) == _shapes(self._outer) and _shapes(momentum) == _shapes(self._momentum)
            ):
                self._sum.load_state_dict(scheme)
                self._done = steps
                for mine, saved in ((self._outer, outer), (self._momentum, momentum)):
                    for name, tensor in mine.items():
                        tensor.copy_(saved[name])
            case _:
                raise CommError("this is no state of local steps of such a model; load one of the same options")

    def _descend(self, gradients: Mapping[str, Tensor]) -> None:
        """Make a step of SGD with Nesterov momentum, as torch's."""
        for name, gradient in gradients.items():
            outer = self._outer[name]
            if self._outer_momentum:
                momentum = self._momentum[name].mul_(self._outer_momentum).add_(gradient)
                gradient.add_(momentum, alpha=self._outer_momentum)
            outer.add_(gradient, alpha=-self._outer_lr)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _take_first(tensor: Tensor, ranks: Transport) -> None:
    """Make `tensor` the one of the first rank."""
    if ranks.rank == 0:
        broadcast_from(0, to_bytes(tensor), ranks, size_bytes=tensor.nbytes)
    else:
        (whole,) = from_bytes(broadcast_from(0, None, ranks, size_bytes=tensor.nbytes), (tensor.dtype, tensor.numel()))
        tensor.copy_(whole.view(tensor.shape))
