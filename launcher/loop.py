"""A training function that can be entered again: after a failure elsewhere, its process goes on with what is warm."""

import gc
import json
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Final, Self, TypeVar

from resilient_run.ckpt.errors import StoppedError
from resilient_run.ckpt.reentry import begin_again, let_go, stop
from resilient_run.ckpt.uncaught import is_final

from .workers.line import INSIDE, LEFT, OUT, READY, become, worker_end

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_PACKET_BYTES: Final = 1 << 17
_MAX_TEXT: Final = 300
_OF_OTHERS: Final = ("gloo/", "NCCL")
"""What errors of collectives say whose class is RuntimeError alone: Gloo's begin with the file of its source."""


def loop(train: Callable[[], T]) -> T:
    """Return what `train()` returns; when another worker fails, call it again in this process.

    Example:
        ```
        model, dataset = build()  # imports, CUDA context, compiled kernels and data stay, too


        def train() -> None:
            dist.init_process_group()
            optimizer = torch.optim.AdamW(model.parameters())
            with Checkpointer(model=model, optimizer=optimizer) as ckpt:
                for n in range(ckpt.restore(), steps):
                    train_one_step()
                    ckpt.step(n + 1)


        resilient_run.loop(train)
        ```

    `train` must make all that belongs to one generation of the run: process groups, DDP and FSDP, gradient hooks, the
    `Checkpointer`, iterators over data; and read `RANK` and the like. Whatever it changes outside itself must be
    registered with the `Checkpointer`, or be set again when it begins. When it is called again, its process groups are
    gone, and the environment is that of the new generation. Registered modules have no gradients, and are in the modes
    (`training`, `requires_grad`) that they had at `restore()`. Outside `train` no worker may wait for another one,
    because those that go on do not come there again.

    The process goes on if `train` raises within ``--rr-stop-timeout`` of the failure, and there is a step to restore.
    Collectives raise when a peer is gone, and so does `Checkpointer.step()`. Otherwise a new process takes its place,
    as without `loop`. An error of its own ends the process as ever, a second later. Outside resilient-run, with
    ``--rr-auto``, and in a second call by the same process, this is ``train()``.
    """
    line = _Line.open()
    if line is None:
        return train()
    with line:
        while True:
            line.enter()
            try:
                return train()
            except Exception as error:
                if is_final(error) or not line.is_stopped(error):
                    raise
                if not isinstance(error, StoppedError):
                    # Which of the errors is the cause, only a reader can tell.
                    log.warning(
                        "another worker failed, too, so train() is called again; here it raised:", exc_info=True
                    )
            # The error is gone, and with it its frames and what `train` had made.
            line.thaw()
            let_go()
            line.go_on()
            begin_again()


def may_be_others(error: BaseException | None) -> bool:
    """Tell whether an error, or what it came from, looks as those of collectives do when a peer is gone."""
    while error is not None:
        if any(each is StoppedError or each.__module__ == "torch.distributed" for each in type(error).__mro__):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_OTHERS):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Line:
    """The worker's end of its line (see `workers/line.py`); a thread hears the launcher."""

    _of_process: "ClassVar[_Line | None]" = None

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._pid = os.getpid()
        self._heard = queue.SimpleQueue[tuple[dict[str, Any], list[int]] | None]()
        self._lock = threading.Lock()
        self._is_inside = self._is_used = self._had_frozen = False
        self._made_inside: list[None] = []
        threading.Thread(target=self._listen, name="resilient-loop", daemon=True).start()

    @classmethod
    def open(cls) -> "_Line | None":
        """Return the line of this process, None where there is none or in a second `loop`.

        A process that is replaced begins with the first, and would not meet those that go on in another.
        """
        line = cls._of_process
        if line is None or line._pid != os.getpid():
            end = worker_end(os.environ)
            line = cls._of_process = None if end is None else cls(end)
        return None if line is None or line._is_used else line

    def __enter__(self) -> Self:
        self._is_used = True
        # What is there by now is not searched for garbage of `train`: with torch imported that takes 0.2 s.
        self._had_frozen = gc.get_freeze_count() > 0
        gc.freeze()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._had_frozen:
            gc.unfreeze()
        with self._lock:
            self._is_inside = False
        self._say(LEFT)

    def thaw(self) -> None:
        """Search all for garbage if `train` has frozen what it made, too: that would stay for ever."""
        if not any(each is self._made_inside for each in gc.get_objects()):
            gc.unfreeze()

    def enter(self) -> None:
        """Say that the function runs."""
        while not self._heard.empty():
            self._heard.get()
        with self._lock:
            self._is_inside = True
        self._made_inside = []
        self._say(INSIDE)

    def is_stopped(self, error: Exception) -> bool:
        """Say that it has raised; return whether the generation is over because of somebody else."""
        with self._lock:
            self._is_inside = False
        text = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_TEXT]
        self._say(OUT, error=text, peers=may_be_others(error))
        heard = self._heard.get()
        return heard is not None and "stop" in heard[0]

    def go_on(self) -> None:
        """Say that nothing is left of the generation, and become the worker of the next one."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        self._say(READY)
        while (heard := self._heard.get()) is not None:
            if "streams" in heard[0]:
                become(*heard)
                return
        raise SystemExit(1)  # The launcher is gone, and so will be this process.

    def _say(self, state: str, **more: object) -> None:
        with suppress(OSError):
            self._end.send(json.dumps({"state": state, **more}).encode())

    def _listen(self) -> None:
        packet = b""
        with suppress(OSError):
            while packet := (received := socket.recv_fds(self._end, _MAX_PACKET_BYTES, 3))[0]:
                message = json.loads(packet)
                with self._lock:
                    if "stop" in message and self._is_inside:
                        stop()
                self._heard.put((message, received[1]))
        self._heard.put(None)
