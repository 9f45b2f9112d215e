"""Puts a scheme under DistributedDataParallel: its communication hook, which sums while backward goes on."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .errors import CommError
from .net.fabric import NOT_GIVEN, agreed, as_number
from .net.scheme import Scheme
from .net.transport import Transport
from .net.two_level import TwoLevel
from .runtime.bucket import LEAST_ELEMENTS, BucketSum
from .runtime.choice import Choice, agreed_scheme, check_alike, check_choice, check_number
from .runtime.lanes import Worker


class GradientHook(BucketSum):
    """Averages the gradients of one DDP module over its ranks, in a thread of its own.

    Args:
        model: Its parameters have the names.
        scheme: Sums large gradients.
        world: All ranks of the model, for everything else.
        least_elements: From how many elements on a gradient is large.
    """

    def __init__(
        self, model: DistributedDataParallel, *, scheme: Scheme, world: Transport, least_elements: int = LEAST_ELEMENTS
    ) -> None:
        super().__init__(scheme=scheme, world=world, least_elements=least_elements)
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        # DDP leaves the gradient of a parameter alone that no rank has used, and drops the sum of it.
        self._used: set[str] | None = set() if model.find_unused_parameters or model.static_graph else None
        self._handles = {
            name: parameter.register_post_accumulate_grad_hook(partial(self._note_used, name))
            for parameter, name in self._names.items()
            if self._used is not None and parameter.requires_grad
        }
        self._device = world.device
        self._precedes_ddp = self._device.type == "cuda" and model.find_unused_parameters
        self._worker = Worker("gradient hook", self._device)

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the averaged bucket; buckets are averaged one after the other, in the order submitted.

        Raises:
            CommError: The hook is closed.
        """
        if self._worker.closed:
            raise CommError("backward() after hook.close(): close the hook after the last backward pass")
        future: Future[Tensor] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        buffer, parameters = bucket.buffer(), bucket.parameters()
        gradients = [buffer] if buffer.is_sparse else _parts(buffer, parameters)
        named_gradients = [(self._names[p], g) for p, g in zip(parameters, gradients, strict=True)]
        used = self._used_of([name for name, _ in named_gradients])

        def task() -> None:
            try:
                future.set_result(self._average(buffer, named_gradients, used))
            except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
                future.set_exception(error)  # type: ignore[arg-type]

        self._worker.submit(task)
        if self._precedes_ddp and bucket.is_last():
            # What DDP sums itself now, which parameters were used, comes after ours on all ranks so: over NCCL ranks
            # that differ in the order may wait for each other for ever.
            with suppress(Exception):  # of whoever waits next
                future.wait()
        return future

    def close(self) -> None:
        """End the thread; call it after the last backward pass, before the process group is destroyed."""
        self._worker.close()
        self._worker.join()
        for handle in self._handles.values():
            handle.remove()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CommError(
            "a gradient hook belongs to one DistributedDataParallel, and is neither copied nor pickled with it: copy "
            "or save model.module, wrap the copy, and register a hook for it"
        )

    def _note_used(self, name: str, parameter: Tensor) -> None:
        # An output that is not in the loss makes autograd come by without a gradient.
        if self._used is not None and parameter.grad is not None:
            self._used.add(name)

    def _used_of(self, names: Sequence[str]) -> list[bool] | None:
        """Return which parameters backward passes have reached since their bucket went last, None where all are."""
        if self._used is None:
            return None
        found = [name in self._used or name not in self._handles for name in names]
        self._used.difference_update(names)
        return found

    def _average(self, buffer: Tensor, gradients: Sequence[tuple[str, Tensor]], used: list[bool] | None) -> Tensor:
        # Divided before the sum, as DDP does it: half precision overflows later.
        if buffer.is_sparse:
            name = gradients[0][0]
            return self.scheme.reduce(name, buffer.coalesce() / self.world.size)
        buffer.div_(self.world.size)
        self.sum_bucket(buffer, gradients, self._unused_anywhere(gradients, used))
        return buffer

    def _unused_anywhere(self, gradients: Sequence[tuple[str, Tensor]], used: list[bool] | None) -> set[str]:
        """Return the names of parameters that no rank has used; all ranks call this together."""
        if used is None or not any(self.is_large(name, each) for name, each in gradients):
            return set()
        counts = torch.tensor(used, dtype=torch.int32, device=self.world.device)
        self.world.all_reduce(counts)
        return {name for (name, _), count in zip(gradients, counts.tolist(), strict=True) if not count}


