"""One of four ranks that sum a gradient by Zen, again and again, each time told something else about its host.

    tests/told_trainer.py '{NAME: [[LOCAL_WORLD_SIZE, LOCAL_RANK] of each rank]}'

It prints name → the size of the group that was summed dense first. Hosts that it gives different sizes are refused.
"""

import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import register
from resilient_run.comm.net.fabric import make_fabric
from resilient_run.comm.net.two_level import TwoLevel

REFUSED = {(1, 1, 2, 2): "1, 1, 2, 2", (2, None, 2, 2): "2, none, 2, 2", (True, 2, 2.0, -3): "0, 2, 0, 0"}
"""What ranks give as their number of ranks per host, and what is told of it."""


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
            lambda per_host: register(model, "zen", ranks_per_host=per_host),
        ):
            with pytest.raises(CommError, match=f"given {told} ranks per host"):
                make(given[rank])
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


main()
