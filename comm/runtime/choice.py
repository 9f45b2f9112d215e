"""The scheme that a hook is asked for: by its name, by that of a compressor, or by what makes it."""

from collections.abc import Callable
from typing import Any

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