def _parts(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients in a bucket, complex ones as pairs of real numbers, as DDP has them there.

    Raises:
        CommError: They do not fill it.
    """
    shapes = [
        torch.view_as_real(p).shape if p.is_complex() and not buffer.is_complex() else p.shape for p in parameters
    ]
    if (elements := sum(map(torch.Size.numel, shapes))) != buffer.numel():
        raise CommError(f"a bucket of DDP has {buffer.numel()} elements, and its parameters {elements}")
    parts = torch.split(buffer, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def synchronize(state: GradientHook, bucket: GradBucket) -> Future[Tensor]:
    """Be the communication hook of `GradientHook`."""
    return state.submit(bucket)


def register(
    model: DistributedDataParallel,
    scheme: Choice = "zen",
    *,
    ranks_per_host: int | None = None,
    least_elements: int = LEAST_ELEMENTS,
    **options: Any,
) -> GradientHook:
    """Let `scheme` sum the gradients of `model` from now on; all its ranks call this before the first backward pass.

    Args:
        model: Of torch's DDP; its sparse gradients (`nn.Embedding(sparse=True)`) stay sparse.
        scheme: A name of `resilient_run.comm.schemes` or of a compressor, which then has error feedback, or what makes
            a scheme for these ranks, as `lambda ranks: Compressed(ranks, MomentumCorrection(…))`.
        ranks_per_host: Sum dense among so many consecutive ranks first, the ranks of a host, and between hosts by the
            scheme (thesis 3.4.1); 1 uses the scheme among all ranks. By default that is torchrun's LOCAL_WORLD_SIZE
            where there are several hosts and all have as many ranks, and 1 elsewhere.
        least_elements: Smaller gradients are all-reduced together.
        options: Of the scheme, if it is a name; of a compressor its `density`, if it has one.

    Returns:
        The hook; give it to the `Checkpointer` as one of its objects.

    Raises:
        CommError: There is no such scheme, options are given without a name, the ranks are given different ones, or
            are not a multiple of `ranks_per_host`; or the model is not DDP's, or has a hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise CommError(
            f"register() takes a model of DistributedDataParallel, got {type(model).__name__}: wrap it first, or use "
            "resilient_run.comm.replicate.register_replicated for FSDP2"
        )
    if model._comm_hooks:
        raise CommError("this model has a communication hook already; DDP has one for its life")
    hook = make_hook(model, scheme, ranks_per_host=ranks_per_host, least_elements=least_elements, **options)
    model.register_comm_hook(hook, synchronize)
    return hook


def make_hook(
    model: DistributedDataParallel,
    scheme: Choice,
    *,
    ranks_per_host: int | None = None,
    least_elements: int = LEAST_ELEMENTS,
    **options: Any,
) -> GradientHook:
    """Return what `register` registers, with the same arguments and errors."""
    ranks = dist.get_process_group_ranks(model.process_group)
    ignored = model.parameters_to_ignore
    device = next(p.device for name, p in model.module.named_parameters() if name not in ignored)
    # Over the group that is there, so that a mistake leaves nothing behind; and on all ranks alike.
    given = Transport(model.process_group, device)
    check_alike(given, scheme=scheme, **options, least_elements=least_elements)
    check_number("least_elements", int, least_elements)
    ranks_per_host = _ranks_per_host(given, ranks_per_host)
    check_choice(scheme, options, ranks=given.size // ranks_per_host)
    world = Transport.among(ranks, device)
    if ranks_per_host == 1:
        made = between = agreed_scheme(scheme, world, world, options, least_elements=least_elements)
    else:
        host, place = divmod(world.rank, ranks_per_host)
        within = Transport.among(ranks[host * ranks_per_host :][:ranks_per_host], device)
        across = Transport.among(ranks[place::ranks_per_host], device)
        between = agreed_scheme(scheme, across, world, options, least_elements=least_elements)
        made = TwoLevel(within, between)
    return GradientHook(model, scheme=made, world=world, least_elements=least_elements)


def _ranks_per_host(world: Transport, given: int | None) -> int:
    """Return what all ranks are given; without that what torchrun says to all in the order of the group, or 1.

    All ranks return, or raise, the same, whatever they are given and their environments are.
    """
    own = [as_number(given), _from_torchrun("LOCAL_WORLD_SIZE"), _from_torchrun("LOCAL_RANK")]
    found: list[list[int]] = world.gather_numbers(torch.tensor(own)).tolist()
    numbers = [number for number, _, _ in found]
    if any(number != NOT_GIVEN for number in numbers):
        return agreed(numbers)
    size = found[0][1]
    alike = [place for _, *place in found] == [[size, rank % max(size, 1)] for rank in range(world.size)]
    return size if alike and 0 < size < world.size and world.size % size == 0 else 1


def _from_torchrun(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
