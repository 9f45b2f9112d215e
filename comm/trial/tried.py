"""A gradient hook that tries methods while its model trains.

Nothing that is tried changes what is trained. In the turn of a method, each bucket is copied and the copy is summed by
that method while backward goes on. When it has all sums, the step has taken as long as with that method alone. Then the
buckets themselves are summed as ever, and no measured second passes until the next step begins.
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import Work
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..errors import CommError
from ..net.scheme import Dense, Scheme, laid_out
from ..net.transport import Transport
from ..runtime.gradient_hook import GradientHook, Submitted, parts
from .advice import BASE, NOTHING, choice
from .trial import Trial

AUTO: Final = "auto"

Own = Callable[[GradBucket], Future[Tensor]]


class _AsDdp(Dense):
    """Sums as DDP does without a hook, sparse gradients too; over NCCL it cannot, and they are dense on the way."""

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        if not gradient.is_sparse or gradient.is_cuda:
            return super().reduce(key, gradient)
        self.transport.all_reduce(gradient)
        return gradient


class TriedHook(GradientHook):
    """Sums as DDP does, and lets `trial` measure other methods meanwhile.

    Args:
        model: Its parameters have the names.
        trial: Says whose turn it is.
        schemes: Name of a method → its scheme.
        world: All ranks of the model.
        least_elements: From how many elements on a gradient is large.
        leads: Whether it is the steps of this model that are measured.

    Attributes:
        own: The hook with which the job trains: one that it has registered itself, or what DDP does without one.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        trial: Trial,
        schemes: Mapping[str, Scheme],
        *,
        world: Transport,
        least_elements: int,
        leads: bool = True,
    ) -> None:
        super().__init__(model, scheme=_AsDdp(world), world=world, least_elements=least_elements)
        self.own: Own = self._as_ddp
        self._trial: Trial | None = trial
        self._leads = leads
        self._schemes = dict(schemes)
        self._fresh = {name: scheme.state_dict() for name, scheme in schemes.items()}
        self._method = BASE
        self._begun: list[Future[Tensor]] = []
        self._held: list[Submitted] = []
        self._said: tuple[Tensor, Work] | None = None
        self._stepped_s = self._now_s()

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the averaged bucket, which may come after the last bucket of this backward pass."""
        if self._trial is None:
            return super().submit(bucket)
        self._switch(self._trial)
        if self._method != self._trial.base:
            return super().submit(bucket)
        if self._leads and self._trial.looks:
            buffer = bucket.buffer()
            gradients = [buffer] if buffer.is_sparse else parts(buffer, bucket.parameters())
            self._trial.look_at(gradients, least_elements=self._least_elements)
        self._begun.append(self.own(bucket))
        if not bucket.is_last():
            return self._begun[-1]
        begun, self._begun = self._begun, []
        return torch.futures.collect_all(begun).then(self._all_ended)

    def advance(self, trial: Trial) -> None:
        """Begin the next turn if one is over; all ranks call this before each step."""
        if self._said is not None:
            (said, work), self._said = self._said, None
            work.wait()
            trial.advance(said.amax(0).tolist())

    def _switch(self, trial: Trial) -> None:
        """Let the method of the present turn be that of the backward pass that begins."""
        if trial.method == self._method:
            return
        if self._method in self._schemes:  # what it remembers of gradients is as large as they are
            self._schemes[self._method].load_state_dict(self._fresh[self._method])
        self._method = trial.method

    def _answer(self, submitted: Submitted) -> None:
        if self._trial is None:
            super()._answer(submitted)
            return
        self._held.append(submitted)
        self._shadow(submitted)
        if submitted.bucket.is_last():
            self._step_ends()
            averages = [answer.wait() for answer in [self.own(each.bucket) for each in self._held]]
            self._stepped_s = self._now_s()
            held, self._held = self._held, []
            for each, average in zip(held, averages, strict=True):
                each.future.set_result(average)

    def _fail(self, submitted: Submitted, error: Exception) -> None:
        for each in {id(held): held for held in (*self._held, submitted)}.values():
            super()._fail(each, error)
        self._held.clear()

    def _shadow(self, submitted: Submitted) -> None:
        """Sum a copy of a bucket by the method whose turn it is."""
        if self._method == NOTHING:
            return
        trained, self.scheme = self.scheme, self._schemes.get(self._method, self.scheme)
        try:
            self._average(submitted, submitted.bucket.buffer().clone())
        finally:
            self.scheme = trained

    def _as_ddp(self, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the averaged bucket, beside whose sum the next may begin."""
        self.check_open()
        gradient, size = bucket.buffer(), self.world.size
        # Dense gradients are multiplied, as DDP does it: the last bit differs from that of a division.
        buffer = gradient.coalesce() / size if gradient.is_sparse else gradient.mul_(1 / size)
        dense = buffer.to_dense().contiguous() if buffer.is_cuda else buffer  # NCCL sums no sparse tensors
        future = self.world.begin_all_reduce(dense).get_future()

        def average(done: Future[list[Tensor]]) -> Tensor:
            (total,) = done.value()
            return laid_out(total, gradient) if total.is_cuda else total

        return self.before_ddp(future.then(average), bucket)

    def _all_ended(self, begun: Future[list[Future[Tensor]]]) -> Tensor:
        """Return the last of all averages of a step."""
        averages = [answer.value() for answer in begun.value()]
        self._step_ends()
        return averages[-1]

    def _step_ends(self) -> None:
        now_s = self._now_s()
        if self._leads and self._trial is not None:
            self._trial.passed(now_s - self._stepped_s)
            if self._trial.turn_is_over and self._said is None:
                # Ranks do not wait for each other here: their backward passes may reach several models in any order.
                rows = torch.zeros(self.world.size, len(own := self._trial.said()), dtype=torch.float64)
                rows[self.world.rank] = torch.tensor(own, dtype=torch.float64)
                rows = rows.to(self._device)
                self._said = rows, self.world.begin_all_reduce(rows)
        self._stepped_s = now_s

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.monotonic()


