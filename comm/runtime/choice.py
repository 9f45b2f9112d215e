"""The scheme that a hook is asked for: by its name, by that of a compressor, or by what makes it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from inspect import signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Final, get_args

import torch
import torch.distributed as dist

from ..compress.compressed import Compressed
from ..compress.compressors import NAMES
from ..compress.compressors import named as compressor_named
from ..compress.feedback import ErrorFeedback
from ..errors import CommError
from ..net.scheme import Scheme
from ..net.transport import Transport
from ..schemes import SCHEMES, class_named, named, unknown

Choice = str | Callable[[Transport], Scheme]
"""A name of `schemes.SCHEMES` or else of `compressors.NAMES`, or what makes a scheme for these ranks."""

_PACKAGE: Final = __name__.partition(".")[0] + "."
_DEEPEST: Final = 8
_KINDS: Final = (
    (float, Real, "a number"),
    (int, Integral, "an integer"),
)


def scheme_of(choice: Choice, transport: Transport, **options: Any) -> Scheme:
    """Return the scheme; that of a compressor is `Compressed` with error feedback.

    Args:
        choice: Which one.
        transport: The ranks.
        options: Of the scheme, or `density` of a compressor that has one, if it is a name.

    Raises:
        CommError: There is none of that name, or it has no such options.
    """
    check_choice(choice, options)
    if not isinstance(choice, str):
        return choice(transport)
    if choice in SCHEMES:
        return named(choice, transport, **options)
    return Compressed(transport, ErrorFeedback(compressor_named(choice, **options)))


def check_choice(choice: Choice, options: Mapping[str, Any], *, ranks: int = 0) -> None:
    """Check the name and the options of a scheme, before anything is made for it.

    Args:
        choice: Which one.
        options: Its own.
        ranks: How many it is for, to check also the values; 0 does not.

    Raises:
        CommError: There is no scheme of that name, it has no such options, or one is not what it has to be.
    """
    if not isinstance(choice, str):
        if not callable(choice):
            raise CommError(f"a scheme is a name or what makes one, got {choice!r}")
        if options:
            raise CommError(f"{', '.join(sorted(options))}: give options to what makes the scheme")
        return
    if choice not in SCHEMES and choice not in NAMES:
        raise unknown(choice, {*SCHEMES, *NAMES}, "scheme and no compressor")
    parameters = dict(signature(class_named(choice) if choice in SCHEMES else compressor_named).parameters)
    if choice not in SCHEMES and not hasattr(compressor_named(choice), "density"):
        parameters.clear()
    takes = {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    others = {name: value for name, value in options.items() if name not in takes}
    if others and any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        check_choice(options.get("scheme", takes["scheme"].default), others)
    elif others:
        raise CommError(f"{choice} has no option {', '.join(others)}; it has {', '.join(takes) or 'none'}")
    for name in options.keys() & takes.keys():
        check_number(f"{choice}: {name}", takes[name].annotation, options[name])
    if ranks:
        nobody = Transport(dist.ProcessGroup(0, ranks))  # type: ignore[call-arg]
        scheme_of(choice, nobody, **options)


def check_number(what: str, annotation: Any, value: object) -> None:
    """Raise CommError unless a value is the number that its annotation asks for."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if value is None and NoneType in kinds:
        return
    for kind, abstract, shown in _KINDS:
        if kind in kinds and (isinstance(value, bool) or not isinstance(value, abstract)):
            raise CommError(f"{what} must be {shown}, got {value!r}")


def agreed_scheme(
    choice: Choice, transport: Transport, among: Transport, options: Mapping[str, Any], **given: object
) -> Scheme:
    """Return what `scheme_of` returns, the same on all ranks of `among`, which call this together.

    Args:
        choice: As of `scheme_of`.
        transport: The ranks of the scheme.
        among: All that must be given the same.
        options: As of `scheme_of`.
        given: What else must be the same.

    Raises:
        CommError: As `scheme_of` and `check_alike`.
    """
    check_alike(among, scheme=choice, **options, **given)
    made = scheme_of(choice, transport, **options)
    if not isinstance(choice, str):
        check_alike(among, scheme=made)
    return made


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
    with ranks.uncounted():
        if len(set(ranks.gather_bytes(sha256(own.encode()).digest()))) == 1:
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
