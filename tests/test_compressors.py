"""Compressors and what ranks remember: nothing is lost, nothing poisoned, all ranks agree, restores continue."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from resilient_run.comm.compress.compressed import Compressed
from resilient_run.comm.compress.compressors import NAMES, SampledTopK, TopK, named
from resilient_run.comm.compress.feedback import ErrorFeedback, Memory, MomentumCorrection
from resilient_run.comm.errors import CommError, MessageError
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.quantize import dequantize, quantize

SPARSE = ("topk", "dgc", "randomk")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def gradient(seed: int, numel: int = 1000, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def message_bytes(name: str, numel: int, item_bytes: int) -> int:
    """Return what the documents say."""
    k, bitmap = max(1, round(0.1 * numel)), -(-numel // 8)
    if name in ("int8", "fp8"):
        return numel + 4 * -(-numel // 256)
    found = {"topk": k * (4 + item_bytes), "randomk": k * item_bytes, "efsignsgd": bitmap + 4, "onebit": bitmap + 8}
    return found.get(name, 2 * numel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_message_decodes_to_what_was_chosen(name: str, numel: int, dtype: torch.dtype) -> None:
    compressor, dense = named(name, density=0.1), gradient(1, numel, dtype)
    message = compressor.compress(dense, seed=5)
    decoded = compressor.decompress(message, numel, dtype, seed=5)
    assert (decoded.shape, decoded.dtype, message.dtype) == (dense.shape, dtype, torch.uint8)
    if compressor.fixed_size:
        assert message.numel() == message_bytes(name, numel, dtype.itemsize)
    if name in SPARSE:
        sent = decoded != 0
        assert torch.equal(decoded[sent], dense[sent])
        expected = max(1, round(numel * 0.1))
        assert expected / 1.25 <= int(sent.sum()) <= expected * 1.25
    elif name in ("fp16", "bf16"):
        assert torch.equal(decoded, dense.to(torch.float16 if name == "fp16" else torch.bfloat16).to(dtype))
    elif name in ("int8", "fp8"):
        codes, scales = quantize(dense, name)  # type: ignore[arg-type]
        assert torch.equal(decoded, dequantize(codes, scales, numel).to(dtype))
    elif name not in ("efsignsgd", "onebit"):
        pytest.fail(f"say here what messages of {name} decode to")
    else:
        assert torch.equal(decoded < 0, dense < 0)
        means = {
            "efsignsgd": (dense.double().abs().mean(), -dense.double().abs().mean()),
            "onebit": (dense[dense >= 0].double().mean(), dense[dense < 0].double().mean()),
        }[name]
        for side, mean in ((decoded[dense >= 0], means[0]), (decoded[dense < 0], means[1])):
            assert side.numel() == 0 or math.isclose(float(side[0]), float(mean), rel_tol=1e-2)
    total = torch.ones_like(dense)
    compressor.add(message, total, seed=5)
    assert torch.equal(total, decoded + 1)


@pytest.mark.parametrize("name", NAMES)
def test_message_of_another_tensor_is_refused(name: str) -> None:
    compressor = named(name, density=0.5)
    message = compressor.compress(gradient(1, 100), seed=0)
    with pytest.raises(MessageError, match="bytes came where"):
        compressor.decompress(message[:-1], 100, torch.float32, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_out_is_sent_later(name: str) -> None:
    """What was sent and what is kept is the sum of all gradients."""
    memory = ErrorFeedback(named(name, density=0.05))
    sent = torch.zeros(1000)
    for step in range(20):
        message, seed = memory.compress("w", gradient(step))
        sent += memory.compressor.decompress(message, 1000, torch.float32, seed=seed)
    kept = memory.state_dict()["kept"]["w"][0]
    torch.testing.assert_close(sent + kept, sum(gradient(step) for step in range(20)), rtol=1e-4, atol=1e-4)


def memories() -> list[Any]:
    made = [pytest.param(lambda name=name: ErrorFeedback(named(name, density=0.05)), id=name) for name in NAMES]

    def dgc() -> Memory:
        return MomentumCorrection(SampledTopK(0.05), ranks=4, clip_norm=1.0, warm_up_steps=4)

    return [*made, pytest.param(dgc, id="momentum correction")]


@pytest.mark.parametrize("make", memories())
def test_step_that_overflowed_leaves_no_trace(make: Any) -> None:
    memory: Memory = make()
    memory.compress("w", gradient(1))
    before = [kept.clone() for kept in memory.state_dict()["kept"]["w"]]
    for bad in (math.inf, -math.inf, math.nan):
        poisoned = gradient(2)
        poisoned[17] = bad
        total = sent_by(memory, "w", poisoned)
        assert not total.isfinite().all()
        memory.undo_unless_finite(["w"], total)
        assert all(map(torch.equal, memory.state_dict()["kept"]["w"], before))


@pytest.mark.parametrize("make", memories())
def test_no_rank_remembers_a_step_that_overflowed_on_one(make: Any) -> None:
    def work(transport: Transport) -> tuple[bool, bool]:
        scheme = Compressed(transport, make())
        scheme.reduce("w", gradient(transport.rank))
        before = [kept.clone() for kept in scheme.state_dict()["kept"]["w"]]
        poisoned = gradient(2 + transport.rank)
        poisoned[17] = math.inf if transport.rank == 1 else 0.0
        total = scheme.reduce("w", poisoned)
        unchanged = all(map(torch.equal, scheme.state_dict()["kept"]["w"], before))
        scheme.reduce("w", gradient(4 + transport.rank))
        return bool(total.isfinite().all()), unchanged and not torch.equal(
            scheme.state_dict()["kept"]["w"][-1], before[-1]
        )

    assert run_ranks(3, work) == [(False, True)] * 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_gradient_that_overflows_leaves_no_trace(name: str, dtype: torch.dtype) -> None:
    """In a message, in the correction of half precision, or in the sum."""
    largest = min(1e38, torch.finfo(dtype).max)

    def work(transport: Transport) -> list[Tensor]:
        scheme = Compressed(transport, ErrorFeedback(named(name, density=0.3)))
        steps = [torch.full((10,), largest).to(dtype), *[gradient(step, 10, dtype) for step in range(20)]]
        return [scheme.reduce("w", step) for step in steps for _ in range(3)][-20:]

    for totals in run_ranks(2, work):
        assert torch.stack(totals).isfinite().all()


@pytest.mark.parametrize("make", [ErrorFeedback, lambda topk: MomentumCorrection(topk, ranks=1, momentum=0.0)])
def test_residual_beyond_half_precision_is_sent_in_parts(make: Any) -> None:
    """Two of four elements wait until they are beyond 65504, the largest number of fp16."""
    memory, sent = make(TopK(0.25)), torch.zeros(4)
    for scale in (1, 1, 0, 0, 0, 0):
        message, seed = memory.compress("w", scale * torch.tensor([60000.0, 40000.0, 0.0, 0.0], dtype=torch.float16))
        sent += memory.compressor.decompress(message, 4, torch.float16, seed=seed).float()
    assert sent.tolist() == [120000.0, 80000.0, 0.0, 0.0]


def test_loss_scaler_finds_a_scale_that_half_precision_holds() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

    def work(transport: Transport) -> list[float]:
        scheme = Compressed(transport, ErrorFeedback(named("fp16")))
        for _ in range(10):
            optimizer.zero_grad()
            scaler.scale(parameter.pow(2).sum()).backward()
            parameter.grad = scheme.reduce("w", parameter.grad)
            scaler.step(optimizer)
            scaler.update()
        return [float(scaler.get_scale()), float(parameter.detach().max())]

    scale, largest = run_ranks(1, work)[0]
    assert scale == 2.0**14  # 2 * 2^15 is beyond fp16
    assert largest < 0.9


@pytest.mark.parametrize("make", memories())
def test_restored_memory_goes_on_bit_for_bit(make: Any) -> None:
    memory: Memory = make()
    for step in range(3):
        memory.compress("w", gradient(step))
    saved = deepcopy(memory.state_dict())
    expected = [memory.compress("w", gradient(step)) for step in range(3, 6)]
    memory.load_state_dict(saved)
    for (message, seed), step in zip(expected, range(3, 6), strict=True):
        again, seed_again = memory.compress("w", gradient(step))
        assert seed_again == seed
        assert torch.equal(again, message)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_get_the_sum_of_what_was_sent(name: str, size: int) -> None:
    def work(transport: Transport) -> tuple[list[Tensor], list[Tensor]]:
        scheme = Compressed(transport, ErrorFeedback(named(name, density=0.1)))
        twin = ErrorFeedback(named(name, density=0.1))
        sums, sent = [], []
        for step in range(3):
            mine = gradient(100 * step + transport.rank, 600)
            message, seed = twin.compress("w", mine)
            sent.append(twin.compressor.decompress(message, 600, torch.float32, seed=seed))
            sums.append(scheme.reduce("w", mine.view(20, 30)))
        assert scheme.reduce("empty", torch.zeros(0, 3)).shape == (0, 3)
        return sums, sent

    ranks = run_ranks(size, work)
    for step in range(3):
        total = torch.stack([sent[step] for _, sent in ranks]).sum(0).view(20, 30)
        tolerance = 1e-2 if name in ("fp16", "bf16") else 1e-6
        for sums, _ in ranks:
            torch.testing.assert_close(sums[step], total, rtol=tolerance, atol=size * tolerance)
            assert torch.equal(sums[step], ranks[0][0][step])


@pytest.mark.parametrize("size", [2, 3])
def test_warm_up_sends_larger_messages(size: int) -> None:
    """25 % in the first of four steps, then a quarter of that in each."""

    def work(transport: Transport) -> list[int]:
        scheme = Compressed(transport, MomentumCorrection(TopK(0.01), ranks=size, warm_up_steps=4))
        generator = torch.Generator().manual_seed(1)  # the same elements on all ranks
        return [int(scheme.reduce("w", torch.randn(1000, generator=generator)).count_nonzero()) for _ in range(5)]

    assert run_ranks(size, work) == [[250, 62, 16, 10, 10]] * size


def sent_by(memory: Memory, key: str, dense: Tensor) -> Tensor:
    message, seed = memory.compress(key, dense)
    return memory.compressor.decompress(message, dense.numel(), torch.float32, seed=seed)


def test_dgc_that_sends_all_is_momentum_sgd() -> None:
    memory = MomentumCorrection(TopK(1.0), ranks=1, momentum=0.9)
    parameter = torch.zeros(1000, requires_grad=True)
    optimizer, moved = torch.optim.SGD([parameter], lr=1.0, momentum=0.9), torch.zeros(1000)
    for step in range(5):
        parameter.grad = gradient(step)
        optimizer.step()
        moved -= sent_by(memory, "w", gradient(step))
        torch.testing.assert_close(moved, parameter.detach())


def test_dgc_loses_no_momentum_unless_masked() -> None:
    """What was sent and what is kept is the sum of momentum SGD's steps; masked, it is less."""
    lost = []
    for masking in (False, True):
        memory = MomentumCorrection(TopK(0.05), ranks=1, momentum=0.9, masking=masking, warm_up_steps=8)
        sent, velocity, steps = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
        for _ in range(20):
            velocity = 0.9 * velocity + gradient(0)
            steps += velocity
            sent += sent_by(memory, "w", gradient(0))
        lost.append(float((steps - sent - memory.state_dict()["kept"]["w"][1]).norm() / steps.norm()))
    assert lost[0] < 1e-6
    assert lost[1] > 0.1


