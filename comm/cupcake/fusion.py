"""How long an iteration takes when groups of gradients are compressed and communicated together (Cupcake, Section 5.3).

Gradients become ready one after the other in the backward pass. A group is encoded on the device that computes, after
the backward step of its last tensor, communicated by itself, one group after the other, and decoded when backward and
encoding are done; the optimizer waits for the last decoding. Decoding last is the best that one device can do: nothing
waits for it but the optimizer.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plan.model import Tensor

LEAST_BUCKET_BYTES = 64 << 10


class Group(NamedTuple):
    """The tensors `start` … `end - 1`, at least one, communicated at once; `compressed` or as they are."""

    start: int
    end: int
    compressed: bool = True


Strategy = tuple[Group, ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GroupCosts(ABC):
    """What groups cost.

    Attributes:
        forward_s: The forward pass and what else precedes the backward pass, seconds.
        bytes_per_element: Size of an element before compression.
    """

    forward_s: float
    bytes_per_element: float

    @abstractmethod
    def over(self, sizes_bytes: Floats, compressed: bool) -> Floats:
        """Return the seconds for encoding, communicating and decoding groups of sizes before compression (3, …)."""


def groups_of(ends: Sequence[int], *, compressed: bool = True) -> Strategy:
    """Return the strategy whose groups end before these tensors."""
    return tuple(Group(start, end, compressed) for start, end in pairwise((0, *ends)))


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFusion:
    """What a search found; times without the forward pass.

    Attributes:
        strategy: The best strategy.
        finish_s: When its last group is decoded.
        bound_s: No strategy takes less; equal to `finish_s` if that is proven to be the optimum.
    """

    strategy: Strategy
    finish_s: float
    bound_s: float


class FusionProblem:
    """One model on one system.

    Args:
        tensors: In the order in which they become ready; at least one.
        system: What operations cost.

    Attributes:
        backward_s: Backward time of the first j tensors, for j = 0 … N.
        size_bytes: Bytes of the first j tensors before compression, for j = 0 … N.
    """

    def __init__(self, tensors: Sequence[Tensor], system: GroupCosts) -> None:
        if not tensors:
            raise ValueError("a model needs at least one tensor")
        self.tensors = tuple(tensors)
        self.system = system
        self.backward_s = tuple(accumulate((tensor.backward_s for tensor in tensors), initial=0.0))
        self.size_bytes = tuple(accumulate((t.numel * system.bytes_per_element for t in tensors), initial=0.0))
        self._costs: dict[bool, Floats] = {}

    def __len__(self) -> int:
        """Return N, the number of tensors."""
        return len(self.tensors)

    def costs(self, compressed: bool) -> Floats:
        """Return the seconds for encoding, communicating and decoding groups [which, start, end] of one kind."""
        if compressed not in self._costs:
            until = np.array(self.size_bytes)
            self._costs[compressed] = self.system.over(np.maximum(until[None, :] - until[:, None], 0.0), compressed)
        return self._costs[compressed]

    def costs_s(self, group: Group) -> tuple[float, float, float]:
        """Return the seconds for encoding, communicating and decoding a group."""
        encode_s, send_s, decode_s = self.costs(group.compressed)[:, group.start, group.end].tolist()
        return encode_s, send_s, decode_s

    def finish_s(self, strategy: Strategy) -> float:
        """Return when the last group is decoded, seconds since the backward pass began."""
        costs = [self.costs_s(group) for group in strategy]
        encoding_s, sent_s = 0.0, 0.0
        sent = []
        for group, (encode_s, send_s, _) in zip(strategy, costs, strict=True):
            # The device is never idle before its last encoding, so backward and encoding times just add up.
            encoding_s += encode_s
            sent_s = max(sent_s, self.backward_s[group.end] + encoding_s) + send_s
            sent.append(sent_s)
        decoded_s = self.backward_s[-1] + encoding_s
        for sent_s, (_, _, decode_s) in zip(sent, costs, strict=True):
            decoded_s = max(decoded_s, sent_s) + decode_s
        return decoded_s

    def iteration_s(self, strategy: Strategy) -> float:
        """Return the time of an iteration with this strategy (Equation 5.1, with decoding)."""
        return self.system.forward_s + self.finish_s(strategy)


def bucketed(until_bytes: Sequence[float], bucket_bytes: float, *, compressed: bool = True) -> Strategy:
    """Return groups that are closed as soon as they hold `bucket_bytes`, as gradient buckets are.

    Args:
        until_bytes: Bytes of the first j tensors, for j = 0 … N.
        bucket_bytes: Size of a bucket.
        compressed: Of all groups.
    """
    ends, start, count = [], 0, len(until_bytes) - 1
    while start < count:
        start = min(bisect_left(until_bytes, until_bytes[start] + bucket_bytes, lo=start + 1), count)
        ends.append(start)
    return groups_of(ends, compressed=compressed)


def all_bucketed(until_bytes: Sequence[float], *, compressed: bool = True) -> Iterator[Strategy]:
    """Yield single tensors, buckets of 64 KiB and of larger sizes by powers of two, up to one for everything."""
    bucket_bytes, found = LEAST_BUCKET_BYTES, groups_of(range(1, len(until_bytes)), compressed=compressed)
    while len(found) > 1:
        yield found
        found = bucketed(until_bytes, bucket_bytes, compressed=compressed)
        bucket_bytes *= 2
    yield found
