"""What a restored state is beside its values: one object in several places, how it lies in memory, whose it is."""

import json
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from saved import assert_same, save
from solo_daemon import SoloDaemon
from test_restore import Holder
from torch import nn

from resilient_run import Checkpointer
from resilient_run.ckpt.errors import SlotError, StateError
from resilient_run.ckpt.state.state import TrainingState

Optimizer = torch.optim.Optimizer


class Stateful(Optimizer):
    """An optimizer whose state and options `fill` makes."""

    def __init__(self, params: Any, fill: Callable[["Stateful"], None] = lambda optimizer: None) -> None:
        super().__init__(params, {"lr": 0.1})
        fill(self)


def parts(fill: Callable[[Stateful], None] = lambda optimizer: None) -> tuple[nn.Module, Stateful]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    groups = [{"params": list(layer.parameters())} for layer in model]
    return model, Stateful(groups, fill)


def restored(fill: Callable[[Stateful], None]) -> Stateful:
    """Return an optimizer that took over what `fill` made of another one."""
    model, optimizer = parts(fill)
    saved = save(model=model, optimizer=optimizer)
    model, after = parts()
    assert saved.load(model=model, optimizer=after) == []
    return after


def states(optimizer: Stateful) -> list[dict[str, Any]]:
    return [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def test_a_list_or_dict_in_several_places_stays_one() -> None:
    def fill(optimizer: Stateful) -> None:
        clock, history, deep = {"step": 3}, [1.5], {"inner": [[]]}
        for group in optimizer.param_groups:
            group["clock"] = clock
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {"history": history, "deep": deep, "other": {"step": 3}, "log": [history]}

    after = restored(fill)
    first, second = states(after)[:2]
    assert after.param_groups[0]["clock"] is after.param_groups[1]["clock"]
    assert first["history"] is second["history"] is first["log"][0]
    assert first["deep"] is second["deep"]
    assert first["other"] is not second["other"]
    assert first["log"] is not second["log"]
    first["history"].append(2)
    assert second["history"] == [1.5, 2]


def test_an_array_in_several_places_stays_one_and_lies_as_it_did() -> None:
    def fill(optimizer: Stateful) -> None:
        norm = np.ones(3)
        for parameter in optimizer.param_groups[0]["params"]:
            columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
            turned = np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0)
            gaps = np.arange(12).reshape(3, 4)[:, ::2]
            optimizer.state[parameter] = {"norm": norm, "own": norm.copy(), "in": (columns, 1), "b": [turned, gaps]}

    first, second = states(restored(fill))[:2]
    assert first["norm"] is second["norm"]
    assert first["own"] is not second["own"]
    columns, (turned, gaps) = first["in"][0], first["b"]
    assert columns.flags.f_contiguous
    assert columns.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert turned.strides == np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0).strides
    assert turned.tolist() == np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0).tolist()
    assert gaps.tolist() == [[0, 2], [4, 6], [8, 10]]


@pytest.mark.parametrize(("step", "kept"), [(2, True), (16, True), (40, False)])
def test_a_tensor_with_gaps_lies_as_it_did_unless_they_are_large(step: int, kept: bool) -> None:
    def fill(optimizer: Stateful) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {"x": torch.arange(3 * step, dtype=torch.float32).view(3, step)[:, :1].t()}

    for state in states(restored(fill))[:2]:
        assert state["x"].tolist() == [[0, step, 2 * step]]
        assert state["x"].stride(1) == (step if kept else 1)


def test_keys_keep_their_order() -> None:
    def fill(optimizer: Stateful) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter] = {"name": "x", "b": np.ones(1), "a": torch.ones(1), "in": {"z": "t", "y": 1}}

    for state in states(restored(fill))[:2]:
        assert list(state) == ["name", "b", "a", "in"]
        assert list(state["in"]) == ["z", "y"]


def test_an_optimizer_keeps_the_state_that_it_has_other_names_for() -> None:
    def fill(optimizer: Stateful) -> None:
        members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(members):
            optimizer.state[parameter] = {"m": torch.full_like(parameter, index), "step": torch.tensor(0.0)}
        optimizer.moments = [optimizer.state[parameter]["m"] for parameter in members]

    model, before = parts(fill)
    for index, moment in enumerate(before.moments):
        moment.add_(7 * index)
    saved = save(model=model, optimizer=before)
    model, after = parts(fill)
    saved.load(model=model, optimizer=after)
    assert [state["m"] is moment for state, moment in zip(states(after), after.moments, strict=True)] == [True] * 4
    assert [moment.flatten()[0].item() for moment in after.moments] == [0, 8, 16, 24]


