"""Optimizers come back bit by bit: every kind of state, uncast, through wrappers, flat, in containers, made anew."""

import copy
import functools
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from saved import Saved, assert_same, save
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.format.manifest import leaf_paths
from resilient_run.ckpt.state import held
from resilient_run.ckpt.state.held import Unregistered, held_optimizers, unregistered
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import entries, unflatten

Optimizer = torch.optim.Optimizer


class Masters(Optimizer):
    """fp32 masters and momentum of parameters of any dtype, and state that is not tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["same"] = state["master"]
                    state["history"] = [parameter.detach().double() * 3, None, 0.25]
                    state["table"] = np.arange(3.0)
                    state["name"] = "masters"
                    state["blob"] = b"\0\1"
                    state["pair"] = (parameter.detach().double() / 3, 7)
                    state["nested"] = {"count": 0, "text": "deep"}
                state["nested"]["count"] += 1
                state["table"] = state["table"] * 1.5
                state["master"].sub_(parameter.grad.float(), alpha=group["lr"])
                assert state["same"] is state["master"]
                parameter.copy_(state["master"])


def plain(name: str, **options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, **{"lr": 0.1} | options)


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": plain("SGD", momentum=0.9),
    "adam": plain("Adam", amsgrad=True, foreach=False),
    "adam-foreach": plain("Adam", foreach=True),
    "adam-fused": plain("Adam", fused=True),
    "adam-tensor-lr": plain("Adam", lr=torch.tensor(0.05), foreach=False),
    "adamw": plain("AdamW"),
    "adagrad": plain("Adagrad"),
    "adagrad-fused": plain("Adagrad", fused=True),
    "sgd-fused": plain("SGD", momentum=0.9, fused=True),
    "rmsprop": plain("RMSprop", momentum=0.9, centered=True),
    "rprop": plain("Rprop"),
    "nadam": plain("NAdam"),
    "radam": plain("RAdam"),
    "adamax": plain("Adamax"),
    "asgd": plain("ASGD"),
    "adadelta": plain("Adadelta"),
    "adafactor": plain("Adafactor"),
    "lbfgs": plain("LBFGS", history_size=3, max_iter=2),
    "masters": Masters,
}


def model(
    dtype: torch.dtype = torch.float32, seed: int = 1, layout: torch.memory_format = torch.channels_last
) -> nn.Module:
    torch.manual_seed(seed)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=layout)  # type: ignore[call-overload]
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(4 * 9, 2)).to(dtype)


def train(module: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    dtype = next(module.parameters()).dtype
    for step in range(first, first + steps):

        def closure(step: int = step) -> torch.Tensor:
            data = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.zero_grad()
            loss = module(data).square().mean()
            loss.backward()
            return loss

        if any(isinstance(held, torch.optim.LBFGS) for held in held_optimizers(optimizer)):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def check(
    make: Callable[[Any], Any], dtype: torch.dtype = torch.float32, module: Callable[..., nn.Module] = model
) -> Saved:
    """Train, capture, restore into fresh objects, compare, and train both on."""
    before, after = module(dtype), module(dtype, seed=2)
    one, other = make(before.parameters()), make(after.parameters())
    train(before, one, 3)
    saved = save(model=before, optimizer=one)
    assert saved.load(model=after, optimizer=other) == []
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})
    train(before, one, 3, first=3)
    train(after, other, 3, first=3)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})
    return saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_by_bit(kind: str, dtype: torch.dtype) -> None:
    if kind == "sgd-fused" and dtype is torch.bfloat16:
        pytest.skip("torch's kernel gives one of two results for the same momentum")
    # torch's LBFGS takes parameters apart with view().
    layout = torch.contiguous_format if kind == "lbfgs" else torch.channels_last
    check(KINDS[kind], dtype, functools.partial(model, layout=layout))


def test_fp32_state_of_bf16_parameters_stays_fp32() -> None:
    before, after = model(torch.bfloat16), model(torch.bfloat16, seed=2)
    one, other = (torch.optim.AdamW(item.parameters(), foreach=False) for item in (before, after))
    train(before, one, 1)
    for state in one.state.values():
        state["exp_avg"] = torch.rand_like(state["exp_avg"], dtype=torch.float32)
        state["step"] = state["step"].double()
    reference = torch.optim.AdamW(after.parameters(), foreach=False)
    reference.load_state_dict(copy.deepcopy(one.state_dict()))
    assert reference.state_dict()["state"][0]["exp_avg"].dtype is torch.bfloat16, "what torch makes of it"
    save(model=before, optimizer=one).load(model=after, optimizer=other)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})
    assert other.state_dict()["state"][0]["exp_avg"].dtype is torch.float32


def test_a_fused_step_reads_state_that_lies_as_its_parameter_does() -> None:
    """Fused kernels on a CPU pair elements by their places in memory."""
    after = model(seed=2)
    optimizer = torch.optim.Adam(after.parameters(), fused=True)
    before = model()
    one = torch.optim.Adam(before.parameters(), fused=True)
    train(before, one, 1)
    save(model=before, optimizer=one).load(model=after, optimizer=optimizer)
    weight = after[0].weight
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride() != torch.empty(weight.shape).stride()


class Encoded(torch.optim.SGD):
    """Has a tensor that no checkpoint can hold for each parameter, and gives what it is made of instead."""

    def __init__(self, params: Any, make: Callable[[int], torch.Tensor], take: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(params, lr=0.1)
        self._make = make
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"count": 0, "own": make(0)}
        self.register_state_dict_post_hook(lambda _, given: _given(given, take))
        self.register_load_state_dict_post_hook(lambda _: self._take())

    def _take(self) -> None:
        for state in self.state.values():
            state["own"] = self._make(state["own"]["count"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["count"] += 1
            state["own"] = self._make(state["count"])


def _given(given: Any, take: Callable[[torch.Tensor], Any]) -> Any:
    states = {key: {**state, "own": take(state["own"])} for key, state in given["state"].items()}
    return {**given, "state": states}


def _count(tensor: torch.Tensor) -> Any:
    value = tensor.dequantize() if tensor.is_quantized else tensor.to_dense() if tensor.is_sparse else tensor
    first = value.unbind()[0] if value.is_nested else value
    return {"count": int(first.flatten()[0])}


class Marked(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize(
    "make",
    [
        lambda count: torch.full((3,), float(count + 1)).to_sparse() - torch.ones(3).to_sparse(),
        lambda count: torch.nested.nested_tensor([torch.full((2,), float(count)), torch.ones(3)]),
        lambda count: torch.nested.nested_tensor([torch.full((2,), float(count)), torch.ones(3)], layout=torch.jagged),
        lambda count: torch.quantize_per_tensor(torch.full((3,), float(count)), 1.0, 0, torch.qint8),
        lambda count: torch.full((3,), float(count)).as_subclass(Marked),
    ],
    ids=["sparse", "nested", "jagged", "quantized", "subclass"],
)
@pytest.mark.filterwarnings("ignore:(?s).*(prototype stage|quantized tensor|invariant checks)")
def test_state_of_its_own_kind_that_hooks_give_as_plain_data(make: Callable[[int], torch.Tensor]) -> None:
    before, after = model(), model(seed=2)
    one, other = (Encoded(module.parameters(), make, _count) for module in (before, after))
    train(before, one, 3)
    saved = save(model=before, optimizer=one)
    state = TrainingState({"model": before, "optimizer": one}, rng=False)
    state.flatten()
    assert state.unsaved.trained is None
    saved.load(model=after, optimizer=other)
    assert [_count(state["own"]) for state in other.state.values()] == [{"count": 3}] * len(one.state)
    train(before, one, 3, first=3)
    train(after, other, 3, first=3)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})


class Keyed(torch.optim.SGD):
    """State under numbers of NumPy and tuples, which cannot be compared with each other; torch loads no text."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state[1, 2] = "text"
                state[np.int64(3)] = parameter.detach() * 2
                state[np.int64(4), 5] = {(1, 2): "text", np.int64(3): state.get((np.int64(4), 5))}


