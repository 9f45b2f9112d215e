"""A model whose arithmetic is waited for, not done: gradients of given sizes that become ready at given times.

Four workers on a few processors cannot compute as four devices would. Here each worker has a device of its own: a
backward step sleeps for as long as it takes, and what else the worker does on that device (compression, copies) is real
work, which delays the steps behind it as it would there. Gradients, hooks and messages are those of any torch module.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
from recording import example_gradient
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.compress.compressor import Compressor
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.plan.plan import Plan
from resilient_run.comm.synchronizer import GradientSynchronizer, synchronize_by

POWERSGD_RANK = 4
ONE_BUCKET_MIB = 1e4


@dataclass(frozen=True, kw_only=True)
class Step:
    """The gradient of one parameter, and the seconds until it is ready after the one before it."""

    name: str
    rows: int
    columns: int
    backward_s: float


def steps_of(tensors: Sequence[tuple[str, int, float]], *, scale: int, backward_s: float) -> list[Step]:
    """Return (name, elements, operations) as matrices of a `scale`-th of the elements; biases are vectors.

    The whole backward pass takes `backward_s`, each gradient its share by operations.
    """
    operations = sum(each for _, _, each in tensors)
    made = []
    for name, numel, each in tensors:
        if numel == 0:
            continue  # tied to another one
        small = max(1, numel // scale)
        rows = 1 if name.endswith("bias") or small < 1024 else isqrt(small)
        made.append(
            Step(
                name=name.replace(".", "_"),
                rows=rows,
                columns=small // rows,
                backward_s=backward_s * each / operations,
            )
        )
    return made


class Device:
    """What computes for one worker: one thing at a time, in the thread that trains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computing: int | None = None
        self._taken_s, self._late_s = 0.0, 0.0

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Let work of other threads delay what this thread computes inside."""
        self._computing, self._taken_s, self._late_s = threading.get_ident(), 0.0, 0.0
        try:
            yield
        finally:
            self._computing = None

    def compute(self, seconds: float) -> None:
        """Take so long, and as long as other threads have worked on the device meanwhile."""
        due_s = time.perf_counter() + seconds - self._late_s + self._take()
        while (left_s := due_s - time.perf_counter()) > 0:
            time.sleep(left_s)
            due_s += self._take()
        # Sleep ends late; the next step makes up for it.
        self._late_s = time.perf_counter() - due_s

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do real work on the device."""
        began_s = time.perf_counter()
        yield
        if self._computing not in (None, threading.get_ident()):
            with self._lock:
                self._taken_s += time.perf_counter() - began_s

    def _take(self) -> float:
        with self._lock:
            taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, signal: Tensor, _: Tensor, gradient: Tensor, device: Device, seconds: float) -> Tensor:
        ctx.step = gradient, device, seconds
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> Any:
        gradient, device, seconds = ctx.step
        device.compute(seconds)
        return signals[0], gradient.clone(), None, None, None


class TimedModel(nn.Module):
    """Parameters whose gradients become ready in the order of `steps`.

    Args:
        steps: In the order of the backward pass.
        forward_s: What the forward pass takes.
        device: Takes it.
        rank: Ranks have different gradients.
    """

    def __init__(self, steps: Sequence[Step], *, forward_s: float, device: Device, rank: int) -> None:
        super().__init__()
        self._forward_s = forward_s
        self.device = device
        self._seconds = {step.name: step.backward_s for step in steps}
        self._made: dict[str, Tensor] = {}
        for index, step in reversed(list(enumerate(steps))):
            shape = (step.columns,) if step.rows == 1 else (step.rows, step.columns)
            self.register_parameter(step.name, nn.Parameter(torch.zeros(shape)))
            self._made[step.name] = example_gradient(step.rows * step.columns, rank, index).view(shape)

    def gradient(self, name: str) -> Tensor:
        """Return what the next backward pass finds for a parameter."""
        return self._made[name]

    def forward(self) -> Tensor:
        began_s = time.perf_counter()
        made = {name: self.gradient(name) for name in self._seconds}
        # What it takes to make them is no part of the step.
        self.device.compute(self._forward_s - (time.perf_counter() - began_s))
        signal = torch.zeros((), requires_grad=True)
        parameters = dict(self.named_parameters())
        for name, seconds in reversed(self._seconds.items()):
            arguments = (made[name], self.device, seconds)
            signal = _Backward.apply(signal, parameters[name], *arguments)  # type: ignore[no-untyped-call]
        return signal


class DeviceFeedback(ErrorFeedback):
    """Error feedback on a worker's device, which is also where `compressor` adds up messages from now on."""

    def __init__(self, compressor: Compressor, device: Device) -> None:
        super().__init__(compressor)
        self._device, add = device, compressor.add

        def on_device(message: Tensor, total: Tensor, *, seed: int) -> None:
            with device.work():
                add(message, total, seed=seed)

        compressor.add = on_device  # type: ignore[method-assign]

    def compress(self, key: str, gradient: Tensor) -> tuple[Tensor, int]:
        with self._device.work():
            return super().compress(key, gradient)


def planned(plan: Plan, model: TimedModel, compressor: Compressor) -> tuple[GradientSynchronizer, Callable[[], None]]:
    """Return what carries out a plan for a compressor, and what trains one iteration with it."""
    memory = DeviceFeedback(compressor, model.device)
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    averaging = synchronize_by(plan, model, memory.compressor, ranks_per_host=per_host, memory=memory)

    def iteration() -> None:
        model.zero_grad()
        with model.device.iteration():
            model().backward()
        averaging.synchronize()

    return averaging, iteration


def fp16_hook(parallel: DistributedDataParallel) -> None:
    """Let torch's hook send half precision."""
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)


def powersgd_hook(parallel: DistributedDataParallel) -> None:
    """Let torch's hook send products of narrow matrices; it needs `ONE_BUCKET_MIB`.

    Its callbacks all-reduce in Gloo's two threads: of two buckets in an order that differs between ranks, and so would
    be theirs and what DDP itself all-reduces after a backward pass.
    """
    state = powerSGD_hook.PowerSGDState(
        process_group=dist.new_group(), matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2
    )
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def unplanned(
    model: TimedModel, *, bucket_mib: float, attach: Callable[[DistributedDataParallel], object] | None = None
) -> Callable[[], None]:
    """Return what trains one iteration with DDP, with buckets of this size and the hook that `attach` gives it."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
    if attach is not None:
        attach(parallel)

    def iteration() -> None:
        parallel.zero_grad()
        with model.device.iteration():
            parallel().backward()

    return iteration


def slowest_s(iteration: Callable[[], None], *, warm_up: int, count: int) -> list[float]:
    """Return the seconds of `count` iterations, each on its slowest rank; the ranks of the job call this together."""
    dist.barrier()
    for _ in range(warm_up):
        iteration()
    seconds = []
    for _ in range(count):
        began_s = time.perf_counter()
        iteration()
        seconds.append(time.perf_counter() - began_s)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found: list[float] = slowest.tolist()
    return found
