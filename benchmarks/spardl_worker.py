"""One rank of `spardl.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines."""

import gc
import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from workload import emit

from resilient_run.comm.errors import CommError
from resilient_run.comm.measure.timing import RecordingTransport, example_gradient, inputs_for, measure, scheme_at

options = json.loads(sys.argv[1])
density = options["density"]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
transport = RecordingTransport(dist.group.WORLD)
for numel in options["sizes"]:
    gradients = [example_gradient(numel, rank, step) for step in range(options["steps"])]
    for name in options["schemes"]:
        try:
            scheme = scheme_at(name, transport, density)
        except CommError:
            continue  # gtopk, where the ranks are no power of two
        inputs = inputs_for(scheme, gradients, density)
        found = measure(scheme, transport, inputs, repeats=options["repeats"], sample_s=0.5)
        if rank == 0:
            emit(json.dumps({"numel": numel, "scheme": name, **asdict(found)}))
        del scheme
        gc.collect()
dist.destroy_process_group()
