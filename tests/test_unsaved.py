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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data import DataLoader, TensorDataset

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
        ckpt.restore()
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
        pytest.raises(
            StateError, match="parameter 2 of group 0 is not what it was, and no registered object's state has it"
        ),
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
            ckpt.restore()
            ckpt.step()
        assert saved.load(**flat()) == []


def test_a_parameter_that_a_module_leaves_out_has_to_be_what_it_was() -> None:
    saved = save(model=Adapted(1.0))
    assert saved.load(model=Adapted(1.0)) == []
    with pytest.raises(StateError, match=r"model\.base is not what it was, and no registered object's state has it"):
        saved.load(model=Adapted(2.0))


def test_a_parameter_that_nothing_trains_and_a_module_leaves_out_is_told_when_it_changes(daemon: SoloDaemon) -> None:
    """As the base of adapters that nobody froze, until an optimizer that nobody registered writes it."""
    model = Adapted(1.0)
    model.base.requires_grad_(True)
    optimizer = torch.optim.SGD([model.adapter], lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                ckpt.step()
                assert is_committed(ckpt)
        with torch.no_grad():
            model.base.add_(1)
        with pytest.warns(RuntimeWarning, match=r"model\.base is trained, and no registered object's state has it"):
            ckpt.step()
        assert is_committed(ckpt)


@pytest.mark.parametrize("write", [torch.Tensor.neg_, lambda tensor: setattr(tensor, "data", tensor.data + 1)])
def test_a_buffer_that_changes_and_is_left_out_is_told(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], Any]
) -> None:
    model = Adapted(1.0)
    model.shift += 1
    with Checkpointer(model=model) as ckpt:
        ckpt.restore()
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
    digest = unsaved.digest_of
    monkeypatch.setattr(unsaved, "digest_of", lambda tensor: hashed.append(tensor) or digest(tensor))
    model = Adapted(1.0)
    training = state.TrainingState({"model": model}, rng=False)
    for _ in range(3):
        training.flatten()
    assert len(hashed) == 2
    model.shift += 1
    training.flatten()
    assert hashed[2:] == [model.shift] or hashed[2] is model.shift


def test_what_a_fused_optimizer_writes_is_hashed_again() -> None:
    """torch does not count its writes, and a master of lower precision's weights may require no grad."""

    class Masters(Holder):
        def __init__(self) -> None:
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
            self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, fused=True)

        def state_dict(self) -> dict[str, Any]:
            return self.optimizer.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state_dict)

    before = Masters()
    training = TrainingState({"masters": before}, rng=False)
    digests = []
    for _ in range(2):
        before.weight.grad = torch.ones(4)
        before.optimizer.step()
        training.flatten()
        digests.append(training.unsaved.digests["parameters"])
    assert digests[0] != digests[1]


@pytest.mark.parametrize("part", [None, ["x"], {"other": {}}, {"buffers": {"a": 1}}, {"buffers": []}])
def test_what_a_damaged_manifest_says_of_them_is_refused(part: Any) -> None:
    from resilient_run.ckpt.errors import SlotError
    from resilient_run.ckpt.state.unsaved import parse

    with pytest.raises(SlotError, match="for what is not saved"):
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


