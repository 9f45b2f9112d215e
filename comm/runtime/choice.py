"""The scheme that a hook is asked for: by its name, by that of a compressor, or by what makes it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..compress.compressed import Compressed
from ..compress.compressors import NAMES
from ..compress.compressors import named as compressor_named
from ..compress.feedback import ErrorFeedback
from ..errors import CommError
from ..net.scheme import Scheme
from ..net.transport import Transport
from ..schemes import SCHEMES, named

Choice = str | Callable[[Transport], Scheme]
"""A name of `schemes.SCHEMES` or else of `compressors.NAMES`, or what makes a scheme for these ranks."""


def scheme_of(choice: Choice, transport: Transport, **options: Any) -> Scheme:
    """Return the scheme; that of a compressor is `Compressed` with error feedback.

    Args:
        choice: Which one.
        transport: The ranks.
        options: Of the scheme, or `density` of a compressor that has one, if it is a name.

    Raises:
        CommError: There is none of that name, or it has no such options.
    """
    if not isinstance(choice, str):
        if options:
            raise CommError(f"{', '.join(sorted(options))}: give options to what makes the scheme")
        return choice(transport)
    if choice in SCHEMES:
        return named(choice, transport, **options)
    if choice not in NAMES:
        known = ", ".join(sorted({*SCHEMES, *NAMES}))
        raise CommError(f"there is no scheme and no compressor {choice!r}; known are {known}")
    compressor = compressor_named(choice, **options)
    if options and not hasattr(compressor, "density"):
        raise CommError(f"{choice} sends something of every element and has no density; leave it out")
    return Compressed(transport, ErrorFeedback(compressor))


def check_alike(ranks: Transport, /, **given: object) -> None:
    """Raise CommError, on all ranks alike, unless all of them are given the same.

    Messages of other sizes than a rank expects would let it wait for ever, or be taken for something else.

    Args:
        ranks: All that sum together.
        given: Name → plain data, or an object, of which its type and its public attributes of plain data count.
    """
    own = {name: _as_text(value) for name, value in given.items()}
    message = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    with ranks.uncounted():
        told = [json.loads(bytes(each.cpu().numpy())) for each in ranks.send_to_all(message.to(ranks.device))]
    for rank, other in enumerate(told):
        for name in told[0] | other:
            first, own_ = (each.get(name, "not given") for each in (told[0], other))
            if first != own_:
                raise CommError(f"{name} is {first} on rank 0 and {own_} on rank {rank}; give all ranks the same")


def _as_text(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_as_text, value))})"
    if isinstance(value, Mapping):
        return _as_text([f"{key}: {_as_text(each)}" for key, each in value.items()])
    if hasattr(value, "__qualname__"):
        return f"{value.__qualname__}"
    public = {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    plain = {name: each for name, each in public.items() if isinstance(each, (bool, int, float, str))}
    return f"{type(value).__qualname__}({', '.join(f'{name}={each!r}' for name, each in plain.items())})"
