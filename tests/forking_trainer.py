"""A trainer that is killed once, while a worker of its DataLoader has hardly begun: python forking_trainer.py GATE.

The worker tells its pid in the file GATE.pid, and begins when GATE is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from resilient_run import Checkpointer

GATE = Path(sys.argv[1])


def begin(worker: int) -> None:
    """Take its time, in the second worker of the trainer that will be killed."""
    if worker == 1 and first:
        GATE.with_suffix(".tmp").write_text(str(os.getpid()))
        GATE.with_suffix(".tmp").rename(GATE.with_suffix(".pid"))
        while not GATE.exists():
            time.sleep(0.01)


checkpointer = Checkpointer(model=torch.nn.Linear(2, 2))
done = checkpointer.restore()
first = done == 0
for step, _ in enumerate(DataLoader(range(8), num_workers=2, worker_init_fn=begin), start=done + 1):
    checkpointer.step(step)
    if first:
        while checkpointer.watermark is None or not GATE.with_suffix(".pid").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
