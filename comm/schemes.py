"""Schemes by the names that users and benchmarks give them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from .errors import CommError

if TYPE_CHECKING:
    from .net.scheme import Scheme
    from .net.transport import Transport

SCHEMES: Final[dict[str, str]] = {
    "agsparse": "zen.centralized:AGsparse",
    "dense": "net.scheme:Dense",
    "dgc": "baselines.dgc:Dgc",
    "fp8": "compress.quantized:Fp8",
    "gtopk": "baselines.gtopk:GTopk",
    "index-free": "zen.parallel:IndexFree",
    "int8": "compress.quantized:Int8",
    "ok-topk": "baselines.ok_topk:OkTopk",
    "omnireduce": "zen.parallel:OmniReduce",
    "powersgd": "baselines.powersgd:PowerSGD",
    "sparcml": "zen.centralized:RecursiveDoubling",
    "spardl": "spardl.spardl:SparDL",
    "sparse-ps": "zen.parallel:SparsePS",
    "strawman": "zen.parallel:Strawman",
    "topk-a": "baselines.topk_a:TopkA",
    "topk-dsa": "baselines.topk_dsa:TopkDSA",
    "zen": "zen.zen:Zen",
}
"""Name → module below this folder and class in it."""


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
        raise CommError(f"there is no scheme {name!r}; known are {', '.join(sorted(SCHEMES))}")
    module, _, attribute = SCHEMES[name].partition(":")
    return getattr(import_module(f".{module}", __package__), attribute)
