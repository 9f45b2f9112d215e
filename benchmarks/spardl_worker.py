"""One rank of `spardl.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines."""

import gc
import json
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from baselines import named
from recording import RecordingTransport, example_gradient, measure
from workload import emit

from resilient_run.comm.errors import CommError
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.spardl.spardl import SparDL

GRADIENTS = 2
SAMPLE_S = 0.3
SMALL_BYTES, LARGE_BYTES = 64, 1 << 20


def network(transport: Transport) -> dict[str, float]:
    """Return what one message and one word of 4 bytes take between neighbours, all of whom send at once."""
    ranks, rank = transport.size, transport.rank

    def swap_s(size_bytes: int, count: int) -> float:
        message = torch.zeros(size_bytes, dtype=torch.uint8)
        began_s = time.monotonic()
        for _ in range(count):
            transport.swap(message, to=(rank + 1) % ranks, source=(rank - 1) % ranks, size_bytes=size_bytes)
        return (time.monotonic() - began_s) / count

    swap_s(LARGE_BYTES, 2)
    alpha_s = median(swap_s(SMALL_BYTES, 50) for _ in range(5))
    large_s = median(swap_s(LARGE_BYTES, 4) for _ in range(5))
    own = torch.tensor([alpha_s, 4 * (large_s - alpha_s) / LARGE_BYTES], dtype=torch.float64).view(torch.uint8)
    every = transport.send_to_all(own, sizes_bytes=[own.numel()] * ranks)
    # Of the slowest rank, and so the same on all.
    alpha_s, beta_s = torch.stack([message.view(torch.float64) for message in every]).amax(0).tolist()
    return {"alpha_s": alpha_s, "beta_s": beta_s}


def memory(scheme: Any) -> dict[str, Any]:
    """Return how SparDL summed the last gradient: teams, and of B-SAG this rank's width and the union of all teams'."""
    kept: dict[str, Any] = scheme.state_dict()["memories"]["gradient"] if isinstance(scheme, SparDL) else {}
    return {name: value for name, value in kept.items() if name != "ranks"}


options = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
found_network = network(Transport(dist.group.WORLD))
for numel in options["sizes"]:
    gradients = [example_gradient(numel, rank, step) for step in range(GRADIENTS)]
    made = {}
    for name, arguments in options["contenders"].items():
        transport = RecordingTransport(dist.group.WORLD)
        scheme, _, _ = name.partition(",")
        try:
            made[name] = named(scheme, transport, **arguments), transport
        except CommError as error:
            if rank == 0:
                emit(json.dumps({"numel": numel, "scheme": name, "refused": str(error)}))
    # The first round allocates and is not measured. Rounds alternate, so that what disturbs the machine hits all alike.
    for turn in range(options["rounds"] + 1):
        names = list(made)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            scheme, transport = made[name]
            gradient = gradients[turn % GRADIENTS].clone()
            found = measure(scheme, transport, [gradient], repeats=1, sample_s=SAMPLE_S)
            if rank == 0 and turn:
                line = {"numel": numel, "scheme": name, "step_s": found.step_s[0], "messages_s": found.messages_s[0]}
                line |= {"received_bytes": found.received_bytes, "rounds": found.rounds, "network": found_network}
                emit(json.dumps(line | memory(scheme)))
    del made, scheme, transport, gradients
    gc.collect()
dist.destroy_process_group()
