"""What a job's own steps take with one method after the other of summing its gradients.

The job runs as it is. Its DDP modules get a communication hook that hands each bucket to the method whose turn it is. A
turn lasts some steps. Round after round changes the order, so that a slow minute of the machine hits all of them. One
"method" sums nothing: what its steps take is what no scheme can beat. What is trained meanwhile is of no use.

All ranks decide alike, because they decide by the same numbers: of each turn the time of the slowest rank.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..hook import GradientHook, make_hook, synchronize
from ..runtime.bucket import LEAST_ELEMENTS
from ..sparsity import density
from .advice import BASE, LEAST_TURNS, NOTHING, OWN, Method, methods, recommended

_FIRST_STEPS: Final = 6
_WARM_UP: Final = 2
_FIRST_WARM_UP: Final = 4
_ROUNDS: Final = 7
_MOST_STEPS: Final = 50
_HOPELESS: Final = 1.3
_SPARSE_BELOW: Final = 0.25
_WORTH_ZEN: Final = 0.1

Sum = Callable[[GradBucket], Future[Tensor]]


class Trial:
    """Tries methods in the modules that the job makes while `watching`.

    Args:
        seconds: How long to measure, about; some rounds are always measured.
        ranks_per_host: As of `hook.register`.
    """

    def __init__(self, *, seconds: float, ranks_per_host: int | None) -> None:
        self.taken: dict[str, list[float]] = {}
        """Name of a method → seconds of a step in each of its turns."""
        self.left_out: dict[str, str] = {}
        """Name of a method that was not measured to the end → why."""
        self._seconds = seconds
        self._ranks_per_host = ranks_per_host
        self._methods = {method.name: method for method in methods(ranks_per_host)}
        self._modules: list[_Module] = []
        self._turns: Iterator[tuple[str, int, int]] = iter(())
        self._method = BASE
        self._warm_up = self._steps = self._passed = 0
        self._began_s = self._ended_s = 0.0
        self._sparse_elements = self._elements = 0

    @property
    def finished(self) -> bool:
        """Whether each method that is not left out was measured often enough."""
        return bool(self.taken) and all(len(turns) >= LEAST_TURNS for turns in self.taken.values())

    @property
    def exact(self) -> frozenset[str]:
        """Names of the methods with which training is the same."""
        return frozenset(name for name in self.taken if self.method(name).exact)

    def method(self, name: str) -> Method:
        """Return what is known of a method that was tried."""
        return self._methods.get(name, Method(name=name, write="", exact=True))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook on every DDP module that is made in the block, in which `Enough` is raised when all is measured.

        An end of the script by `os._exit` is one by `sys.exit` here: there is something to say after it.
        """
        construct, leave, pid = DistributedDataParallel.__init__, os._exit, os.getpid()

        def make(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            construct(module, *args, **kwargs)
            self._hook_on(module)

        def end(status: int) -> NoReturn:
            if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
                leave(status)  # a process or thread of the script's
            raise SystemExit(status)

        DistributedDataParallel.__init__ = make  # type: ignore[method-assign, assignment]
        os._exit = end
        try:
            yield
        except Enough:
            pass
        finally:
            DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]
            os._exit = leave
            for module in self._modules:
                module.close()

    def _hook_on(self, module: DistributedDataParallel) -> None:
        made = _Module(module, self._methods.values(), self._ranks_per_host)
        module.register_comm_hook(None, lambda _, bucket: self._sum(made, bucket))
        # torch refuses a second hook; the script's is one of the methods instead.
        module.register_comm_hook = made.take_own  # type: ignore[method-assign]
        self._modules.append(made)
        if len(self._modules) == 1:
            module.register_forward_pre_hook(lambda *_: self._before_forward())

    def _sum(self, module: "_Module", bucket: GradBucket) -> Future[Tensor]:
        if self._measures_density:
            self._look_at(bucket)
        if module is self._modules[0] and bucket.is_last():
            self._pass()
        return module.sum(self._method, bucket)

    @property
    def _measures_density(self) -> bool:
        return not self.taken and self._passed == _FIRST_STEPS - 1

    def _look_at(self, bucket: GradBucket) -> None:
        if bucket.buffer().is_sparse:
            self._sparse_elements += bucket.buffer().numel()
            self._elements += bucket.buffer().numel()
            return
        for gradient in bucket.gradients():
            self._elements += gradient.numel()
            if gradient.numel() >= LEAST_ELEMENTS and density(gradient) < _SPARSE_BELOW:
                self._sparse_elements += gradient.numel()

    def _pass(self) -> None:
        """Count a step; take the time at both ends of those of a turn that count."""
        self._passed += 1
        if self._passed == self._warm_up:
            self._began_s = self._now()
        if self._passed == self._warm_up + self._steps:
            self._ended_s = self._now()

    def _now(self) -> float:
        device = self._modules[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic()

    def _before_forward(self) -> None:
        """Begin the next turn where one is over."""
        if not torch.is_grad_enabled() or self._passed < self._warm_up + self._steps:
            return
        if self._steps == 0:
            self._turns = self._schedule()
        turn = next(self._turns, None)
        if turn is None:
            raise Enough
        if not self.method(self._method).exact:
            for module in self._modules:
                module.forget(self._method)
        self._method, self._warm_up, self._steps = turn
        self._passed = 0

    def _schedule(self) -> Iterator[tuple[str, int, int]]:
        """Yield turns: a method, steps that do not count, steps that do; hear after each how long it took."""
        started_s = time.monotonic()
        base = OWN if self._modules[0].has_own else BASE
        yield base, _FIRST_STEPS - 2, 2
        step_s, sparse = self._agree((self._ended_s - self._began_s) / 2, float(self._is_sparse))
        active = [base, *([BASE] if base == OWN else []), NOTHING, *self._methods]
        if not sparse:
            active.remove("zen")
            self.left_out["zen"] = "no large gradient has fewer than a quarter of its elements"
        each = self._seconds / step_s / (LEAST_TURNS + 2) / len(active)
        steps = min(max(round(each) - _WARM_UP, 2), _MOST_STEPS)
        self.taken = {name: [] for name in active}
        for number in range(_ROUNDS):
            yield from self._round(active if number % 2 == 0 else active[::-1], steps, first=number == 0)
            if number == 0:
                limit_s = _HOPELESS * self.taken[base][0]
                for name in [name for name in active if name in self._methods and self.taken[name][0] > limit_s]:
                    active.remove(name)
                    self.left_out[name] = f"its steps took {self.taken.pop(name)[0]:.3g} s in the first round"
            (elapsed_s,) = self._agree(time.monotonic() - started_s)
            if number + 1 >= LEAST_TURNS and elapsed_s >= self._seconds:
                break
        # The best of many is the luckiest, too: what seems to pay has to do so once more.
        if (best := recommended(self.taken, self.exact)) is not None:
            for number in range(_ROUNDS):
                yield from self._round([base, best][:: 1 if number % 2 else -1], steps)

    def _round(self, names: Iterable[str], steps: int, *, first: bool = False) -> Iterator[tuple[str, int, int]]:
        for name in names:
            yield name, _FIRST_WARM_UP if first else _WARM_UP, steps
            (took_s,) = self._agree((self._ended_s - self._began_s) / steps)
            self.taken[name].append(took_s)

    @property
    def _is_sparse(self) -> bool:
        return self._sparse_elements >= _WORTH_ZEN * max(self._elements, 1)

    def _agree(self, *values: float) -> Sequence[float]:
        """Return the greatest of each value among all ranks."""
        module = self._modules[0]
        mine = torch.tensor(values, dtype=torch.float64, device=module.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=module.group)
        found: list[float] = mine.tolist()
        return found


class Enough(BaseException):
    """Ends the script: all is measured. No `except Exception` of the script is to catch it."""


class _Module:
    """One DDP module, and each method made for it."""

    def __init__(self, module: DistributedDataParallel, tried: Iterable[Method], ranks_per_host: int | None) -> None:
        self.device = next(module.module.parameters()).device
        self.group = module.process_group
        self._own: tuple[Any, Callable[[Any, GradBucket], Future[Tensor]]] | None = None
        self._hooks: dict[str, GradientHook] = {}
        self._fresh: dict[str, Any] = {}
        for method in tried:
            if method.scheme:
                hook = make_hook(module, method.scheme, ranks_per_host=ranks_per_host, **method.options)
                self._hooks[method.name] = hook
                self._fresh[method.name] = hook.state_dict()

    @property
    def has_own(self) -> bool:
        return self._own is not None

    def take_own(self, state: Any, hook: Callable[[Any, GradBucket], Future[Tensor]]) -> None:
        """Be `register_comm_hook` for the script."""
        self._own = (state, hook)

    def sum(self, method: str, bucket: GradBucket) -> Future[Tensor]:
        if method == NOTHING:
            done: Future[Tensor] = Future()
            done.set_result(bucket.buffer())
            return done
        if method == OWN and self._own is not None:
            state, hook = self._own
            return hook(state, bucket)
        if method in self._hooks:
            return synchronize(self._hooks[method], bucket)
        return default_hooks.allreduce_hook(self.group, bucket)

    def forget(self, method: str) -> None:
        """Free what a method remembers of gradients, which is as large as they are."""
        if method in self._hooks:
            self._hooks[method].load_state_dict(self._fresh[method])

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.close()
