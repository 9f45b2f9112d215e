"""What who writes a planner's input files by hand has to know of a machine, for `predicted.py` and `whole_steps.py`."""

import os

import torch.distributed as dist

from resilient_run.comm.compress.compressor import Compressor
from resilient_run.comm.measure.probe import probe_coder, probe_link
from resilient_run.comm.net.fabric import make_fabric
from resilient_run.comm.plan.collective import load
from resilient_run.comm.plan.tree import Routine

CODED_BYTES = (256 << 10, 4 << 20)
IN_HOST_BYTES = 1 << 20
BATCHES = 15


def known(compressor: Compressor) -> dict[str, object]:
    """Return seconds of start-ups, bytes within a host, and the compressor at two sizes; all ranks measure together."""
    fabric = make_fabric(range(dist.get_world_size()), ranks_per_host=int(os.environ["LOCAL_WORLD_SIZE"]), device="cpu")
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
