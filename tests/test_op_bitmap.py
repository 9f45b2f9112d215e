"""Bitmaps and hash bitmaps, on all backends."""

import pytest
import torch
from op_cases import EACH_GRADIENT, RUNNERS, Runner, lists, same, sparse
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.bitmap import bitmap_bytes, bitmap_encode, bitmap_indices
from resilient_run.comm.ops.coo import coo_encode
from resilient_run.comm.ops.scatter import scatter_add
from resilient_run.comm.ops.spread import Spread
from resilient_run.comm.zen.histogram import indices_at, partition


def packed(present: list[bool]) -> Tensor:
    """Return the bitmap, written down bit by bit."""
    found = [0] * bitmap_bytes(len(present))
    for i, bit in enumerate(present):
        found[i // 8] |= bit << (i % 8)
    return torch.tensor(found, dtype=torch.uint8)


def unpacked(run: Runner, bitmap: Tensor, spread: Spread, part: int) -> Tensor:
    """Return the indices that `part` has encoded."""
    found: Tensor = run(indices_at, run(bitmap_indices, bitmap, spread.size(part)), spread, part)
    return found


@RUNNERS
@EACH_GRADIENT
def test_a_bit_stands_for_each_element(run: Runner, gradient: Tensor) -> None:
    present = gradient.detach().reshape(-1) != 0
    same([run(bitmap_indices, packed(present.tolist()), present.numel())], [coo_encode(gradient).indices])


@pytest.mark.parametrize("seed", range(6))
def test_kernels_are_their_references(seed: int) -> None:
    gradient = sparse(1000 + 7 * seed, 0.9**seed, seed=seed)
    bitmap, numel = packed((gradient != 0).tolist()), gradient.numel()
    same([bitmap_indices(bitmap, numel)], [bitmap_indices.on("reference")(bitmap, numel)])
    indices = coo_encode(gradient).indices.flip(0)
    same([bitmap_encode(indices, numel), bitmap_encode.on("reference")(indices, numel)], [bitmap] * 2)


@RUNNERS
def test_bitmaps_of_others_are_not_trusted(run: Runner) -> None:
    with pytest.raises(OpError, match="2 bytes"):
        run(bitmap_indices, torch.zeros(1, dtype=torch.uint8), 9)
    with pytest.raises(OpError, match="10 elements has bits set behind the last one"):
        run(bitmap_indices, torch.tensor([0, 8], dtype=torch.uint8), 10)


@RUNNERS
@pytest.mark.parametrize(("numel", "parts"), [(50, 3), (50, 4), (3, 5)])
def test_hash_bitmap_names_the_indices_of_a_part(run: Runner, numel: int, parts: int) -> None:
    spread = Spread(numel=numel, parts=parts, seed=2)
    gradient = sparse(numel, 0.4)
    for part, (places, values) in enumerate(lists(partition(*coo_encode(gradient), spread))):
        bitmap = run(bitmap_encode, places.flip(0), spread.size(part))
        assert bitmap.numel() == bitmap_bytes(spread.size(part))
        same([unpacked(run, bitmap, spread, part)], [indices_at(places, spread, part)])
        # A server that keeps its share dense has the same bitmap, and values in the same order.
        share = scatter_add(torch.zeros(spread.size(part)), places, values)
        same([packed((share != 0).tolist()), share[share != 0]], [bitmap, values])


@RUNNERS
def test_all_and_none(run: Runner) -> None:
    spread = Spread(numel=30, parts=2)
    for part in range(2):
        own = torch.arange(30, dtype=torch.int32)[spread.owners(torch.arange(30)) == part]
        full = run(bitmap_encode, spread.positions(own), spread.size(part))
        assert full.tolist() == [255, 127]
        same([unpacked(run, full, spread, part)], [own])
        assert run(bitmap_encode, own[:0], spread.size(part)).tolist() == [0, 0]


def test_bitmaps_of_all_servers_take_a_thirtysecond_of_the_tensor() -> None:
    # Theorem 3.3, up to the last byte of each server.
    spread = Spread(numel=1_000_000, parts=16)
    total_bytes = sum(bitmap_bytes(spread.size(part)) for part in range(16))
    assert 1_000_000 / 8 <= total_bytes < 1_000_000 / 8 + 16


@RUNNERS
def test_indices_that_do_not_fit_are_refused(run: Runner) -> None:
    for wrong in (-1, 10):
        with pytest.raises(OpError, match=f"indices from {min(wrong, 0)} to {max(wrong, 0)} do not fit 10 elements"):
            run(bitmap_encode, torch.tensor([0, wrong], dtype=torch.int32), 10)
