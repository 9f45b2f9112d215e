"""Local steps with an outer optimizer: replicas train by themselves and meet only every so many steps (DiLoCo)."""

import atexit
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .errors import CommError
from .net.alike import check_alike
from .net.collectives import carry_dense
from .net.entries import all_finite
from .net.scheme import Scheme, split_as
from .net.transport import Transport
from .plan.tree import Routine
from .runtime.bucket import LEAST_ELEMENTS, BucketSum
from .runtime.choice import Choice, agreed_scheme
from .runtime.lanes import Worker

log = logging.getLogger(__name__)

_NONE: Final = -1
_LEAVE_S: Final = 10.0
"""How long the end of a script that has not closed its local steps waits for a sum."""


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

    With `fragments` and `delay` it is Streaming DiLoCo (Douillard et al., 2025): fragments of the model have rounds of
    their own, that end one after the other, and a sum is on its way while training goes on.

    The state is that of the outer optimizer, how far the round is, what this rank has sent into a sum that is on its
    way, and what the scheme remembers: register this object with the `Checkpointer`, and a run that is killed goes on
    bit for bit.

    Args:
        model: Its trainable parameters, and its buffers, become those of the first rank. A DistributedDataParallel,
            over the ranks of one replica, is looked through.
        every: Steps of a round.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum; 0 for none. With it 0 and `outer_lr` 1, a round ends with the mean of the
            replicas' parameters.
        fragments: Into how many parts of about the same size the parameters are cut, in their order.
        delay: Steps from the end of a round to its outer step, while the sum is on its way. Another fragment's round
            may end at that step at the earliest (`every // fragments`), the fragment's own only after it.
        mixing: Share of its own parameters that a replica keeps at the outer step, in [0, 1); None for 0 without
            `delay` and 0.5 with it, when replicas have trained on.
        scheme: What sums the pseudo-gradients, as of `hook.register`.
        group: One rank of each replica, the same place in all of them; None for all ranks, a replica each. With
            `delay` nothing else may use it.
        least_elements: Smaller tensors are all-reduced together.
        options: Of the scheme, if it is a name.

    Raises:
        CommError: An argument is out of its range or not that of other ranks, there is no such scheme, or the model has
            sharded parameters or none to train.

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
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        scheme: Choice = "dense",
        group: ProcessGroup | None = None,
        least_elements: int = LEAST_ELEMENTS,
        **options: Any,
    ) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        if not self._parameters or any(isinstance(each, DTensor) for each in self._parameters.values()):
            raise CommError("local steps need trainable parameters, whole on each rank: give a module without sharding")
        device = next(iter(self._parameters.values())).device
        ranks = Transport.over(group, device) if group else Transport.among(range(dist.get_world_size()), device)
        check_alike(
            ranks,
            scheme=scheme,
            **options,
            every=every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            delay=delay,
            mixing=mixing,
            least_elements=least_elements,
        )
        made = agreed_scheme(scheme, ranks, ranks, options)
        if every < 1 or not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise CommError(
                f"every {every}, outer_lr {outer_lr}, outer_momentum {outer_momentum}: give at least one step, a "
                f"positive learning rate, and a momentum in [0, 1)"
            )
        longest = every // fragments if fragments > 1 else every - 1
        if not 1 <= fragments <= min(every, len(self._parameters)) or not 0 <= delay <= longest:
            raise CommError(
                f"fragments {fragments}, delay {delay}: give one fragment to as many as a round has steps ({every}) "
                f"and the model parameters ({len(self._parameters)}), and a delay of 0 to {longest} steps"
            )
        self._mixing = (0.5 if delay else 0.0) if mixing is None else mixing
        if not 0 <= self._mixing < 1:
            raise CommError(f"mixing {mixing}: give a share in [0, 1)")
        self._every, self._outer_lr, self._outer_momentum = every, outer_lr, outer_momentum
        self._fragments, self._delay = _fragments_of(self._parameters, fragments), delay
        # Step within a round → fragment whose own round ends with it.
        self._ends = {(place + 1) * every // fragments % every: place for place in range(fragments)}
        self._sum = BucketSum(scheme=made, world=ranks, least_elements=least_elements)
        self._done = 0
        with torch.no_grad():
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                own = tensor.reshape(-1) if ranks.rank == 0 else None
                first = carry_dense(Routine.BROADCAST, own, ranks, root=0, numel=tensor.numel(), dtype=tensor.dtype)
                assert first is not None, "a broadcast reaches everybody"
                tensor.copy_(first.view(tensor.shape))
            exact = torch.float32
            for parameter in self._parameters.values():
                exact = torch.promote_types(exact, parameter.dtype)
            self._outer = {name: each.detach().to(exact, copy=True) for name, each in self._parameters.items()}
            self._momentum = {name: torch.zeros_like(each) for name, each in self._outer.items() if outer_momentum}
        largest = max(sum(self._outer[name].numel() for name in names) for names in self._fragments)
        self._sent = torch.zeros(largest if delay else 0, dtype=exact, device=device)
        self._sending, self._begun = _NONE, 0
        self._pending: _Flight | None = None

    @property
    def scheme(self) -> Scheme:
        """What sums the pseudo-gradients."""
        return self._sum.scheme

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step that this replica has made; all ranks call it after each step of their inner optimizers.

        If a sum has an inf or a NaN, because a replica has diverged, all of them go back to the outer parameters, where
        the round began, and a warning says so.

        Returns:
            Whether an outer step was made: with one fragment and without `mixing`, all replicas are equal now.
        """
        self._done += 1
        if self._sending != _NONE and self._pending is None:  # restored
            self._pending = self._start_sum(self._fragments[self._sending])
        moved = False
        if (pending := self._pending) is not None and self._done >= self._begun + self._delay:
            pending.wait()
            self._pending, self._sending = None, _NONE
            self._move(pending.total, pending.gradients)
            moved = True
        place = self._ends.get(self._done % self._every)
        if place is not None:
            names = self._fragments[place]
            ways = [(self._outer[name] - self._parameters[name]).reshape(-1) for name in names]
            pseudo = torch.cat(ways).div_(self._sum.world.size)
            if self._delay:
                self._sent[: pseudo.numel()] = pseudo
                self._sending, self._begun = place, self._done
                self._pending = self._start_sum(names)
            else:
                gradients = self._views(names, pseudo)
                self._sum.sum_bucket(pseudo, list(gradients.items()))
                self._move(pseudo, gradients)
                moved = True
        return moved

    def close(self) -> None:
        """Wait for a sum that is on its way, and leave it; call it before the process group is destroyed.

        The next step, if there is one, begins it anew.
        """
        if (pending := self._pending) is not None:
            pending.wait()
            self._pending = None
            self._sum.load_state_dict(pending.before)

    def differs_between_ranks(self) -> tuple[nn.Module]:
        """Return what replicas hold each in its own way within a round: the `Checkpointer` has it not compared."""
        return (self._model,)

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state, the steps made, what is on its way, and what the scheme remembers.

        Nothing is copied. What is on its way is what this rank has sent into the sum, and what the scheme remembers is
        that of before.
        """
        return {
            "steps": self._done,
            "outer": dict(self._outer),
            "momentum": dict(self._momentum),
            "scheme": self._sum.state_dict() if self._pending is None else self._pending.before,
            "sent": self._sent,
            "fragments": len(self._fragments),
            "sending": self._sending,
            "begun": self._begun,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank; a sum that was on its way begins anew.

        Raises:
            CommError: It is of other parameters, of an outer optimizer with or without momentum where this one is the
                other, of other fragments or with delay where this one has none, or of another scheme.
        """
        match state:
            case {
                "steps": int(steps),
                "outer": dict(outer),
                "momentum": dict(momentum),
                "scheme": dict(scheme),
                "sent": Tensor() as sent,
                "fragments": int(fragments),
                "sending": int(sending),
                "begun": int(begun),
            } if (
                _shapes({**outer, "": sent}) == _shapes({**self._outer, "": self._sent})
                and _shapes(momentum) == _shapes(self._momentum)
                and fragments == len(self._fragments)
                and _NONE <= sending < fragments
            ):
                self.close()
                self._sum.load_state_dict(scheme)
                self._done, self._sending, self._begun = steps, sending, begun
                for mine, saved in ((self._outer, outer), (self._momentum, momentum), ({"": self._sent}, {"": sent})):
                    for name, tensor in mine.items():
                        tensor.copy_(saved[name])
            case _:
                raise CommError("this is not a state of local steps of such a model; load one of the same options")

    def _views(self, names: Sequence[str], flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of `flat` that are of these parameters."""
        return dict(zip(names, split_as(flat, (self._outer[name].shape for name in names)), strict=True))

    def _start_sum(self, names: Sequence[str]) -> "_Flight":
        """Send what `_sent` has of these parameters into a sum beside training."""
        total = self._sent[: sum(self._outer[name].numel() for name in names)].clone()
        gradients = self._views(names, total)
        before = deepcopy(self._sum.state_dict())
        worker = Worker("local steps", total.device)
        done = worker.submit(partial(self._sum.sum_bucket, total, list(gradients.items())))
        worker.close()
        flight = _Flight(total=total, gradients=gradients, before=before, worker=worker, done=done)
        atexit.register(flight.leave)
        return flight

    def _move(self, pseudo: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """Make the outer step that the sum asks for, and take its parameters."""
        names, kept = list(gradients), self._mixing
        if all_finite(pseudo):
            self._descend(gradients)
        else:
            names, kept = list(self._outer), 0.0
            warnings.warn(
                f"local steps: the round that ended with step {self._done - self._delay} is given up, because the mean "
                f"of the replicas is not finite; all go back to where it began. Look at the inner learning rate",
                RuntimeWarning,
                stacklevel=3,
            )
        for name in names:
            outer, parameter = self._outer[name], self._parameters[name]
            parameter.copy_(outer.lerp(parameter.to(outer.dtype), kept) if kept else outer)

    def _descend(self, gradients: Mapping[str, Tensor]) -> None:
        """Make a step of SGD with Nesterov momentum, as torch's."""
        for name, gradient in gradients.items():
            outer = self._outer[name]
            if self._outer_momentum:
                momentum = self._momentum[name].mul_(self._outer_momentum).add_(gradient)
                gradient.add_(momentum, alpha=self._outer_momentum)
            outer.add_(gradient, alpha=-self._outer_lr)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Flight:
    """A sum that is on its way in a worker of its own; nobody else asks for one before it is there.

    Attributes:
        total: What is to be summed, and the sum once it is `done`.
        gradients: Its parts, by name.
        before: What the scheme remembered before.
        worker: That sums.
        done: When the sum is there.
    """

    total: Tensor
    gradients: dict[str, Tensor]
    before: dict[str, Any]
    worker: Worker
    done: "Future[None]"

    def wait(self) -> None:
        """Return when the sum is there, or raise what went wrong; on CUDA, the current stream waits for it."""
        try:
            self.done.result()
        finally:
            self.worker.join()
            atexit.unregister(self.leave)
        self.worker.follow()

    def leave(self) -> None:
        """Wait at the end of a script: Python's own end aborts the process if the thread is in the middle of a sum."""
        if getattr(sys, "last_type", None) is None:  # others may never send theirs to a script that has failed
            log.warning("the script ends while a sum of local steps is on its way; call close() after the last step")
            self.worker.join(_LEAVE_S)


def _fragments_of(parameters: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Return the names in their order, cut into `count` fragments of about as many elements each, none empty."""
    whole = sum(each.numel() for each in parameters.values())
    found: list[list[str]] = [[]]
    before = 0
    for done, (name, each) in enumerate(parameters.items()):
        left = len(parameters) - done
        is_full = before + each.numel() / 2 > whole * len(found) / count
        if found[-1] and len(found) < count and (is_full or left == count - len(found)):
            found.append([])
        found[-1].append(name)
        before += each.numel()
    return found


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
