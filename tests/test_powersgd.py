"""PowerSGD: sums lose nothing, all ranks agree, two all-reduces a bucket, and the same as torch's hook without rest."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from resilient_run.comm.compress.powersgd import PowerSGD
from resilient_run.comm.errors import CommError
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.schemes import named


def made(transport: Transport, **options: Any) -> PowerSGD:
    scheme = named("powersgd", transport, **options)
    assert isinstance(scheme, PowerSGD)
    return scheme


def gradient(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_and_residuals_are_what_was_given(ranks: int, dtype: torch.dtype) -> None:
    def work(transport: Transport) -> tuple[Tensor, list[Tensor], Tensor]:
        scheme = made(transport, rank=2)
        steps = [gradient(transport.rank, step, 40, 5, 6).to(dtype) for step in range(6)]
        sums = [scheme.reduce("w", step.clone()) for step in steps]
        residual = scheme.state_dict()["residuals"].get("w")
        assert residual is not None
        return torch.stack(steps).double().sum(0), sums, residual.view(40, 5, 6).double()

    found = run_ranks(ranks, work)
    for _, sums, _ in found:
        assert all(map(torch.equal, sums, found[0][1])), "ranks differ"
        assert sums[0].dtype == dtype
    given, left = (torch.stack([each[place] for each in found]).sum(0) for place in (0, 2))
    arrived = torch.stack(found[0][1]).double().sum(0)
    torch.testing.assert_close(arrived + left, given, rtol=0, atol=1e-3)
    assert torch.linalg.matrix_rank(found[0][1][-1].view(40, 30).float(), rtol=1e-2) == 2


def test_gradient_of_low_rank_is_summed_exactly() -> None:
    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        columns = torch.randn(64, 3, generator=generator)
        own = columns @ gradient(transport.rank, 1, 3, 50)
        return own.clone(), made(transport, rank=3).reduce("w", own)

    found = run_ranks(3, work)
    torch.testing.assert_close(found[0][1], sum(own for own, _ in found), rtol=1e-4, atol=1e-4)


def test_what_is_left_out_is_sent_later() -> None:
    """Of a constant gradient, the mean of what arrives is the gradient."""

    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        scheme, own = made(transport, rank=2), gradient(transport.rank, 0, 30, 40)
        sums = [scheme.reduce("w", own.clone()) for _ in range(300)]
        return own, torch.stack(sums).mean(0)

    found = run_ranks(2, work)
    exact = found[0][0] + found[1][0]
    assert float((found[0][1] - exact).norm() / exact.norm()) < 0.1


def test_a_bucket_takes_two_all_reduces() -> None:
    """And its layout changes nothing but the order of additions: what is remembered goes by parameter."""
    shapes = {"a": (64, 48), "b": (100,), "c": (32, 8, 9), "d": (3, 3), "e": (50, 40)}

    def work(transport: Transport) -> None:
        together, apart = made(transport), made(transport)
        for step in range(3):
            given = [(key, gradient(transport.rank, step, *shape)) for key, shape in shapes.items()]
            transport.traffic.reset()
            sums = together.reduce_together([(key, each.clone()) for key, each in given])
            assert transport.traffic.rounds == 2
            sent = sum(4 * (shape[0] + math.prod(shape[1:])) for key, shape in shapes.items() if key in "ace")
            dense = sum(math.prod(shape) for key, shape in shapes.items() if key in "bd")
            expected = 2 * (transport.size - 1) / transport.size * 4 * (sent + dense)
            assert transport.traffic.received_bytes == pytest.approx(expected, abs=2)
            singles = [apart.reduce(key, each.clone()) for key, each in reversed(given)][::-1]
            for total, single in zip(sums, singles, strict=True):
                torch.testing.assert_close(total, single, rtol=1e-3, atol=1e-3)
        assert together.state_dict()["residuals"].keys() == {"a", "c", "e"}

    run_ranks(3, work)


def test_what_has_no_low_rank_is_all_reduced() -> None:
    def work(transport: Transport) -> list[tuple[Tensor, Tensor]]:
        scheme, found = made(transport), []
        for shape in ((), (7,), (3, 3), (0, 5), (1, 400)):
            own = gradient(transport.rank, 0, *shape)
            found.append((own, scheme.reduce(str(shape), own.clone())))
        assert not scheme.state_dict()["residuals"]
        return found

    for (own, total), (other, _) in zip(*run_ranks(2, work), strict=True):
        assert torch.equal(total, own + other)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_step_that_overflowed_on_one_rank_leaves_no_trace_on_any(bad: float) -> None:
    def work(transport: Transport) -> None:
        scheme = made(transport)
        scheme.reduce("w", gradient(transport.rank, 0, 40, 30))
        before = deepcopy(scheme.state_dict())
        poisoned = gradient(transport.rank, 1, 40, 30)
        poisoned[7, 3] = bad if transport.rank == 1 else 0.0
        good, wrong = scheme.reduce_together([("v", gradient(transport.rank, 1, 40, 30)), ("w", poisoned)])
        assert good.isfinite().all()
        assert not wrong.isfinite().all()
        after = scheme.state_dict()
        for kind in ("residuals", "factors"):
            assert torch.equal(after[kind]["w"], before[kind]["w"])
        assert scheme.reduce("w", gradient(transport.rank, 2, 40, 30)).isfinite().all()

    run_ranks(3, work)


def test_step_of_zeros_does_not_end_the_learning() -> None:
    def work(transport: Transport) -> None:
        scheme = made(transport)
        assert not scheme.reduce("w", torch.zeros(40, 30)).any()
        assert scheme.reduce("w", torch.ones(40, 30)).sum() > 1000

    run_ranks(2, work)


def test_sparse_gradients_stay_sparse() -> None:
    def work(transport: Transport) -> None:
        own = torch.zeros(40, 30).index_fill_(0, torch.tensor([transport.rank]), 1.0)
        found = made(transport).reduce("w", own.to_sparse(1))
        assert found.is_sparse
        assert torch.equal(found.to_dense(), made(transport).reduce("w", own.clone()))

    run_ranks(2, work)


def test_restored_scheme_goes_on_bit_for_bit_and_other_states_are_refused() -> None:
    def work(transport: Transport) -> None:
        scheme, again = made(transport), made(transport)
        for step in range(3):
            scheme.reduce("w", gradient(transport.rank, step, 40, 30))
        again.load_state_dict(deepcopy(scheme.state_dict()))
        for step in range(3, 6):
            given = gradient(transport.rank, step, 40, 30)
            assert torch.equal(scheme.reduce("w", given.clone()), again.reduce("w", given.clone()))
        with pytest.raises(CommError, match="powersgd cannot go on from the state of 'zen'; name the same"):
            again.load_state_dict({"scheme": "zen"})
        with pytest.raises(CommError, match=r"w is \(30, 40\) of torch.float32, its residual \(40, 30\)"):
            again.reduce("w", torch.ones(30, 40))
        other = made(transport, rank=2)
        other.load_state_dict(scheme.state_dict())
        with pytest.raises(CommError, match="w has factors of rank 4; give the rank"):
            other.reduce("w", torch.ones(40, 30))
        with pytest.raises(CommError, match="rank 0 is below 1"):
            made(transport, rank=0)

    run_ranks(1, work)
