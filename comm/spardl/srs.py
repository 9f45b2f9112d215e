"""Spar-Reduce-Scatter: every rank ends with the sparse sum of one block of the gradient (SparDL, Section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..net.entries import add_to, from_message, joined, size_bytes, take, to_message, top_k
from ..net.rounds import Rounds, swap
from ..ops.coo import Coo


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamBlocks:
    """A flat gradient in contiguous blocks, one for each rank of a team, and how many elements of each are kept.

    Attributes:
        numel: Elements of the gradient.
        count: Blocks.
        kept: k, the elements kept of all blocks together. Each block that has elements keeps at least one: a block
            that kept none would never be sent, and its residuals would grow for ever.
    """

    numel: int
    count: int
    kept: int

    def span(self, block: int) -> tuple[int, int]:
        """Return the first index of a block and the one behind its last."""
        return block * self.numel // self.count, (block + 1) * self.numel // self.count

    def quota(self, block: int) -> int:
        """Return how many elements of a block are kept: k / count, rounded so that the sum is k."""
        start, end = self.span(block)
        share = (block + 1) * self.kept // self.count - block * self.kept // self.count
        return min(end - start, max(1, share))

    def take(self, work: Tensor, block: int, dtype: torch.dtype, *, count: int | None = None) -> Coo:
        """Move the greatest `count` (default: the quota) elements of a block out of `work`, rounded to `dtype`."""
        start, end = self.span(block)
        chosen = top_k(work[start:end], self.quota(block) if count is None else count)
        return take(work, chosen + start, dtype)


def sending_bags(own: int, count: int) -> list[list[int]]:
    """Return the blocks that the rank at place `own` of `count` sends, in the order of rounds.

    Bag i holds the blocks from own + 2^(i-1) on, 2^(i-1) of them or as many as are left, and goes to the rank that
    far ahead. The last bag is sent first; the rank's own block is in none.
    """
    distances = [1 << step for step in range((count - 1).bit_length())]
    return [
        [(own + offset) % count for offset in range(distance, min(2 * distance, count))]
        for distance in reversed(distances)
    ]


def spar_reduce_scatter(
    rank: int, members: Sequence[int], work: Tensor, blocks: TeamBlocks, dtype: torch.dtype
) -> Rounds[list[Coo]]:
    """Sum `work` over the members so that each gets, of the block of its place, what was not discarded on the way.

    A block is sparsified once, by the rank that sends it next, with all that it has received by then (the optimized
    order of Section 3.1). ⌈log2 n⌉ rounds, in which each rank receives 2·k·(n-1)/n words.

    Args:
        rank: This one, which is a member.
        members: Ranks, the same on all of them.
        work: Flat. Afterwards the own block holds its sum, and every other one what this rank discarded of it.
        blocks: As many as members.
        dtype: Of the values sent.

    Returns:
        What this rank sent.
    """
    count, own = len(members), members.index(rank)
    sent: list[Coo] = []
    for bag in sending_bags(own, count):
        distance = (bag[0] - own) % count
        to, source = members[(own + distance) % count], members[(own - distance) % count]
        lists = [blocks.take(work, block, dtype) for block in bag]
        outgoing = joined(lists)
        # The source's bag begins with the own block and ends before what is held (Theorem 3.1).
        expected = sum(blocks.quota((block - distance) % count) for block in bag)
        expected_bytes = size_bytes(expected, dtype)
        message = yield from swap(to_message(outgoing), to=to, source=source, size_bytes=expected_bytes)
        add_to(work, from_message(message, dtype, end=blocks.numel))
        sent.append(outgoing)
    return sent
