"""One rank of `interleaving.py`: layers that compute and then reduce over the network, one after the other.

Computing is a pause, because the measured machine has fewer cores than hosts and a GPU's work takes no CPU either. The
collectives, the optimizer, the captures and their replicas are real.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from workload import emit

from resilient_run import Checkpointer

layers, compute_s, bucket_bytes, state_bytes, steps = (float(argument) for argument in sys.argv[1:6])
torch.set_num_threads(1)
dist.init_process_group("gloo")
parameters = [torch.nn.Parameter(torch.zeros(int(state_bytes) // 16)) for _ in range(4)]
for parameter in parameters:
    parameter.grad = torch.full_like(parameter, 1e-3)
bucket = torch.ones(int(bucket_bytes) // 4)
optimizer = torch.optim.SGD(parameters, lr=0.1)
checkpointer = Checkpointer(parameters=dict(enumerate(parameters)), optimizer=optimizer)
began_s = time.monotonic()
for step in range(checkpointer.restore(), int(steps)):
    for _ in range(int(layers)):
        time.sleep(compute_s)
        dist.all_reduce(bucket)
    time.sleep(compute_s)
    optimizer.step()
    checkpointer.step(step + 1)
    ended_s = time.monotonic()
    if dist.get_rank() == 0:
        stats = checkpointer.stats
        line = {"step": step + 1, "seconds": ended_s - began_s, "captures": stats.captures, "stall_s": stats.stall_s}
        emit(json.dumps(line))
    began_s = ended_s
checkpointer.close()
dist.destroy_process_group()
