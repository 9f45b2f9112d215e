"""Whether all ranks are given the same."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from numbers import Integral, Real
from typing import Any, Final

import torch

from ..errors import CommError
from .transport import Transport

_PACKAGE: Final = __name__.partition(".")[0] + "."
_DEEPEST: Final = 8


def check_alike(ranks: Transport, /, **given: object) -> None:
    """Raise CommError, on all ranks alike, unless all of them are given the same.

    Otherwise messages may have other sizes than a rank expects, or another meaning. Of an object of this package all
    its plain attributes count, and theirs; of others only the type does.

    Args:
        ranks: All that sum together.
        given: Name → value.
    """
    own = json.dumps(
        dict(described for name, value in given.items() for described in _described(name, value)), sort_keys=True
    )
    digest = torch.frombuffer(bytearray(sha256(own.encode()).digest()), dtype=torch.uint8)
    with ranks.uncounted():
        if len(set(map(tuple, ranks.gather_numbers(digest).tolist()))) == 1:
            return
        described = [json.loads(each) for each in ranks.gather_bytes(own.encode())]
    for rank, other in enumerate(described):
        for name in described[0] | other:
            first, its = (each.get(name, "not given") for each in (described[0], other))
            if first != its:
                raise CommError(f"{name} is {first} on rank 0 and {its} on rank {rank}; give all ranks the same")


def _described(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the parts of a value, by name, as texts that are equal where ranks do the same."""
    text, parts = _text_and_parts(value)
    yield name, text
    if depth < _DEEPEST:
        for part, each in parts.items():
            yield from _described(f"{name}{part}", each, depth + 1)


def _text_and_parts(value: object) -> tuple[str, dict[str, Any]]:
    if isinstance(value, Integral):
        return str(int(value)), {}
    if isinstance(value, Real):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number), {}
    if value is None or isinstance(value, str | bytes | range | torch.dtype | Enum):
        return repr(value), {}
    if isinstance(value, list | tuple):
        return f"{len(value)} items", {f"[{index}]": each for index, each in enumerate(value)}
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value))), {}
    if isinstance(value, Mapping):
        return f"{len(value)} items", {f"[{key!r}]": value[key] for key in sorted(value, key=repr)}
    if isinstance(value, partial):
        return "partial", {f".{part}": getattr(value, part) for part in ("func", "args", "keywords")}
    if isinstance(value, Transport):
        return "ranks", {}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}", {}
    kind = type(value)
    attributes: dict[str, Any] = {}
    if kind.__module__.startswith(_PACKAGE):
        own = [field.name for field in fields(value)] if is_dataclass(value) else getattr(value, "__dict__", ())
        attributes = {f".{each}": getattr(value, each) for each in own if each not in getattr(value, "differs", ())}
    return kind.__qualname__, attributes
