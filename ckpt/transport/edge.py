"""An edge: one direction of replication between two trainers, over torch.distributed groups of two that are its own.

An edge that breaks takes nothing with it: neither other edges, nor groups of the training, nor its collectives. What
is agreed on travels over Gloo, the captures over Gloo or NCCL. Nothing that is received is unpickled.
"""

import contextlib
import threading
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final, Self

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..errors import WireError
from ..format.slot import HEADER_BYTES
from ..link.env import TrainerEnv
from .carriers import UNLIMITED, Carrier, DeviceCarrier, HostCarrier

_OPEN: Final = timedelta(seconds=120)
_FORMAT: Final = 0x45_44_47_45_01
_PAGE_TAG, _ANSWER_TAG, _CLOSE_TAG = range(1000, 1003)
_MAX_SUB_BUFFERS: Final = 64
_LEAST_BYTES: Final = 1 << 12
_MOST_BYTES: Final = _MAX_SUB_BUFFERS << 30
"""Of all sub-buffers together: without pipelining one of them may have it all."""


class Reply(IntEnum):
    """What a receiver says to the announcement of a capture."""

    LATER = 0  # no slot is free yet
    SEND = 1  # it travels next
    NEVER = 2  # its daemon holds it, or refuses it


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeConfig:
    """How captures travel over edges.

    Attributes:
        sub_buffers: Chunks on their way at a time, p; the owner's number is taken.
        sub_buffer_bytes: The largest chunk, R / p; the owner's size is taken.
        device: GPU whose sub-buffers NCCL moves, None for Gloo; NCCL is taken if both ends have one.
    """

    sub_buffers: int
    sub_buffer_bytes: int
    device: torch.device | None


class Edge:
    """One end of an open edge; one thread uses it, and any other may close it.

    Attributes:
        carrier: Moves the bytes of captures that the receiver wants.
        on_device: Whether it is NCCL that moves them, from and to page-locked memory.
    """

    def __init__(self, group: Any, carrier: Carrier) -> None:
        """Wrap an open group; use `open` instead."""
        self.carrier = carrier
        self.on_device = isinstance(carrier, DeviceCarrier)
        self._group = group
        self._closing = threading.Lock()

    @classmethod
    def open(cls, env: TrainerEnv, *, owner: int, receiver: int, config: EdgeConfig) -> Self:
        """Return this trainer's end, once the other one has come too.

        Both meet in the key-value store of the worker group, over connections of their own: torch's would block
        whoever else uses it meanwhile.

        Raises:
            RuntimeError: It did not come within two minutes, or cannot be reached.
            WireError: It is no edge of this version, or wants sub-buffers that nobody can have.
        """
        rank = 0 if env.rank == owner else 1
        if env.store is None:
            raise WireError("trainers cannot find a store: MASTER_ADDR and MASTER_PORT are not set")
        client = TCPStore(*env.store, is_master=False, wait_for_workers=False, timeout=_OPEN)
        store = PrefixStore(f"resilient-run/{env.generation}/{owner}>{receiver}/", client)
        group: Any = distributed.ProcessGroupGloo(PrefixStore("gloo/", store), rank, 2, _OPEN)
        said = torch.tensor([_FORMAT, config.sub_buffers, config.sub_buffer_bytes, config.device is not None])
        heard = torch.zeros_like(said)
        works = [group.send([said], 1 - rank, _PAGE_TAG), group.recv([heard], 1 - rank, _PAGE_TAG)]
        for work in works:
            work.wait(_OPEN)
        _, count, size_bytes, _ = (said if rank == 0 else heard).tolist()
        if heard[0] != _FORMAT:
            raise WireError(f"the other end of edge {owner}>{receiver} is of another version")
        if not (0 < count <= _MAX_SUB_BUFFERS and _LEAST_BYTES <= size_bytes <= _MOST_BYTES // count):
            raise WireError(f"the owner of edge {owner}>{receiver} wants {count} sub-buffers of {size_bytes} bytes")
        carrier: Carrier = HostCarrier(group, sub_buffers=count, sub_buffer_bytes=size_bytes)
        if config.device is not None and said[3] and heard[3]:
            nccl = PrefixStore("nccl/", store)
            carrier = DeviceCarrier(group, nccl, config.device, sub_buffers=count, sub_buffer_bytes=size_bytes)
        return cls(group, carrier)

    def announce(self, page: bytes) -> Reply:
        """Send the header page of a capture, as the owner, and return what the receiver says.

        Raises:
            RuntimeError: The edge is broken.
            WireError: It says nothing that is known.
        """
        answer = torch.zeros(1, dtype=torch.int64)
        works = [
            self._group.send([torch.frombuffer(bytearray(page), dtype=torch.uint8)], 1, _PAGE_TAG),
            self._group.recv([answer], 1, _ANSWER_TAG),
        ]
        for work in works:
            work.wait(UNLIMITED)
        try:
            return Reply(int(answer.item()))
        except ValueError as error:
            raise WireError(f"the receiver answers an announcement with {answer.item()}") from error

    def next_page(self) -> bytes:
        """Return the next header page that the owner announces, as the receiver; nothing in it is checked.

        Raises:
            RuntimeError: The edge is broken.
        """
        page = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._group.recv([page], 0, _PAGE_TAG).wait(UNLIMITED)
        return page.numpy().tobytes()

    def answer(self, answer: Reply) -> None:
        """Answer, as the receiver, the announcement of a capture.

        Raises:
            RuntimeError: The edge is broken.
        """
        self._group.send([torch.tensor([int(answer)])], 0, _ANSWER_TAG).wait(UNLIMITED)

    def close(self) -> None:
        """Break the edge: what waits on it at either end fails. A second call does nothing."""
        if self._closing.acquire(blocking=False):
            self.carrier.close()
            # Gloo's way to end waits of other threads: one that expires closes the connection for all.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], 1 - self._group.rank(), _CLOSE_TAG).wait(timedelta(milliseconds=1))