def test_keys_that_cannot_be_compared_keep_their_order() -> None:
    check(lambda params: Keyed(params, lr=0.1))


@pytest.mark.parametrize("key", [np.int64(1), 1, 1.0, True])
def test_a_key_that_is_taken_for_a_parameter_is_refused(key: Any) -> None:
    """torch's `state_dict()` has one place for both, and what one of them has is lost."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[np.int64(7)] = optimizer.state["epoch"] = {"seen": 3}
    save(model=module, optimizer=optimizer)
    optimizer.state[key] = {"seen": 3}
    with pytest.raises(StateError, match=rf"optimizer: SGD has the key {re.escape(repr(key))} .* for parameter 1:"):
        save(model=module, optimizer=optimizer)


def test_a_number_of_numpy_is_told_from_the_number_that_it_is_equal_to() -> None:
    class Own:
        def __init__(self, key: Any) -> None:
            self.key = key

        def state_dict(self) -> Any:
            return {self.key: torch.ones(1)}

        def load_state_dict(self, state: Any) -> None:
            assert list(state) == [self.key]

    with pytest.raises(StateError, match=r"own\.np\.int64\(3\): float32 \[1\] in the .*; own\.3: nothing in the"):
        save(own=Own(np.int64(3))).load(own=Own(3))


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_an_option_that_a_hook_gives_otherwise_is_told_and_refused_unless_it_is_turned_back(option: str) -> None:
    def made(change: Callable[[float], float]) -> tuple[nn.Module, Optimizer]:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.125, momentum=0.125)
        optimizer.register_state_dict_post_hook(
            lambda _, given: given["param_groups"][0].update({option: change(given["param_groups"][0][option])})
        )
        return module, optimizer

    module, optimizer = made(lambda _: 0.5)
    state = TrainingState({"model": module, "optimizer": optimizer}, rng=False)
    state.flatten()
    assert str(state.unsaved.trained).startswith(f"optimizer.param_groups.0.{option} of SGD 0 is trained, and no reg")
    saved = save(model=module, optimizer=optimizer)
    # What the hook gives of the loaded state is what it gave.
    with pytest.raises(StateError, match=rf"optimizer\.param_groups\.0\.{option} of SGD 0 is not what it was, and no"):
        saved.load(model=module, optimizer=optimizer)
    module, optimizer = made(lambda value: 2 * value)
    saved = save(model=module, optimizer=optimizer)
    optimizer.param_groups[0][option] = 0.75
    optimizer.register_load_state_dict_pre_hook(
        lambda _, given: given["param_groups"][0].update({option: given["param_groups"][0][option] / 2})
    )
    saved.load(model=module, optimizer=optimizer)
    assert optimizer.param_groups[0][option] == 0.125


def test_an_option_that_a_hook_changes_later_is_refused_too() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, given: given["param_groups"][0].update(lr=0.1))
    state = TrainingState({"model": module, "optimizer": optimizer}, rng=False)
    optimizer.param_groups[0]["lr"] = 0.05
    state.flatten()
    assert state.unsaved.digests["optimizers"]["optimizer.param_groups.0.lr of SGD 0"] == "float 0.05"
    saved = save(model=module, optimizer=optimizer)
    with pytest.raises(StateError, match=r"optimizer\.param_groups\.0\.lr of SGD 0 is not what it was"):
        saved.load(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.05))


class Noted(torch.optim.Adam):
    """Has plain values and arrays in its state, and may have a method of its own in place of a hook."""

    change: Callable[[Any], Any] | None = None
    arrays = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["number"] = state.get("number", 0) + 1
            if self.arrays:  # which torch's own load_state_dict() cannot take
                state["array"] = np.full(3, state["number"])
            state["nested"] = {"list": [state["number"]]}

    def state_dict(self) -> Any:
        given = super().state_dict()
        return given if self.change is None else self.change(given)


def _changed(key: str, value: Any) -> Callable[[Any], Any]:
    """Return what sets one part of a `state_dict()`, and nothing of the optimizer."""

    def change(given: Any) -> Any:
        if key == "betas":
            return {**given, "param_groups": [{**group, "betas": value} for group in given["param_groups"]]}
        return {**given, "state": {place: {**state, key: value} for place, state in given["state"].items()}}

    return change


@pytest.mark.parametrize(
    ("key", "value", "how"),
    [
        (key, value, how)
        for how in ("hook", "method", "both", "inside")
        for key, value in {
            "number": 0,
            "array": np.zeros(3, np.int64),
            "nested": {"list": [0]},
            "step": torch.tensor(0.0),
            "betas": (0.5, 0.75),
        }.items()
        if (key, how) != ("array", "inside")
    ],
    ids=str,
)
def test_whatever_an_optimizer_does_not_show_as_it_is_is_compared(key: str, value: Any, how: str) -> None:
    """A hook may come after the first capture, and zeros be elsewhere in the state, too."""

    def made(seed: int) -> tuple[nn.Module, Noted, dict[str, Any]]:
        module = model(seed=seed)
        optimizer = Noted(module.parameters(), lr=0.1)
        optimizer.arrays = key == "array"
        objects = {"model": module, "zero": Holder({"zero": torch.tensor(0.0)})}
        return module, optimizer, {**objects, "optimizer": Holding(optimizer) if how == "inside" else optimizer}

    def begin(optimizer: Noted) -> None:
        if how in ("hook", "inside"):
            optimizer.register_state_dict_post_hook(lambda _, given: _changed(key, value)(given))
        else:
            optimizer.change = _changed(key, value)
        if how == "both":
            optimizer.register_state_dict_post_hook(lambda _, given: None)

    module, optimizer, objects = made(1)
    train(module, optimizer, 2)
    state = TrainingState(objects, rng=False)
    state.flatten()
    assert not state.unsaved.digests
    begin(optimizer)
    state.flatten()
    assert key in str(state.unsaved.trained)
    saved = save(**objects)
    for hooked in (True, False):
        _, another, again = made(2)
        if hooked:
            begin(another)
        with pytest.raises(StateError, match=rf"{key}.* is not what it was|was not restored exactly"):
            saved.load(**again)


class Forgetting:
    """Holds an optimizer, and gives its state without the learning rate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        given = self.optimizer.state_dict()
        groups = [{key: value for key, value in group.items() if key != "lr"} for group in given["param_groups"]]
        return {"inner": {**given, "param_groups": groups}}

    def load_state_dict(self, state: Any) -> None:
        groups = [
            {**group, "lr": mine["lr"]}
            for group, mine in zip(state["inner"]["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        self.optimizer.load_state_dict({**state["inner"], "param_groups": groups})


def test_an_option_that_the_object_around_an_optimizer_leaves_out_is_compared() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    train(module, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.05
    objects = {"model": module, "optimizer": Forgetting(optimizer)}
    state = TrainingState(objects, rng=False)
    state.flatten()
    assert "optimizer.param_groups.0.lr of Adam 0 is trained" in str(state.unsaved.trained)
    saved = save(**objects)
    for rate in (0.1, 0.05):
        other = model(seed=2)
        again = {"model": other, "optimizer": Forgetting(torch.optim.Adam(other.parameters(), lr=rate))}
        if rate == 0.05:
            saved.load(**again)
            continue
        with pytest.raises(StateError, match=r"optimizer\.param_groups\.0\.lr of Adam 0 is not what it was"):
            saved.load(**again)


def test_a_pair_of_hooks_that_turn_each_other_back_is_no_loss() -> None:
    """Also while what they change is zero, and the same."""

    def made() -> tuple[nn.Module, Optimizer]:
        module = model()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for factor, register in (
            (2, optimizer.register_state_dict_post_hook),
            (0.5, optimizer.register_load_state_dict_pre_hook),
        ):
            register(  # type: ignore[operator]
                lambda _, given, factor=factor: {
                    **given,
                    "state": {
                        place: {**state, "exp_avg": state["exp_avg"] * factor}
                        for place, state in given["state"].items()
                    },
                }
            )
        return module, optimizer

    for gradients in (torch.zeros_like, torch.ones_like):
        (module, optimizer), (other, another) = made(), made()
        for parameter in module.parameters():
            parameter.grad = gradients(parameter)
        optimizer.step()
        save(model=module, optimizer=optimizer).load(model=other, optimizer=another)
        for one, same in zip(optimizer.state.values(), another.state.values(), strict=True):
            assert torch.equal(one["exp_avg"], same["exp_avg"])


def test_a_hook_that_changes_nothing_needs_none_at_the_restore() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, given: None)
    save(model=module, optimizer=optimizer).load(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5))


def test_masters_that_the_optimizer_has_twice_stay_one() -> None:
    class Listed(Masters):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.listed = [state["master"] for state in self.state.values()]

    before, after = model(torch.bfloat16), model(torch.bfloat16, seed=2)
    one, other = Listed(before.parameters()), Listed(after.parameters())
    train(before, one, 2)
    save(model=before, optimizer=one).load(model=after, optimizer=other)
    for state, listed in zip(other.state.values(), other.listed, strict=True):
        assert listed is state["master"]
        assert listed.dtype is torch.float32


# Wrappers.


class Holder:
    """An object of a script's own."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


class Holding:
    """Holds an optimizer, and gives its state below a name."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return {"inner": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["inner"])


class Flat:
    """torchtitan's OptimizersContainer: one flat dict of all optimizers, made anew at each call."""

    def __init__(self, modules: list[nn.Module], make: Callable[[Any], Optimizer]) -> None:
        self.modules = modules
        self.optimizers = [make(module.parameters()) for module in modules]
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value
            for module, optimizer in zip(self.modules, self.optimizers, strict=True)
            for key, value in get_optimizer_state_dict(module, optimizer, options=self.options).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            set_optimizer_state_dict(module, optimizer, optim_state_dict=state_dict, options=self.options)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    made = nn.Sequential(nn.Flatten(), nn.Linear(75, 5), nn.Linear(5, 2)).to(dtype)
    fully_shard(made[1])
    fully_shard(made)
    return made


class Gathered:
    """Gives what is sharded as a whole, by DCP's functions, which make a list of `betas` when they load."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.parts, self.options = (module, optimizer), StateDictOptions(full_state_dict=True)

    def state_dict(self) -> Any:
        model, optimizer = get_state_dict(*self.parts, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Any) -> None:
        set_state_dict(
            *self.parts,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )
        # As if there were two ranks: of these tensors DCP leaves shards.
        state["model"] = {name: 2 * parameter.detach() for name, parameter in self.parts[0].named_parameters()}


@pytest.mark.usefixtures("process_group")
def test_a_state_that_was_gathered_comes_back_or_is_refused_by_name() -> None:
    def made(kind: str, seed: int) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
        module = sharded(seed=seed)
        optimizer = KINDS[kind](module.parameters())
        return module, optimizer, {"app": Gathered(module, optimizer)}

    for kind in ("sgd", "adamw"):
        module, optimizer, before = made(kind, 1)
        train(module, optimizer, 2)
        saved, (*_, after) = save(**before), made(kind, 2)
        if kind == "sgd":
            saved.load(**after)
            assert_same(before, after)
        else:
            with pytest.raises(StateError, match=r"betas: \(0\.9, 0\.999\) in the checkpoint, \[0\.9, 0\.999\] now"):
                saved.load(**after)


@pytest.mark.parametrize("module", [model, sharded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("process_group")
def test_flat_state_dicts(module: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    before, after = module(dtype), module(dtype, seed=2)
    one, other = (Flat([item], lambda params: torch.optim.AdamW(params, lr=0.1)) for item in (before, after))
    train(before, one, 3)
    for state in one.optimizers[0].state.values():
        # What an optimizer of low precision keeps, and torch would cast.
        state["extra"] = state["exp_avg"].float() / 3
    saved = save(model=before, optimizer=one)
    for optimizer in other.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    **{name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq", "extra")},
                }
    saved.load(model=after, optimizer=other)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})
    train(before, one, 3, first=3)
    train(after, other, 3, first=3)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})


@pytest.mark.parametrize("module", [model, sharded])
@pytest.mark.usefixtures("process_group")
def test_flat_state_dicts_of_fresh_optimizers(module: Callable[..., nn.Module]) -> None:
    before, after = module(), module(seed=2)
    one, other = (Flat([item], lambda params: torch.optim.AdamW(params, lr=0.1)) for item in (before, after))
    train(before, one, 3)
    save(model=before, optimizer=one).load(model=after, optimizer=other)
    train(before, one, 3, first=3)
    train(after, other, 3, first=3)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})


@pytest.mark.usefixtures("process_group")
def test_sharded_fp32_state_of_bf16_shards_stays_fp32() -> None:
    check(lambda params: torch.optim.AdamW(params), torch.bfloat16, sharded)
    before, after = sharded(torch.bfloat16), sharded(torch.bfloat16, seed=2)
    one, other = (torch.optim.AdamW(item.parameters(), foreach=False) for item in (before, after))
    train(before, one, 1)
    for state in one.state.values():
        state["exp_avg"] = state["exp_avg"].float() / 3
    save(model=before, optimizer=one).load(model=after, optimizer=other)
    assert_same({"model": before, "optimizer": one}, {"model": after, "optimizer": other})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("process_group")
def test_post_local_sgd() -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def make(params: Any) -> Any:
        return PostLocalSGDOptimizer(Masters(params), PeriodicModelAverager(period=2, warmup_steps=1))

    check(make, torch.bfloat16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("process_group")
def test_zero_redundancy_is_refused_at_once_and_its_part_works() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model().parameters(), torch.optim.Adam)
    with pytest.raises(StateError, match=r"optimizer: .*ZeroRedundancyOptimizer .*attribute `optim`"):
        TrainingState({"optimizer": optimizer}, rng=False)
    check(lambda params: ZeroRedundancyOptimizer(params, torch.optim.Adam).optim)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    check(lambda params: accelerator.prepare(Masters(params)), torch.bfloat16)


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    fabric = pytest.importorskip("lightning.fabric.wrappers")
    from lightning.fabric.strategies import SingleDeviceStrategy

    class Wrapped(lightning.LightningOptimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            return self._optimizer.step(closure)

        def state_dict(self) -> Any:
            return self._optimizer.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self._optimizer.load_state_dict(state)

    check(lambda params: Wrapped(Masters(params)), torch.bfloat16)
    check(lambda params: fabric._FabricOptimizer(Masters(params), SingleDeviceStrategy()), torch.bfloat16)


class Borrowing(Optimizer):
    """Begins with the attributes of the optimizer inside, so that both have one state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__ = {**vars(optimizer), "inside": optimizer}

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


class Showing(Optimizer):
    """Has nothing of its own and shows what the optimizer inside has, as Lightning's wrapper does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inside = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


class ReadOnly(Optimizer):
    """Shows the groups of the optimizer inside by a property that cannot be set, as Lookahead often does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__ = {**vars(optimizer), "state": {}, "inside": optimizer}

    @property  # type: ignore[override]
    def param_groups(self) -> Any:
        return self.inside.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)

    def state_dict(self) -> Any:
        return self.inside.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inside.load_state_dict(state)


def test_groups_that_a_wrapper_shows_and_cannot_be_set_stay_what_they_are() -> None:
    module = model()
    optimizer = ReadOnly(torch.optim.Adam(module.parameters()))
    groups = list(optimizer.param_groups)
    save(model=module, optimizer=optimizer).load(model=module, optimizer=optimizer)
    assert all(map(operator.is_, optimizer.param_groups, groups))


@pytest.mark.parametrize("wrapper", [Borrowing, ReadOnly, Showing])
def test_a_wrapper_and_its_optimizer_still_have_one_state(wrapper: Callable[[Optimizer], Optimizer]) -> None:
    check(lambda params: wrapper(Masters(params)), torch.bfloat16)
    check(lambda params: wrapper(torch.optim.Adam(params, fused=True)))


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedule_free(name: str) -> None:
    schedulefree = pytest.importorskip("schedulefree")

    def make(params: Any) -> Any:
        made = getattr(schedulefree, name)(params)
        made.train()
        return made

    check(make)
    check(make, torch.bfloat16)


def test_schedule_free_around_any_optimizer() -> None:
    schedulefree = pytest.importorskip("schedulefree")

    def make(params: Any) -> Any:
        made = schedulefree.ScheduleFreeWrapper(torch.optim.SGD(params, lr=0.1), momentum=0.9)
        made.train()
        return made

    check(make, module=functools.partial(model, layout=torch.contiguous_format))


# What optimizers train is known, whoever holds them.


def test_optimizers_are_found_by_what_holds_them() -> None:
    class Engine:
        __slots__ = ("parts",)

    inner = torch.optim.SGD(model().parameters())
    engine = Engine()
    engine.parts = {"one": [(inner,)]}
    assert held_optimizers(engine) == [inner]
    assert held_optimizers(model()) == held_optimizers({"x": 1}) == []
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
    state = TrainingState({"schedule": schedule, "optimizer": inner}, rng=False)
    assert state.optimizers == [inner]


def test_an_optimizer_that_nobody_registered_is_warned_of_once() -> None:
    module = model()
    registered, new = torch.optim.SGD(module[0].parameters()), torch.optim.AdamW(module.parameters())
    state = TrainingState({"model": module, "optimizer": registered}, rng=False)
    assert unregistered(registered, state.objects) is None
    assert unregistered(torch.optim.SGD(model().parameters()), state.objects) is None, "it trains something else"
    watch = Unregistered(lambda: state.objects)
    assert watch.before_step(registered) is None
    told = watch.before_step(new)
    assert told is not None
    assert told.startswith("AdamW steps model.0.weight and 3 more, but no registered object")
    assert watch.before_step(new) is None
    state.replace({"optimizer": new})
    assert state.optimizers == [new]
    assert unregistered(new, state.objects) is None
    watch.forget()
    assert watch.before_step(new) is None


def test_the_wrapper_of_a_registered_optimizer_is_no_stranger() -> None:
    class Sam(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.base = torch.optim.SGD(self.param_groups)

    module = model()
    sam = Sam(module.parameters())
    assert unregistered(sam, {"model": module, "optimizer": sam.base}) is None
    assert unregistered(sam.base, {"model": module, "optimizer": sam}) is None


class Engine:
    """Holds a module and an optimizer, and saves what `saves` makes of the optimizer's state."""

    def __init__(self, module: nn.Module, optimizer: Any, saves: Callable[[Any], Any] = dict) -> None:
        self.module, self.optimizer, self.saves, self.calls = module, optimizer, saves, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"parts": [(self.saves(self.optimizer.state_dict()), self.module.state_dict())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded, module = state["parts"][0]
        self.optimizer.load_state_dict(loaded)
        self.module.load_state_dict(module)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)], [3]
    ),
    "chained": lambda optimizer: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_does_not_keep_its_optimizer(kind: str) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)
    schedule = SCHEDULES[kind](optimizer)
    assert held_optimizers(schedule)[0] is optimizer
    text = unregistered(optimizer, {"model": module, "schedule": schedule})
    assert text is not None
    assert "SGD steps model.0.weight and 3 more, but no registered object keeps its state" in text
    assert unregistered(optimizer, {"model": module, "schedule": schedule, "optimizer": optimizer}) is None


