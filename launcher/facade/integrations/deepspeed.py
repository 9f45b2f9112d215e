"""DeepSpeed: see docs/frameworks/deepspeed.md."""

import contextlib
import importlib
import sys

from resilient_run.ckpt.integrations.deepspeed import EngineState

__all__ = ["EngineState"]

if "deepspeed" in sys.modules:
    # With ZeRO, deepspeed.initialize() imports these and torch's compiler, too late for `--rr-preload learn`.
    for late in ("runtime.zero.muon.muon_optimizer", "module_inject.auto_ep_layer"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"deepspeed.{late}")
