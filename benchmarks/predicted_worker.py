"""One worker of `predicted.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines.

The first line has what a file written by hand needs to know of this machine; the plans for that file come in a folder.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from known_costs import known
from timed_model import Device, Step, TimedModel, planned, slowest_s, unplanned
from workload import emit

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.plan.plan import Plan

options = json.loads(sys.argv[1])
device = Device()


def sent_again() -> int:
    """Return the TCP segments that all hosts have sent again."""
    titles, values = (row.split() for row in Path("/proc/net/snmp").read_text().splitlines() if row.startswith("Tcp:"))
    count = int(values[titles.index("RetransSegs")]) if os.environ["LOCAL_RANK"] == "0" else 0
    everywhere = torch.tensor([count])
    dist.all_reduce(everywhere)
    return int(everywhere)


torch.set_num_threads(1)
dist.init_process_group("gloo")
found = known(named(**options["compressor"]))
if dist.get_rank() == 0:
    emit(json.dumps(found))
folder = Path(options["folder"])
while not (folder / "planned").exists():
    time.sleep(0.05)
steps = [Step(**step) for step in options["steps"]]


def measure(name: str, iteration: Callable[[], None]) -> None:
    """Print what iterations take."""
    before = sent_again()
    seconds = slowest_s(iteration, warm_up=options["warm_up"], count=options["iterations"])
    again = sent_again() - before
    if dist.get_rank() == 0:
        emit(json.dumps({"plan": name, "seconds": seconds, "sent_again": again}))


def made() -> TimedModel:
    """Return the model as it is at first."""
    return TimedModel(steps, forward_s=options["forward_s"], device=device, rank=dist.get_rank())


for path in sorted(folder.glob("plan-*.json")):
    averaging, iteration = planned(Plan.read(path), made(), named(**options["compressor"]))
    measure(path.name, iteration)
    averaging.close()
measure(options["ddp"], unplanned(made(), bucket_mib=options["bucket_mib"]))
dist.barrier()
os._exit(0)  # groups end with the process
