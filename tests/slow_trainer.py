"""Runs a training script whose steps compute for a while beside, five times as long on rank 0.

slow_trainer.py SCRIPT [ARGS…]
"""

import os
import runpy
import sys
import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


def compute(*_: Any) -> None:
    time.sleep(0.1)  # a step as long as the daemons' reports are apart needs no computing
    end_s = time.thread_time() + (0.03 if os.environ["RANK"] != "0" else 0.15)
    while time.thread_time() < end_s:
        pass


register_optimizer_step_post_hook(compute)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
