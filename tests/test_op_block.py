"""Tensor blocks, on all backends."""

import pytest
import torch
from op_cases import EACH_GRADIENT, RUNNERS, Runner, same, sparse
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.block import BLOCK, block_encode
from resilient_run.comm.ops.coo import coo_decode


@RUNNERS
@EACH_GRADIENT
@pytest.mark.parametrize("block", [1, 8])
def test_blocks_with_a_non_zero_and_back(run: Runner, gradient: Tensor, block: int) -> None:
    if run.simulated and gradient.numel() > 20 and block == 1:
        pytest.skip("slow in the simulator")
    flat = gradient.detach().reshape(-1)
    chunks = flat.split(block) if flat.numel() else ()
    expected = [i for i, chunk in enumerate(chunks) if bool((chunk != 0).any())]
    found = run(block_encode, gradient, block)
    assert found.indices.tolist() == expected
    assert found.values.shape == (len(expected), block)
    for row, i in zip(found.values, expected, strict=True):
        same([row], [torch.nn.functional.pad(chunks[i], (0, block - len(chunks[i])))])
    restored = torch.zeros_like(flat)
    for i in expected:
        restored[i * block : (i + 1) * block] = chunks[i]
    same([run(coo_decode, *found, flat.numel())], [restored])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [1, 7, 16, 100, BLOCK, 300])
def test_kernels_are_their_references(seed: int, block: int) -> None:
    gradient = sparse(5000 + seed, 0.002 * seed, seed=seed, dtype=[torch.float32, torch.bfloat16][seed % 2])
    found = block_encode(gradient, block)
    same(found, block_encode.on("reference")(gradient, block))
    same([coo_decode(*found, gradient.numel())], [gradient])
    same(block_encode(gradient), block_encode(gradient, BLOCK))


@RUNNERS
def test_blocks_of_others_are_not_trusted(run: Runner) -> None:
    ids, data = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2, 4)
    with pytest.raises(OpError, match="do not fit 2 elements"):
        run(coo_decode, ids, data, 8)
    with pytest.raises(OpError, match=r"2 indices come with values of shape \(1, 4\)"):
        run(coo_decode, ids, data[:1], 12)
    for wrong in (0, -1):
        with pytest.raises(OpError, match="at least 1 element"):
            run(block_encode, torch.ones(4), wrong)
