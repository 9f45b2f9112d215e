"""nvidia-resiliency-ext's restart in the process: the training is called again in the ranks that are left.

The state is kept as under torchrun, with `torch.distributed.checkpoint` after every step: the wrapper keeps none.
"""

import os
from collections.abc import Callable
from datetime import timedelta

from nvidia_resiliency_ext import inprocess

from .dcp import make

__all__ = ["loop", "make"]

_OFTEN = timedelta(milliseconds=100)


def loop(train: Callable[[], None]) -> None:
    """Call `train` until it comes to its end; each time with a store of its own."""
    port = int(os.environ["MASTER_PORT"])

    def again(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        os.environ["MASTER_PORT"] = str(port + 2 + call_wrapper.iteration)
        train()

    # Its defaults are made for long steps: a second between looks, half a minute until a rank is missed.
    inprocess.Wrapper(
        store_kwargs={"host_name": os.environ["MASTER_ADDR"], "port": port + 1},
        monitor_thread_interval=_OFTEN,
        monitor_process_interval=_OFTEN,
        heartbeat_interval=_OFTEN,
        progress_watchdog_interval=_OFTEN,
        heartbeat_timeout=timedelta(seconds=3),
        last_call_wait=_OFTEN,
    )(again)()
