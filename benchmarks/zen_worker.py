"""One rank of `zen.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines."""

import gc
import json
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from sparse_workload import WIDTH, WORKLOADS, gradient
from workload import emit

from resilient_run.comm.measure.timing import RecordingTransport, measure
from resilient_run.comm.schemes import named
from resilient_run.comm.zen.formats import ALL
from resilient_run.comm.zen.zen import Zen

WARM_UP = 2
"""Steps that allocate memory: Zen's first is profiled, and the next is the first that goes its way."""
ROWS: dict[str, Any] = {"row": WIDTH, "formats": ALL}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, rows": (name, ROWS) for name in ("agsparse", "sparcml", "sparse-ps")},
    "zen": ("zen", {"profile_steps": 1}),
    "zen, elements": ("zen", {"route": "parallel", "rows": ()}),
}

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
transport = RecordingTransport(dist.group.WORLD)
for workload in options["workloads"]:
    own = gradient(WORKLOADS[workload], rank, elements=options["elements"], gpus=options["gpus"])
    for name in options["schemes"]:
        kind, arguments = OPTIONS.get(name, (name, {}))
        scheme = named(kind, transport, **arguments)
        inputs = (own.clone() for _ in range(WARM_UP + options["steps"]))
        found = measure(
            scheme, transport, inputs, repeats=options["repeats"], warm_up=WARM_UP, sample_s=0.5, at_most_s=4.0
        )
        if rank == 0:
            plan = next(iter(scheme.plans.values())) if isinstance(scheme, Zen) else None
            chosen = None if plan is None else f"{plan.route}, rows of {plan.width}"
            emit(json.dumps({"workload": workload, "scheme": name, "chosen": chosen, **asdict(found)}))
        del scheme
        gc.collect()
dist.destroy_process_group()