def test_dgc_sends_the_momentum_of_what_waited() -> None:
    """By hand, one of two elements a step: Lin et al., equation (4), with and without momentum factor masking."""
    # Second element: u = 3, v = 3; u = 4.5, v = 7.5 is sent. First element: u = 4, v = 4 is sent; masked, u = 0 and
    # then u = v = 4, u = 6, v = 10; otherwise u = v = 6, u = 7, v = 13.
    for masking, last in ((True, 10.0), (False, 13.0)):
        memory = MomentumCorrection(TopK(0.5), ranks=1, momentum=0.5, masking=masking)
        sent = [sent_by(memory, "w", torch.tensor([4.0, 3.0])).tolist() for _ in range(3)]
        assert sent == [[4.0, 0.0], [0.0, 7.5], [last, 0.0]]


def test_dgc_is_the_published_algorithm() -> None:
    """Lin et al., Algorithm 4, in plain torch: local clipping, momentum correction, momentum factor masking."""
    ranks, momentum, norm, k = 4, 0.9, 20.0, 50
    memory = MomentumCorrection(TopK(k / 1000), ranks=ranks, momentum=momentum, masking=True, clip_norm=norm)
    u, v = torch.zeros(1000), torch.zeros(1000)
    for step in range(30):
        g = gradient(step) * (1 + step % 3)
        g = g * min(1.0, norm / math.sqrt(ranks) / float(g.norm()))
        u = momentum * u + g
        v = v + u
        mask = v.abs() >= v.abs().topk(k).values[-1]
        sent = sent_by(memory, "w", gradient(step) * (1 + step % 3))
        torch.testing.assert_close(sent, v * mask)
        u, v = u * ~mask, v * ~mask


