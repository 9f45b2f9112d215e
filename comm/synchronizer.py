"""Sums gradients while backward goes on, group by group, as a plan says: Espresso's and Cupcake's run-time.

The counterpart of DDP for plans that DDP's buckets cannot carry out: a plan says which gradients go together, in which
order, and what happens to each group. The device that computes compresses a group as soon as its last gradient is
there; a thread communicates the groups one after the other while backward goes on, and where CPUs compress or
decompress, two more do that before and after it; what is left to do after that, such as decompression on the device
that computes, waits for the end of the backward pass. So predicted iterations see it (`fusion`, `maxplus`).
"""

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from .compress.compressor import Compressor
from .compress.feedback import ErrorFeedback, Memory
from .errors import CommError
from .net.alike import check_alike
from .net.fabric import make_fabric
from .net.scheme import split_as
from .plan.plan import Plan
from .runtime.execute import OptionScheme, options_of
from .runtime.lanes import Lanes


class GradientSynchronizer:
    """Averages the gradients of one module over all ranks.

    Every rank has the same module and makes the same calls. When `backward()` returns, the gradients are averages, as
    with DDP, provided that every parameter got one. Where some get none, `synchronize` finishes the averages: call it
    right after the backward pass when anything but an attached optimizer's step comes next (clipping, a gradient
    scaler, other collectives). What the scheme remembers is the state of this object, a named object of a
    `Checkpointer`.

    Args:
        module: Its trainable parameters each have one gradient, which is dense.
        groups: Names of parameters that are summed as one tensor; all that are trainable, each once.
        scheme: Sums in stages; the key of a group is its `group_key`.

    Raises:
        CommError: The groups are not the trainable parameters.
    """

    def __init__(self, module: nn.Module, groups: Sequence[Sequence[str]], scheme: OptionScheme) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if reason := mismatch(groups, parameters):
            raise CommError(f"the groups do not fit the module: {reason}; plan for this model")
        self.scheme = scheme
        self._groups = [[parameters[name] for name in names] for names in groups]
        self._keys = [group_key(names) for names in groups]
        self._lanes = Lanes(scheme.stages, len(self._groups), scheme.transport.device)
        self._arriving = threading.Lock()
        self._missing = [len(group) for group in self._groups]
        self._enabled = True
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))  # type: ignore[no-untyped-call]
            for index, group in enumerate(self._groups)
            for parameter in group
        ]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` finish the averages before each step, after backward passes that do not reach everything."""
        optimizer.register_step_pre_hook(lambda *_: self.synchronize())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in here; the next backward pass outside averages what has accumulated."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def synchronize(self) -> None:
        """Wait until all gradients of the last backward pass are averaged; without one do nothing.

        A parameter that got no gradient on this rank counts as zero, because it may have one on another rank; it has
        the average afterwards, which is zero and not None if no rank had one.

        Raises:
            Exception: What went wrong in the scheme.
        """
        with self._arriving:
            if all(missing == len(group) for missing, group in zip(self._missing, self._groups, strict=True)):
                return
            late = [index for index, missing in enumerate(self._missing) if missing]
            self._missing = [0] * len(self._groups)
        for index in late:
            self._begin(index)
        for index in range(len(self._groups)):
            self._finish(index)
        self._missing = [len(group) for group in self._groups]

    def close(self) -> None:
        """End the threads and take the hooks off; call it before the process groups are destroyed."""
        self._lanes.close()
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return what the scheme remembers."""
        return self.scheme.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the scheme go on from a state of this rank.

        Raises:
            CommError: It is of another scheme.
        """
        self.scheme.load_state_dict(state)

    def _arrived(self, index: int, _: nn.Parameter) -> None:
        """Record that a gradient of a group is there."""
        if not self._enabled:
            return
        with self._arriving:
            if self._missing[index] == 0:
                raise CommError(
                    "a gradient came twice before the averages were fetched; use no_sync() for all backward passes of "
                    "a step but the last, or call synchronize() after each"
                )
            self._missing[index] -= 1
            if self._missing[index]:
                return
            complete = not any(self._missing)
        self._begin(index)
        if complete:
            Variable._execution_engine.queue_callback(self.synchronize)

    def _begin(self, index: int) -> None:
        """Compress a group, on this thread and its stream, and hand it over."""
        try:
            with torch.no_grad():
                self._lanes.put(index, self.scheme.begin(self._keys[index], self._share(index)))
        except Exception as error:  # noqa: BLE001 (it belongs to whoever waits in `synchronize`)
            self._lanes.fail(error)

    def _share(self, index: int) -> Tensor:
        """Return what this rank adds to the averages of a group, as one tensor."""
        group = self._groups[index]
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in group))
        device = self.scheme.transport.device
        own = torch.empty(sum(parameter.numel() for parameter in group), dtype=dtype, device=device)
        for parameter, part in zip(group, split_as(own, (parameter.shape for parameter in group)), strict=True):
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.layout is not torch.strided:
                raise CommError(
                    f"a gradient of {self._keys[index]} is sparse, which plans do not support: make it dense "
                    f"(sparse=False), or use DDP with resilient_run.comm.hook.register"
                )
            else:
                # Divided before the sum, as DDP does it: half precision overflows later.
                torch.div(parameter.grad.to(dtype), self.scheme.transport.size, out=part)
        return own

    def _finish(self, index: int) -> None:
        """Wait until a group is communicated, and make its sum the gradients."""
        with torch.no_grad():
            total, group = self._lanes.take(index).total(), self._groups[index]
            for parameter, part in zip(group, split_as(total, (parameter.shape for parameter in group)), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part)


def synchronize_by(
    plan: Plan,
    module: nn.Module,
    compressor: Compressor,
    *,
    ranks_per_host: int = 1,
    memory: Memory | None = None,
) -> GradientSynchronizer:
    """Return what averages the gradients of `module` by `plan`; all ranks of the default process group call this.

    Parameters and buffers are made equal to those of rank 0.

    Args:
        plan: Of `resilient-comm plan`.
        module: As it is on all ranks.
        compressor: What the plan was made for.
        ranks_per_host: How many consecutive ranks share a host.
        memory: What remembers; error feedback of `compressor` by default.

    Raises:
        CommError: The plan is not one for `module`, or names options that do not exist, the ranks are not a multiple of
            `ranks_per_host` or are given different plans or compressors, or no parameter is trainable.
    """
    device = next((p.device for p in module.parameters() if p.requires_grad), None)
    if device is None:
        raise CommError(f"this {type(module).__name__} has no trainable parameter, so there is nothing to average")
    check_fits(plan, module)
    groups = plan.groups
    options = options_of({group_key(group.tensors): group.option for group in groups})
    ranks = range(dist.get_world_size())
    fabric = make_fabric(ranks, ranks_per_host=ranks_per_host, device=device)
    check_alike(fabric.flat, groups=groups, compressor=compressor, memory=memory)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)
    scheme = OptionScheme(fabric, memory or ErrorFeedback(compressor), options)
    return GradientSynchronizer(module, [group.tensors for group in groups], scheme)


def group_key(names: Sequence[str]) -> str:
    """Return the name under which a scheme remembers what it left out of a group; another order has another one."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]}..{names[-1]} ({zlib.crc32(' '.join(names).encode()):08x})"


def check_fits(plan: Plan, module: nn.Module) -> None:
    """Raise CommError unless a plan is one for the trainable parameters of a module."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if reason := mismatch([group.tensors for group in plan.groups], parameters):
        raise CommError(f"the plan for {plan.model} does not fit the model: {reason}; plan for this model")


def mismatch(groups: Sequence[Sequence[str]], parameters: dict[str, nn.Parameter]) -> str | None:
    """Return why the groups are not just the parameters, None when they are."""
    names = [name for group in groups for name in group]
    if missing := sorted(parameters.keys() - set(names)):
        return f"{missing[0]} ({len(missing)} in all) is in no group"
    if unknown := sorted(set(names) - parameters.keys()):
        return f"it has no trainable parameter {unknown[0]} ({len(unknown)} in all)"
    if len(names) != len(set(names)):
        return "a parameter is in two groups"
    return None
