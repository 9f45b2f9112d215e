"""Carries out an option of Espresso's tree: its collectives, compressions and decompressions, one after the other.

Between steps a rank holds either a dense part of the tensor, or *pieces* of a part, each with the messages that sum up
to it, or nothing, while another rank of its host or phase goes on (rooted routines). The tensor is padded so that each
part divides evenly. Which pieces a compression makes is decided by the collectives that its messages travel through.

The steps run in stages, where the timeline F(S) has them (`maxplus`): what the device that computes does first, what
CPUs do before the first collective, collectives and all that is between them, what CPUs do after them, and what the
device does last.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.nn import functional as F

from ..compress.feedback import Memory
from ..errors import CommError
from ..net.collectives import carry_dense
from ..net.fabric import Fabric
from ..net.scheme import Reduction, Scheme, Stage
from ..net.transport import Transport
from ..plan.plan import COMPRESSED, DENSE, FLAT
from ..plan.tree import Comm, Comp, Decomp, Device, Option, Phase, Role, Routine, parse
from .pieces import Message, Pieces, carry_pieces

log = logging.getLogger(__name__)

_SCATTERING = (Routine.REDUCE_SCATTER, Routine.ALL_TO_ALL)

_Held = Tensor | Pieces | None


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
        on_cpus = any(Device.CPU in option.devices for option in self._options.values())
        self.stages: tuple[Stage, ...] = ("prepare", "communicate", "settle") if on_cpus else ("communicate",)

    def is_all_reduced(self, key: str) -> bool:
        """Tell whether the gradient of `key` is only all-reduced."""
        return key not in self._options

    def begin(self, key: str, gradient: Tensor) -> Reduction:
        """Compress the gradient as far as that is done where it was computed, and return the rest of the sum."""
        option = self._options.get(key)
        if option is None or gradient.numel() == 0:
            return _AllReduce(self.transport, gradient)
        return _Run(self._fabric, self.memory, key, option, gradient)

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        """Return the sum over all ranks, equal on all of them."""
        reduction = self.begin(key, gradient)
        reduction.prepare()
        reduction.communicate()
        reduction.settle()
        return reduction.total()

    def state_dict(self) -> dict[str, Any]:
        """Return what the memory remembers, and what it belongs to."""
        return {"treatments": self._treatments(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned on this rank.

        What is remembered of tensors that were treated otherwise is of other parts of them: it is lost, with a warning.

        Raises:
            CommError: It is not of such a scheme or memory.
        """
        match state:
            case {"treatments": dict(before), "memory": memory}:
                self.memory.load_state_dict(memory)
            case _:
                raise CommError("this is not a state of planned gradients; load one that was saved with a plan")
        now = self._treatments()
        remembered = [(key, key.rsplit("/", 2)[0]) for key in self.memory.state_dict()["kept"]]
        keys = {key for _, key in remembered}
        gone = keys - now.keys()
        other = {key for key in keys & now.keys() if now[key] != before.get(key)}
        if gone or other:
            log.warning(
                "what compression left out of %d of %d groups of gradients is lost: %d are not groups of this plan, %d "
                "are treated in another way",
                len(gone | other),
                len(keys),
                len(gone),
                len(other),
            )
        self.memory.forget(part for part, key in remembered if key in gone | other)

    def _treatments(self) -> dict[str, str]:
        """Return by key what decides which parts of a tensor are compressed."""
        ranks = f"{self._fabric.flat.size} ranks, {self._fabric.intra.size} on a host"
        return {key: f"{option} ({ranks})" for key, option in self._options.items()}