def test_dgc_warms_up_and_clips() -> None:
    memory = MomentumCorrection(TopK(0.001), ranks=4, masking=True, clip_norm=1.0, warm_up_steps=8)
    densities = [memory.density(step) for step in range(9)]
    assert densities == [0.25, 0.25, 0.0625, 0.0625, 0.015625, 0.015625, 0.00390625, 0.00390625, 0.001]
    large, small = torch.tensor([30.0, 40.0]), torch.tensor([0.03, 0.04])
    for key, dense, clipped in (("large", large, [0.3, 0.4]), ("small", small, [0.03, 0.04])):
        memory.compress(key, dense)
        velocity, residual = memory.state_dict()["kept"][key]
        torch.testing.assert_close(residual[0].item(), clipped[0])
        assert velocity[1] == 0


def test_wrong_arguments_and_states_are_refused() -> None:
    with pytest.raises(CommError, match=r"density 0 is not in \(0, 1\]"):
        named("topk", density=0)
    with pytest.raises(CommError, match="there is no compressor 'zip'; take one of topk"):
        named("zip")
    with pytest.raises(CommError, match="momentum 1"):
        MomentumCorrection(TopK(0.1), ranks=1, momentum=1)
    for norm in (0.0, math.nan, math.inf):
        with pytest.raises(CommError, match=f"clip_norm {norm}"):
            MomentumCorrection(TopK(0.1), ranks=1, clip_norm=norm)
    with pytest.raises(CommError, match="momentum correction of randomk is not defined; take topk or dgc"):
        MomentumCorrection(named("randomk"), ranks=1)  # type: ignore[arg-type]
    memory = ErrorFeedback(named("topk"))
    memory.compress("w", gradient(0, 10))
    with pytest.raises(CommError, match=r"w is \(11,\) of torch.float32, its residual \(10,\)"):
        memory.compress("w", gradient(0, 11))


