"""Flat tensors: which elements of which parameters a shard of FSDP1, or a partition of ZeRO, has where.

What is described by no range is padding, and belongs to nobody.
"""

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple

from ..errors import SlotError

FLAT: Final = "_resilient_flat"
"""Key of an object's state that describes the flat tensors in it: JSON, path below the object → its ranges.

As text it costs a capture nothing, however many parameters there are.
"""
_UNTOLD: Final = "FSDP1 has it of parameters that are not contiguous, or of DTensors"


class Box(NamedTuple):
    """Neighbouring elements of a parameter that is laid out in rows; a flat tensor has them from `at` on."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    at: int


class Range(NamedTuple):
    """`size` elements of the parameter `name`, from `begin` in its memory on, which the flat tensor has from `at` on.

    `shape` is that of the whole parameter. Of a parameter that is divided by its columns, these are `times` as many, of
    rows that are `every` elements apart; the flat tensor has one after the other.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    at: int
    size: int
    times: int = 1
    every: int = 0

    @property
    def end(self) -> int:
        """Behind the last of them."""
        return self.begin + (self.times - 1) * self.every + self.size

    def boxes(self, width: int) -> Iterator[Box]:
        """Yield what these are of rows of `width`, which is `every` if there is one."""
        if self.every:
            yield Box(divmod(self.begin, width), (self.times, self.size), self.at)
            return
        begin, end = self.begin, self.begin + self.size
        while begin < end:
            row, column = divmod(begin, width)
            rows = 0 if column else (end - begin) // width
            columns = width if rows else min(width - column, end - begin)
            yield Box((row, column), (max(rows, 1), columns), self.at + begin - self.begin)
            begin += columns * max(rows, 1)


Ranges = Sequence[Range] | str
"""What a flat tensor has, or why that cannot be told."""


_TEXTS: Final = weakref.WeakKeyDictionary[Any, tuple[Any, str]]()
"""What was told last of a module or an optimizer, and of what: a step has no time to describe it again."""


def description(owner: Any, key: Any, describe: Callable[[], Mapping[str, Ranges]]) -> str:
    """Return the text below `FLAT` of what `describe` tells, which is the same where `owner` is and `key` is equal.

    `key` has no tensors in it, which nobody else may hold, but their ids.
    """
    known, text = _TEXTS.get(owner, (None, ""))
    if known != key:
        text = encode(describe())
        _TEXTS[owner] = key, text
    return text


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
            path: ranges if isinstance(ranges, str) else _apart(tuple(_range(*each) for each in ranges))
            for path, ranges in json.loads(text).items()
        }
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise SlotError(f"manifest does not tell what its flat tensors have: {error!r}") from error


def _range(name: str, shape: list[int], begin: int, at: int, size: int, times: int = 1, every: int = 0) -> Range:
    numbers = [*shape, begin, at, size, times, every]
    if type(name) is not str or any(type(each) is not int or not 0 <= each < 2**59 for each in numbers):
        raise ValueError(f"{size!r} elements of {name!r:.80}, from {begin!r} on at {at!r}")
    if not size or begin + size > prod(shape):
        raise ValueError(f"{size} elements of {name!r:.80} of shape {shape}, from {begin} on")
    rows = prod(shape) // every - begin // every if every else 1
    if not 0 < times <= rows or (every and (prod(shape) % every or begin % every + size > every)):
        raise ValueError(f"{times} times {size} elements of {name!r:.80} of shape {shape}, {every} apart")
    return Range(name, tuple(shape), begin, at, size, times, every)


def _apart(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return `ranges`, which have nothing in common but what is one parameter under several names."""
    for one, other in pairwise(sorted(ranges, key=lambda each: (each.at, each.size, each.name))):
        is_same = (one.at, one.size) == (other.at, other.size) and one.name != other.name
        if other.at < one.at + one.size * one.times and not is_same:
            raise ValueError(f"{one.name!r:.80} and {other.name!r:.80} overlap at {other.at}")
    return ranges


def divided(
    name: str, shape: Sequence[int], offset: Sequence[int], local: Sequence[int], begin: int, at: int, size: int
) -> Iterator[Range]:
    """Yield the ranges of a parameter that a flat tensor has from `at` on: `size` elements from `begin` on of a part.

    The part has the shape `local` and lies at `offset` of the parameter, whole in all dimensions but one.
    """
    cut = next((dim for dim, pair in enumerate(zip(shape, local, strict=True)) if len(set(pair)) > 1), 0)
    every, width = prod(shape[cut:]), prod(local[cut:])
    first = offset[cut] * prod(shape[cut + 1 :]) if shape else 0
    part = Range(name, tuple(local), begin, at, size)
    for box in part.boxes(width):
        (row, column), (rows, columns) = box.offset, box.size
        where = row * every + first + column
        if rows == 1 or width == every:
            yield Range(name, tuple(shape), where, box.at, rows * columns)
        else:
            yield Range(name, tuple(shape), where, box.at, columns, rows, every)


def of_units(
    prefixes: Mapping[int, str], units: Iterable[Any], tensors: Iterable[tuple[str, Any]]
) -> dict[str, Ranges]:
    """Return the ranges of those of `tensors` in which units of FSDP1 have their parameters, by path.

    Args:
        prefixes: What stands before the names of a module's parameters, by its id.
        units: Instances of FullyShardedDataParallel.
        tensors: Paths and tensors.
    """
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    found: dict[int, Ranges] = {}
    for unit in units:
        if (flat := unit._flat_param) is None:
            continue
        # Of one that is not contiguous, the flat tensor has the memory as it lay; of a DTensor, a shard.
        is_plain = all(flat._contiguities) and not any(flat._param_extensions)
        parts = {
            (id(info.module), info.param_name): (tuple(shape), shard)
            for info, shape, shard in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
        }
        infos = [(key, key) for key in parts]
        for info in flat._shared_param_infos:
            infos.append(((id(info.module), info.param_name), (id(info.prim_module), info.prim_param_name)))
        held = [flat] * len(infos) if flat._params is None else [*flat._params, *flat._shared_params]
        for ((module, own), of), tensor in zip(infos, held, strict=True):
            shape, shard = parts[of]
            ranges = found.setdefault(id(tensor), [] if is_plain else _UNTOLD)
            if isinstance(ranges, list) and shard.in_shard and shard.numel_in_shard:
                # With the original parameters, each is a tensor of its own.
                at = shard.offset_in_shard if tensor is flat else 0
                name = clean_tensor_name(prefixes[module] + own)
                ranges.append(Range(name, shape, shard.intra_param_start_idx, at, shard.numel_in_shard))
    return {path: found[id(tensor)] for path, tensor in tensors if id(tensor) in found}
