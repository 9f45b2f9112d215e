"""The run-time that averages gradients by a plan, on real ranks: same training as by hand, whatever the groups."""

import threading
from collections.abc import Iterator

import pytest
import torch
from ranks import run_hosts
from torch import Tensor, nn

from resilient_run.comm.compress.compressors import named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import CommError
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.scheme import Reduction, Scheme
from resilient_run.comm.runtime.execute import OptionScheme, options_of
from resilient_run.comm.synchronizer import GradientSynchronizer, group_key

GROUPS = [["4.bias"], ["4.weight", "2.bias"], ["0.weight", "2.weight", "0.bias"]]

HIERARCHICAL = "reduce_scatter@intra1 > all_reduce@inter > all_gather@intra2"
ON_CPUS = "comp:cpu > all_gather@flat > decomp:cpu"


def model() -> nn.Sequential:
    """Make the same model in every thread; they share torch's own generator."""
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * rank + step))


def synchronizer(fabric: Fabric, module: nn.Module, option: str, density: float = 1.0) -> GradientSynchronizer:
    options = options_of({group_key(names): option for names in GROUPS})
    scheme = OptionScheme(fabric, ErrorFeedback(named("topk", density=density)), options)
    return GradientSynchronizer(module, GROUPS, scheme)


def by_hand(ranks: int, steps: int) -> list[Tensor]:
    """Train with the mean gradient of all ranks, as one process."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (module(batch(rank, step)).pow(2).sum() / ranks).backward()
        optimizer.step()
    return list(module.parameters())


def test_group_of_several_dtypes_is_averaged_in_the_widest() -> None:
    """Half precision does not hold 32768.25, which the other parameter of the group gets."""

    def work(fabric: Fabric) -> list[Tensor]:
        narrow, wide = (nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float16, torch.float32))
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk", density=1.0)), {})
        averaging = GradientSynchronizer(nn.ParameterList([narrow, wide]), [["0", "1"]], scheme)
        (narrow.sum() * 2 + wide.sum() * (65536.0, 0.5)[fabric.flat.rank]).backward()
        averaging.synchronize()
        averaging.close()
        assert narrow.grad is not None
        assert wide.grad is not None
        return [narrow.grad, wide.grad]

    for narrow, wide in run_hosts(1, 2, work):
        assert narrow.tolist() == [2.0] * 3
        assert wide.tolist() == [32768.25] * 3


@pytest.mark.parametrize("option", ["dense", "compressed", HIERARCHICAL, ON_CPUS])
def test_training_is_that_of_the_mean_gradient(option: str) -> None:
    def work(fabric: Fabric) -> list[Tensor]:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        averaging = synchronizer(fabric, module, option)
        averaging.attach(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            module(batch(fabric.flat.rank, step)).pow(2).sum().backward()
            optimizer.step()
        averaging.close()
        return list(module.parameters())

    expected = by_hand(4, 5)
    ranks = run_hosts(2, 2, work)
    for found in ranks:
        for mine, first, wanted in zip(found, ranks[0], expected, strict=True):
            torch.testing.assert_close(mine, wanted)
            assert torch.equal(mine, first)


@pytest.mark.parametrize("option", ["dense", "compressed"])
def test_averages_are_there_before_gradients_are_unscaled_and_clipped(option: str) -> None:
    """Otherwise the averages, which are still scaled and not clipped, would replace what the optimizer is to apply."""

    def work(fabric: Fabric) -> list[Tensor]:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        averaging = synchronizer(fabric, module, option)
        averaging.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(module(batch(fabric.flat.rank, 0)).pow(2).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        averaging.close()
        return list(module.parameters())

    twin = model()
    for rank in range(2):
        (twin(batch(rank, 0)).pow(2).sum() / 2).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for found in run_hosts(1, 2, work):
        for mine, wanted in zip(found, twin.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted)


def test_sparse_gradient_is_refused() -> None:
    def work(fabric: Fabric) -> None:
        module = nn.Embedding(5, 3, sparse=True)
        averaging = GradientSynchronizer(module, [["weight"]], OptionScheme(fabric, ErrorFeedback(named("topk")), {}))
        with pytest.raises(CommError, match=r"a gradient of weight is sparse.*sparse=False"):
            module(torch.tensor([1])).sum().backward()
        averaging.close()

    run_hosts(1, 1, work)


def test_accumulated_gradients_are_averaged_once() -> None:
    def work(fabric: Fabric) -> tuple[list[Tensor], int]:
        module = model()
        averaging = synchronizer(fabric, module, "dense")
        with averaging.no_sync():
            module(batch(fabric.flat.rank, 0)).pow(2).sum().backward()
        averaging.synchronize()
        assert fabric.flat.traffic.rounds == 0
        module(batch(fabric.flat.rank, 1)).pow(2).sum().backward()
        averaging.synchronize()
        averaging.close()
        return [parameter.grad.clone() for parameter in module.parameters()], fabric.flat.traffic.rounds

    twin = model()
    for step in range(2):
        for rank in range(2):
            (twin(batch(rank, step)).pow(2).sum() / 2).backward()
    for gradients, rounds in run_hosts(1, 2, work):
        assert rounds == len(GROUPS)
        for found, parameter in zip(gradients, twin.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_parameter_without_gradient_counts_as_zero() -> None:
    """Rank 1 uses only the first layer; all ranks take part in every group all the same."""

    def work(fabric: Fabric) -> list[Tensor]:
        module = model()
        averaging = synchronizer(fabric, module, "dense")
        layers = module if fabric.flat.rank == 0 else module[:1]
        layers(batch(fabric.flat.rank, 0)).pow(2).sum().backward()
        averaging.synchronize()
        averaging.close()
        return [parameter.grad.clone() for parameter in module.parameters()]

    twin = model()
    (twin(batch(0, 0)).pow(2).sum() / 2).backward()
    (twin[:1](batch(1, 0)).pow(2).sum() / 2).backward()
    for gradients in run_hosts(1, 2, work):
        for found, parameter in zip(gradients, twin.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_restored_state_goes_on_bit_for_bit() -> None:
    def work(fabric: Fabric) -> None:
        def gradients(module: nn.Module, averaging: GradientSynchronizer, step: int) -> list[Tensor]:
            module.zero_grad()
            module(batch(fabric.flat.rank, step)).pow(2).sum().backward()
            averaging.synchronize()
            return [parameter.grad.clone() for parameter in module.parameters()]

        module = model()
        averaging = synchronizer(fabric, module, "compressed", density=0.1)
        gradients(module, averaging, 0)
        saved = averaging.state_dict()
        expected = gradients(module, averaging, 1)
        averaging.close()
        again = synchronizer(fabric, module, "compressed", density=0.1)
        again.load_state_dict(saved)
        assert all(map(torch.equal, gradients(module, again, 1), expected))
        again.close()

    run_hosts(1, 2, work)


NAMES = [name for names in GROUPS for name in names]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([NAMES], [[NAMES[0], *NAMES[-2:0:-1], NAMES[-1]]]),
        (GROUPS, [*GROUPS[:2], ["0.weight"], ["2.weight", "0.bias"]]),
        (GROUPS, [["4.bias"], ["4.weight", "2.weight", "2.bias"], ["0.weight", "0.bias"]]),
    ],
    ids=["order", "split", "members"],
)
def test_other_groups_begin_without_residuals(
    before: list[list[str]], after: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that begin and end with the same names."""
    same = [names for names in after if names in before]

    def work(fabric: Fabric) -> None:
        def scheme_of(groups: list[list[str]]) -> OptionScheme:
            options = options_of({group_key(names): "compressed" for names in groups})
            return OptionScheme(fabric, ErrorFeedback(named("topk", density=0.1)), options)

        module, scheme = model(), scheme_of(before)
        averaging = GradientSynchronizer(module, before, scheme)
        module(batch(fabric.flat.rank, 0)).pow(2).sum().backward()
        averaging.close()
        saved = averaging.state_dict()
        assert len(saved["memory"]["kept"]) == len(before)
        averaging = GradientSynchronizer(module, after, scheme_of(after))
        averaging.load_state_dict(saved)
        assert averaging.state_dict()["memory"]["kept"].keys() == {f"{group_key(names)}/0/0" for names in same}
        module.zero_grad()
        module(batch(fabric.flat.rank, 1)).pow(2).sum().backward()
        averaging.close()

    run_hosts(1, 2, work)
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"what compression left out of {len(before) - len(same)} of {len(before)} groups of gradients is lost"
    ] * 2


