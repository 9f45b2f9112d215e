"""How long an iteration takes when groups of gradients are compressed and communicated together (Cupcake, Section 5.3).

Gradients become ready one after the other in the backward pass. A group is encoded on the device that computes, after
the backward step of its last tensor, communicated by itself, one group after the other, and decoded when backward and
encoding are done; the optimizer waits for the last decoding. Decoding last is the best that one device can do: nothing
waits for it but the optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..plan.model import Tensor
from ..plan.system import System


class Group(NamedTuple):
    """The tensors `start` … `end - 1`, at least one, communicated at once; `compressed` or as they are."""

    start: int
    end: int
    compressed: bool = True


Strategy = tuple[Group, ...]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTimes:
    """When a group is encoded, communicated and decoded, seconds since the backward pass began."""

    encode_s: tuple[float, float]
    communicate_s: tuple[float, float]
    decode_s: tuple[float, float]


class FusionProblem:
    """One model on one system.

    Args:
        tensors: In the order in which they become ready; at least one.
        system: What operations cost.

    Attributes:
        backward_s: Backward time of the first j tensors, for j = 0 … N.
        size_bytes: Bytes of the first j tensors before compression, for j = 0 … N.
    """

    def __init__(self, tensors: Sequence[Tensor], system: System) -> None:
        if not tensors:
            raise ValueError("a model needs at least one tensor")
        self.tensors = tuple(tensors)
        self.system = system
        self.backward_s = tuple(accumulate((tensor.backward_s for tensor in tensors), initial=0.0))
        self.size_bytes = tuple(accumulate((t.numel * system.bytes_per_element for t in tensors), initial=0.0))

    def __len__(self) -> int:
        """Return N, the number of tensors."""
        return len(self.tensors)

    def costs_s(self, group: Group) -> tuple[float, float, float]:
        """Return the seconds for encoding, communicating and decoding a group."""
        size_bytes, system = self.size_bytes[group.end] - self.size_bytes[group.start], self.system
        if group.compressed:
            return system.compress(size_bytes), system.communicate(size_bytes), system.decompress(size_bytes)
        return 0.0, system.dense(size_bytes), 0.0

    def timeline(self, strategy: Strategy) -> tuple[GroupTimes, ...]:
        """Return when each group of the strategy is encoded, communicated and decoded."""
        costs = [self.costs_s(group) for group in strategy]
        encoding_s, encoded_s, sent_s = 0.0, 0.0, 0.0
        encodings, sendings = [], []
        for group, (encode_s, send_s, _) in zip(strategy, costs, strict=True):
            # The device is never idle before its last encoding, so backward and encoding times just add up.
            begin_s = self.backward_s[group.end] + encoding_s
            encoding_s += encode_s
            encoded_s = self.backward_s[group.end] + encoding_s
            begin_sending_s = max(sent_s, encoded_s)
            sent_s = begin_sending_s + send_s
            encodings.append((begin_s, encoded_s))
            sendings.append((begin_sending_s, sent_s))
        decoded_s, found = encoded_s, []
        for encode, send, (_, _, decode_s) in zip(encodings, sendings, costs, strict=True):
            begin_s = max(decoded_s, send[1])
            decoded_s = begin_s + decode_s
            found.append(GroupTimes(encode_s=encode, communicate_s=send, decode_s=(begin_s, decoded_s)))
        return tuple(found)

    def finish_s(self, strategy: Strategy) -> float:
        """Return when the last group is decoded, seconds since the backward pass began."""
        return self.timeline(strategy)[-1].decode_s[1]

    def iteration_s(self, strategy: Strategy) -> float:
        """Return the time of an iteration with this strategy (Equation 5.1, with decoding)."""
        return self.system.forward_s + self.finish_s(strategy)
