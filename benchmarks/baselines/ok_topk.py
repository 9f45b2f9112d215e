"""Ok-Topk: owners of balanced regions sum what exceeds one threshold and send what exceeds another (Li et al. 2022)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from resilient_run.comm.errors import MessageError
from resilient_run.comm.net.entries import (
    add_to,
    copied,
    from_message,
    joined,
    kept_count,
    rounded,
    size_bytes,
    take,
    to_message,
    top_k,
)
from resilient_run.comm.net.rounds import Rounds, all_to_all, bruck_gather
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.coo import Coo
from resilient_run.comm.spardl.sparse_scheme import SparseScheme, Synchronized

from .settled import settle

_THRESHOLD_PERIOD = 32
_REGION_PERIOD = 64
_TOLERANCE = 2.0
_UNBALANCED = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is used again for many steps, because it changes slowly.

    Attributes:
        step: Steps done, the same on all ranks.
        local: Magnitude from which on this rank's elements are selected.
        total: Magnitude from which on sums are kept, the same on all ranks; None: to be evaluated again.
        ends: Index behind each region, the same on all ranks.
    """

    step: int
    local: float
    total: float | None
    ends: list[int]


class OkTopk(SparseScheme):
    """O(k) sparse all-reduce: split and reduce by regions, then balance and all-gather.

    Thresholds stand for exact selections: exact ones every 32 steps, and as soon as a threshold selects more than
    twice or less than half of k. Regions that split each rank's selection evenly are agreed on every 64 steps. Between
    2·k·(n-1)/n and 6·k·(n-1)/n words. A rank keeps what it did not select and what is not in the result, which is
    all: an owner sees every selected part of an element.
    """

    name = "ok-topk"

    def _synchronize(self, key: str, accumulated: Tensor, total: Tensor) -> Rounds[Synchronized]:
        dtype = total.dtype
        kept = kept_count(accumulated.numel(), self.density)
        work = copied(accumulated, total)
        estimate, chosen = self._select(key, accumulated, kept)
        mine = take(work, chosen, dtype)
        region = yield from self._reduce_regions(mine, estimate, accumulated.dtype)
        estimate, best = yield from self._select_sums(region, estimate, kept)
        best_sums = Coo(indices=region.indices[best], values=rounded(region.values[best], dtype))
        final = yield from self._gather(best_sums, dtype, accumulated.numel())
        if not kept / _TOLERANCE <= final.indices.numel() <= kept * _TOLERANCE:
            estimate = replace(estimate, total=None)

        settle(accumulated, work, mine, final)
        add_to(total.zero_(), final)
        memory = asdict(replace(estimate, step=estimate.step + 1))
        return Synchronized(values=final.values, residual=accumulated, memory=memory)

    def _select(self, key: str, accumulated: Tensor, kept: int) -> tuple[Estimate, Tensor]:
        """Return what is known with this step's regions and local threshold, and the indices that it selects."""
        memory = self._memories.get(key)
        magnitudes = accumulated.abs()
        chosen = None
        if memory is None:
            estimate = Estimate(step=0, local=0.0, total=None, ends=[])
        else:
            estimate = Estimate(**memory)
            if estimate.step % _THRESHOLD_PERIOD:
                # Not `>=`: a NaN must be selected too.
                chosen = (~(magnitudes < estimate.local)).nonzero().view(-1).int()
        if chosen is None or not kept / _TOLERANCE <= chosen.numel() <= kept * _TOLERANCE:
            chosen = top_k(accumulated, kept)
            estimate = replace(estimate, local=float(magnitudes[chosen].min()))
        if estimate.step % _REGION_PERIOD == 0:
            estimate = replace(estimate, ends=_balanced_ends(self.transport, chosen, accumulated.numel()))
        return estimate, chosen

    def _reduce_regions(self, mine: Coo, estimate: Estimate, exact: torch.dtype) -> Rounds[Coo]:
        """Return the sums of all that any rank selected in this rank's region."""
        rank, dtype = self.transport.rank, mine.values.dtype
        inner = torch.tensor(estimate.ends[:-1], dtype=torch.int32, device=mine.indices.device)
        cuts = torch.searchsorted(mine.indices, inner).cpu()
        parts = zip(mine.indices.tensor_split(cuts), mine.values.tensor_split(cuts), strict=True)
        received = yield from all_to_all(
            rank, [to_message(Coo(indices=indices, values=values)) for indices, values in parts]
        )
        start, end = (0, *estimate.ends)[rank], estimate.ends[rank]
        sums = torch.zeros(end - start, dtype=exact, device=mine.values.device)
        touched = torch.zeros(end - start, dtype=torch.bool, device=mine.values.device)
        for message in received:
            entries = from_message(message, dtype, start=start, end=end)
            places = entries.indices.long() - start
            sums[places] += entries.values
            touched[places] = True
        places = touched.nonzero().view(-1)
        return Coo(indices=(places + start).to(torch.int32), values=sums[places])

    def _select_sums(self, region: Coo, estimate: Estimate, kept: int) -> Rounds[tuple[Estimate, Tensor]]:
        """Return which sums of `region` exceed the threshold of all ranks, evaluated again when it is time."""
        magnitudes = region.values.abs()
        total = estimate.total
        if total is None or estimate.step % _THRESHOLD_PERIOD == 0:
            candidates = magnitudes[top_k(magnitudes, kept)].to(torch.float32)
            rank, ranks = self.transport.rank, range(self.transport.size)
            messages = yield from bruck_gather(rank, ranks, candidates.view(torch.uint8))
            every = torch.cat([message.clone().view(torch.float32) for message in messages])
            total = float(every[top_k(every, kept)].min())
        return replace(estimate, total=total), (~(magnitudes < total)).nonzero().view(-1)

    def _gather(self, mine: Coo, dtype: torch.dtype, numel: int) -> Rounds[Coo]:
        """Return the kept sums of all regions, moved between ranks first if some have far more than the others."""
        ranks, rank = self.transport.size, self.transport.rank
        count = torch.tensor([mine.indices.numel()], device=mine.indices.device).view(torch.uint8)
        sizes = [count.numel()] * ranks
        every = yield from bruck_gather(rank, range(ranks), count, sizes_bytes=sizes)
        counts: list[int] = torch.cat(every).view(torch.int64).tolist()
        if not all(0 <= number <= numel for number in counts) or counts[rank] != mine.indices.numel():
            raise MessageError(f"ranks say that they keep {counts} of {numel} sums; run the same version on all ranks")
        if max(counts) * ranks > _UNBALANCED * sum(counts):
            ends = [sum(counts) * (place + 1) // ranks for place in range(ranks)]
            mine = yield from _moved(rank, mine, list(accumulate(counts)), ends, dtype, numel)
            counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        messages = yield from bruck_gather(
            rank,
            range(ranks),
            to_message(mine),
            sizes_bytes=[size_bytes(number, dtype) for number in counts],
        )
        return joined([from_message(message, dtype, end=numel) for message in messages])


def _balanced_ends(transport: Transport, chosen: Tensor, numel: int) -> list[int]:
    """Return the mean of where each rank would end its regions to split its own selection evenly."""
    ranks = transport.size
    places = [min(chosen.numel() - 1, (rank + 1) * chosen.numel() // ranks) for rank in range(ranks - 1)]
    wished = torch.cat(
        [chosen[places].double(), torch.tensor([float(numel)], dtype=torch.float64, device=chosen.device)]
    )
    transport.all_reduce(wished)
    ends = [min(numel, round(end / ranks)) for end in wished.tolist()]
    return [*ends[:-1], numel]


def _moved(
    rank: int, mine: Coo, had: Sequence[int], ends: Sequence[int], dtype: torch.dtype, numel: int
) -> Rounds[Coo]:
    """Return this rank's part of all elements in the order of ranks, where `had` and `ends` are the parts' ends."""
    ranks = range(len(ends))
    began, begins = [0, *had[:-1]], [0, *ends[:-1]]

    def overlap(holder: int, taker: int) -> tuple[int, int]:
        start = max(began[holder], begins[taker])
        return start - began[holder], max(start, min(had[holder], ends[taker])) - began[holder]

    def part(taker: int) -> Tensor:
        start, end = overlap(rank, taker)
        return to_message(Coo(indices=mine.indices[start:end], values=mine.values[start:end]))

    spans = [overlap(holder, rank) for holder in ranks]
    received = yield from all_to_all(
        rank,
        [part(taker) for taker in ranks],
        sizes_bytes=[size_bytes(end - start, dtype) for start, end in spans],
    )
    return joined([from_message(message, dtype, end=numel) for message in received])
