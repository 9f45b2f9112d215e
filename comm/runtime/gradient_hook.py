"""The communication hook of DistributedDataParallel that sums buckets by a scheme while backward goes on."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..errors import CommError
from ..net.scheme import Scheme, split_as
from ..net.transport import Transport
from .bucket import LEAST_ELEMENTS, BucketSum
from .lanes import Worker


@dataclass(kw_only=True, slots=True, eq=False)
class Submitted:
    """A bucket that is to be averaged.

    Attributes:
        future: Gets the average.
        bucket: As DDP gave it: gradients together, or one sparse gradient alone.
        names: Of its parameters, in their order.
        used: Which of them this rank's backward passes have reached, None where all are.
    """

    future: Future[Tensor]
    bucket: GradBucket
    names: Sequence[str]
    used: list[bool] | None


class _Failed:
    """In place of an average: raises the error where DDP casts it to a tensor, and says in words that it cannot."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


def _raise(failed: _Failed) -> NoReturn:
    raise failed.error


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
        self.check_open()
        names = [self._names[parameter] for parameter in bucket.parameters()]
        submitted = Submitted(
            future=Future(devices=[self._device] if self._device.type == "cuda" else None),
            bucket=bucket,
            names=names,
            used=self._used_of(names),
        )
        self._worker.submit(partial(self._answer, submitted), failed=partial(self._fail, submitted))
        return self.before_ddp(submitted.future, bucket)

    def before_ddp(self, answer: Future[Tensor], bucket: GradBucket) -> Future[Tensor]:
        """Return the answer for a bucket; what DDP sums itself after the last one comes after it on all ranks."""
        if self._precedes_ddp and bucket.is_last():
            # DDP sums which parameters were used: over NCCL ranks that differ in the order may wait for each other.
            with suppress(Exception):  # of whoever waits next
                answer.wait()
        return answer

    def check_open(self) -> None:
        """Refuse to sum after `close()`.

        Raises:
            CommError: The hook is closed.
        """
        if self._worker.closed:
            raise CommError("backward() after hook.close(): close the hook after the last backward pass")

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

    def _answer(self, submitted: Submitted) -> None:
        submitted.future.set_result(self._average(submitted, submitted.bucket.buffer()))

    def _fail(self, submitted: Submitted, error: Exception) -> None:
        submitted.future._set_unwrap_func(_raise)
        submitted.future.set_result(_Failed(error))  # type: ignore[arg-type]

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

    def _average(self, submitted: Submitted, buffer: Tensor) -> Tensor:
        """Return the average of `buffer`, that of `submitted` or a copy of it, which is overwritten."""
        # Divided before the sum, as DDP does it: half precision overflows later.
        if buffer.is_sparse:
            return self.scheme.reduce(submitted.names[0], buffer.coalesce() / self.world.size)
        gradients = list(zip(submitted.names, parts(buffer, submitted.bucket.parameters()), strict=True))
        buffer.div_(self.world.size)
        self.sum_bucket(buffer, gradients, self._unused_anywhere(gradients, submitted.used))
        return buffer

    def _unused_anywhere(self, gradients: Sequence[tuple[str, Tensor]], used: list[bool] | None) -> set[str]:
        """Return the names of parameters that no rank has used; all ranks call this together."""
        if used is None or not any(self.is_large(name, each) for name, each in gradients):
            return set()
        counts = torch.tensor(used, dtype=torch.int32, device=self.world.device)
        self.world.all_reduce(counts)
        return {name for (name, _), count in zip(gradients, counts.tolist(), strict=True) if not count}


def synchronize(state: GradientHook, bucket: GradBucket) -> Future[Tensor]:
    """Be the communication hook of `GradientHook`."""
    return state.submit(bucket)


def parts(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients in a bucket, complex ones as pairs of real numbers, as DDP has them there.

    Raises:
        CommError: They do not fill it.
    """
    shapes = [
        torch.view_as_real(p).shape if p.is_complex() and not buffer.is_complex() else p.shape for p in parameters
    ]
    if (elements := sum(map(torch.Size.numel, shapes))) != buffer.numel():
        raise CommError(f"a bucket of DDP has {buffer.numel()} elements, and its parameters {elements}")
    return split_as(buffer, shapes)
