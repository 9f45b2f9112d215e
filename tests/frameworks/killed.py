"""Run a training script that dies at given moments: `killed.py DIRECTORY (SCRIPT | -m MODULE) ARGUMENT…`, as a worker.

`DIRECTORY/kills.json` has moments `[where, step, rank]`, and each strikes once: "train" and "evaluate" in a forward
pass of any model once that many steps are completed and committed, "after" as soon as `step(n)` has returned, none
while there is a file `DIRECTORY/wait`. The script knows nothing of it.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from resilient_run import Checkpointer

RANK = int(os.environ.get("RANK", "0"))
DIRECTORY = Path(sys.argv[1])
plan = [tuple(kill) for kill in json.loads((DIRECTORY / "kills.json").read_text())]
# Not here: `--rr-auto` looks at what a script remembers, and takes this one for a part of it.
Checkpointer.completed, Checkpointer.latest = 0, None


def strike(where: str) -> None:
    """Die, if that is planned for now."""
    for number, (place, step, rank) in enumerate(plan):
        mark = DIRECTORY / f"struck{number}"
        if (place, rank) != (where, RANK) or step > Checkpointer.completed or mark.exists():
            continue
        checkpointer, completed = Checkpointer.latest, Checkpointer.completed
        deadline = time.monotonic() + 10  # a step that a rank did not capture is committed never
        while where != "after" and checkpointer is not None and time.monotonic() < deadline:
            if checkpointer.watermark is not None and checkpointer.watermark[1] >= completed:
                break
            time.sleep(0.002)
        while (DIRECTORY / "wait").exists():
            time.sleep(0.01)
        mark.write_text(f"{where} {completed}")
        os.kill(os.getpid(), signal.SIGKILL)


restore, advance = Checkpointer.restore, Checkpointer.step


def noted_restore(self: Checkpointer) -> int:
    Checkpointer.latest, Checkpointer.completed = self, restore(self)
    with (DIRECTORY / f"restored{RANK}").open("a") as file:
        print(Checkpointer.completed, file=file)
    return Checkpointer.completed


def noted_step(self: Checkpointer, n: int | None = None, **told: Any) -> None:
    advance(self, n, **told)
    Checkpointer.completed = self._step
    strike("after")


def before_forward(module: torch.nn.Module, _arguments: object) -> None:
    strike("train" if module.training else "evaluate")


Checkpointer.restore = noted_restore
Checkpointer.step = noted_step
register_module_forward_pre_hook(before_forward)
print(json.dumps({"rank": RANK, "pid": os.getpid()}), flush=True)
sys.argv = sys.argv[2:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
