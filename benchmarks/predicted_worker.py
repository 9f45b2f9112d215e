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
from timed_model import Device, Step, TimedModel, planned, slowest_s, unplanned
from workload import emit

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.measure.probe import probe_coder, probe_link
from resilient_run.comm.net.fabric import make_fabric
from resilient_run.comm.plan.collective import load
from resilient_run.comm.plan.plan import Plan
from resilient_run.comm.plan.tree import Routine

CODED_BYTES = (256 << 10, 4 << 20)
IN_HOST_BYTES = 1 << 20
BATCHES = 15

options = json.loads(sys.argv[1])
device = Device()


def known() -> dict[str, object]:
    """Return seconds of start-ups, bytes within a host, and the compressor at two sizes; all ranks measure together."""
    fabric = make_fabric(range(dist.get_world_size()), ranks_per_host=int(os.environ["LOCAL_WORLD_SIZE"]), device="cpu")
    compressor = named(**options["compressor"])
    found: dict[str, object] = {}
    for name, transport in {"inter": fabric.flat, "intra": fabric.intra}.items():
        if transport.size == 1:
            continue
        library, own = (load(routine, transport.size) for routine in (Routine.ALL_REDUCE, Routine.ALL_GATHER))
        (library_s,) = probe_link(transport, Routine.ALL_REDUCE, [4], repeats=BATCHES, everyone=fabric.flat)
        (own_s,) = probe_link(transport, Routine.ALL_GATHER, [4], repeats=BATCHES, everyone=fabric.flat)
        (coded_s,) = probe_link(
            transport, Routine.ALL_GATHER, [4], repeats=BATCHES, compressor=compressor, everyone=fabric.flat
        )
        found[f"{name}_library_alpha_s"] = library_s / library.startups
        found[f"{name}_alpha_s"], found[f"{name}_coded_alpha_s"] = own_s / own.startups, coded_s / own.startups
        if name == "intra":
            (long_s,) = probe_link(transport, Routine.ALL_REDUCE, [IN_HOST_BYTES], everyone=fabric.flat)
            found["intra_byte_s"] = max(0.0, long_s - library_s) / (library.rank * IN_HOST_BYTES)
    coder = probe_coder(compressor, CODED_BYTES, device="cpu", repeats=5, transport=fabric.flat)
    points = {"compress": coder.compress, "decompress": coder.decompress, "accumulate": coder.accumulate}
    return {**found, "sizes_bytes": CODED_BYTES, **points, "ratio": coder.ratio}


def sent_again() -> int:
    """Return the TCP segments that all hosts have sent again."""
    titles, values = (row.split() for row in Path("/proc/net/snmp").read_text().splitlines() if row.startswith("Tcp:"))
    count = int(values[titles.index("RetransSegs")]) if os.environ["LOCAL_RANK"] == "0" else 0
    everywhere = torch.tensor([count])
    dist.all_reduce(everywhere)
    return int(everywhere)


torch.set_num_threads(1)
dist.init_process_group("gloo")
found = known()
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
