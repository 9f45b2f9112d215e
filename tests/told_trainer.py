"""One of four ranks that sum a gradient by Zen, again and again, each time told something else about its host.

    tests/told_trainer.py '{NAME: [[LOCAL_WORLD_SIZE, LOCAL_RANK] of each rank]}'

It prints name → the size of the group that was summed dense first. Hosts that it gives different sizes are refused.
"""

import json
import os
import re
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import make_hook, register
from resilient_run.comm.local_steps import LocalSteps
from resilient_run.comm.net.fabric import make_fabric
from resilient_run.comm.net.two_level import TwoLevel
from resilient_run.comm.runtime.choice import scheme_of
from resilient_run.comm.zen.zen import Zen

REFUSED: dict[tuple[Any, ...], str] = {
    (1, 1, 2, 2): "ranks_per_host is 1 on rank 0 and 2 on rank 2; give all ranks the same",
    (2, None, 2, 2): "ranks_per_host is 2 on rank 0 and None on rank 1; give all ranks the same",
    (2, 2.0, 2.0, -3): "ranks_per_host is 2 on rank 0 and -3 on rank 3; give all ranks the same",
    (3, 3.0, 3, 3): "4 ranks are not a multiple of 3.* per host; give a divisor",
}
"""What ranks give as their number of ranks per host, and what is told of it."""

DIFFERENT: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"scheme": "topk", "density": 0.01}, {"scheme": "topk", "density": 0.02}],
        "density is 0.01 on rank 0 and 0.02 on rank 1",
    ),
    ([{"scheme": "zen"}, {"scheme": "zen", "seed": 1}], "seed is not given on rank 0 and 1 on rank 1"),
    ([{"scheme": "zen"}] * 3 + [{"scheme": "no such"}], "scheme is 'zen' on rank 0 and 'no such' on rank 3"),
    (
        [{"scheme": lambda ranks: Zen(ranks)}, {"scheme": Zen}],
        "scheme is __main__.<lambda> on rank 0 and resilient_run.comm.zen.zen.Zen on rank 1",
    ),
    (
        [{"scheme": partial(Zen, seed=1)}, {"scheme": partial(Zen, seed=2)}],
        "scheme.keywords['seed'] is 1 on rank 0 and 2 on rank 1",
    ),
    (
        [{"scheme": lambda ranks: scheme_of("fp16", ranks)}, {"scheme": lambda ranks: scheme_of("bf16", ranks)}],
        "scheme.memory.compressor.dtype is torch.float16 on rank 0 and torch.bfloat16 on rank 1",
    ),
]
"""What ranks are given in turn, and what is said of it."""

ALIKE: list[list[dict[str, Any]]] = [
    [{"scheme": "topk", "density": 1}, {"scheme": "topk", "density": 1.0}],
    [{"scheme": lambda ranks: scheme_of("int8", ranks, rounding="stochastic")}],
    [{"scheme": "zen", "ranks_per_host": 2}, {"scheme": "zen", "ranks_per_host": 2.0}],
    [{"scheme": "zen", "rows": (16, 64)}, {"scheme": "zen", "rows": [16, 64]}],
]
"""What ranks are given in turn that is the same."""


def main() -> None:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for name, told in json.loads(sys.argv[1]).items():
        for variable, value in zip(("LOCAL_WORLD_SIZE", "LOCAL_RANK"), told[rank], strict=True):
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = str(value)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(300, 100))
        hook = register(model, "zen")
        model(torch.full((1, 300), 1.0 + rank)).sum().backward()
        gradient = model.module.weight.grad
        assert torch.equal(gradient, torch.full_like(gradient, 2.5)), name
        found[name] = hook.scheme.within.size if isinstance(hook.scheme, TwoLevel) else 1
        hook.close()
    for given, told in REFUSED.items():
        for make in (
            lambda per_host: make_fabric(range(dist.get_world_size()), ranks_per_host=per_host),
            lambda per_host: register(DistributedDataParallel(nn.Linear(300, 100)), "zen", ranks_per_host=per_host),
        ):
            with pytest.raises(CommError, match=told):
                make(given[rank])
    for given, said in DIFFERENT:
        with pytest.raises(CommError, match=f"^{re.escape(said)}; give all ranks the same$"):
            register(DistributedDataParallel(nn.Linear(300, 100)), **given[rank % len(given)])
    for given in ALIKE:
        make_hook(model, **given[rank % len(given)]).close()
    with pytest.raises(CommError, match=r"^every is 4 on rank 0 and 0 on rank 1"):
        LocalSteps(nn.Linear(3, 3), every=(4, 0)[rank % 2])
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


main()