class _AllReduce(Reduction):
    """An all-reduce beside which the next may begin, as DDP's buckets do."""

    def __init__(self, transport: Transport, gradient: Tensor) -> None:
        self._transport = transport
        self._total = gradient.contiguous()
        self._work: Work | None = None

    def communicate(self) -> None:
        if self._total.numel():
            self._work = self._transport.begin_all_reduce(self._total)

    def total(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._total

    def tensors(self) -> Iterator[Tensor]:
        yield self._total


class _Run(Reduction):
    """One tensor on its way through the steps of an option."""

    def __init__(self, fabric: Fabric, memory: Memory, key: str, option: Option, gradient: Tensor) -> None:
        self._fabric = fabric
        self._memory = memory
        self._key = key
        self._remembered: list[str] = []
        self._option, self._steps = option, option.steps
        self._dtype, self._device, self._shape = gradient.dtype, gradient.device, gradient.shape
        self._begun, self._prepared, self._communicated, self._settled = self._ends()
        flat = gradient.reshape(-1)
        scatters = (step.phase for step in option.comms if step.routine in _SCATTERING)
        missing = -flat.numel() % prod(self._fabric.of(phase).size for phase in scatters)
        padded = F.pad(flat, (0, missing)) if missing else flat
        self._held: _Held = padded
        self._numel = padded.numel()
        self._run(0, self._begun)

    def prepare(self) -> None:
        self._run(self._begun, self._prepared)

    def communicate(self) -> None:
        self._run(self._prepared, self._communicated)

    def settle(self) -> None:
        self._run(self._communicated, self._settled)

    def total(self) -> Tensor:
        self._run(self._settled, len(self._steps))
        assert isinstance(self._held, Tensor), "every path of the tree ends with the sum on all ranks"
        total = self._held[: self._shape.numel()]
        if self._remembered:
            self._memory.undo_unless_finite(self._remembered, total)
        return total.view(self._shape)

    def tensors(self) -> Iterator[Tensor]:
        match self._held:
            case Tensor():
                yield self._held
            case Pieces(pieces=pieces):
                yield from (message.data for piece in pieces for message in piece)

    def _run(self, start: int, end: int) -> None:
        held = self._held
        for index, step in enumerate(self._steps[start:end], start):
            match step:
                case Comp():
                    held = None if held is None else self._compress(held, index, step.device)
                case Decomp():
                    held = None if held is None else self._decompress(held, step.device)
                case Comm() if self._alone(step):
                    pass
                case Comm():
                    held = self._communicate(held, step)
            if held is not None:
                self._numel = held.numel() if isinstance(held, Tensor) else held.numel * len(held.pieces)
        self._held = held

    # Compression.

    def _compress(self, held: _Held, index: int, device: Device) -> Pieces:
        assert isinstance(held, Tensor)
        dense = self._on(held, device)
        count = prod(self._fabric.of(phase).size for phase in self._option.ways[index])
        pieces = []
        for piece, part in enumerate(dense.view(count, -1)):
            remembered = f"{self._key}/{index}/{piece}"
            message, seed = self._memory.compress(remembered, part)
            self._remembered.append(remembered)
            pieces.append([Message(seed=seed, data=message.to(self._device))])
        return Pieces(numel=dense.numel() // count, pieces=pieces)

    def _decompress(self, held: _Held, device: Device) -> Tensor:
        assert isinstance(held, Pieces)
        where = "cpu" if device is Device.CPU else self._device
        dense = torch.zeros(len(held.pieces), held.numel, dtype=self._dtype, device=where)
        for row, messages in zip(dense, held.pieces, strict=True):
            for message in messages:
                self._memory.compressor.add(self._on(message.data, device), row, seed=message.seed)
        return dense.view(-1).to(self._device)

    def _on(self, tensor: Tensor, device: Device) -> Tensor:
        return tensor.cpu() if device is Device.CPU else tensor.to(self._device)

    # Collectives.

    def _communicate(self, held: _Held, step: Comm) -> _Held:
        if self._idle(step.phase):
            return None
        transport, root = self._fabric.of(step.phase), self._root(step.phase)
        if step.compressed:
            assert not isinstance(held, Tensor)
            parts_differ = step.routine is Routine.ALL_GATHER and step.role is not Role.WHOLE
            fixed = self._memory.compressor.fixed_size
            return carry_pieces(step.routine, held, transport, root=root, alike=fixed, parts_differ=parts_differ)
        assert not isinstance(held, Pieces)
        # Of a part that is broadcast this rank had as many elements, before one rank went on for all.
        return carry_dense(step.routine, held, transport, root=root, numel=self._numel, dtype=self._dtype)

    def _root(self, phase: Phase) -> int:
        # Spread by name, so that not one rank aggregates all tensors. Counted from the first rank of a host, as costs
        # are: else the ranks that are each other's neighbours in rounds would not be those of a host.
        flat, intra = self._fabric.flat.size, self._fabric.intra.size
        step = intra if phase is Phase.FLAT and intra < flat else 1
        return zlib.crc32(self._key.encode()) * step % self._fabric.of(phase).size

    def _idle(self, phase: Phase) -> bool:
        """Tell whether this rank has nothing to do between hosts: the root of its host has it all."""
        first = self._steps[0] if isinstance(self._steps[0], Comm) else self._steps[1]
        assert isinstance(first, Comm)
        rooted = first.phase is Phase.INTRA1 and first.routine.rooted
        return phase is Phase.INTER and rooted and self._fabric.intra.rank != self._root(Phase.INTRA1)

    def _alone(self, step: Comm) -> bool:
        """Tell whether a collective has this rank only; costs leave it out (`Costs`)."""
        return self._fabric.of(step.phase).size == 1

    def _ends(self) -> tuple[int, int, int, int]:
        """Return how many steps are done after `begin`, `prepare`, `communicate` and `settle`."""
        steps = list(enumerate(self._steps))
        collectives = [index for index, step in steps if isinstance(step, Comm) and not self._alone(step)]
        collectives = collectives or [len(steps)]
        on_cpus = [index for index, step in steps if not isinstance(step, Comm) and step.device is Device.CPU]
        elsewhere = [*collectives, *on_cpus]
        return min(elsewhere), collectives[0], collectives[-1] + 1, max(elsewhere) + 1


def options_of(texts: Mapping[str, str]) -> dict[str, Option]:
    """Return key → option for what a plan says of each key, without those that it leaves dense.

    Raises:
        CommError: A text is not an option of the tree.
    """
    try:
        return {key: parse(FLAT if text == COMPRESSED else text) for key, text in texts.items() if text != DENSE}
    except ValueError as error:
        raise CommError(str(error)) from error
