"""One rank of `collectives.py` on a host of the laboratory network. Options are a JSON object; rank 0 prints lines."""

import json
import sys

import torch
import torch.distributed as dist
from workload import emit

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.measure.probe import PROBED, PROBED_COMPRESSED, probe_link
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.plan.tree import Routine

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
transport = Transport(dist.group.WORLD)
# The first line is of an all-reduce of next to nothing.
cases = [(Routine.ALL_REDUCE, None, 4)]
cases += [(routine, None, options["size_bytes"]) for routine in PROBED]
cases += [(routine, name, options["size_bytes"]) for name in options["compressors"] for routine in PROBED_COMPRESSED]
for routine, name, size_bytes in cases:
    # All ranks together hold as much after an all-gather or gather as before another collective.
    held_bytes = size_bytes // (transport.size if routine in (Routine.ALL_GATHER, Routine.GATHER) else 1)
    compressor = None if name is None else named(name)
    (seconds,) = probe_link(transport, routine, [held_bytes], repeats=options["repeats"], compressor=compressor)
    if dist.get_rank() == 0:
        emit(
            json.dumps(
                {"routine": routine, "compressor": name, "held_bytes": held_bytes, "seconds": seconds},
            )
        )
dist.destroy_process_group()
