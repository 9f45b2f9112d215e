"""One rank of `whole_steps.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines.

With dense gradients the first line has what a file written by hand needs to know of this machine; the plans for that
file come in a folder.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from baselines import BASELINES
from known_costs import known
from sparse_workload import WIDTH, WORKLOADS, gradient
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
from torch import Tensor, nn
from workload import emit

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.hook import register
from resilient_run.comm.local_steps import LocalSteps
from resilient_run.comm.plan.plan import Plan
from resilient_run.comm.zen.formats import ALL

TABLE = "table.weight"
WARM_UP = 5
"""Iterations that do not count: buckets are made anew, torch's PowerSGD begins, Zen counts, decides, and goes its way
for the first time."""

options = json.loads(sys.argv[1])
device = Device()
Iteration = Callable[[], None]


class Model(TimedModel):
    """Dense gradients are other ones at each step; with a table it has the one of `options["workload"]` besides.

    Args:
        sparse: The table's gradient is a sparse tensor.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        steps = [Step(**step) for step in options["steps"]]
        super().__init__(steps, forward_s=options["forward_s"], device=device, rank=dist.get_rank())
        self._places = torch.Generator().manual_seed(0)  # the same on all ranks, whose gradients overlap
        if options["workload"] is not None:
            workload, elements = WORKLOADS[options["workload"]], options["table_elements"]
            made = gradient(workload, dist.get_rank(), elements=elements, gpus=options["gpus"])
            self.table = nn.Embedding(*made.shape, sparse=sparse)
            self._made[TABLE] = made.to_sparse(1) if sparse else made
            self._seconds[TABLE] = options["table_s"]

    def gradient(self, name: str) -> Tensor:
        made = super().gradient(name)
        if name == TABLE:
            return made
        place = int(torch.randint(made.numel(), (), generator=self._places))
        return made.view(-1).roll(place).view_as(made)


def with_scheme(name: str, *, sparse: bool = False, **scheme_options: Any) -> Iteration:
    """Return what trains an iteration under DDP; a scheme sums the table where there is one, and everything if not."""
    least = 1 if options["workload"] is None else options["table_elements"]
    choice: Any = name
    if name in BASELINES:
        choice, scheme_options = partial(BASELINES[name], **scheme_options), {}
    return unplanned(
        Model(sparse=sparse),
        bucket_mib=options["bucket_mib"],
        attach=lambda parallel: register(parallel, choice, least_elements=least, **scheme_options),
    )


def with_local_steps() -> Iteration:
    """Return what trains an iteration of a replica, which meets the others every so many."""
    model = Model()
    local = LocalSteps(model, every=options["every"], least_elements=1)

    def iteration() -> None:
        model.zero_grad()
        with device.iteration():
            model().backward()
        local.step()

    return iteration


def for_tables() -> dict[str, Iteration]:
    """Return contenders whose sums lose nothing."""
    rows: dict[str, Any] = {"row": WIDTH, "formats": ALL}
    return {
        "all-reduce": unplanned(Model(), bucket_mib=options["bucket_mib"]),
        "torch's all-gather, sparse table": unplanned(Model(sparse=True), bucket_mib=options["bucket_mib"]),
        "agsparse, rows": with_scheme("agsparse", **rows),
        "sparcml, rows": with_scheme("sparcml", **rows),
        "sparcml, rows, sparse table": with_scheme("sparcml", sparse=True, **rows),
        "sparse-ps, rows": with_scheme("sparse-ps", **rows),
        "omnireduce": with_scheme("omnireduce"),
        "zen": with_scheme("zen", profile_steps=1),
        "zen, sparse table": with_scheme("zen", sparse=True, profile_steps=1),
    }


def for_dense() -> dict[str, Iteration]:
    """Return contenders that send less than the gradients have."""
    bucket_mib, density = options["bucket_mib"], options["compressor"]["density"]
    return {
        "all-reduce": unplanned(Model(), bucket_mib=bucket_mib),
        "torch's fp16_compress_hook": unplanned(Model(), bucket_mib=bucket_mib, attach=fp16_hook),
        "torch's powerSGD_hook": unplanned(Model(), bucket_mib=ONE_BUCKET_MIB, attach=powersgd_hook),
        "powersgd": with_scheme("powersgd", rank=POWERSGD_RANK),
        "int8": with_scheme("int8"),
        "fp8": with_scheme("fp8"),
        **{
            name: with_scheme(name, density=density)
            for name in ("topk-a", "topk-dsa", "gtopk", "ok-topk", "dgc", "spardl")
        },
        **{
            path.name: planned(Plan.read(path), Model(), named(**options["compressor"]))[1]
            for path in sorted(Path(options["folder"]).glob("plan-*.json"))
        },
        "local steps": with_local_steps(),
    }


torch.set_num_threads(1)
dist.init_process_group("gloo")
if options["workload"] is None:
    found = known(named(**options["compressor"]))
    if dist.get_rank() == 0:
        emit(json.dumps(found))
    while not (Path(options["folder"]) / "planned").exists():
        time.sleep(0.05)
contenders = for_dense() if options["workload"] is None else for_tables()
for turn in range(-1, options["rounds"]):
    for contender, iteration in contenders.items():
        # A round of local steps is one measurement.
        every = options["every"] if contender == "local steps" else 1
        count = every if turn >= 0 else max(every, WARM_UP)
        seconds = slowest_s(iteration, warm_up=0, count=count)
        if turn >= 0 and dist.get_rank() == 0:
            emit(json.dumps({"contender": contender, "seconds": fmean(seconds)}))
dist.barrier()
os._exit(0)  # the synchronizers' threads and groups end with the process
