"""Carries out the rounds of collectives (`plan.collective`) over a transport.

All ranks of the transport make the same calls in the same order, as of the transport itself.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..plan.collective import Hop, turns
from ..plan.tree import Routine
from .transport import Transport, Turn, from_bytes, to_bytes


def relay_gather(transport: Transport, message: Tensor, *, sizes_bytes: Sequence[int] | None = None) -> list[Tensor]:
    """Return the messages of all ranks, in their order; own by reference.

    Other than with `Transport.send_to_all`, ranks pass on what others sent: less leaves a host that has several.

    Args:
        transport: The ranks.
        message: This rank's.
        sizes_bytes: Of each rank's, where all know them; None announces them.
    """
    if sizes_bytes is None:
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        announced = transport.announce(dict.fromkeys(others, message), others)
        sizes_bytes = [announced.get(rank, message.numel()) for rank in range(transport.size)]
    held: list[Tensor] = [message] * transport.size
    _run_turns(transport, Routine.ALL_GATHER, held, sizes_bytes)
    return held


def gather_shares(transport: Transport, share: Tensor) -> Tensor:
    """Return the 1-D shares of all ranks, all of one length, one after the other."""
    if _is_left_to_library(transport):
        return transport.all_gather_dense(share)
    held = [share] * transport.size
    _run_turns(transport, Routine.ALL_GATHER, held, [share.numel()] * transport.size)
    return torch.cat(held)


def reduce_scatter(transport: Transport, tensor: Tensor) -> Tensor:
    """Return this rank's n-th of the 1-D `tensor`, whose length is a multiple of the ranks, summed over all.

    `tensor` is overwritten. The library has one as well: Gloo's moves as many bytes as an all-reduce.
    """
    if _is_left_to_library(transport):
        return transport.reduce_scatter(tensor)
    held = list(tensor.contiguous().view(transport.size, -1).unbind())
    _run_turns(transport, Routine.REDUCE_SCATTER, held, [share.numel() for share in held])
    return held[transport.rank]


def reduce_to(root: int, tensor: Tensor, transport: Transport) -> Tensor | None:
    """Return on `root` the sum of the ranks' 1-D tensors, which are overwritten; None on the others."""
    dense = tensor.contiguous()
    _run_turns(transport, Routine.REDUCE, [dense], [dense.numel()], root=root)
    return dense if transport.rank == root else None


def broadcast_from(root: int, message: Tensor | None, transport: Transport, *, size_bytes: int | None = None) -> Tensor:
    """Return the message of `root`; on the others `message` is None. `size_bytes`: its size, where all know it."""
    if message is None:
        size_bytes = transport.announce({}, [root])[root] if size_bytes is None else size_bytes
        held = [torch.empty(0, dtype=torch.uint8, device=transport.device)]
        _run_turns(transport, Routine.BROADCAST, held, [size_bytes], root=root)
        return held[0]
    if size_bytes is None:
        transport.announce({rank: message for rank in range(transport.size) if rank != root}, [])
    _run_turns(transport, Routine.BROADCAST, [message], [message.numel()], root=root)
    return message


def gather_to(
    root: int, message: Tensor, transport: Transport, *, sizes_bytes: Sequence[int] | None = None
) -> list[Tensor] | None:
    """Return on `root` the messages of all ranks, in their order, own by reference; None on the others.

    Args:
        root: Who gets them.
        message: This rank's.
        transport: The ranks.
        sizes_bytes: As of `relay_gather`.
    """
    if transport.rank != root:
        transport.exchange({root: message}, [], sizes_bytes=None if sizes_bytes is None else {})
        return None
    sources = [rank for rank in range(transport.size) if rank != root]
    known = transport.announce({}, sources) if sizes_bytes is None else dict(enumerate(sizes_bytes))
    found = {root: message} | transport.exchange({}, sources, sizes_bytes=known)
    return [found[rank] for rank in range(transport.size)]


def carry_dense(
    routine: Routine, held: Tensor | None, transport: Transport, *, root: int, numel: int, dtype: torch.dtype
) -> Tensor | None:
    """Return what a rank holds after a collective of 1-D tensors, which may be overwritten.

    Args:
        routine: One of dense tensors.
        held: This rank's tensor; None on all but `root` before a broadcast.
        transport: The ranks.
        root: Who receives or sends everything, if anybody does.
        numel: Elements that are broadcast.
        dtype: Theirs.
    """
    if routine is Routine.BROADCAST:
        message = None if held is None else to_bytes(held)
        received = broadcast_from(root, message, transport, size_bytes=numel * dtype.itemsize)
        return from_bytes(received, (dtype, numel))[0]
    assert held is not None
    match routine:
        case Routine.ALL_REDUCE:
            transport.all_reduce(held)
            return held
        case Routine.REDUCE_SCATTER:
            return reduce_scatter(transport, held)
        case Routine.ALL_GATHER:
            return gather_shares(transport, held)
        case Routine.REDUCE:
            return reduce_to(root, held, transport)
    raise AssertionError(f"{routine} is no collective of dense tensors")


def _is_left_to_library(transport: Transport) -> bool:
    # NCCL's moves what a ring does, and knows which links there are.
    return transport.device.type == "cuda"


def _run_turns(
    transport: Transport, routine: Routine, held: list[Tensor], numels: Sequence[int], *, root: int = 0
) -> None:
    """Send and receive blocks of `numels` elements, which are replaced in `held`, or added to what is there."""
    size, dtype = transport.size, held[0].dtype
    adds = routine in (Routine.REDUCE, Routine.REDUCE_SCATTER)

    def message(hop: Hop | None) -> dict[int, Tensor]:
        return {} if hop is None else {(hop.receiver + root) % size: to_bytes(*(held[block] for block in hop.blocks))}

    def take(blocks: Sequence[int], received: Mapping[int, Tensor]) -> None:
        for message in received.values():
            parts = from_bytes(message, *((dtype, numels[block]) for block in blocks))
            for block, part in zip(blocks, parts, strict=True):
                held[block] = held[block].add_(part) if adds else part

    own = []
    for sent, received in turns(routine, size, (transport.rank - root) % size):
        if sent is None and received is None:
            continue
        blocks = received.blocks if received else ()
        size_bytes = dtype.itemsize * sum(numels[block] for block in blocks)
        sizes_bytes = {(received.sender + root) % size: size_bytes} if received else {}
        own.append(Turn(outgoing=partial(message, sent), sizes_bytes=sizes_bytes, take=partial(take, blocks)))
    transport.relay(own)
