"""Flat tensors: which elements of which parameters a shard of FSDP1, or a partition of ZeRO, has where.

What is described by no range is padding, and belongs to nobody.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

from ..errors import SlotError

FLAT: Final = "_resilient_flat"
"""Key of an object's state that describes the flat tensors in it: JSON, path below the object → its ranges.

As text it costs a capture nothing, however many parameters there are.
"""
_UNTOLD: Final = "FSDP1 has it of parameters that are not contiguous, or of DTensors"


class Range(NamedTuple):
    """`size` elements of the parameter `name`, from `begin` in its memory on, which the flat tensor has from `at` on.

    `shape` is that of the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    at: int
    size: int


Ranges = Sequence[Range] | str
"""What a flat tensor has, or why that cannot be told."""


def encode(flats: Mapping[str, Ranges]) -> str:
    """Return the text below `FLAT`."""
    return json.dumps(flats)


def parse(text: Any) -> dict[str, Ranges]:
    """Return what was encoded as `text`.

    Raises:
        SlotError: It is malformed.
    """
    try:
        return {
            path: ranges if isinstance(ranges, str) else tuple(_range(*each) for each in ranges)
            for path, ranges in json.loads(text).items()
        }
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise SlotError(f"manifest does not tell what its flat tensors have: {error!r}") from error


def _range(name: str, shape: list[int], begin: int, at: int, size: int) -> Range:
    numbers = [*shape, begin, at, size]
    if type(name) is not str or any(type(each) is not int or not 0 <= each < 2**59 for each in numbers):
        raise ValueError(f"{size!r} elements of {name!r:.80}, from {begin!r} on at {at!r}")
    if not size or begin + size > prod(shape):
        raise ValueError(f"{size} elements of {name!r:.80} of shape {shape}, from {begin} on")
    return Range(name, tuple(shape), begin, at, size)


class Unit(NamedTuple):
    """What tells which ranges of its parameters a unit of FSDP1 has: a value, of which a description is made once.

    `names` and `of` are of every parameter, those in several places after the others: its name, and the number of what
    has its shape and shard. `tensors` are the ids of what has them, all the same without the original parameters.
    """

    is_told: bool
    is_flat: bool
    names: tuple[str, ...]
    of: tuple[int, ...]
    tensors: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: tuple[Any, ...]


def units_of(prefixes: Mapping[int, str], units: Iterable[Any]) -> Iterator[Unit]:
    """Yield what tells the ranges of `units`, which are instances of FullyShardedDataParallel.

    Args:
        prefixes: What stands before the names of a module's parameters, by its id.
        units: The units.
    """
    for unit in units:
        if (flat := unit._flat_param) is None:
            continue
        owned, shared = flat._param_infos, flat._shared_param_infos
        of = [*range(len(owned))]
        if shared:
            numbers = {(id(info.module), info.param_name): number for number, info in enumerate(owned)}
            of += [numbers[id(info.prim_module), info.prim_param_name] for info in shared]
        is_flat = flat._params is None
        yield Unit(
            # Of one that is not contiguous, the flat tensor has the memory as it lay; of a DTensor, a shard.
            is_told=all(flat._contiguities) and not any(flat._param_extensions),
            is_flat=is_flat,
            names=tuple([prefixes[id(info.module)] + info.param_name for info in chain(owned, shared)]),
            of=tuple(of),
            tensors=(id(flat),) * len(of) if is_flat else tuple(map(id, chain(flat._params, flat._shared_params))),
            shapes=flat._shapes,
            shards=flat._shard_param_infos,
        )


@lru_cache(maxsize=16)
def describe(parameters: tuple[tuple[str, int], ...], units: tuple[Unit, ...]) -> str:
    """Return the text below `FLAT` for `parameters`, path and id of each tensor."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    found: dict[int, Ranges] = {}
    for unit in units:
        for name, number, tensor in zip(unit.names, unit.of, unit.tensors, strict=True):
            shape, shard = unit.shapes[number], unit.shards[number]
            ranges = found.setdefault(tensor, [] if unit.is_told else _UNTOLD)
            if isinstance(ranges, list) and shard.in_shard and shard.numel_in_shard:
                # With the original parameters, each is a tensor of its own.
                at = shard.offset_in_shard if unit.is_flat else 0
                ranges.append(
                    Range(clean_tensor_name(name), shape, shard.intra_param_start_idx, at, shard.numel_in_shard)
                )
    return encode({path: found[tensor] for path, tensor in parameters if tensor in found})
