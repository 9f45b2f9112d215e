"""One rank of `strangers.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines.

All contenders train the same model from the same parameters with the same data, one after the other step by step, each
with random numbers of its own.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from strange_trainings import SPARSE, begin
from timed_model import ONE_BUCKET_MIB, fp16_hook, powersgd_hook
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workload import emit

from resilient_run.comm.hook import register
from resilient_run.comm.trial.advice import Turns
from resilient_run.comm.trial.tried import AutoHook

options = json.loads(sys.argv[1])
Attach = Callable[[DistributedDataParallel], object]
AUTOS = {"auto": False, "auto, lossy": True}


class Contender:
    """A training, step by step.

    Args:
        attach: Gives a hook to its model.
        ddp: Options of DistributedDataParallel beside the training's own.
    """

    def __init__(self, attach: Attach | None = None, **ddp: Any) -> None:
        self._attach, self._ddp = attach, ddp
        self.hook: Any = None
        self.losses: list[Tensor] = []
        self._steps: Iterator[Tensor] = begin(options["name"], self._parallelize)
        self._random = torch.get_rng_state()

    def _parallelize(self, model: nn.Module, **given: Any) -> DistributedDataParallel:
        parallel = DistributedDataParallel(model, **given, **self._ddp)
        if self._attach is not None:
            self.hook = self._attach(parallel)
        return parallel

    def step(self) -> float:
        """Train a step and return the seconds of the slowest rank."""
        torch.set_rng_state(self._random)
        dist.barrier()
        began_s = time.perf_counter()
        self.losses.append(next(self._steps))
        took_s = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
        self._random = torch.get_rng_state()
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        return took_s.item()

    def mean_losses(self) -> list[float]:
        """Return the mean over ranks of the loss of each step."""
        losses = torch.stack(self.losses).double()
        dist.all_reduce(losses)
        found: list[float] = (losses / dist.get_world_size()).tolist()
        return found


def chosen(lossy: bool) -> Attach:
    """Let "auto" choose in a training of its own, tell of it, and return what goes on with the choice elsewhere."""
    attach = partial(register, scheme="auto", lossy=lossy, seconds=options["seconds"])
    tries = Contender(attach)
    began_s = time.perf_counter()
    tries.step()
    hook: AutoHook = tries.hook
    trial = hook._trial
    assert trial is not None
    while hook.chosen is None:
        tries.step()
    found = {
        "trial": next(name for name, each in AUTOS.items() if each == lossy),
        "chosen": hook.chosen,
        "taken": trial.taken,
        "left_out": trial.left_out,
        "steps": len(tries.losses),
        "seconds": time.perf_counter() - began_s,
        "promised_s": Turns.of(trial.taken[hook.chosen]).median_s if trial.taken else None,
        "base_s": Turns.of(trial.taken["all-reduce"]).median_s if trial.taken else None,
    }
    if dist.get_rank() == 0:
        emit(json.dumps(found))
    state = hook.state_dict()
    hook.close()

    def resume(parallel: DistributedDataParallel) -> AutoHook:
        resumed: Any = attach(parallel)
        resumed.load_state_dict(state)
        return resumed

    return resume


def as_advised(model: DistributedDataParallel) -> Any:
    """Carry out the line that was advised, and return its hook."""
    names: dict[str, Any] = {"model": model, "register": register}
    exec(options["write"], names)
    return names["hook"]


def main() -> None:
    """Let "auto" choose, then train all contenders in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = {
        "DDP": Contender(),
        **{name: Contender(chosen(lossy)) for name, lossy in AUTOS.items()},
    }
    if options["write"] is not None:
        contenders["as advised"] = Contender(as_advised)
    # torch's hooks end with an error, or never, where gradients are sparse.
    if options["name"] not in SPARSE:
        contenders["torch's fp16_compress_hook"] = Contender(fp16_hook)
        contenders["torch's powerSGD_hook"] = Contender(powersgd_hook, bucket_cap_mb=ONE_BUCKET_MIB)
    for turn in range(-1, options["rounds"]):
        for name, contender in contenders.items():
            seconds = [contender.step() for _ in range(options["steps"] if turn >= 0 else options["warm_up"])]
            if turn >= 0 and dist.get_rank() == 0:
                emit(json.dumps({"contender": name, "seconds": median(seconds)}))
    for name, contender in contenders.items():
        losses = contender.mean_losses()
        if dist.get_rank() == 0:
            emit(json.dumps({"contender": name, "losses": losses}))
    dist.barrier()
    os._exit(0)  # the hooks' threads and groups end with the process


if __name__ == "__main__":
    main()
