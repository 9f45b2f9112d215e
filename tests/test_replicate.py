"""The hook of hybrid sharding: what a scheme gets, what is refused, and plans; `test_hook.py` trains with it."""

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient_run.comm.compress.compressed import Compressed
from resilient_run.comm.compress.compressors import TopK
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.errors import CommError
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.plan.plan import FLAT, Plan, PlanGroup
from resilient_run.comm.replicate import ReplicateHook, planned, register_replicated
from resilient_run.comm.runtime.execute import OptionScheme

pytestmark = pytest.mark.usefixtures("alone")


class Recording(Scheme):
    """Doubles, and keeps what it was asked for."""

    name = "recording"

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        self.asked.append((key, tuple(gradient.shape)))
        return gradient * 2


class Broken(Scheme):
    """Fails."""

    name = "broken"

    def reduce(self, key: str, gradient: Tensor) -> Tensor:
        raise CommError(f"cannot sum {key}")


class Model(nn.Module):
    """Two parameter groups, the second with a layer that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)
        self.seldom = nn.Linear(3, 3)

    def forward(self, batch: Tensor, *, seldom: bool = True) -> Tensor:
        out: Tensor = self.last(self.first(batch))
        return self.seldom(out) if seldom else out


def hybrid(mesh: DeviceMesh | None = None) -> Model:
    mesh = mesh or init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Model()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients(model: Model, *, seldom: bool = True) -> dict[str, Tensor]:
    model.zero_grad()
    model(torch.ones(2, 4), seldom=seldom).sum().backward()
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}


def test_scheme_gets_parameters_by_name_and_shape() -> None:
    plain = gradients(hybrid())
    model = hybrid()
    hook = register_replicated(model, Recording, least_elements=9)
    found = gradients(model)
    assert isinstance(hook.scheme, Recording)
    assert hook.scheme.asked == [("last.weight", (3, 6)), ("seldom.weight", (3, 3)), ("first.weight", (6, 4))]
    for name, gradient in plain.items():
        assert torch.equal(found[name], gradient * 2 if name.endswith("weight") else gradient), name
    hook.close()
    after = gradients(model)
    assert all(torch.equal(after[name], gradient) for name, gradient in plain.items())


def test_frozen_parameters_are_left_out() -> None:
    model = hybrid()
    for parameter in (model.first.bias, model.last.weight):
        parameter.requires_grad_(requires_grad=False)
    hook = register_replicated(model, Recording, least_elements=1)
    assert gradients(model).keys() == {"first.weight", "last.bias", "seldom.weight", "seldom.bias"}
    assert isinstance(hook.scheme, Recording)
    names = [name for name, _ in hook.scheme.asked]
    assert names == ["last.bias", "seldom.weight", "seldom.bias", "first.weight"]


def test_a_group_without_all_its_gradients_is_all_reduced(caplog: pytest.LogCaptureFixture) -> None:
    plain = gradients(hybrid(), seldom=False)
    model = hybrid()
    hook = register_replicated(model, Recording, least_elements=9)
    with caplog.at_level(logging.WARNING):
        found = gradients(model, seldom=False)
        gradients(model, seldom=False)
    assert isinstance(hook.scheme, Recording)
    assert {name for name, _ in hook.scheme.asked} == {"first.weight"}
    assert torch.equal(found["last.weight"], plain["last.weight"])
    assert [record.message.count("set_reduce_scatter_unused_params(True)") for record in caplog.records] == [1]
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        return  # torch before 2.13
    model.set_reduce_scatter_unused_params(True)
    hook.scheme.asked.clear()
    assert torch.equal(gradients(model, seldom=False)["seldom.weight"], torch.zeros(3, 3))
    assert [name for name, _ in hook.scheme.asked] == ["last.weight", "seldom.weight", "first.weight"]


def test_errors_of_a_scheme_are_raised_by_backward() -> None:
    model = hybrid()
    register_replicated(model, Broken, least_elements=9)
    with pytest.raises(CommError, match=r"cannot sum last.weight"):
        gradients(model)


def test_a_new_model_goes_on_from_the_state() -> None:
    def build() -> tuple[Model, ReplicateHook]:
        model = hybrid()
        made = register_replicated(model, lambda ranks: Compressed(ranks, ErrorFeedback(TopK(0.1))), least_elements=20)
        return model, made

    model, hook = build()
    first = gradients(model)
    state = deepcopy(hook.state_dict())
    assert state["kept"].keys() == {"first.weight"}
    expected = gradients(model)
    assert not torch.equal(first["first.weight"], expected["first.weight"])
    fresh, other = build()
    other.load_state_dict(state)
    found = gradients(fresh)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    with pytest.raises(CommError, match="not a state of error feedback; load one that this memory saved"):
        other.load_state_dict({"scheme": "spardl"})


def plan_of(model: nn.Module, options: dict[str, str]) -> Plan:
    groups = tuple(PlanGroup(tensors=(n,), option=options.get(n, "dense")) for n, _ in model.named_parameters())
    return Plan(
        planner="none",
        model="small",
        compressor="topk",
        groups=groups,
        reason="",
        iteration_s=1.0,
        planning_s=0.0,
        bound_s=0.0,
        baselines_s={},
    )


def test_a_plan_is_carried_out() -> None:
    model = hybrid()
    plan = plan_of(model, {"first.weight": FLAT, "last.weight": "compressed"})
    hook = register_replicated(model, planned(plan, model, ErrorFeedback(TopK(0.1))), least_elements=1)
    found = gradients(model)
    assert isinstance(hook.scheme, OptionScheme)
    assert {name: found[name].count_nonzero().item() for name in found} == {
        "first.weight": 2,
        "first.bias": 6,
        "last.weight": 2,
        "last.bias": 3,
        "seldom.weight": 9,
        "seldom.bias": 3,
    }
    left = hook.state_dict()["memory"]["kept"]
    assert left.keys() == {"first.weight/0/0", "last.weight/0/0"}


def test_plan_with_steps_within_hosts_is_refused() -> None:
    model = hybrid()
    memory = ErrorFeedback(TopK(0.1))
    hierarchical = "reduce_scatter@intra1 > comp:gpu > all_gather@inter > decomp:gpu > all_gather@intra2"
    with pytest.raises(CommError, match=r"first\.weight is to be summed by .*--constraint flat"):
        planned(plan_of(model, {"first.weight": hierarchical}), model, memory)


def test_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CommError, match=r"for small does not fit the model: first\.bias \(6 in all\) is in no group"):
        planned(plan_of(nn.Module(), {}), hybrid(), ErrorFeedback(TopK(0.1)))


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tensor"))

    def spread(_: str, module: nn.Module, over: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, over, [Replicate()])))

    return fully_shard(distribute_module(nn.Linear(4, 6), mesh["tensor"], spread), mesh=mesh["replicate", "shard"])


def test_tensor_parallel_parameters_are_summed_part_by_part() -> None:
    plain, model = tensor_parallel(), tensor_parallel()
    model.load_state_dict(plain.state_dict())
    hook = register_replicated(model, Recording, least_elements=9)
    for each in (plain, model):
        batch = distribute_tensor(torch.ones(2, 4), each.weight.device_mesh["tensor"], [Replicate()])
        each(batch).to_local().sum().backward()
    assert isinstance(hook.scheme, Recording)
    assert hook.scheme.asked == [("weight", (6, 4))]
    expected, found = (each.weight.grad.full_tensor() for each in (plain, model))
    assert torch.equal(found, 2 * expected)


def registered() -> nn.Module:
    model = hybrid()
    register_replicated(model)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(4, 6), r"no parameter of this Linear .* call fully_shard with a mesh"),
        (lambda: fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (1,))), r"weight has no replicas: .*two"),
        (registered, r"weight has a scheme between replicas already; close\(\)"),
    ],
)
def test_other_models_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(CommError, match=message):
        register_replicated(build())


@pytest.fixture
def one_of_four(alone: None) -> Iterator[None]:
    """The default process group of rank 0 of four; nobody is there."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("one_of_four")
def test_different_replicas_are_refused() -> None:
    def over(replicas: int) -> DeviceMesh:
        return init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))

    model = Model()
    fully_shard(model.first, mesh=over(4))
    fully_shard(model, mesh=over(2))
    message = r"last\.weight has replicas on ranks \[0, 2\], first\.weight on \[0, 1, 2, 3\]; give fully_shard one mesh"
    with pytest.raises(CommError, match=message):
        register_replicated(model)


def test_wrong_schemes_are_refused() -> None:
    with pytest.raises(CommError, match="there is no scheme and no compressor 'zenn'"):
        register_replicated(hybrid(), "zenn")
    with pytest.raises(CommError, match="density, seed: give options to what makes the scheme"):
        register_replicated(hybrid(), Recording, seed=1, density=0.5)
