"""The scheme that a hook is asked for: by its name, by that of a compressor, or by what makes it."""

from collections.abc import Callable, Mapping
from inspect import signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Final, get_args

import torch.distributed as dist

from ..compress.compressed import Compressed
from ..compress.compressors import NAMES
from ..compress.compressors import named as compressor_named
from ..compress.feedback import ErrorFeedback
from ..errors import CommError
from ..net.alike import check_alike
from ..net.scheme import Scheme
from ..net.transport import Transport
from ..schemes import SCHEMES, class_named, named, unknown

Choice = str | Callable[[Transport], Scheme]
"""A name of `schemes.SCHEMES` or else of `compressors.NAMES`, or what makes a scheme for these ranks."""

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


def agreed_scheme(choice: Choice, transport: Transport, among: Transport, options: Mapping[str, Any]) -> Scheme:
    """Return what `scheme_of` returns, the same on all ranks of `among`, which call this together.

    Args:
        choice: As of `scheme_of`; `check_alike` has found names and options to be the same.
        transport: The ranks of the scheme.
        among: All that must have the same.
        options: As of `scheme_of`.

    Raises:
        CommError: As `scheme_of`; or what makes a scheme has made others elsewhere.
    """
    made = scheme_of(choice, transport, **options)
    if not isinstance(choice, str):
        check_alike(among, scheme=made)
    return made
