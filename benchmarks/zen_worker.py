"""One rank of `zen.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines."""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from baselines import named
from recording import Measurement, RecordingTransport, measure
from sparse_workload import WIDTH, WORKLOADS, gradient
from workload import emit

from resilient_run.comm.zen.formats import ALL
from resilient_run.comm.zen.zen import Zen

FIRST_WARM_UP, WARM_UP = 2, 1
"""Steps that do not count: Zen's first is profiled, and the next is the first that goes its way."""
ROWS: dict[str, Any] = {"row": WIDTH, "formats": ALL}
options = json.loads(sys.argv[1])
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, rows": (name, ROWS) for name in ("agsparse", "sparcml", "sparse-ps")},
    "zen": ("zen", {"profile_steps": 1}),
    "zen, gather": ("zen", {"route": "gather"}),
    "zen, elements": ("zen", {"route": "parallel", "rows": ()}),
}

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
transport = RecordingTransport.over(dist.group.WORLD)
for workload in options["workloads"]:
    own = gradient(WORKLOADS[workload], rank, elements=options["elements"], gpus=options["gpus"])
    schemes = {}
    for name in options["schemes"]:
        kind, arguments = OPTIONS.get(name, (name, {}))
        schemes[name] = named(kind, transport, **arguments)
    rounds: dict[str, list[Measurement]] = {name: [] for name in schemes}
    for number in range(options["rounds"]):
        for name, scheme in schemes.items():
            warm_up = FIRST_WARM_UP if number == 0 else WARM_UP
            inputs = (own.clone() for _ in range(warm_up + 1))
            rounds[name].append(measure(scheme, transport, inputs, repeats=1, warm_up=warm_up, sample_s=0.5))
    if rank == 0:
        for name, found in rounds.items():
            scheme = schemes[name]
            plan = next(iter(scheme.plans.values())) if isinstance(scheme, Zen) else None
            chosen = None if plan is None else f"{plan.route}, rows of {plan.width}"
            all_rounds = {kind: [s for each in found for s in getattr(each, kind)] for kind in ("step_s", "messages_s")}
            line = {"workload": workload, "scheme": name, "chosen": chosen, **asdict(found[-1]), **all_rounds}
            emit(json.dumps(line))
dist.destroy_process_group()
