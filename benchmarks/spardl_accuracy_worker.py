"""One rank of `spardl_accuracy.py` on a host of the laboratory network. Its options are JSON; rank 0 prints lines."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from baselines import named
from torch import Tensor, nn
from workload import emit

from resilient_run.comm.net.transport import Transport

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from byte_model import CONTEXT, DECAY_AFTER, HELD_OUT, build, loss_of, read_text


def accuracy_of(model: nn.Module, text: Tensor, starts: Tensor) -> float:
    """Return the share of the windows that begin at `starts` whose last byte the model tells from those before it."""
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long() & 127
    with torch.no_grad():
        return float((model(windows[:, :-1]).argmax(1) == windows[:, -1]).float().mean())


options = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
transport = Transport(dist.group.WORLD)
text = read_text()
limit = len(text) - HELD_OUT - CONTEXT
held_out = torch.arange(limit, limit + HELD_OUT - CONTEXT - 1)
steps = options["steps"]
names = list(options["contenders"])
for turn, seed in enumerate(options["seeds"]):
    first = turn % len(names)
    for name in names[first:] + names[:first]:
        scheme = named(name, transport, **options["contenders"][name])
        model = build(options["width"], seed)
        parameters = list(model.parameters())
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        points, trained_s = [], 0.0
        dist.barrier()
        began_s = time.monotonic()
        for step in range(1, steps + 1):
            starts = torch.randint(limit - CONTEXT - 1, (options["batch"],), generator=generator)
            gradients = torch.autograd.grad(loss_of(model, text, starts), parameters)
            total = scheme.reduce("model", torch.cat([gradient.reshape(-1) for gradient in gradients]))
            rate = options["learning_rate"] / (1 if step <= DECAY_AFTER * steps else 10)
            with torch.no_grad():
                parts = total.split([parameter.numel() for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter -= rate / ranks * part.view_as(parameter)
            if step % options["every"] == 0:
                trained_s += time.monotonic() - began_s
                if rank == 0:
                    points.append((trained_s, accuracy_of(model, text, held_out)))
                # Nobody trains while rank 0 looks.
                dist.barrier()
                began_s = time.monotonic()
        if rank == 0:
            emit(json.dumps({"scheme": name, "seed": seed, "points": points}))
dist.destroy_process_group()