def test_errors_reach_who_waits() -> None:
    def work(fabric: Fabric) -> None:
        module = model()
        averaging = synchronizer(fabric, module, "compressed")
        state = averaging.state_dict()
        state["memory"].update(steps={"4.bias/0/0": 1}, kept={"4.bias/0/0": [torch.zeros(3)]})
        averaging.load_state_dict(state)
        with pytest.raises(CommError, match=r"4\.bias/0/0 is \(2,\) of torch.float32, its residual \(3,\)"):
            module(batch(0, 0)).pow(2).sum().backward()
        averaging.close()

    run_hosts(1, 2, work)


def test_second_backward_pass_without_no_sync_is_refused() -> None:
    """The first one does not reach all parameters, so its averages are not finished yet."""

    def work(fabric: Fabric) -> None:
        module = model()
        averaging = synchronizer(fabric, module, "dense")
        module[:1](batch(0, 0)).pow(2).sum().backward()
        with pytest.raises(CommError, match=r"use no_sync\(\) for all backward passes"):
            module(batch(0, 1)).pow(2).sum().backward()
        averaging.synchronize()
        averaging.close()

    run_hosts(1, 2, work)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([["4.bias"]], r"0\.bias \(5 in all\) is in no group"),
        ([*GROUPS, ["head"]], r"no trainable parameter head \(1 in all\)"),
        ([*GROUPS, ["4.bias"]], "a parameter is in two groups"),
    ],
)
def test_groups_of_another_model_are_refused(groups: list[list[str]], reason: str) -> None:
    def work(fabric: Fabric) -> None:
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk")), {})
        with pytest.raises(CommError, match=reason):
            GradientSynchronizer(model(), groups, scheme)

    run_hosts(1, 1, work)


