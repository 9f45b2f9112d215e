"""What training goes on with and no object's state has: refused, or told."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from saved import save
from solo_daemon import SoloDaemon, is_committed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import Flattener


class Holder:
    """An object of a script's own."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Adapted(nn.Module):
    """Its state dict leaves out what is frozen, and `shift`."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.full((4,), base), requires_grad=False)
        self.adapter = nn.Parameter(torch.zeros(4))
        self.register_buffer("shift", torch.zeros(4), persistent=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if key != "base"}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False)


def masters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]


def half() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3).bfloat16()
    return model, torch.optim.Adam([*model.parameters(), *masters(model)])


def test_an_optimizer_whose_parameters_nobody_registered_is_refused_at_once(daemon: SoloDaemon) -> None:
    model, optimizer = half()
    with pytest.raises(StateError, match=r"^optimizer: parameter 2 of group 0 is in no .* Register the module or"):
        Checkpointer(model=model, optimizer=optimizer)
    assert not any(message["op"] == "attach" for message in daemon.seen)


def test_what_an_object_may_keep_is_told_and_compared(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = half()
    with Checkpointer(model=model, optimizer=optimizer, own=Holder()) as ckpt:
        with pytest.warns(RuntimeWarning, match="parameter 2 of group 0 is trained, and no registered object's state"):
            ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    with Checkpointer(model=model, optimizer=optimizer, own=Holder()) as ckpt:
        assert ckpt.restore() == 1, "the very same ones"
    daemon.restart(monkeypatch, generation=3)
    other, another = half()
    with (
        Checkpointer(model=other, optimizer=another, own=Holder()) as ckpt,
        pytest.raises(StateError, match="parameter 2 of group 0 is in no registered object's state, and not what it"),
    ):
        ckpt.restore()


def flat() -> dict[str, Any]:
    model = nn.Linear(3, 3)
    whole = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    start = 0
    for parameter in model.parameters():
        parameter.data = whole.data[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return {"model": model, "optimizer": torch.optim.Adam([whole])}


def test_one_parameter_that_has_the_memory_of_a_module_is_kept(daemon: SoloDaemon) -> None:
    saved = save(**flat())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(**flat()) as ckpt:
            ckpt.step()
        assert saved.load(**flat()) == []


def test_a_parameter_that_a_module_leaves_out_has_to_be_what_it_was() -> None:
    saved = save(model=Adapted(1.0))
    assert saved.load(model=Adapted(1.0)) == []
    with pytest.raises(StateError, match=r"model\.base is in no registered object's state, and not what it was"):
        saved.load(model=Adapted(2.0))


@pytest.mark.parametrize("write", [torch.Tensor.neg_, lambda tensor: setattr(tensor, "data", tensor.data + 1)])
def test_a_buffer_that_changes_and_is_left_out_is_told(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], Any]
) -> None:
    model = Adapted(1.0)
    model.shift += 1
    with Checkpointer(model=model) as ckpt:
        ckpt.step()
        write(model.shift)
        with pytest.warns(RuntimeWarning, match=r"model\.shift changes, and state_dict\(\) leaves it out"):
            ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    with Checkpointer(model=Adapted(1.0)) as ckpt, pytest.warns(RuntimeWarning, match=r"model\.shift is another one"):
        assert ckpt.restore() == 2


def test_what_is_frozen_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from resilient_run.ckpt.state import state, unsaved

    hashed = []
    digest = unsaved._digest
    monkeypatch.setattr(unsaved, "_digest", lambda tensor: hashed.append(tensor) or digest(tensor))
    model = Adapted(1.0)
    training = state.TrainingState({"model": model}, rng=False)
    for _ in range(3):
        training.flatten()
    assert len(hashed) == 2
    model.shift += 1
    training.flatten()
    assert hashed[2:] == [model.shift] or hashed[2] is model.shift


@pytest.mark.parametrize("part", [None, ["x"], {"other": {}}, {"buffers": {"a": 1}}, {"buffers": []}])
def test_what_a_damaged_manifest_says_of_them_is_refused(part: Any) -> None:
    from resilient_run.ckpt.errors import SlotError
    from resilient_run.ckpt.state.unsaved import parse

    with pytest.raises(SlotError, match="for tensors that are not saved"):
        parse(Flattener(part).node)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[torch.Tensor]:
    np.save(tmp_path / "table.npy", np.ones(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.from_numpy(np.load(tmp_path / "table.npy", mmap_mode="r"))


def test_a_module_in_memory_that_cannot_be_written_is_refused(daemon: SoloDaemon, table: torch.Tensor) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", table)
    with pytest.raises(StateError, match=r"model\.table lies in memory that cannot be written.*clone\(\)"):
        Checkpointer(model=model)


def test_a_module_that_was_made_in_inference_mode_is_refused(daemon: SoloDaemon) -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(StateError, match=r"model\.weight was made in torch\.inference_mode\(\).*clone\(\)"):
        Checkpointer(model=model)


@pytest.mark.filterwarnings("ignore")  # of torch, that it may give up such tensors
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), r"tensors of torch\.float4_e2m1fn_x2"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), r"tensors of torch\.quint8 are not"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensors are not supported"),
        (lambda: nn.LazyLinear(2).weight, "it has no data before the module's first forward pass"),
    ],
    ids=["float4", "quantized", "nested", "lazy"],
)
def test_a_tensor_that_no_slot_can_hold_is_named(make: Callable[[], torch.Tensor], reason: str) -> None:
    with pytest.raises(StateError, match=rf"^values\.a\.0: {reason}"):
        Flattener({"values": {"a": [make()]}})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("persistent", [True, False])
def test_a_module_may_have_a_nested_tensor_that_its_state_leaves_out(persistent: bool) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), persistent=persistent)
    training = TrainingState({"model": model}, rng=False)
    if persistent:
        with pytest.raises(StateError, match=r"^model\.mask: nested tensors are not supported"):
            training.flatten()
    else:
        training.flatten()
        assert not training.unsaved.digests


class Grows(nn.Module):
    """Has what a script changes in a model while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def grow(self) -> None:
        self.register_buffer("mean", torch.zeros(2))

    def prune(self) -> None:
        del self.inner.bias

    def widen(self) -> None:
        self.inner = nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda model, _: model.grow(), "model.mean is new since restore", id="buffer"),
        pytest.param(lambda model, _: model.prune(), "model.inner.bias is gone since restore", id="pruned"),
        pytest.param(lambda model, _: model.widen(), "model.inner.weight has other shapes since restore", id="widened"),
        pytest.param(
            lambda _, optimizer: optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]}),
            "optimizer has other groups since restore",
            id="groups",
        ),
    ],
)
@pytest.mark.parametrize("knows", [False, True])
def test_what_a_restart_has_to_make_anew_is_told(
    daemon: SoloDaemon, change: Callable[[Grows, torch.optim.Optimizer], None], message: str, knows: bool
) -> None:
    """Unless the script asks which step it goes on from, which is how it would do that."""
    model, plain = Grows(), Holder()
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
    optimizer.zero_grad()
    with Checkpointer(model=model, optimizer=optimizer, plain=plain) as ckpt:
        assert ckpt.restore() == 0
        assert not knows or ckpt.planned_step == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.step(1)
        change(model, optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ckpt.step(2)
            ckpt.step(3)
    changes = [warning for warning in told if "since restore()" in str(warning.message)]
    assert len(changes) == (not knows)
    assert all(str(warning.message).startswith(message) for warning in changes)


def test_what_is_replaced_is_no_change(daemon: SoloDaemon) -> None:
    model = Grows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        model.grow()
        ckpt.replace(model=model, optimizer=torch.optim.SGD(model.inner.parameters(), lr=0.1, momentum=0.9))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.step(2)


class Perturbing(torch.optim.Optimizer):
    """SAM as it is widely copied: its `state_dict()` has nothing of what the optimizer inside has."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
        self.base.step()


def trained(kind: Callable[[Any], torch.optim.Optimizer], steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = kind(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_what_a_wrapper_leaves_out_of_the_optimizer_inside_is_told_and_refused(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped(parameters: Any) -> torch.optim.Optimizer:
        return Perturbing(parameters, torch.optim.Adam)

    model, optimizer = trained(wrapped)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        with pytest.warns(RuntimeWarning, match="optimizer: step of parameter 0 in Adam is trained, and no registe"):
            ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    model, optimizer = trained(wrapped, steps=0)
    with (
        Checkpointer(model=model, optimizer=optimizer) as ckpt,
        pytest.raises(StateError, match="step of parameter 0 in Adam is in no registered object's state"),
    ):
        ckpt.restore()


def test_the_optimizer_inside_comes_back_if_it_is_registered_too(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped(parameters: Any) -> Any:
        return Perturbing(parameters, torch.optim.Adam)

    model, optimizer = trained(wrapped)
    momentum = [state["exp_avg"].tolist() for state in optimizer.base.state.values()]  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(model=model, optimizer=optimizer, base=optimizer.base) as ckpt:  # type: ignore[attr-defined]
            ckpt.step()
            assert is_committed(ckpt)
        daemon.restart(monkeypatch)
        model, optimizer = trained(wrapped, steps=0)
        with Checkpointer(model=model, optimizer=optimizer, base=optimizer.base) as ckpt:  # type: ignore[attr-defined]
            assert ckpt.restore() == 1
    assert [state["exp_avg"].tolist() for state in optimizer.base.state.values()] == momentum  # type: ignore[attr-defined]


class Container:
    """Torchtitan's optimizers in short: DCP's functions make states for an optimizer that has none."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, torch.optim.Adam(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


def test_looking_at_an_optimizer_without_state_leaves_it_without(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*, steps: int, kept: bool = True) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizers = Container(model)
        with Checkpointer(model=model, optimizers=optimizers) if kept else nullcontext() as ckpt:
            for _ in range(ckpt.restore() if ckpt else 0, steps):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizers.optimizer.step()
                optimizers.optimizer.zero_grad()
                if ckpt:
                    ckpt.step()
                    assert is_committed(ckpt)
        return [tensor.tolist() for tensor in model.parameters()]

    undisturbed = run(steps=4, kept=False)
    run(steps=2)
    daemon.restart(monkeypatch)
    assert run(steps=4) == undisturbed
