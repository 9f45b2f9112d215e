"""One threshold for the parts of a gradient that several ranks hold, as with tensor parallelism (ZEN, section 4)."""

from math import ceil, floor
from typing import Final

import torch
from torch import Tensor

from ..errors import CommError
from ..net.transport import Transport, copied_to_device, from_bytes, to_bytes
from ..ops.coo import Coo
from ..ops.topk import SLACK, reach, sample, topk
from .compressors import SampledTopK

_WEIGHT_BITS: Final = 16


class PooledTopK(SampledTopK):
    """The elements of all parts above a threshold that samples of all parts give.

    About k of them over all parts, a quarter more or less; a part with larger elements sends more than its share. Where
    no threshold does so, because too many elements are equal, each part sends its own k largest. Ranks that hold the
    same part select the same elements.

    Args:
        density: Share of the elements of all parts that is sent.
        pool: The ranks that hold the parts of this replica. All of them call `select` for the same gradients in the
            same order.
    """

    def __init__(self, density: float, pool: Transport) -> None:
        super().__init__(density)
        self.pool = pool

    def select(self, dense: Tensor, k: int, *, seed: int) -> Coo:
        """Return this part's elements; `k` is its share.

        Raises:
            CommError: Not all ranks of the pool select for one gradient, of one type.
        """
        numel, wanted, threshold = self._threshold(dense, k, seed)
        if wanted >= numel:
            return topk(dense, k)
        most = floor(wanted * SLACK)
        found = reach(dense, max(1, threshold), min(most, dense.numel()))
        own = most + 1 if found is None else found.indices.numel()
        reached = int(self.pool.all_gather_dense(copied_to_device([own], self.pool.device)).sum())
        return found if found is not None and ceil(wanted / SLACK) <= reached <= most else topk(dense, k)

    def _threshold(self, dense: Tensor, k: int, seed: int) -> tuple[int, int, int]:
        """Return how many elements all parts have, how many of them are wanted, and which magnitude so many reach."""
        samples = sample(dense, k, seed=seed)
        # The seed is that of the parameter and step.
        own = copied_to_device([dense.numel(), k, seed, samples.itemsize], samples.device)
        messages = self.pool.send_to_all(to_bytes(own, samples))
        numel = wanted = 0
        pooled, weights = [], []
        heads = [from_bytes(message[: own.nbytes], (own.dtype, own.numel()))[0] for message in messages]
        for message, head in zip(messages, torch.stack(heads).tolist(), strict=True):
            part_numel, part_k, *asked = head
            if asked != [seed, samples.itemsize]:
                raise CommError(
                    "ranks of the pool select from different gradients, or from different types of one: all must have "
                    "the same gradients in the same order (under DDP with find_unused_parameters, give it a "
                    "bucket_cap_mb that holds them all)"
                )
            count = (message.numel() - own.nbytes) // samples.itemsize
            _, part = from_bytes(message, (own.dtype, own.numel()), (samples.dtype, count))
            numel, wanted = numel + part_numel, wanted + part_k
            pooled.append(part.long())
            # An integer, so that the order of additions does not matter.
            weight = round((part_numel << _WEIGHT_BITS) / max(1, count))
            weights.append(torch.full_like(pooled[-1], weight))
        ordered, order = torch.cat(pooled).sort(descending=True)
        if not ordered.numel():
            return numel, wanted, 1
        reached = torch.cat(weights)[order].cumsum(0)
        place = int(torch.searchsorted(reached, wanted << _WEIGHT_BITS))
        return numel, wanted, int(ordered[min(place, ordered.numel() - 1)])
