"""Schemes by the names that users and benchmarks give them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from .errors import CommError

if TYPE_CHECKING:
    from .scheme import Scheme
    from .transport import Transport

SCHEMES: Final[dict[str, str]] = {
    "agsparse": "centralized:AGsparse",
    "dense": "scheme:Dense",
    "dgc": "dgc:Dgc",
    "gtopk": "gtopk:GTopk",
    "index-free": "parallel:IndexFree",
    "ok-topk": "ok_topk:OkTopk",
    "omnireduce": "parallel:OmniReduce",
    "sparcml": "centralized:RecursiveDoubling",
    "spardl": "spardl:SparDL",
    "sparse-ps": "parallel:SparsePS",
    "strawman": "parallel:Strawman",
    "topk-a": "topk_a:TopkA",
    "topk-dsa": "topk_dsa:TopkDSA",
    "zen": "zen:Zen",
}
"""Name → module of this folder and class in it."""


def named(name: str, transport: "Transport", **options: Any) -> "Scheme":
    """Return a scheme; its module is imported only now.

    Args:
        name: A key of `SCHEMES`.
        transport: The ranks.
        options: Of the scheme's class.

    Raises:
        CommError: There is none of that name.
    """
    if name not in SCHEMES:
        raise CommError(f"there is no scheme {name!r}; known are {', '.join(sorted(SCHEMES))}")
    module, _, attribute = SCHEMES[name].partition(":")
    made: Scheme = getattr(import_module(f".{module}", __package__), attribute)(transport, **options)
    return made
