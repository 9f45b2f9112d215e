"""torch's agent starts workers our way while a run lasts.

The agent starts them through `torch.distributed.elastic.multiprocessing.api.get_subprocess_handler`; `warm_workers`
replaces that.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)

from . import early
from .rebind import rebound
from .warm import WorkerStarter


@contextmanager
def warm_workers(*, enabled: bool = True, preload: Sequence[str] | None = ()) -> Iterator[WorkerStarter]:
    """Let torch's agent start workers warm, and bind them to this process's life, while the block runs.

    The zygote is prepared at the first start, or before, with the `expect` of what is yielded, or even before that
    (see `early`): torch is then imported once, while the rendezvous is under way. A program that does not name torch is
    not kept waiting for that.

    Enter it on the thread that runs the agent: that thread's end kills the workers.

    Args:
        enabled: False starts every worker cold, still bound to this process.
        preload: Modules that the zygote imports besides torch; None learns them from the first workers.
    """
    starter = early.take(enabled=enabled, preload=preload) or WorkerStarter(warm=enabled, preload=preload)
    handler = partial(_WorkerHandler, starter)
    with rebound(torch_multiprocessing, "get_subprocess_handler", get_subprocess_handler, handler):
        try:
            yield starter
        finally:
            starter.close()


class _WorkerHandler(SubprocessHandler):
    """torch's handle of one worker, with our way to start it."""

    def __init__(self, starter: WorkerStarter, **kwargs: Any) -> None:
        self._starter = starter
        super().__init__(**kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        return self._starter.start(args, env, self._stdout, self._stderr, self.local_rank_id)