@pytest.mark.usefixtures("process_group")
def test_wrappers_keep_their_optimizer_and_the_schedules_of_wrappers_do_not() -> None:
    accelerate = pytest.importorskip("accelerate")
    schedulefree = pytest.importorskip("schedulefree")
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    fabric = pytest.importorskip("lightning.fabric.wrappers")
    from lightning.fabric.strategies import SingleDeviceStrategy

    module = model()
    inner = torch.optim.AdamW(module.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
    prepared, prepared_schedule = accelerator.prepare(inner, schedule)
    wrappers = [
        prepared,
        lightning.LightningOptimizer(inner),
        fabric._FabricOptimizer(inner, SingleDeviceStrategy()),
        schedulefree.ScheduleFreeWrapper(inner),
        Borrowing(inner),
        Engine(module, inner),
    ]
    for wrapper in wrappers:
        assert unregistered(inner, {"model": module, "wrapper": wrapper}) is None, wrapper
    for wrapper in (schedule, prepared_schedule):
        assert unregistered(prepared, {"model": module, "wrapper": wrapper}) is not None, wrapper
    flat = Flat([module], torch.optim.AdamW)
    train(module, flat, 1)
    assert unregistered(flat.optimizers[0], {"model": module, "wrapper": flat}) is None


def test_what_an_object_keeps_is_asked_once_and_only_of_one_that_holds_the_optimizer() -> None:
    module = model()
    optimizer, other = (torch.optim.SGD(module.parameters()) for _ in range(2))
    keeping = Engine(module, optimizer)
    losing = Engine(module, optimizer, lambda state: {"lr": state["param_groups"][0]["lr"]})
    failing = Engine(module, optimizer, lambda state: state["nothing"])
    stranger = Engine(module, other)
    for engine, kept in ((keeping, True), (losing, False), (failing, True), (stranger, False)):
        assert (unregistered(optimizer, {"model": module, "engine": engine}) is None) == kept
    assert [engine.calls for engine in (keeping, losing, failing, stranger)] == [1, 1, 1, 0]


# The names of parameters, by which their order is known.


def order(state: TrainingState) -> dict[str, Any]:
    return unflatten(entries(state.flatten().node)["order"], lambda index: index)


@pytest.mark.usefixtures("process_group")
def test_parameters_of_no_registered_module_are_named_by_the_leaf_in_their_memory() -> None:
    parts = sharded()
    engine = Engine(parts, torch.optim.SGD(parts.parameters()))
    names = [f"engine.parts.0.1.{key}" for key in parts.state_dict()]
    assert order(TrainingState({"engine": engine}, rng=False)) == {"engine": [names]}
    weights = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(0), torch.ones(0), torch.ones(4)]
    values = {"w": weights[:2], "empty": [item.detach() for item in weights[2:4]], "table": np.ones(3)}
    state = TrainingState({"optimizer": torch.optim.SGD(weights), **values, "blob": b"1" * 2000}, rng=False)
    assert order(state) == {"optimizer": [["values.w.0", "values.w.1", None, None, None]]}


