"""One rank of `at_once.py` on a host of the laboratory network. Options are a JSON object; rank 0 prints lines."""

import json
import os
import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from workload import emit

from resilient_run.comm.net.transport import Transport


class Fixed(Transport):
    """Lets messages come at once, or never."""

    at_once = True

    def overruns(self, sizes_bytes: Iterable[int]) -> bool:
        """As of `Transport`."""
        return not self.at_once


options = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
transport = Fixed(dist.group.WORLD)
found = []
for _ in range(options["repeats"]):
    dist.barrier()
    began_s = time.perf_counter()
    transport.learn()
    found.append((time.perf_counter() - began_s, transport.at_once_bytes))
if dist.get_rank() == 0:
    emit(json.dumps(dict(zip(("learn_s", "learnt_bytes"), zip(*found, strict=True), strict=True))))
for received_kib in options["sizes_kib"]:
    message = torch.zeros((received_kib << 10) // (transport.size - 1), dtype=torch.uint8)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options["repeats"]):
        for transport.at_once, taken in seconds.items():
            dist.barrier()
            began_s = time.perf_counter()
            transport.all_to_all([message] * transport.size, sizes_bytes=[message.numel()] * transport.size)
            dist.barrier()
            taken.append(time.perf_counter() - began_s)
    if dist.get_rank() == 0:
        line = {"received_kib": received_kib, "at_once_s": seconds[True], "in_turn_s": seconds[False]}
        emit(json.dumps(line))
dist.barrier()
os._exit(0)  # groups end with the process