def test_what_takes_the_place_of_a_plain_loader_is_named() -> None:
    loader = DataLoader(TensorDataset(torch.ones(2)))
    with pytest.raises(StateError, match=r"^values\.loader: .*DataLoader .*torch\.ResumableLoader\(loader\)$"):
        TrainingState({"loader": loader}, rng=False).flatten()


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
        ckpt.restore()
        with pytest.warns(RuntimeWarning, match="optimizer: step of parameter 0 in Adam 1 is trained, and no registe"):
            ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    model, optimizer = trained(wrapped, steps=0)
    with (
        Checkpointer(model=model, optimizer=optimizer) as ckpt,
        pytest.raises(StateError, match="step of parameter 0 in Adam 1 is not what it was, and no registered"),
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
            ckpt.restore()
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


class Counting(torch.optim.Adam):
    """Has a plain number in its states, as optimizers of many libraries do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["count"] = state.get("count", 0) + 1


@pytest.mark.parametrize("offload", [False, True])
def test_plain_numbers_that_dcp_has_under_the_names_of_parameters_are_not_told(offload: bool) -> None:
    options = StateDictOptions(cpu_offload=offload)

    class Named(Holder):
        def __init__(self, seed: int) -> None:
            torch.manual_seed(seed)
            self.model = nn.Linear(3, 3)
            self.optimizer = Counting(self.model.parameters())
            self.forgets = False

        def train(self, steps: int) -> "Named":
            for _ in range(steps):
                self.model(torch.ones(2, 3)).sum().backward()
                self.optimizer.step()
            return self

        def state_dict(self) -> dict[str, Any]:
            given = get_optimizer_state_dict(self.model, self.optimizer, options=options)
            if self.forgets:
                given["state"] = {
                    name: {key: value for key, value in state.items() if key != "count"}
                    for name, state in given["state"].items()
                }
            return given

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=options)

    before, after = Named(1).train(3), Named(2)
    state = TrainingState({"model": before.model, "optimizer": before}, rng=False)
    state.flatten()
    assert state.unsaved.trained is None
    assert save(model=before.model, optimizer=before).load(model=after.model, optimizer=after) == []
    assert [each["count"] for each in after.optimizer.state.values()] == [3, 3]
    before.forgets, after = True, Named(2)
    with pytest.raises(StateError, match="count of parameter 0 in Counting 0 is not what it was"):
        save(model=before.model, optimizer=before).load(model=after.model, optimizer=after)


class Owner:
    """Has a tensor that an optimizer trains, or a module has, and takes another one in its place if `replaces`."""

    def __init__(self, tensor: torch.Tensor, *, replaces: bool) -> None:
        self.tensor, self.replaces = tensor, replaces
        self.optimizer: torch.optim.Optimizer | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.replaces:
            self.tensor = state["tensor"]
            if self.optimizer is not None:
                self.optimizer = torch.optim.SGD([self.tensor], lr=0.1)
        else:
            self.tensor.data.copy_(state["tensor"])


def test_an_object_that_makes_another_tensor_of_what_is_trained_is_refused() -> None:
    def made(value: float, *, replaces: bool) -> dict[str, Any]:
        owner = Owner(torch.full((2,), value).requires_grad_(), replaces=replaces)
        return {"owner": owner, "optimizer": torch.optim.SGD([owner.tensor], lr=0.1)}

    for replaces in (False, True):
        saved = save(**made(1.0, replaces=replaces))
        for value in (1.0, 2.0):  # equal ones come apart later
            again = made(value, replaces=replaces)
            if replaces:
                with pytest.raises(
                    StateError, match=r"optimizer: parameter 0 of group 0 was in the state of a register"
                ):
                    saved.load(**again)
            else:
                assert saved.load(**again) == []
                assert again["optimizer"].param_groups[0]["params"][0].tolist() == [1.0, 1.0]


def test_an_object_that_makes_its_optimizer_anew_is_loaded() -> None:
    def made(value: float) -> Owner:
        owner = Owner(torch.full((2,), value).requires_grad_(), replaces=True)
        owner.optimizer = torch.optim.SGD([owner.tensor], lr=0.1)
        return owner

    after = made(2.0)
    assert save(owner=made(1.0)).load(owner=after) == []
    assert after.tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_module_leaves_out_and_an_object_replaces_is_refused(shared: bool) -> None:
    before, after = Adapted(1.0), Adapted(2.0)
    saved = save(model=before, owner=Owner(before.base, replaces=True))
    with pytest.raises(StateError, match=r"model\.base was in the state of a registered object, which has another"):
        saved.load(model=after, owner=Owner(after.base if shared else after.base.clone(), replaces=True))


class Tagged(nn.Parameter):
    """A class of a script's own for parameters."""


@pytest.mark.parametrize("how", ["left out", "rounded"])
def test_parameters_of_a_class_of_their_own_are_compared(how: str) -> None:
    def made(value: float) -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight = Tagged(torch.full((2, 2), value))

        def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            weight = state.pop("weight")
            if how == "rounded":
                state["weight"] = weight.round()

        model.register_state_dict_post_hook(hook)
        model.register_load_state_dict_pre_hook(
            lambda module, state, *rest: state.setdefault("weight", module.weight.detach())
        )
        return model

    saved = save(model=made(1.25))
    with pytest.raises(StateError, match=r"model\.weight is not what it was, and no registered object's state has it"):
        saved.load(model=made(1.0))


def test_a_view_that_does_not_show_all_of_a_tensor_is_no_copy_of_it() -> None:
    class Hankel(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), value))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"first": self.weight.detach().as_strided((4, 4), (1, 1))}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            self.weight.data.flatten()[:7].copy_(torch.cat([state["first"][0], state["first"][1:, 3]]))

    with pytest.raises(StateError, match=r"model\.weight is not what it was"):
        save(model=Hankel(1.0)).load(model=Hankel(2.0))


