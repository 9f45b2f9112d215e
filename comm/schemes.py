"""Schemes by the names that users and benchmarks give them."""

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from .errors import CommError

if TYPE_CHECKING:
    from .net.scheme import Scheme
    from .net.transport import Transport

SCHEMES: Final[dict[str, str]] = {
    "dense": "resilient_run.comm.net.scheme:Dense",
    "dgc": "resilient_run.comm.runtime.dgc:Dgc",
    "fp8": "resilient_run.comm.compress.quantized:Fp8",
    "int8": "resilient_run.comm.compress.quantized:Int8",
    "powersgd": "resilient_run.comm.compress.powersgd:PowerSGD",
    "spardl": "resilient_run.comm.spardl.spardl:SparDL",
    "topk-a": "resilient_run.comm.spardl.topk_a:TopkA",
    "zen": "resilient_run.comm.zen.zen:Zen",
}
"""Name → module and class in it."""

REPLACEMENTS: Final = {
    "agsparse": '"zen", route="gather"',
    "gtopk": '"spardl"',
    "index-free": '"zen"',
    "ok-topk": '"spardl"',
    "omnireduce": '"zen"',
    "sparcml": '"zen", route="hierarchical"',
    "sparse-ps": '"zen", route="parallel"',
    "strawman": '"zen"',
    "topk-dsa": '"topk-a"',
}
"""Schemes that are only compared with, and are no longer in this package → what to write."""


def named(name: str, transport: "Transport", **options: Any) -> "Scheme":
    """Return a scheme; its module is imported only now.

    Args:
        name: A key of `SCHEMES`.
        transport: The ranks.
        options: Of the scheme's class.

    Raises:
        CommError: There is none of that name.
    """
    made: Scheme = class_named(name)(transport, **options)
    return made


def class_named(name: str) -> Any:
    """Return the class of a scheme.

    Raises:
        CommError: There is none of that name.
    """
    if name not in SCHEMES:
        raise unknown(name, SCHEMES)
    module, _, attribute = SCHEMES[name].partition(":")
    return getattr(import_module(module), attribute)


def unknown(name: str, known: Iterable[str], kind: str = "scheme") -> CommError:
    """Return the error that says what to use in place of a name that is not `known`."""
    if name in REPLACEMENTS:
        return CommError(f"{name!r} is not a scheme of this package, only of its benchmarks: use {REPLACEMENTS[name]}")
    return CommError(f"there is no {kind} {name!r}; known are {', '.join(sorted(known))}")
