"""The sum in which every rank sums its part of a gradient: push to the part's server, sum at once, pull from all."""

from collections.abc import Sequence

from ..net.rounds import Rounds, all_to_all
from .formats import ALL, Format, decode, encode
from .partition import Balanced, join
from .sparse import Sparse, merge


def push_and_pull(
    rank: int, ranks: int, own: Sparse, cut: Balanced, *, formats: Sequence[Format] = ALL
) -> Rounds[Sparse]:
    """Return the sum over all `ranks`, of which `rank` is this one; each server adds in the order of ranks."""
    width, dtype = own.width, own.values.dtype
    lengths = [cut.size(server) for server in range(ranks)]
    parts = yield from cut.split(own)
    messages = yield from all_to_all(rank, encode(parts, formats))
    pushed = yield from decode.finding(messages, [lengths[rank]] * ranks, width=width, dtype=dtype)
    share = yield from merge.finding(pushed)
    messages = yield from all_to_all(rank, encode([share], formats) * ranks)
    pulled = yield from decode.finding(messages, lengths, width=width, dtype=dtype)
    return join(cut, pulled, own.length)
