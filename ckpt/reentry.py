"""What becomes of this process's checkpoints when `loop` enters a training function again."""

import gc
import os

import torch
from torch.distributed import distributed_c10d

from .capture.stopped import stopped
from .checkpointer import _open
from .state.outside import set_modes
from .state.state import reentered


def stop() -> None:
    """Capture nothing any more that is not complete, let `step()` raise, and end collectives on GPUs; any thread may.

    Those of Gloo raise when a peer has let go of its groups.
    """
    stopped.set()
    has_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if has_gpu and distributed_c10d.is_initialized():
        distributed_c10d._abort_process_group()


def let_go() -> None:
    """Close the Checkpointer and the process groups, once nobody uses them any more."""
    stopped.set()
    if (checkpointer := _open.get(os.getpid())) is not None:
        checkpointer.close()
    del checkpointer
    # A DDP module that outlives its process group can deadlock.
    gc.collect()
    if distributed_c10d.is_initialized():
        distributed_c10d._abort_process_group()
    gc.collect()


def begin_again() -> None:
    """Let the training function begin as in a new process."""
    set_modes()
    reentered.set()
    stopped.clear()
