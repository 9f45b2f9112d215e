"""Sums of sparse tensors, on all backends."""

import pytest
import torch
from op_cases import DTYPES, RUNNERS, Runner, same, sparse
from torch import Tensor

from resilient_run.comm.errors import OpError
from resilient_run.comm.ops.coo import Coo, coo_decode, coo_encode
from resilient_run.comm.ops.scatter import coo_add, scatter_add


def indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@RUNNERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_added_in_place(run: Runner, dtype: torch.dtype) -> None:
    dense = torch.arange(6, dtype=dtype).view(2, 3)
    found = run(scatter_add, dense, indices(5, 0, 2), torch.tensor([0.5, -1.0, float("inf")], dtype=dtype))
    same([found], [torch.tensor([[-1, 1, float("inf")], [3, 4, 5.5]], dtype=dtype)])
    if run.device == "cpu":
        assert found is dense


@RUNNERS
def test_duplicates_are_all_added(run: Runner) -> None:
    found = run(scatter_add, torch.zeros(3), indices(1, 1, 2, 1, 0), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert found.tolist() == [16, 11, 4]


@RUNNERS
def test_nothing_is_added(run: Runner) -> None:
    assert run(scatter_add, torch.ones(2), indices(), torch.empty(0)).tolist() == [1, 1]
    assert run(scatter_add, torch.empty(0), indices(), torch.empty(0)).tolist() == []


@pytest.mark.parametrize("seed", range(6))
def test_sums_are_in_the_order_of_the_list(seed: int) -> None:
    torch.manual_seed(seed)
    dense, values = torch.randn(50), torch.randn(2000)
    places = torch.randint(0, 50, (2000,), dtype=torch.int32)
    expected = dense.clone()
    for place, value in zip(places.tolist(), values, strict=True):
        expected[place] += value
    same([scatter_add(dense, places, values)], [expected])


@RUNNERS
def test_wrong_places_change_nothing(run: Runner) -> None:
    dense = torch.zeros(4)
    for wrong in (indices(0, 4), indices(-1, 0)):
        with pytest.raises(OpError, match="do not fit 4 elements"):
            run(scatter_add, dense, wrong, torch.ones(2))
    with pytest.raises(OpError, match=r"cannot be added to torch.float32"):
        run(scatter_add, dense, indices(0), torch.ones(1, dtype=torch.float64))
    with pytest.raises(OpError, match="make it contiguous"):
        run(scatter_add, torch.zeros(2, 3).t(), indices(0), torch.ones(1))
    assert dense.tolist() == [0] * 4


LISTS = {
    "both": ((0, 2, 5), (1, 2, 5, 7)),
    "first empty": ((), (0, 3)),
    "second empty": ((0, 3), ()),
    "none": ((), ()),
    "equal": ((1, 2, 9), (1, 2, 9)),
    "apart": ((5, 6), (0, 1)),
    "interleaved": ((0, 2, 4, 6), (1, 3, 5)),
}


@RUNNERS
@pytest.mark.parametrize(("ours", "theirs"), LISTS.values(), ids=LISTS.keys())
def test_two_lists_become_one(run: Runner, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    first, second = torch.arange(1.0, len(ours) + 1), -torch.arange(1.0, len(theirs) + 1)
    sums = dict.fromkeys(sorted({*ours, *theirs}), 0.0)
    for index, value in (*zip(ours, first.tolist(), strict=True), *zip(theirs, second.tolist(), strict=True)):
        sums[index] += value
    found = run(coo_add, indices(*ours), first, indices(*theirs), second)
    same(found, Coo(indices(*sums), torch.tensor([*sums.values()], dtype=torch.float32)))


@RUNNERS
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_round_as_one_addition(run: Runner, dtype: torch.dtype) -> None:
    size = 40 if run.simulated else 3000
    first, second = sparse(size, 0.5, seed=1, dtype=dtype), sparse(size, 0.5, seed=2, dtype=dtype)
    first[0] = -0.0
    found = run(coo_add, *coo_encode(first), *coo_encode(second))
    present = (first != 0) | (second != 0)
    assert torch.equal(found.indices, present.nonzero().view(-1).int())
    assert torch.equal(coo_decode(*found, size), first + second)


@RUNNERS
def test_lists_of_different_types_have_no_sum(run: Runner) -> None:
    with pytest.raises(OpError, match="no common sum"):
        run(coo_add, indices(0), torch.ones(1), indices(0), torch.ones(1).half())