def test_groups_are_compressed_in_backward_communicated_meanwhile_and_decoded_after_it() -> None:
    """The second group's compression waits for the first one's communication; it could not if one thread did both."""

    class Staged(Scheme):
        name = "staged"
        stages = ("communicate",)

        def __init__(self, fabric: Fabric) -> None:
            super().__init__(fabric.flat)
            self.communicated = threading.Event()
            self.seen: list[tuple[str, str, str]] = []

        def note(self, stage: str, key: str) -> None:
            self.seen.append((stage, key, threading.current_thread().name))

        def reduce(self, key: str, gradient: Tensor) -> Tensor:
            raise AssertionError("it has stages")

        def begin(self, key: str, gradient: Tensor) -> Reduction:
            if self.seen:
                assert self.communicated.wait(30), "the first group was not communicated during the backward pass"
            self.note("begin", key)
            return Stages(self, key, gradient)

    class Stages(Reduction):
        def __init__(self, scheme: Staged, key: str, gradient: Tensor) -> None:
            self.scheme, self.key, self.gradient = scheme, key, gradient

        def communicate(self) -> None:
            self.scheme.note("communicate", self.key)
            self.scheme.transport.all_reduce(self.gradient)
            self.scheme.communicated.set()

        def total(self) -> Tensor:
            self.scheme.note("total", self.key)
            return self.gradient

        def tensors(self) -> Iterator[Tensor]:
            yield self.gradient

    def work(fabric: Fabric) -> tuple[list[tuple[str, str, str]], str, list[Tensor]]:
        module, scheme = model(), Staged(fabric)
        averaging = GradientSynchronizer(module, GROUPS, scheme)
        module(batch(fabric.flat.rank, 0)).pow(2).sum().backward()
        averaging.close()
        gradients = [parameter.grad.clone() for parameter in module.parameters()]
        return scheme.seen, threading.current_thread().name, gradients

    twin = model()
    for rank in range(2):
        (twin(batch(rank, 0)).pow(2).sum() / 2).backward()
    keys = [group_key(names) for names in GROUPS]
    for stages, own, gradients in run_hosts(1, 2, work):
        of = {stage: [(key, thread) for which, key, thread in stages if which == stage] for stage, _, _ in stages}
        assert of["begin"] == [(key, own) for key in keys]
        assert of["communicate"] == [(key, "gradients: communicate") for key in keys]
        assert of["total"] == [(key, own) for key in keys]
        assert [stage for stage, _, _ in stages if stage != "communicate"] == ["begin"] * 3 + ["total"] * 3
        for found, parameter in zip(gradients, twin.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)
