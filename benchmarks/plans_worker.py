"""One worker of `plans.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from timed_model import (
    ONE_BUCKET_MIB,
    POWERSGD_RANK,
    Device,
    Step,
    TimedModel,
    fp16_hook,
    planned,
    powersgd_hook,
    slowest_s,
    unplanned,
)
from torch.nn.parallel import DistributedDataParallel
from workload import emit

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.hook import register
from resilient_run.comm.plan.plan import Plan
from resilient_run.comm.profiler import BackwardProfiler

options = json.loads(sys.argv[1])
device = Device()


def build() -> TimedModel:
    steps = [Step(**step) for step in options["steps"]]
    return TimedModel(steps, forward_s=options["forward_s"], device=device, rank=dist.get_rank())


def under_ddp(
    attach: Callable[[DistributedDataParallel], object] | None = None, *, bucket_mib: float = options["bucket_mib"]
) -> Callable[[], None]:
    # DDP's buckets have as much less in them as the model has.
    return unplanned(build(), bucket_mib=bucket_mib, attach=attach)


def profile() -> None:
    """Write the model file, measured while all workers do the same and none communicates."""
    model = build()
    profiler = BackwardProfiler(model, iterations=options["iterations"], warm_up=1)
    for _ in range(options["iterations"] + 2):
        model.zero_grad()
        with device.iteration():
            model().backward()
    dist.barrier()
    if dist.get_rank() == 0:
        profiler.write(Path(options["model_path"]), name=options["model"])


def train() -> None:
    """Print the seconds of each iteration by each strategy, on the slowest rank; they take turns."""
    made: dict[str, Callable[[], None]] = {
        "fp32": under_ddp(),
        "fp16": under_ddp(fp16_hook),
        "powersgd": under_ddp(powersgd_hook, bucket_mib=ONE_BUCKET_MIB),
        "powersgd, overlapped": under_ddp(
            lambda parallel: register(parallel, "powersgd", rank=POWERSGD_RANK, least_elements=1)
        ),
        **{
            name: planned(Plan.read(Path(path)), build(), named("topk", density=options["density"]))[1]
            for name, path in options["plans"].items()
        },
    }
    for iteration in made.values():
        for _ in range(4):  # compiles, makes DDP's final buckets, begins PowerSGD
            iteration()
    for turn in range(options["rounds"]):
        for name, iteration in made.items():
            seconds = slowest_s(iteration, warm_up=1, count=options["iterations"])
            if dist.get_rank() == 0:
                emit(json.dumps({"strategy": name, "round": turn, "seconds": seconds}))


torch.set_num_threads(1)
dist.init_process_group("gloo")
{"profile": profile, "train": train}[options["task"]]()
dist.barrier()
os._exit(0)  # the synchronizers' threads and groups end with the process
