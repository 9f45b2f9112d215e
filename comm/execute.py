"""Carries out an option of Espresso's tree: its collectives, compressions and decompressions, one after the other.

Between steps a rank holds either a dense part of the tensor, or *pieces* of a part, each with the messages that sum up
to it, or nothing, while another rank of its host or phase goes on (rooted routines). The tensor is padded so that each
part divides evenly. Which pieces a compression makes is decided by the collectives that its messages travel through.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import CommError, MessageError
from .fabric import Fabric
from .feedback import Memory
from .plan import COMPRESSED, DENSE
from .scheme import Scheme
from .transport import Transport, from_bytes, to_bytes
from .tree import Comm, Comp, Decomp, Device, Option, Phase, Role, Routine, Step, parse

_FLAT = "comp:gpu > all_gather@flat > decomp:gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """One compressed piece of one rank, and the seed that decodes it."""

    seed: int
    data: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pieces:
    """Neighbouring pieces of `numel` elements each, with the messages whose sum each is."""

    numel: int
    pieces: list[list[_Message]]


_Held = Tensor | _Pieces | None


class OptionScheme(Scheme):
    """Sums each tensor as the option says that is planned for it.

    Args:
        fabric: The ranks.
        memory: Compresses, and remembers for each compression of each tensor what it left out.
        options: Key → option; a key without one is all-reduced.
    """

    name = "plan"

    def __init__(self, fabric: Fabric, memory: Memory, options: Mapping[str, Option]) -> None:
        super().__init__(fabric.flat)
        self.memory = memory
        self._fabric = fabric
        self._options = dict(options)

    def fuses(self, key: str) -> bool:
        """Tell whether the gradient of `key` is only all-reduced."""
        return key not in self._options

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks, equal on all of them."""
        option = self._options.get(key)
        if option is None:
            contiguous = gradient.contiguous()
            self.transport.all_reduce(contiguous)
            return contiguous
        if gradient.numel() == 0:
            return gradient
        return _Run(self._fabric, self.memory, key, option.steps, gradient).total

    def state_dict(self) -> dict[str, Any]:
        """Return what the memory remembers."""
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank, with the same options."""
        self.memory.load_state_dict(state)


class _Run:
    """One tensor on its way through the steps of an option."""

    def __init__(self, fabric: Fabric, memory: Memory, key: str, steps: Sequence[Step], gradient: Tensor) -> None:
        self._fabric = fabric
        self._memory = memory
        self._key = key
        self._steps = steps
        self._dtype, self._device = gradient.dtype, gradient.device
        scattered = prod(self._size(step) for step in steps if isinstance(step, Comm) and _scatters(step))
        flat = gradient.reshape(-1)
        held: _Held = F.pad(flat, (0, -flat.numel() % scattered))
        for index, step in enumerate(steps):
            match step:
                case Comp():
                    held = None if held is None else self._compress(held, index, step.device)
                case Decomp():
                    held = None if held is None else self._decompress(held, step.device)
                case Comm(compressed=False):
                    held = self._dense(held, step)
                case Comm():
                    held = self._messages(held, step)
        assert isinstance(held, Tensor), "every path of the tree ends with the sum on all ranks"
        self.total = held[: flat.numel()].view(gradient.shape)

    # Compression.

    def _compress(self, held: _Held, index: int, device: Device) -> _Pieces:
        assert isinstance(held, Tensor)
        dense = self._on(held, device)
        following = self._steps[index + 1 :]
        until = next((i for i, step in enumerate(following) if isinstance(step, Decomp)), len(following))
        count = prod(self._size(step) for step in following[:until] if isinstance(step, Comm) and _scatters(step))
        pieces = []
        for piece, part in enumerate(dense.view(count, -1)):
            message, seed = self._memory.compress(f"{self._key}/{index}/{piece}", part)
            pieces.append([_Message(seed=seed, data=message.to(self._device))])
        return _Pieces(numel=dense.numel() // count, pieces=pieces)

    def _decompress(self, held: _Held, device: Device) -> Tensor:
        assert isinstance(held, _Pieces)
        dense = self._on(torch.zeros(len(held.pieces), held.numel, dtype=self._dtype, device=self._device), device)
        for row, messages in zip(dense, held.pieces, strict=True):
            for message in messages:
                self._memory.compressor.add(self._on(message.data, device), row, seed=message.seed)
        return dense.view(-1).to(self._device)

    def _on(self, tensor: Tensor, device: Device) -> Tensor:
        return tensor.cpu() if device is Device.CPU else tensor.to(self._device)

    # Collectives.

    def _dense(self, held: _Held, step: Comm) -> _Held:
        transport = self._fabric.of(step.phase)
        if self._idle(step.phase):
            return None
        if step.routine is Routine.BROADCAST:
            message = None if held is None else to_bytes(_tensor(held))
            return from_bytes(
                received := self._broadcast(message, transport), (self._dtype, _count(received, self._dtype))
            )[0]
        dense = _tensor(held)
        match step.routine:
            case Routine.ALL_REDUCE:
                transport.all_reduce(dense)
                return dense
            case Routine.REDUCE_SCATTER:
                return transport.reduce_scatter(dense)
            case Routine.ALL_GATHER:
                return transport.all_gather_dense(dense)
            case Routine.REDUCE:
                return self._reduce(dense, transport)
        raise AssertionError(f"{step} is no collective of dense tensors")

    def _messages(self, held: _Held, step: Comm) -> _Held:
        transport = self._fabric.of(step.phase)
        if self._idle(step.phase):
            return None
        match step.routine:
            case Routine.BROADCAST:
                return _unpack(self._broadcast(None if held is None else _pack(_pieces(held)), transport))
            case Routine.ALL_TO_ALL:
                return _summands(self._all_to_all(_pieces(held), transport))
            case Routine.GATHER:
                return self._gather(_pieces(held), transport)
            case Routine.ALL_GATHER:
                gathered = [_unpack(message) for message in transport.all_gather(_pack(_pieces(held)))]
                return _summands(gathered) if step.role is Role.WHOLE else _neighbours(gathered)
        raise AssertionError(f"{step} is no collective of messages")

    def _reduce(self, dense: Tensor, transport: Transport) -> _Held:
        root = self._root(transport)
        others = [rank for rank in range(transport.size) if rank != root]
        if transport.rank != root:
            transport.exchange({root: to_bytes(dense)}, [], sizes_bytes={})
            return None
        found = transport.exchange({}, others, sizes_bytes=dict.fromkeys(others, dense.nbytes))
        for rank in others:
            dense = dense + from_bytes(found[rank], (self._dtype, dense.numel()))[0]
        return dense

    def _gather(self, held: _Pieces, transport: Transport) -> _Held:
        root = self._root(transport)
        if transport.rank != root:
            transport.exchange({root: _pack(held)}, [])
            return None
        found = transport.exchange({}, [rank for rank in range(transport.size) if rank != root])
        return _summands([held if rank == root else _unpack(found[rank]) for rank in range(transport.size)])

    def _broadcast(self, message: Tensor | None, transport: Transport) -> Tensor:
        root = self._root(transport)
        if message is None:
            return transport.exchange({}, [root])[root]
        transport.exchange({rank: message for rank in range(transport.size) if rank != root}, [])
        return message

    def _all_to_all(self, held: _Pieces, transport: Transport) -> list[_Pieces]:
        each = len(held.pieces) // transport.size
        parts = [held.pieces[rank * each : (rank + 1) * each] for rank in range(transport.size)]
        received = transport.all_to_all([_pack(_Pieces(numel=held.numel, pieces=part)) for part in parts])
        return [_unpack(message) for message in received]

    def _root(self, transport: Transport) -> int:
        # Spread by name, so that not one rank aggregates all tensors.
        return zlib.crc32(self._key.encode()) % transport.size

    def _idle(self, phase: Phase) -> bool:
        """Tell whether this rank has nothing to do between hosts: the root of its host has it all."""
        first = self._steps[0] if isinstance(self._steps[0], Comm) else self._steps[1]
        assert isinstance(first, Comm)
        rooted = first.phase is Phase.INTRA1 and first.routine.rooted
        return phase is Phase.INTER and rooted and self._fabric.intra.rank != self._root(self._fabric.intra)

    def _size(self, step: Comm) -> int:
        return self._fabric.of(step.phase).size


def _scatters(step: Comm) -> bool:
    """Tell whether each rank goes on with a share of what it had."""
    return step.routine in (Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL)


def _tensor(held: _Held) -> Tensor:
    assert isinstance(held, Tensor)
    return held


def _pieces(held: _Held) -> _Pieces:
    assert isinstance(held, _Pieces)
    return held


def _summands(sources: Sequence[_Pieces]) -> _Pieces:
    """Return the same pieces with the messages of all sources."""
    pieces = [
        [message for piece in same for message in piece] for same in zip(*(s.pieces for s in sources), strict=True)
    ]
    return _Pieces(numel=sources[0].numel, pieces=pieces)


def _neighbours(sources: Sequence[_Pieces]) -> _Pieces:
    """Return the pieces of all sources, one after the other."""
    return _Pieces(numel=sources[0].numel, pieces=[piece for source in sources for piece in source.pieces])


def _count(message: Tensor, dtype: torch.dtype) -> int:
    return message.numel() // dtype.itemsize


def _pack(held: _Pieces) -> Tensor:
    """Return pieces as one message: counts and sizes first, then the data."""
    messages = [message for piece in held.pieces for message in piece]
    head = [held.numel, len(held.pieces), *(len(piece) for piece in held.pieces)]
    head += [number for message in messages for number in (message.data.numel(), message.seed)]
    device = messages[0].data.device
    return to_bytes(
        torch.tensor([len(head)], device=device),
        torch.tensor(head, device=device),
        *(message.data for message in messages),
    )


def _unpack(message: Tensor) -> _Pieces:
    """Return the pieces of a message.

    Raises:
        MessageError: It is none.
    """
    try:
        length = int(message[:8].view(torch.int64).item())
        head = message[8 : 8 + 8 * length].view(torch.int64).tolist()
        numel, count = head[0], head[1]
        counts, rest = head[2 : 2 + count], head[2 + count :]
        offset, pieces, at = 8 + 8 * length, [], 0
        for each in counts:
            piece = []
            for size_bytes, seed in zip(rest[at : at + 2 * each : 2], rest[at + 1 : at + 2 * each : 2], strict=True):
                piece.append(_Message(seed=seed, data=message[offset : offset + size_bytes].clone()))
                offset += size_bytes
            at += 2 * each
            pieces.append(piece)
    except (IndexError, RuntimeError, ValueError) as error:
        raise MessageError(f"a message of {message.numel()} bytes is not made of pieces: {error}") from error
    if offset != message.numel():
        raise MessageError(
            f"pieces of {offset} bytes came in a message of {message.numel()}; run one version on all ranks"
        )
    return _Pieces(numel=numel, pieces=pieces)


def options_of(texts: Mapping[str, str]) -> dict[str, Option]:
    """Return key → option for what a plan says of each key, without those that it leaves dense.

    `compressed`, which planners of one network say, is the flat indivisible scheme.

    Raises:
        CommError: A text is no option of the tree.
    """
    try:
        return {key: parse(_FLAT if text == COMPRESSED else text) for key, text in texts.items() if text != DENSE}
    except ValueError as error:
        raise CommError(str(error)) from error