def test_two_modules_whose_tensors_have_one_name_are_refused() -> None:
    models = {"net": nn.Sequential(nn.Linear(2, 2)), "net.0": nn.Linear(2, 2)}
    with pytest.raises(
        StateError, match=r"models\.net\.0\.weight is a tensor of two modules: give one of them another"
    ):
        save(models=models)
    models["net.0"] = models["net"][0]  # type: ignore[index]
    save(models=models)


def test_a_module_may_have_a_method_of_its_own_for_the_names_of_its_parameters() -> None:
    class Old(nn.Linear):
        def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
            return super().named_parameters(prefix, recurse)

        def named_buffers(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
            return super().named_buffers(prefix, recurse)

    def made() -> dict[str, Any]:
        model = Old(2, 2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    after = made()
    before = made()
    assert save(**before).load(**after) == []
    assert torch.equal(before["model"].weight, after["model"].weight)


class Lookahead(torch.optim.Optimizer):
    """As it is widely copied: its slow weights are under `id(parameter)`, which no other process knows."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                slow += (parameter.detach() - slow) / 2

    def state_dict(self) -> Any:
        fast = self.optimizer.state_dict()
        slow = {id(key) if isinstance(key, torch.Tensor) else key: state for key, state in self.state.items()}
        return {"fast": fast["state"], "slow": slow, "param_groups": fast["param_groups"]}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict({"state": state["fast"], "param_groups": state["param_groups"]})
        super().load_state_dict({"state": state["slow"], "param_groups": state["param_groups"]})


def test_state_that_comes_back_under_keys_of_another_process_is_refused() -> None:
    def made(steps: int) -> dict[str, Any]:
        model, optimizer = trained(lambda parameters: Lookahead(torch.optim.Adam(parameters, lr=0.1)), steps)
        return {"model": model, "optimizer": optimizer}

    saved = save(**made(2))
    with pytest.raises(
        StateError, match="optimizer: what Lookahead 0 has a state for is not what it was, and no regis"
    ):
        saved.load(**made(0))


class Trainer:
    """Has models and their optimizers, and may leave something out of their states."""

    def __init__(self, steps: int, change: Callable[[dict[str, Any]], Any]) -> None:
        self.parts = [trained(lambda parameters: torch.optim.Adam(parameters, lr=0.1), steps) for _ in range(2)]
        self.change = change

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {str(at): [part.state_dict() for part in both] for at, both in enumerate(self.parts)}
        self.change(states)
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for both, parts in zip(self.parts, state.values(), strict=True):
            for part, of_part in zip(both, parts, strict=False):
                part.load_state_dict(of_part)


def _zero_steps(states: dict[str, Any]) -> None:
    """The other optimizer has the same numbers of steps."""
    given = states["0"][1]
    states["0"][1] = {**given, "state": {at: {**each, "step": torch.zeros(())} for at, each in given["state"].items()}}


def _leave_out(states: dict[str, Any]) -> None:
    for parts in states.values():
        del parts[1]


@pytest.mark.parametrize(("change", "what"), [(_zero_steps, "step"), (_leave_out, "exp_avg")])
def test_what_an_object_shows_of_its_optimizers_is_compared_one_by_one(
    change: Callable[[dict[str, Any]], Any], what: str
) -> None:
    saved = save(trainer=Trainer(2, lambda _: None))
    assert saved.load(trainer=Trainer(0, lambda _: None)) == []
    saved = save(trainer=Trainer(2, change))
    with pytest.raises(StateError, match=rf"trainer: {what} of parameter 0 in Adam 0 is not what it was, and no regis"):
        saved.load(trainer=Trainer(0, change))


def test_parts_of_a_state_whose_names_are_alike_are_told_apart() -> None:
    """What is under the names "a" and "b" is lost here, and what is under "a.b" comes back."""

    def scaled(given: Any, factor: float) -> Any:
        states = given["state"].items()
        return {**given, "state": {at: {"a": {"b": 0}, "a.b": state["a.b"] * factor} for at, state in states}}

    def made(value: int) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {"a": {"b": value}, "a.b": 2.0}
        optimizer.register_state_dict_post_hook(lambda _, given: scaled(given, 2))
        optimizer.register_load_state_dict_pre_hook(lambda _, given: scaled(given, 0.5))
        return optimizer

    optimizer = made(3)
    parameter = optimizer.param_groups[0]["params"]
    saved = save(optimizer=optimizer, owner=Owner(parameter[0], replaces=False))
    after = made(3)
    with pytest.raises(StateError, match=r"optimizer: a\.b of parameter 0 in SGD 0 is not what it was"):
        saved.load(optimizer=after, owner=Owner(after.param_groups[0]["params"][0], replaces=False))