@pytest.mark.parametrize("make", [ErrorFeedback, lambda topk: MomentumCorrection(topk, ranks=1)])
def test_only_states_of_the_same_kind_of_memory_are_loaded(make: Any) -> None:
    memory, feedback, correction = make(TopK(0.1)), ErrorFeedback(TopK(0.1)), MomentumCorrection(TopK(0.1), ranks=1)
    for other in (memory, feedback, correction):
        other.compress("w", gradient(0, 10))
    before = deepcopy(memory.state_dict())
    other = correction if memory.kind == feedback.kind else feedback
    with pytest.raises(CommError, match=f"a state of {other.kind} cannot go on as {memory.kind}; take the memory"):
        memory.load_state_dict(other.state_dict())
    good = memory.state_dict()
    damaged = [
        None,
        [],
        {},
        {"steps": {}, "kept": {}},
        {**good, "steps": None},
        {**good, "kept": {"v": good["kept"]["w"]}},
    ]
    damaged += [
        {**good, "kept": {"w": kept}} for kept in (None, [], good["kept"]["w"] * 2, [1, 2], [1], torch.ones(1, 3))
    ]
    for state in damaged:
        with pytest.raises(CommError, match=f"not a state of {memory.kind}; load one that this memory saved"):
            memory.load_state_dict(state)
    assert str(memory.state_dict()) == str(before)
    memory.load_state_dict(good)