class AutoHook(TriedHook):
    """Takes the method that pays, once that was measured.

    Its state is what was chosen and what that remembers, so that a restored job goes on with it. As long as nothing is
    chosen, it trains as DDP does.

    Attributes:
        chosen: The method, "all-reduce" if none pays, None while methods are tried.
    """

    chosen: str | None = None
    _begins = True

    def submit(self, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the averaged bucket; chooses at the beginning of a backward pass."""
        self.check_open()
        if self._begins and self._trial is not None:
            self.advance(self._trial)
            if self._trial.is_over:
                self._choose(self._trial)
        self._begins = bucket.is_last()
        return self._as_ddp(bucket) if self.chosen == BASE else super().submit(bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return what was chosen, None while nothing is, and what that remembers."""
        return {"scheme": AUTO, "chosen": self.chosen, "memory": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; one from before the choice that was made here leaves that as it is.

        Raises:
            CommError: It is of another hook, its method is none of those of this one, or this one has chosen another.
        """
        if state.get("scheme") != AUTO:
            raise CommError(f"auto cannot go on from the state of {state.get('scheme')!r}; name the same scheme")
        chosen = state["chosen"]
        if chosen is None and self.chosen is not None:
            # The choice stays. Before it there was nothing to remember.
            for fresh in self._fresh.values():
                self.scheme.load_state_dict(fresh)
            return
        if self.chosen not in (None, chosen):
            raise CommError(f"auto has chosen {self.chosen!r} since this state; load it after register()")
        if chosen not in (None, BASE, self.chosen, *self._schemes):
            raise CommError(f"auto chose {chosen!r} for this job; give register() the same lossy= as then")
        if self.chosen is None and chosen is not None:
            self._take(chosen)
        super().load_state_dict(state["memory"])

    def _choose(self, trial: Trial) -> None:
        name = trial.recommended
        if self.world.rank == 0:
            print(f"resilient-run: {choice(trial.taken, trial.known, trial.left_out)}", file=sys.stderr, flush=True)
        self._take(name or BASE)

    def _take(self, name: str) -> None:
        self.chosen, self._trial = name, None
        self._fresh = {name: self._fresh[name]} if name in self._schemes else {}
        for fresh in self._fresh.values():
            self.scheme = self._schemes[name]
            self.scheme.load_state_dict(fresh)
        self._schemes.clear()
