"""Faults that the daemon orders for this rank on purpose (`resilient-inject`); they strike in `Checkpointer.step()`."""

import hashlib
import logging
import math
import random
import threading
import time
from typing import Any

import torch

from ..errors import InjectedFault, StoppedError
from ..format.digests import is_part
from ..format.manifest import leaf_paths
from ..format.wire import Message
from ..state.state import TrainingState
from .stopped import stopped

_log = logging.getLogger(__name__)


class Injected:
    """The fault that waits for the next step, if any."""

    def __init__(self) -> None:
        """Begin with none."""
        self._order: Message | None = None
        self._factor = 1.0
        self._until_s = 0.0
        self._worked_s = 0.0

    def order(self, message: Message) -> None:
        """Let the next `strike` carry out the daemon's notification `message`."""
        self._order = message

    def strike(self, state: TrainingState) -> None:
        """Carry out what is ordered, once.

        Raises:
            StoppedError: The generation is over.
            InjectedFault: That is what is ordered, or there is no such tensor in `state` as is to be struck.
        """
        if stopped.is_set():
            raise StoppedError("another worker has failed: let this error leave the function given to loop()")
        order, self._order = self._order, None
        if self._factor > 1:
            self._drag()
        if order is None:
            return
        if order.get("kind") == "raise":
            raise InjectedFault("resilient-inject ordered this step to fail")
        if order.get("kind") == "flip-bit":
            _log.warning("resilient-inject flipped %s", flip_bit(state, order.get("leaf", ""), order.get("seed", 0)))
            return
        duration: Any = order.get("duration_s")
        if order.get("kind") == "slow-rank":
            self._factor = order.get("factor", 1.0)
            self._until_s = time.monotonic() + (duration or math.inf)
            self._worked_s = time.thread_time()
            return
        threading.Event().wait(duration or None)

    def _drag(self) -> None:
        """Compute for as much longer as this rank shall be slower, since it was here last."""
        if time.monotonic() > self._until_s:
            self._factor = 1.0
            return
        now_s, block = time.thread_time(), bytes(1 << 16)
        end_s = now_s + (self._factor - 1) * (now_s - self._worked_s)
        while time.thread_time() < end_s:
            hashlib.sha256(block)
        self._worked_s = time.thread_time()


def flip_bit(state: TrainingState, leaf: str, seed: int) -> str:
    """Flip one bit of a live tensor of a registered module or of what is or holds an optimizer, and say which.

    Args:
        state: Where it is.
        leaf: Its dotted path, "" for any.
        seed: Draws the bit and, without a path, the tensor; the random state of training is left alone.

    Raises:
        InjectedFault: There is no such tensor.
    """
    flat, draw = state.flatten(), random.Random(seed)
    tensors = {
        path.removeprefix("objects."): tensor
        for path, index in sorted(leaf_paths(flat.node).items())
        if isinstance(tensor := flat.leaves[index], torch.Tensor)
        and tensor.numel()
        and tensor.is_contiguous()
        and path.startswith("objects.")
        and is_part(path.removeprefix("objects."), state.trained)
    }
    name = leaf or (draw.choice(list(tensors)) if tensors else "any")
    if name not in tensors:
        raise InjectedFault(f"no contiguous tensor {name!r} is registered; there are: {', '.join(tensors)[:400]}")
    data = tensors[name].detach().reshape(-1).view(torch.uint8)
    byte, bit = draw.randrange(len(data)), draw.randrange(8)
    data[byte] ^= 1 << bit
    return f"bit {bit} of byte {byte} of {name}"