def test_any_of_a_tied_parameters_names_will_do() -> None:
    def make(*paths: str) -> dict[str, Any]:
        weights = [torch.ones(3), torch.zeros(3)]
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer = torch.optim.SGD(weights, momentum=0.9)
        optimizer.step()
        return {"optimizer": optimizer, **dict.fromkeys(paths, weights[0]), "last": weights[1]}

    saved = save(**make("tied"))
    after = make("first", "tied")
    assert order(TrainingState(after, rng=False)) == {"optimizer": [["values.first", "values.last"]]}
    saved.load(**after)


def test_names_follow_a_module_that_took_the_place_of_another() -> None:
    module = model()
    parts = {"model": module, "optimizer": torch.optim.SGD(module.parameters())}
    state = TrainingState(parts, rng=False)
    assert order(state)["optimizer"][0][0] == "model.0.weight"
    state.replace({"model": torch.compile(module, backend="eager")})
    assert order(state)["optimizer"][0][0] == "model._orig_mod.0.weight"

    engine = Engine(module, parts["optimizer"])
    state = TrainingState({"engine": engine}, rng=False)
    assert order(state)["engine"][0][0] == "engine.parts.0.1.0.weight"
    wrapped = Engine(nn.ModuleDict({"inside": module}), parts["optimizer"])
    state.replace({"engine": wrapped})
    assert order(state)["engine"][0][0] == "engine.parts.0.1.inside.0.weight"


