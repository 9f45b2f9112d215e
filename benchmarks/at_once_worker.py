"""One rank of `at_once.py` on a host of the laboratory network. Options are a JSON object; rank 0 prints lines."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from workload import emit

from resilient_run.comm.net.collectives import gather_shares, reduce_scatter
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.plan.collective import MOST_AT_ONCE_BYTES

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
transport = Transport(dist.group.WORLD)
learnt: dict[str, list[float]] = {"learn_s": [], "learnt_bytes": []}
for _ in range(options["repeats"]):
    dist.barrier()
    began_s = time.perf_counter()
    transport.learn()
    learnt["learn_s"].append(time.perf_counter() - began_s)
    learnt["learnt_bytes"].append(transport.at_once_bytes)
if dist.get_rank() == 0:
    emit(json.dumps(learnt))
most_bytes = {f"{each} ms": 1e-3 * each / options["byte_s"] for each in options["at_once_ms"]}
most_bytes["whole"] = MOST_AT_ONCE_BYTES
for length_ms in options["lengths_ms"]:
    # What comes from one other rank, of all but this one.
    share = torch.zeros(round(1e-3 * length_ms / options["byte_s"] / (transport.size - 1)) // 4)
    messages = [share.view(torch.uint8)] * transport.size
    link_s = 3 * (transport.size - 1) * share.nbytes * options["byte_s"]
    ways: dict[str, list[float]] = {way: [] for way in most_bytes}
    for _ in range(options["repeats"]):
        for way, transport.at_once_bytes in most_bytes.items():
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(2):
                gather_shares(transport, share)
                transport.all_to_all(messages, sizes_bytes=[share.nbytes] * transport.size)
                reduce_scatter(transport, share.repeat(transport.size))
            ways[way].append((time.perf_counter() - began_s) / (2 * link_s))
    if dist.get_rank() == 0:
        emit(json.dumps({"length_ms": length_ms, "over_link": ways}))
dist.barrier()
os._exit(0)  # groups end with the process
