"""All-reduce in 8 bits: nothing is lost, all ranks agree, errors are those of 8 bits, restores go on."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from gradients import gradient
from ranks import run_ranks
from sparse_gradients import in_order
from torch import Tensor

from resilient_run.comm.compress.quantized import EightBits, TwoStep
from resilient_run.comm.errors import CommError, MessageError
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.schemes import named

NAMES = ("int8", "fp8")
EACH = pytest.mark.parametrize("name", NAMES)


def residuals(scheme: TwoStep, key: str) -> list[Tensor]:
    """Return what a rank adds to its next gradient, and to the next sum of its share."""
    return [scheme.state_dict()[memory]["kept"][key][0] for memory in ("own", "sums")]


def made(name: str, transport: Transport, **options: Any) -> TwoStep:
    scheme = named(name, transport, **options)
    assert isinstance(scheme, TwoStep)
    return scheme


@EACH
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_sums_and_residuals_are_what_was_given(ranks: int, rounding: str, name: str) -> None:
    """Also where some ranks have no block of a gradient, and the last block is a short one."""
    numels = (1, 5, 64, 1000)

    def work(transport: Transport) -> list[tuple[Tensor, list[Tensor], list[Tensor]]]:
        scheme, found = made(name, transport, block=16, rounding=rounding), []
        for numel in numels:
            steps = [gradient(transport.rank, step, numel) for step in range(4)]
            sums = [scheme.reduce(str(numel), step.clone()) for step in steps]
            found.append((in_order(steps), sums, list(residuals(scheme, str(numel)))))
        assert scheme.reduce("empty", torch.zeros(0, 3)).shape == (0, 3)
        return found

    by_rank = run_ranks(ranks, work)
    for place, numel in enumerate(numels):
        found = [each[place] for each in by_rank]
        for _, sums, _ in found[1:]:
            assert all(map(torch.equal, sums, found[0][1])), "ranks differ"
        left = in_order([own for _, _, (own, _) in found]) + torch.cat([share for _, _, (_, share) in found])
        given = in_order([total for total, _, _ in found])
        torch.testing.assert_close(in_order(found[0][1]) + left, given, rtol=1e-5, atol=1e-5 * float(given.abs().max()))
        assert numel < 16 or left.any(), "nothing was rounded"


@EACH
def test_errors_are_those_of_eight_bits(name: str) -> None:
    given = [torch.randn(40, 30, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]

    def work(transport: Transport) -> Tensor:
        return made(name, transport).reduce("w", given[transport.rank].clone())

    exact = in_order(given)
    # Half a step of the greatest magnitude: of each gradient, and of the sum.
    steps = 254 if name == "int8" else 28
    most = (sum(float(part.abs().max()) for part in given) + float(exact.abs().max())) / steps
    for total in run_ranks(4, work):
        assert total.shape == exact.shape
        assert 0 < float((total - exact).abs().max()) < 1.01 * most


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    given = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]

    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        scheme = made(name, transport)
        sums = [scheme.reduce("w", given[transport.rank].clone()) for _ in range(20)]
        assert sums[0].dtype == dtype
        own, share = residuals(scheme, "w")
        assert own.dtype == share.dtype == torch.promote_types(dtype, torch.float32)
        return in_order([each.double() for each in sums]), torch.cat([own, share]).double()

    found = run_ranks(3, work)
    left = in_order([each[:3000] for _, each in found]) + torch.cat([each[3000:] for _, each in found])
    exact = 20 * in_order([part.double() for part in given])
    torch.testing.assert_close(found[0][0] + left, exact, rtol=0, atol=1e-3)


@EACH
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_step_that_overflowed_on_one_rank_leaves_no_trace_on_any(name: str, bad: float) -> None:
    def work(transport: Transport) -> None:
        scheme = made(name, transport)
        scheme.reduce("w", gradient(transport.rank, 0, 1000))
        before = [each.clone() for each in residuals(scheme, "w")]
        poisoned = gradient(transport.rank, 1, 1000)
        poisoned[777] = bad if transport.rank == 1 else 0.0
        total = scheme.reduce("w", poisoned)
        assert total.isnan()[777]
        assert all(map(torch.equal, residuals(scheme, "w"), before))
        assert scheme.reduce("w", gradient(transport.rank, 2, 1000)).isfinite().all()
        assert not torch.equal(residuals(scheme, "w")[0], before[0])

    run_ranks(3, work)


@EACH
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_restored_scheme_goes_on_bit_for_bit(name: str, rounding: str) -> None:
    def work(transport: Transport) -> None:
        scheme = made(name, transport, rounding=rounding)
        for step in range(3):
            scheme.reduce("w", gradient(transport.rank, step, 700))
        saved = deepcopy(scheme.state_dict())
        expected = [scheme.reduce("w", gradient(transport.rank, step, 700)) for step in range(3, 6)]
        again = made(name, transport, rounding=rounding)
        again.load_state_dict(saved)
        found = [again.reduce("w", gradient(transport.rank, step, 700)) for step in range(3, 6)]
        assert all(map(torch.equal, found, expected))
        with pytest.raises(CommError, match=f"{name} cannot go on from the state of 'zen'; name the same"):
            again.load_state_dict({"scheme": "zen"})

    run_ranks(2, work)


@EACH
def test_sparse_gradients_stay_sparse(name: str) -> None:
    def work(transport: Transport) -> Tensor:
        own = torch.zeros(8, 4).index_fill_(0, torch.tensor([transport.rank]), 1.0 + transport.rank)
        found = made(name, transport).reduce("table", own.to_sparse(1))
        assert found.is_sparse
        assert torch.equal(found.to_dense(), made(name, transport).reduce("table", own))
        return found.to_dense()

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    assert first.any()


def test_ranks_round_stochastically_each_in_its_own_way() -> None:
    """Else errors of equal gradients would add up, not average out."""
    dense = torch.linspace(0, 1, 512)
    messages = [EightBits("int8", rounding="stochastic", rank=rank).compress(dense, seed=3) for rank in range(3)]
    assert len({bytes(message.numpy()) for message in messages}) == 3
    nearest = [EightBits("int8", rank=rank).compress(dense, seed=3) for rank in range(3)]
    assert len({bytes(message.numpy()) for message in nearest}) == 1


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(CommError, match="rounding 'up', block 256: give nearest or stochastic"):
        EightBits("int8", rounding="up")  # type: ignore[arg-type]
    with pytest.raises(CommError, match="block 0: give nearest or stochastic, and at least one element"):
        EightBits("int8", block=0)

    with pytest.raises(MessageError, match="7 bytes came where 13 were expected"):
        EightBits("int8").decompress(torch.zeros(7, dtype=torch.uint8), 9, torch.float32, seed=0)