def test_leaves_are_searched_for_names_only_when_something_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Any] = []
    monkeypatch.setattr(held, "leaf_paths", lambda node: searches.append(node) or leaf_paths(node))
    module = model()
    state = TrainingState({"engine": Engine(module, torch.optim.Adam(module.parameters()))}, rng=False)
    for _ in range(3):
        state.flatten()
        train(module, state.objects["engine"].optimizer, 1)
    # The states of the parameters, which the second one is the first to have, come before the module.
    assert len(searches) == 2


# Other objects in the place of those that were registered, and more groups.


def test_replacing_needs_objects_of_the_same_names() -> None:
    module = model()
    optimizers = [torch.optim.SGD(module.parameters()) for _ in range(3)]
    state = TrainingState({"optimizers": optimizers[:2], "epoch": 1}, rng=False)
    for wrong in ({"other": optimizers[2]}, {"optimizers": optimizers}, {"epoch": 2}, {"optimizers": 3}):
        with pytest.raises(StateError, match="cannot take the place of"):
            state.replace(wrong)
    state.replace({"optimizers": [optimizers[2], optimizers[1]]})
    assert state.optimizers == [optimizers[2], optimizers[1]]
    state.replace({"optimizers.1": optimizers[0]})
    assert state.optimizers == [optimizers[2], optimizers[0]]


def test_groups_that_were_added_come_back_once_the_script_adds_them() -> None:
    def make(groups: int) -> dict[str, Any]:
        module = model()
        optimizer = torch.optim.Adam(module[0].parameters())
        if groups == 2:
            optimizer.add_param_group({"params": module[2].parameters(), "lr": 0.5})
        return {"model": module, "optimizer": optimizer}

    before = make(2)
    train(before["model"], before["optimizer"], 2)
    saved = save(**before)
    fresh = make(1)
    untouched = copy.deepcopy(fresh["model"].state_dict())
    with pytest.raises(StateError, match=r"nothing was loaded: optimizer: parameter groups of \[2, 2\].*planned_step"):
        saved.load(**fresh)
    assert_same({"model": untouched}, {"model": fresh["model"].state_dict()})
    after = make(2)
    saved.load(**after)
    assert_same(before, after)
