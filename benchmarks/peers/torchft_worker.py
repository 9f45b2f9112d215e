"""The training of `recovery_worker.py` as torchft has it: ranks that go on in their processes, with whoever is left.

Its launcher is torchrun with one rank per replica group. The state is not kept anywhere: who survives has it.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).parent.parent))
from workload import build, emit, loss_of

BATCH = 16


def main() -> None:
    """Train, and report every committed step, as `recovery_worker.py` does."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--state-mb", type=int, required=True)
    options.add_argument("--replica", type=int, required=True)
    options.add_argument("--directory", help="what others keep their states in")
    args = options.parse_args()
    torch.set_num_threads(1)
    model, inner = build(args.state_mb << 20)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica-{args.replica}-",
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < args.steps:
        optimizer.zero_grad()
        loss_of(parallel, batch=BATCH).backward()
        optimizer.step()
        if manager.current_step() > step:
            line = {"rank": args.replica, "pid": os.getpid(), "step": step + 1, "ranks": manager.num_participants()}
            emit(json.dumps({**line, "monotonic_s": time.monotonic()}))
    os._exit(0)


if __name__ == "__main__":
    main()