def test_state_that_shares_memory_before_a_restore_and_not_in_the_checkpoint_is_not_mixed_up() -> None:
    def together(optimizer: Stateful) -> None:
        zeros = torch.zeros(3)
        first, second = optimizer.param_groups[0]["params"]
        optimizer.state[first] = {"m": zeros}
        optimizer.state[second] = {"m": zeros, "p": second.data}

    def apart(optimizer: Stateful) -> None:
        first, second = optimizer.param_groups[0]["params"]
        optimizer.state[first] = {"m": torch.ones(3)}
        optimizer.state[second] = {"m": torch.full((3,), 2.0), "p": torch.full((3,), 3.0)}

    model, before = parts(apart)
    saved = save(model=model, optimizer=before)
    bias = model[0].bias.detach().clone()
    model, after = parts(together)
    saved.load(model=model, optimizer=after)
    assert [(name, value[0].item()) for state in states(after)[:2] for name, value in state.items()] == [
        ("m", 1),
        ("m", 2),
        ("p", 3),
    ]
    assert torch.equal(model[0].bias, bias)


def test_what_an_object_makes_two_of_is_told() -> None:
    class Copying(Holder):
        def load_state_dict(self, state: Any) -> None:
            self.held = {key: value.copy() for key, value in state.items()}

    log, table = [1], np.ones(2)
    both = Holder(a=log, b=log, c=table, d=table)
    assert save(object=both).load(object=Holder()) == []
    assert save(object=both).load(object=Copying()) == [
        "object.b: one object with object.a in the checkpoint, two now",
        "object.d: one object with object.c in the checkpoint, two now",
    ]


