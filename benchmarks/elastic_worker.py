"""Trains epochs of numbered samples in any number of ranks, and logs them: python elastic_worker.py LOG GATE PAUSE.

A step trains a batch of each of two loaders, as ranks may share an epoch in two ways: `dealt`, a `DistributedSampler`
deals the samples out, and `shared`, all ranks draw the same batch and each trains its part of it. Gradients are whole
numbers in float64, whose sums are exact in any order: what is trained follows from the samples of each step alone.

Each rank appends a line to LOG before it gives a step to the `Checkpointer`. The run ends with the step that the file
GATE names. PAUSE is how long a step computes.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from resilient_run import Checkpointer
from resilient_run.integrations.torch import ResumableLoader

DEALT, SHARED = range(1009), range(997)
"""Samples of an epoch: primes, so that no number of ranks divides them."""
DEALT_BATCH, SHARED_BATCH = 2, 12


def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return what is trained, as it is at the beginning."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 16, dtype=torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def gradients(model: torch.nn.Module, samples: Iterable[int]) -> list[torch.Tensor]:
    """Return the sums over samples of whole numbers that depend on sample and parameters."""
    numbers = torch.tensor(list(samples), dtype=torch.float64)
    found = []
    for parameter in model.parameters():
        each = numbers.reshape(-1, *(1,) * parameter.dim()) + 1
        found.append((((parameter.detach() * 1000).round() * each).remainder(97) - 48).sum(0))
    return found


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, sums: Iterable[torch.Tensor]) -> None:
    """Make a step with these gradients."""
    for parameter, gradient in zip(model.parameters(), sums, strict=True):
        parameter.grad = gradient
    optimizer.step()


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of the parameters."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()[:16]


def endless(loader: Any, epochs: dict[str, Any], name: str, sampler: Any = None) -> Iterator[list[int]]:
    """Yield the batches of one epoch after the other, from where the loader is."""
    while True:
        if sampler is not None:
            sampler.set_epoch(epochs[name])
        for batch in loader:
            yield batch.tolist()
        epochs[name] += 1


def main(log: str, gate: str, pause_s: str) -> None:
    """Train."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    who = {"generation": int(os.environ["RESILIENT_GENERATION"]), "rank": rank, "of": world_size}

    def say(**fields: object) -> None:
        # In one write: all ranks share the file.
        os.write(descriptor, (json.dumps({**who, **fields}) + "\n").encode())

    dist.init_process_group("gloo")
    model, optimizer = begin()
    sampler = DistributedSampler(DEALT, num_replicas=world_size, rank=rank, seed=3)  # type: ignore[arg-type]
    dealt = ResumableLoader(DataLoader(DEALT, DEALT_BATCH, sampler=sampler))  # type: ignore[arg-type]
    seeded = torch.Generator().manual_seed(5)
    shared = ResumableLoader(DataLoader(SHARED, SHARED_BATCH, shuffle=True, generator=seeded))  # type: ignore[arg-type]
    checkpointer = Checkpointer(
        model=model, optimizer=optimizer, dealt_data=dealt, shared_data=shared, dealt=0, shared=0
    )
    step = checkpointer.restore()
    say(host=os.environ["RESILIENT_HOST_ID"], restored=step, digest=digest_of(model))
    values = checkpointer.values
    batches = endless(dealt, values, "dealt", sampler), endless(shared, values, "shared")
    while step < int(Path(gate).read_text()):
        step += 1
        time.sleep(float(pause_s))
        dealt_part, shared_part = next(batches[0]), next(batches[1])[rank::world_size]
        sums = gradients(model, [*dealt_part, *shared_part])
        for each in sums:
            dist.all_reduce(each)
        learn(model, optimizer, sums)
        say(
            step=step,
            digest=digest_of(model),
            dealt=[values["dealt"], dealt_part],
            shared=[values["shared"], shared_part],
            committed=checkpointer.watermark,
            monotonic_s=time.monotonic(),
        )
        checkpointer.step(step)
    while (checkpointer.watermark or (0, 0))[1] < step:
        time.sleep(0.001)
    say(ended=step, digest=digest_of(model))
    checkpointer.close()
    dist.barrier()
    # A thread of Gloo can abort a process in Python's own end.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
