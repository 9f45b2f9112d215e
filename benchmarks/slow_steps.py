"""Runs a training script whose steps take longer, as on a model that computes longer.

slow_steps.py SECONDS SCRIPT [ARGS…]
"""

import runpy
import sys
import time

from torch.optim.optimizer import register_optimizer_step_pre_hook

if __name__ == "__main__":
    seconds = float(sys.argv[1])
    del sys.argv[:2]
    register_optimizer_step_pre_hook(lambda *_: time.sleep(seconds))
    runpy.run_path(sys.argv[0], run_name="__main__")
