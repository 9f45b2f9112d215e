"""Trains the small GPT of the examples as long as a test lasts, and pauses after each step, as the test often waits."""

import runpy
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

register_optimizer_step_post_hook(lambda *_: time.sleep(0.1))
runpy.run_path(str(Path(__file__).parent.parent / "examples" / "train_gpt.py"), run_name="__main__")
