"""What a planner knows of a model: its gradients, in the order in which the backward pass produces them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .fields import FileFields, read_object

VERSION = 1
MOST_TENSORS = 1000
"""Planners take about as long as the square of their number, and as much memory."""
# What profiles and published lists of tensors say besides.
_REMARKS = ("order", "note", "num_tensors", "total_numel", "fp32_MiB")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A gradient: its name, its number of elements, and the seconds of backward computation until it is ready."""

    name: str
    numel: int
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The gradients of a model, at least one, in ready order; names are unique.

    Attributes:
        name: What it is called.
        tensors: Its gradients.
        forward_s: The forward pass, seconds, for cluster files; None if nobody measured it.
    """

    name: str
    tensors: tuple[Tensor, ...]
    forward_s: float | None = None

    @property
    def backward_s(self) -> float:
        """The whole backward pass, seconds."""
        return sum(tensor.backward_s for tensor in self.tensors)

    @property
    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(tensor.numel for tensor in self.tensors)


def fused(model: Model, groups: Sequence[Sequence[Tensor]]) -> Model:
    """Return the model with one tensor, named as its first one, for each group of neighbours."""
    return replace(
        model,
        tensors=tuple(
            Tensor(
                name=group[0].name,
                numel=sum(tensor.numel for tensor in group),
                backward_s=sum(tensor.backward_s for tensor in group),
            )
            for group in groups
        ),
    )


def neighbours(model: Model, most: int = MOST_TENSORS) -> list[list[Tensor]]:
    """Return the tensors by themselves, or, of more than `most`, as many groups of small ones at most.

    A group is small in elements and in backward time, so that little is lost if it is sent as one.
    """
    if len(model.tensors) <= most:
        return [[tensor] for tensor in model.tensors]
    numel, backward_s = model.numel, model.backward_s
    shares = [
        sum(part / whole for part, whole in ((t.numel, numel), (t.backward_s, backward_s)) if whole)
        for t in model.tensors
    ]
    # All shares are 2 together. Groups that are full have this much each, and each may have one before it that is not.
    full = 4 / (most - 1)
    groups: list[list[Tensor]] = []
    held = full
    for tensor, share in zip(model.tensors, shares, strict=True):
        if held >= full or (share >= full and held > 0):
            groups.append([])
            held = 0.0
        groups[-1].append(tensor)
        held += share
    return groups


def read_model(path: Path, *, flops_per_s: float | None = None) -> Model:
    """Return the model of a JSON file: `{"tensors": [{"name", "numel", "backward_s"}, …]}` in ready order.

    Args:
        path: The file; `version` (1), `model` (its name) and `forward_s` may stand at the top.
        flops_per_s: Read `bwd_flop` of each tensor in place of `backward_s`, and divide it by this rate.

    Raises:
        FileError: The file is no such description.
        ValueError: The rate is no number of at least 1.
    """
    if flops_per_s is not None and not 1 <= flops_per_s < math.inf:
        raise ValueError(f"{flops_per_s} operations per second: write a number of at least 1")
    fields = read_object(path)
    fields.version(VERSION)
    name = (
        fields.text("model", "the name of the model")
        if "model" in fields
        else path.stem.encode(errors="replace").decode()
    )
    tensors = tuple(_tensor(entry, flops_per_s) for entry in fields.objects("tensors", 'tensors {"name", "numel", …}'))
    seen: set[str] = set()
    for index, tensor in enumerate(tensors):
        if tensor.name in seen:
            raise fields.wrong("tensors", f'entry {index} has the name "{tensor.name}" again: give each its own')
        seen.add(tensor.name)
    forward_s = fields.number("forward_s", "the seconds of the forward pass") if "forward_s" in fields else None
    fields.ignore(_REMARKS)
    fields.close()
    return Model(name=name, tensors=tensors, forward_s=forward_s)


def _tensor(fields: FileFields, flops_per_s: float | None) -> Tensor:
    name = fields.text("name", "the name of the parameter")
    numel = fields.integer("numel", "the number of elements")
    fields.ignore(["tied_to", "bwd_flop", "backward_s"])
    if flops_per_s is None:
        if "bwd_flop" in fields and "backward_s" not in fields:
            raise fields.wrong("bwd_flop", "these are operations, no seconds: say --flops-per-s as well")
        backward_s = fields.number("backward_s", "the seconds of the backward pass until this gradient is ready")
    else:
        if "backward_s" in fields and "bwd_flop" not in fields:
            raise fields.wrong("backward_s", "these are seconds already: leave out --flops-per-s")
        backward_s = fields.number("bwd_flop", "the operations of the backward pass for this tensor") / flops_per_s
    fields.close()
    return Tensor(name=name, numel=numel, backward_s=backward_s)
