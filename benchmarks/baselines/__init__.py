"""Schemes that papers compare ours with; they are not in the package."""

from collections.abc import Callable
from typing import Any, Final

from resilient_run.comm import schemes
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport

from .gtopk import GTopk
from .index_free import IndexFree
from .ok_topk import OkTopk
from .rows import AGsparse, OmniReduce, RecursiveDoubling, SparsePS
from .strawman import Strawman
from .topk_dsa import TopkDSA

BASELINES: Final[dict[str, Callable[..., Scheme]]] = {
    each.name: each
    for each in (AGsparse, GTopk, IndexFree, OkTopk, OmniReduce, RecursiveDoubling, SparsePS, Strawman, TopkDSA)
}


def named(name: str, transport: Transport, **options: Any) -> Scheme:
    """Return one of these schemes or of the package's."""
    make = BASELINES.get(name)
    return make(transport, **options) if make else schemes.named(name, transport, **options)
