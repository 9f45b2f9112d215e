"""Coordinate lists, on all backends."""

import pytest
import torch
from op_cases import EACH_GRADIENT, RUNNERS, Runner, huge, same, sparse
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.coo import coo_decode, coo_encode


@RUNNERS
@EACH_GRADIENT
def test_non_zeros_in_order_and_back(run: Runner, gradient: Tensor) -> None:
    flat = gradient.detach().reshape(-1)
    expected = [i for i, value in enumerate(flat.tolist()) if value != 0]
    found = run(coo_encode, gradient)
    same(found, (torch.tensor(expected, dtype=torch.int32), flat[expected]))
    same([run(coo_decode, *found, flat.numel())], [torch.where(flat == 0, 0, flat)])


@pytest.mark.parametrize("seed", range(8))
def test_kernel_is_its_reference(seed: int) -> None:
    numel = int(torch.randint(1, 5000, (), generator=torch.Generator().manual_seed(seed)))
    gradient = sparse(numel, 10 ** -(seed / 2), seed=seed, dtype=[torch.float32, torch.bfloat16][seed % 2])
    found = coo_encode(gradient)
    same(found, coo_encode.on("reference")(gradient))
    order = torch.randperm(found.indices.numel())
    same([coo_decode(found.indices[order], found.values[order], numel)], [gradient])


@RUNNERS
def test_lists_of_others_are_not_trusted(run: Runner) -> None:
    values = torch.ones(2)
    for indices in ([0, 5], [-1, 0]):
        with pytest.raises(OpError, match="do not fit 5 elements"):
            run(coo_decode, torch.tensor(indices, dtype=torch.int32), values, 5)
    with pytest.raises(OpError, match="pass pairs"):
        run(coo_decode, torch.zeros(3, dtype=torch.int32), values, 5)
    with pytest.raises(OpError, match=r"1-D torch.int64"):
        run(coo_decode, torch.zeros(2, dtype=torch.int64), values, 5)


@RUNNERS
def test_what_cannot_be_numbered_is_refused(run: Runner) -> None:
    if run.device == "cpu":  # 8 GiB elsewhere
        with pytest.raises(OpError, match=r"2147483648 elements .* split the tensor"):
            run(coo_encode, huge())
    with pytest.raises(OpError, match="2147483648 elements"):
        run(coo_decode, torch.empty(0, dtype=torch.int32), torch.empty(0), 2**31)
    with pytest.raises(OpError, match=r"floating point, this tensor is torch.int64"):
        run(coo_encode, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(OpError, match="first argument is a list"):
        coo_encode([1.0])  # type: ignore[arg-type]
