"""Trains the small GPT of the examples; each step computes for a while beside, three times as long on rank 0."""

import os
import runpy
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


def compute(*_: Any) -> None:
    end_s = time.thread_time() + (0.1 if os.environ["RANK"] != "0" else 0.3)
    while time.thread_time() < end_s:
        pass


register_optimizer_step_post_hook(compute)
runpy.run_path(str(Path(__file__).parent.parent / "examples" / "train_gpt.py"), run_name="__main__")