def test_values_share_their_lists_again() -> None:
    log = [1]
    saved = save(a=log, b={"log": log})
    state: dict[str, Any] = {"a": [0], "b": {}}
    own = state["a"]
    flat = TrainingState(state, rng=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flat.values is not state
    saved.load(**state)
    assert own == [1]
    with pytest.warns(RuntimeWarning, match=r"could not fill what the script registered as b\.log"):
        saved.load(a=[0], b={"log": [0]})


@pytest.mark.parametrize(
    "shared",
    [[[[0], [9]]], [[[0, 0], [2]]], [["x", [1]]], [7], [[[0, 0], [0, 1, 0]]]],
    ids=["nothing there", "other content", "no place", "no places", "too deep"],
)
def test_shared_places_of_a_damaged_manifest_are_refused(shared: Any) -> None:
    log = [1]
    saved = save(object=Holder(a=log, b=log))
    parsed = json.loads(saved.manifest)
    keys, children = parsed["tree"][1], parsed["tree"][2]
    children[keys.index("shared")] = encoded(shared)
    with pytest.raises(SlotError, match="malformed"):
        saved.altered(tree=parsed["tree"]).load(object=Holder())


def encoded(value: Any) -> Any:
    return ["l", *map(encoded, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("view", [lambda p: p.detach().numpy(), lambda p: p.detach().numpy()[1:]], ids=["all", "part"])
def test_an_array_that_is_a_view_of_something_else_is_refused(view: Callable[[torch.Tensor], Any]) -> None:
    def fill(optimizer: Stateful) -> None:
        parameter = optimizer.param_groups[0]["params"][1]
        optimizer.state[parameter] = {"own": np.ones(2), "view": view(parameter)}

    model, optimizer = parts(fill)
    text = r"model\.0\.bias and optimizer\.state\.1\.view share memory, and one is a numpy array.*leave it out"
    for rng in (False, True):
        with pytest.raises(StateError, match=text):
            TrainingState({"model": model, "optimizer": optimizer}, rng=rng).flatten()
    table = np.ones(4)
    with pytest.raises(StateError, match=r"object\.a and object\.b share memory"):
        save(object=Holder(a=table[:3], b=table[1:]))
    # What a script registers as its own is filled where it is.
    save(model=model, table=model[0].bias.detach().numpy(), a=table[:3], b=table[1:])


def test_views_of_arrays_are_found_when_they_come_later() -> None:
    model, optimizer = parts()
    holder = Holder(x=np.ones(3))
    state = TrainingState({"model": model, "optimizer": optimizer, "object": holder}, rng=True)
    for _ in range(2):
        state.flatten()
    holder.held["x"] = model[0].bias.detach().numpy()
    with pytest.raises(StateError, match=r"model\.0\.bias and object\.x share memory"):
        state.flatten()


# What no `state_dict()` says.


def test_the_state_of_an_optimizer_of_another_class_is_refused() -> None:
    def make(kind: type[Optimizer]) -> dict[str, Any]:
        model, _ = parts()
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}

    saved = save(**make(torch.optim.Adam))
    assert saved.load(**make(torch.optim.Adam)) == []
    with pytest.raises(StateError, match="nothing was loaded: optimizer: Adam in the checkpoint, RAdam now"):
        saved.load(**make(torch.optim.RAdam))


def test_what_is_frozen_or_in_evaluation_mode_is_told() -> None:
    def make() -> dict[str, Any]:
        model, optimizer = parts()
        return {"model": model, "optimizer": optimizer}

    before, after = make(), make()
    before["model"][0].requires_grad_(False)
    before["model"].eval()
    after["model"][1].bias.requires_grad_(False)
    saved = save(**before)
    assert saved.load(**after) == [
        "requires_grad of model.0.bias and 2 more was False, is True, and restore() leaves it to the script",
        "training of model and 2 more was False, is True, and restore() leaves it to the script",
    ]
    after["model"].eval().requires_grad_(True)
    after["model"][0].requires_grad_(False)
    assert saved.load(**after) == []


def test_checkpoints_that_do_not_say_it_are_loaded() -> None:
    model, optimizer = parts()
    saved = save(model=model, optimizer=optimizer)
    tree = json.loads(saved.manifest)["tree"]
    at = tree[1].index("outside")
    del tree[1][at], tree[2][at]
    assert saved.altered(tree=tree).load(model=model, optimizer=optimizer) == []


@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, torch.Tensor.round], ids=["dtype", "values"])
def test_a_hook_that_rounds_is_warned_of(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def rounding(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update({key: change(value) for key, value in state.items()})

    def copying(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update({key: value.clone() for key, value in state.items()})

    model, _ = parts()
    state = TrainingState({"model": model}, rng=False)
    model.register_state_dict_post_hook(copying)
    state.flatten()
    assert state.unsaved.trained is None
    model.register_state_dict_post_hook(rounding)
    state.flatten()
    assert state.unsaved.trained is not None
    assert state.unsaved.trained.startswith("model.0.weight is trained, and no registered object's state has it as")
    saved = save(model=model)
    with pytest.raises(
        StateError, match=r"model\.0\.weight is not what it was, and no registered object's state has it"
    ):
        saved.load(model=model)


class Rounding(nn.Linear):
    """Rounds in a method, not in a hook."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key: value.round() for key, value in super().state_dict(*args, **kwargs).items()}


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.t, torch._neg_view, lambda weight: weight.half().numpy()],
    ids=["transposed", "negative", "an array"],
)
def test_a_view_or_an_array_that_a_hook_gives_is_no_parameter(change: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Linear(3, 3, bias=False)
    model.register_state_dict_post_hook(lambda _, state, *__: state.update(weight=change(state["weight"])))
    state = TrainingState({"model": model}, rng=False)
    state.flatten()
    assert state.unsaved.digests["changed"].keys() == {"model.weight"}


@pytest.mark.parametrize("how", ["hook", "method"])
def test_what_a_module_begins_to_give_otherwise_later_is_refused_too(how: str) -> None:
    """As long as there was nothing to round, there was nothing to warn of."""
    model = Rounding(3, 2) if how == "method" else nn.Linear(3, 2)
    if how == "hook":
        model.register_state_dict_post_hook(
            lambda _, state, *__: state.update({key: value.round() for key, value in state.items()})
        )
    with torch.no_grad():
        model.weight.fill_(2)
        model.bias.zero_()
    save(model=model).load(model=model)
    state = TrainingState({"model": model}, rng=False)
    with torch.no_grad():
        model.bias.add_(0.25)
    state.flatten()
    assert state.unsaved.digests["changed"].keys() == {"model.bias"}
    assert state.unsaved.trained is not None
    assert "model.bias is trained, and no registered object's state has it as it is" in state.unsaved.trained


def test_a_hook_that_another_one_turns_back_is_no_loss() -> None:
    """Also of a buffer: what is compared is what training goes on with."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].running_mean.normal_()
        model.register_state_dict_post_hook(lambda _, state, *__: state.update({k: -v for k, v in state.items()}))
        model.register_load_state_dict_pre_hook(lambda _, state, *__: state.update({k: -v for k, v in state.items()}))
        return model

    before, after = made(1), made(2)
    save(model=before).load(model=after)
    for one, other in zip(before.state_dict().values(), after.state_dict().values(), strict=True):
        assert torch.equal(one, other)


class Counting(nn.Module):
    """Has extra state."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = {"steps": [count, torch.tensor(count)]}

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_extra_state_that_a_hook_changes_is_told_and_refused_unless_it_is_turned_back() -> None:
    def counting(change: int) -> nn.Module:
        model = nn.Sequential(Counting(3))
        model.register_state_dict_post_hook(
            lambda _, state, *__: state.update({"0._extra_state": {"steps": [change, torch.tensor(change)]}})
        )
        return model

    save(model=counting(3)).load(model=counting(3))
    state = TrainingState({"model": counting(0)}, rng=False)
    state.flatten()
    assert str(state.unsaved.trained).startswith("model.0._extra_state is trained, and no registered object's state")
    saved = save(model=counting(0))
    with pytest.raises(StateError, match=r"model\.0\._extra_state is not what it was, and no registered"):
        saved.load(model=counting(0))
    turned = counting(0)
    turned.register_load_state_dict_pre_hook(
        lambda _, state, *__: state.update({"0._extra_state": {"steps": [3, torch.tensor(3)]}})
    )
    turned[0].count = None  # type: ignore[assignment]
    saved.load(model=turned)
    assert turned[0].get_extra_state() == {"steps": [3, torch.tensor(3)]}


@pytest.mark.parametrize("renamed", [False, True])
def test_persistent_buffers_that_a_hook_leaves_out_are_refused(renamed: bool) -> None:
    """Those that are not persistent a module makes anew; these it does not."""

    def made() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(3))

        def leave_out(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
            mean = state.pop("0.running_mean").clone()
            if renamed:
                state["mean"] = mean

        model.register_state_dict_post_hook(leave_out)
        model.load_state_dict = partial(model.load_state_dict, strict=False)  # type: ignore[method-assign]
        return model

    model = made()
    state = TrainingState({"model": model}, rng=False)
    state.flatten()
    assert state.unsaved.trained is None
    model[0].running_mean.data.add_(1)  # which torch does not count
    state.flatten()
    assert str(state.unsaved.trained).startswith("model.0.running_mean is trained, and no registered object's state")
    saved = save(model=model)
    with pytest.raises(StateError, match=r"model\.0\.running_mean is not what it was|model\.mean: 1\.0"):
        saved.load(model=made())


def test_a_parameter_that_left_its_module_is_told_and_refused(daemon: SoloDaemon) -> None:
    model, optimizer = parts()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        model[1] = nn.Linear(3, 2)
        text = r"optimizer has the parameter that was model\.1\.weight, and the module another one"
        with pytest.warns(RuntimeWarning, match=text):
            ckpt.step(2)
        ckpt.step(3)
    saved = save(model=model, optimizer=optimizer)
    again, its = parts()
    with pytest.raises(
        StateError, match=r"parameter 0 of group 1 is model\.1\.weight in the optimizer, which had another"
    ):
        saved.load(model=again, optimizer=its)


class Copies:
    """Hands out copies of a module's state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def test_parameters_are_in_order_where_their_owner_hands_out_copies() -> None:
    def make(*places: int) -> dict[str, Any]:
        torch.manual_seed(1)
        layers = [nn.Linear(3, 3) for _ in places]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam([parameter for place in places for parameter in layers[place].parameters()])
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"owner": Copies(model), "optimizer": optimizer}

    saved = save(**make(0, 1, 2))
    saved.load(**make(0, 1, 2))
    text = r"parameter 0 of group 0 is owner\.0\.weight in the checkpoint, owner\.1\.weight in the optimizer"
    with pytest.raises(StateError, match=text):
        saved.load(**make(1, 0, 2))


def test_dicts_of_objects_keep_their_kind() -> None:
    counts: Any = defaultdict(int, {"a": 1})
    nested = {"order": OrderedDict(x=1, y=OrderedDict(z=2)), "counts": counts, "again": counts}
    holder = Holder()
    saved = save(object=Holder(own=nested, lists=defaultdict(list), odd=defaultdict(lambda: 3)), plain=1)
    saved.load(object=holder, plain=1)
    own = holder.held["own"]
    own["order"].move_to_end("x")
    own["order"]["y"].move_to_end("z")
    own["counts"]["new"] += 1
    assert own["again"] is own["counts"] == {"a": 1, "new": 1}
    assert holder.held["lists"]["x"] == []
    assert type(holder.held["odd"]) is dict
    tree = json.loads(saved.manifest)["tree"]
    at = tree[1].index("kinds")
    for wrong in ([["l"]], ["l", ["t", ["l", 9], "OrderedDict"]], ["l", ["t", ["l", 0, 0], "dict_keys"]], 7):
        tree[2][at] = wrong
        with pytest.raises(SlotError, match="malformed"):
            saved.altered(tree=tree).load(object=Holder(), plain=1)


def test_the_state_of_an_object_that_is_a_dict_of_a_kind_keeps_it() -> None:
    class Counts:
        def __init__(self) -> None:
            self.held: Any = defaultdict(int)

        def state_dict(self) -> Any:
            return self.held

        def load_state_dict(self, state: Any) -> None:
            self.held = state

    before, after = Counts(), Counts()
    before.held["a"] += 1
    assert save(counts=before).load(counts=after) == []
    after.held["new"] += 2
    assert after.held == {"a": 1, "new": 2}


class Extra(nn.Module):
    """A module with an extra state, as modules with their own quantization have it."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("fresh", [None, 1.5, torch.zeros(0), torch.zeros(3, dtype=torch.uint8), {"a": torch.ones(2)}])
@pytest.mark.parametrize("kept", [torch.arange(5, dtype=torch.uint8), 3, None, {"a": torch.zeros(7), "b": "x"}])
def test_extra_state_of_another_form_comes_back(fresh: Any, kept: Any) -> None:
    before, after = nn.Sequential(Extra(kept)), nn.Sequential(Extra(fresh))
    state = TrainingState({"model": before}, rng=False)
    before[0].extra = fresh
    state.begin()
    before[0].extra = kept
    state.flatten()
    assert state.changed() is None, "a restarted script need not make it"
    assert save(model=before).load(model=after) == []
    assert_same({"model": before}, {"model": after})


def test_dicts_in_extra_state_keep_their_kind() -> None:
    after = Extra(None)
    save(model=Extra({"order": OrderedDict(x=1, y=2), "counts": defaultdict(int)})).load(model=after)
    after.extra["order"].move_to_end("x")
    after.extra["counts"]["new"] += 1


def test_an_option_that_was_expanded_takes_no_harm() -> None:
    def make(rate: float) -> dict[str, Any]:
        model, optimizer = parts()
        optimizer.param_groups[0]["lr"] = torch.tensor([rate]).expand(3)
        return {"model": model, "optimizer": optimizer}

    after = make(0.2)
    assert save(**make(0.1)).load(**after) == []
    assert_same(make(0.1), after)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Let what is made without a device lie on another one than the CPU, as `torch.set_default_device("cuda")` does."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere")
def test_a_default_device_of_the_script_changes_nothing() -> None:
    def make(fill: float) -> dict[str, Any]:
        model = nn.Linear(2, 2, device="cpu")
        for name in ("kept", "passing"):
            model.register_buffer(name, torch.empty(0, 3, device="cpu"), persistent=name == "kept")
        nn.init.constant_(model.weight, fill)
        return {"model": model, "own": Holder(none=torch.empty(2, 0, device="cpu"), text=b"", array=np.zeros(0))}

    before, after = make(1.0), make(2.0)
    assert save(**before).load(**after) == []
    assert_same(before, after)
    assert after["own"].held["none"].is_cpu


def test_leaves_require_grad_again() -> None:
    held, value = Holder(), [torch.zeros(2, requires_grad=True)]
    saved = save(object=Holder(z=torch.ones(3, requires_grad=True), n=torch.ones(3)), values=[value])
    target: dict[str, Any] = {"object": held, "values": [[]]}
    saved.load(**target)
    assert held.held["z"].requires_grad
    assert held.held["z"].is_leaf
    assert not held.held["n"].requires_grad


@pytest.mark.parametrize("detaches", [False, True])
def test_what_an_object_with_an_optimizer_trains_requires_grad_again(detaches: bool) -> None:
    class Agent:
        """As those of SAC are: the temperature is no parameter of a module, and a restore makes its optimizer anew."""

        def __init__(self) -> None:
            self.load_state_dict({"temperature": torch.ones(1, requires_grad=True)})

        def state_dict(self) -> dict[str, Any]:
            return {"temperature": self.temperature}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.temperature = state["temperature"].detach() if detaches else state["temperature"]
            self.optimizer = torch.optim.SGD([self.temperature], lr=0.1)

    before, after = Agent(), Agent()
    before.temperature.requires_grad_()
    told = save(agent=before).load(agent=after)
    assert after.temperature.requires_grad is not detaches
    assert told == ["agent.temperature: requires_grad was True, is False"] * detaches


def test_a_rate_that_an_object_and_an_optimizer_share_stays_one() -> None:
    def make() -> dict[str, Any]:
        model, _ = parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        return {"own": Holder(lr=optimizer.param_groups[0]["lr"]), "model": model, "optimizer": optimizer}

    before, after = make(), make()
    before["own"].held["lr"].mul_(0.5)
    assert save(**before).load(**after) == []
    assert after["own"].held["lr"] is after["optimizer"].param_groups[0]["lr"]


def test_names_for_groups_and_states_stay_right() -> None:
    model, before = parts(
        lambda optimizer: [optimizer.state[p].update(n=0) for p in optimizer.param_groups[0]["params"]]
    )
    before.param_groups[1]["lr"] = 0.7
    states(before)[0]["n"] = 5
    saved = save(model=model, optimizer=before)
    model, after = parts(
        lambda optimizer: [optimizer.state[p].update(n=0) for p in optimizer.param_groups[0]["params"]]
    )
    groups, group, state = after.param_groups, after.param_groups[1], states(after)[0]
    saved.load(model=model, optimizer=after)
    assert after.param_groups is groups
    assert after.param_groups[1] is group
    assert group["lr"] == 0.7
    assert states(after)[0] is state
    assert state["n"] == 5


def test_states_that_were_one_dict_before_a_restore_are_not_mixed_up() -> None:
    def together(optimizer: Stateful) -> None:
        both = {"n": 0}
        optimizer.state.update(dict.fromkeys(optimizer.param_groups[0]["params"], both))

    def apart(optimizer: Stateful) -> None:
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            optimizer.state[parameter] = {"n": number}

    model, before = parts(apart)
    saved = save(model=model, optimizer=before)
    model, after = parts(together)
    saved.load(model=model, optimizer=after)
    assert [state["n"] for state in states(after)[:2]] == [0, 1]


def test_what_values_and_objects_share_is_told_when_it_comes_apart() -> None:
    log = [1]
    found = save(object=Holder(log=log), values={"log": log}).load(object=Holder(), values={"log": [0]})
    assert found == ["values.values.log: one object with object.log in the checkpoint, two now"]


def test_a_list_of_objects_that_grows_is_told(daemon: SoloDaemon) -> None:
    model, optimizer = parts()
    models, optimizers = [model], {"first": optimizer, "later": None}
    with Checkpointer(models=models, optimizers=optimizers) as ckpt:
        ckpt.restore()
        ckpt.step(1)
        more, its = parts()
        models.append(more)
        with pytest.warns(RuntimeWarning, match="models has other objects than it was registered with"):
            ckpt.step(2)
        optimizers["later"] = its
        models.pop()
        with pytest.warns(RuntimeWarning, match="optimizers has other objects"):
            ckpt.step(3)
        ckpt.step(4)
        optimizers["later"] = None
        models[0], optimizers["first"] = more, its
        ckpt.replace(models=models, **{"optimizers.first": its})
        ckpt.step(5)
        models[0] = None  # type: ignore[call-overload]
        ckpt.step(6)


def test_an_array_that_a_later_tensor_views_is_refused() -> None:
    holder = Holder(x=np.zeros(8))
    state = TrainingState({"object": holder}, rng=False)
    state.flatten()
    holder.held["t"] = torch.from_numpy(holder.held["x"])
    with pytest.raises(StateError, match=r"object\.x and object\.t share memory"):
        state.flatten()


def test_arrays_between_each_other_share_nothing() -> None:
    stats = np.arange(8.0).reshape(4, 2)
    held = Holder()
    save(object=Holder(x=stats[:, 0], y=stats[:, 1])).load(object=held)
    assert held.held["y"].tolist() == [1, 3, 5, 7]
    held.held["y"].resize(9, refcheck=False)
