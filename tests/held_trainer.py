"""A few deterministic steps in any number of ranks, which can be held: python held_trainer.py STEPS [HELD GATE [HOW]].

No step begins before the one before it is committed. When HELD steps are done every rank evaluates for as long as the
file GATE is absent, as HOW says: "sleep" (the default), "burn" (CPU), "sum" (collectives), "pause" (asleep inside
`Checkpointer.pause()`), or "zero": rank 0 alone inside of it, while the others wait for it in a collective.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from resilient_run import Checkpointer


def say(**fields: object) -> None:
    """Print one JSON line, in one write: the ranks of a host share its output."""
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), **fields}) + "\n").encode())


def held(checkpointer: Checkpointer, gate: Path, how: str) -> None:
    """Evaluate until `gate` exists."""

    def last(act: Callable[[], object]) -> None:
        while not gate.exists():
            act()

    match how:
        case "burn":
            last(lambda: sum(range(10_000)))
        case "sum":
            while not agreed(gate.exists()):
                time.sleep(0.05)
        case "pause":
            with checkpointer.pause():
                last(lambda: time.sleep(0.05))
        case "zero":
            if os.environ["RANK"] == "0":
                with checkpointer.pause():
                    last(lambda: time.sleep(0.05))
            dist.barrier()
        case _:
            last(lambda: time.sleep(0.05))


def agreed(here: bool) -> bool:
    """Tell whether it is so on every rank."""
    votes = torch.tensor([int(here)])
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


def main(steps: str, held_step: str = "0", gate: str = "", how: str = "sleep") -> None:
    """Train."""
    say(pid=os.getpid(), world=os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(model=model, optimizer=optimizer)
    for step in range(checkpointer.restore(), int(steps)):
        if step == int(held_step) and gate:
            held(checkpointer, Path(gate), how)
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        checkpointer.step(step + 1)
        while (checkpointer.watermark or (0, 0))[1] <= step:
            time.sleep(0.001)
        say(step=step + 1, loss=loss.item())
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters()))
    if dist.get_rank() == 0:
        say(params_sha256=digest.hexdigest())
    checkpointer.close()
    dist.barrier()
    # A thread of Gloo can abort a process in Python's own end.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
