"""`Checkpointer`: training continues bit by bit, refuses what does not fit, and survives its daemon."""

import threading
import time
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import wait_until
from solo_daemon import SoloDaemon, is_committed
from torch.optim import optimizer as optimizer_module

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.errors import (
    DaemonError,
    MemoryBudgetError,
    RestoreError,
    StateError,
    TopologyError,
)
from resilient_run.ckpt.format.slot import Slot
from resilient_run.ckpt.link import link

Parameters = Any
Optimizer = torch.optim.Optimizer


class _Training:
    """A model with every kind of state: parameters, buffers, dropout, momentum, schedule, average, counters."""

    def __init__(
        self, make_optimizer: Callable[[Parameters], Optimizer], make_schedule: Callable[[Optimizer], Any]
    ) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Dropout(0.3), torch.nn.Linear(9, 1)
        )
        self.optimizer = make_optimizer(self.model.parameters())
        self.schedule = make_schedule(self.optimizer)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.losses: list[float] = []

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "average": self.average}

    def step(self) -> None:
        data = torch.randn(8, 6) + float(np.random.rand())
        self.optimizer.zero_grad()
        loss = self.model(data).square().mean()
        loss.backward()
        self.optimizer.step()
        if isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(loss.item())
        else:
            self.schedule.step()
        self.average.update_parameters(self.model)
        self.losses.append(loss.item())

    def parameters(self) -> list[torch.Tensor]:
        return [tensor.clone() for item in (self.model, self.average) for tensor in item.state_dict().values()]


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw-groups": lambda parameters: torch.optim.AdamW(
        [{"params": tensors[:2], "lr": 0.5}, {"params": tensors[2:]}] if (tensors := list(parameters)) else []
    ),
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    "multistep": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 6]),
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=20, cycle_momentum=False
    ),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "restarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


@pytest.mark.parametrize(("schedule", "optimizer"), [*zip(SCHEDULES, cycle(OPTIMIZERS), strict=False)])
def test_training_continues_bit_by_bit(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, schedule: str, optimizer: str
) -> None:
    """Each schedule once, and each optimizer; `test_restore_optimizers.py` has all kinds of them."""
    make_optimizer, make_schedule = OPTIMIZERS[optimizer], SCHEDULES[schedule]
    torch.manual_seed(1)
    undisturbed = _Training(make_optimizer, make_schedule)
    with Checkpointer(**undisturbed.objects(), seen=0) as ckpt:
        assert ckpt.restore() == 0
        for step in range(1, 6):
            undisturbed.step()
            ckpt.values["seen"] = 8 * step
            ckpt.step(step)
            assert is_committed(ckpt)
    for _ in range(4):
        undisturbed.step()
    daemon.wait_for("complete", step=5)
    daemon.restart(monkeypatch)
    torch.manual_seed(99)
    restored = _Training(make_optimizer, make_schedule)
    with Checkpointer(**restored.objects(), seen=0) as ckpt:
        assert ckpt.restore() == 5
        assert ckpt.values == {"seen": 40}
        for slot in daemon.slots():
            path = slot.path
            slot.close()
            _scribble(path)  # nothing that was loaded may still live in the slot
        for _ in range(4):
            restored.step()
    assert restored.losses == undisturbed.losses[5:]
    for ours, theirs in zip(restored.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert restored.optimizer.state_dict()["param_groups"] == undisturbed.optimizer.state_dict()["param_groups"]
    assert daemon.wait_for("restored", step=5)["seconds"] > 0


def _scribble(path: Path) -> None:
    slot = Slot.open(path, writable=True)
    size = slot.capacity_bytes - slot.payload_offset
    slot.buffer[slot.payload_offset :] = b"\xaa" * size
    slot.close()


def test_ties_stay_ties_and_memory_formats_stay(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    model = Tied()
    with Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters())) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    again = Tied()
    with Checkpointer(model=again, optimizer=torch.optim.SGD(again.parameters())) as ckpt:
        assert ckpt.restore() == 1
    assert again.head.weight is again.embed.weight
    assert again.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_ddp_is_seen_through(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(3, 3)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        with Checkpointer(model=wrapped, optimizer=torch.optim.SGD(wrapped.parameters())) as ckpt:
            ckpt.restore()
            ckpt.step()
            assert is_committed(ckpt)
    finally:
        torch.distributed.destroy_process_group()
    daemon.restart(monkeypatch)
    plain = torch.nn.Linear(3, 3)
    with Checkpointer(model=plain, optimizer=torch.optim.SGD(plain.parameters())) as ckpt:
        assert ckpt.restore() == 1
    assert torch.equal(plain.weight, model.weight)


def test_what_does_not_fit_is_listed_before_anything_is_loaded(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(model=model, optimizer=optimizer, extra=torch.nn.Linear(1, 1)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    changed = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2, dtype=torch.float64))
    changed.register_buffer("added", torch.zeros(1))
    before = [tensor.clone() for tensor in changed.state_dict().values()]
    groups = [{"params": [item]} for item in changed.parameters()]
    values = {"epoch": 3}
    with Checkpointer(model=changed, optimizer=torch.optim.SGD(groups), **values) as ckpt:
        with pytest.raises(StateError, match="nothing was loaded") as caught:
            ckpt.restore()
        text = str(caught.value)
        assert "extra: in the checkpoint, but not registered" in text
        assert "model.0.weight: float32 [3, 2] in the checkpoint, float32 [4, 2] in the model" in text
        assert "and 2 more" in text
        with pytest.raises(StateError, match="before restore"):
            ckpt.step()
        assert ckpt.values == values
    for ours, theirs in zip(before, changed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


class Peaks(Optimizer):
    """Has only plain numbers for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["peak"] = max(state.get("peak", 0.0), float(parameter.grad.norm()))
                parameter.sub_(parameter.grad, alpha=group["lr"] / state["peak"])


ORDERED: dict[str, Callable[[Parameters], Optimizer]] = {
    "tensors": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "plain": Peaks,
    "stateless": lambda parameters: torch.optim.SGD(parameters),
}


class _Ordered:
    """Two layers and an optimizer of their weights, registered in one of several ways."""

    def __init__(self, optimizer: str, order: int) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
        self.optimizer = ORDERED[optimizer](list(self.model.parameters())[::order])

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def registered(self, kind: str) -> dict[str, Any]:
        if kind == "own":
            return {"trainer": self}
        if kind == "values":
            return {"optimizer": self.optimizer, "w": [item.detach() for item in self.model.parameters()]}
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def swap(self) -> None:
        self.model[0], self.model[1] = self.model[1], self.model[0]


@pytest.mark.parametrize("optimizer", ORDERED)
@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("module", r"optimizer: parameter 0 of group 0 is model\.0\.weight in .*, model\.1\.weight in the optimizer"),
        ("own", r"trainer: parameter 0 of group 0 is trainer\.model\.0\.weight in .*, trainer\.model\.1\.weight in"),
        ("values", r"optimizer: parameter 0 of group 0 is values\.w\.0 in .*, values\.w\.1 in the optimizer"),
    ],
    ids=["module", "own", "values"],
)
def test_an_optimizer_with_its_parameters_in_another_order_is_refused(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, optimizer: str, kind: str, refused: str
) -> None:
    training = _Ordered(optimizer, 1)
    with Checkpointer(**training.registered(kind)) as ckpt:
        ckpt.restore()
        training.step()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    training = _Ordered(optimizer, -1)
    before = training.model[0].weight.detach().clone()
    with Checkpointer(**training.registered(kind)) as ckpt:
        if optimizer == "stateless" and kind != "own":
            # Without a state of their own the parameters of a group may have any order; what an object of the script
            # keeps beside an optimizer may be such a state.
            assert ckpt.restore() == 1
            return
        with pytest.raises(StateError, match=rf"nothing was loaded: {refused}"):
            ckpt.restore()
    assert torch.equal(training.model[0].weight, before)
    daemon.restart(monkeypatch, generation=3)
    with Checkpointer(**_Ordered(optimizer, 1).registered(kind)) as ckpt:
        assert ckpt.restore() == 1


@pytest.mark.parametrize("kind", ["module", "own"])
def test_the_order_of_parameters_is_that_of_the_step(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The layers change places at step 2, and before `restore()` again; the optimizer stays what it was."""
    training = _Ordered("tensors", 1)
    with Checkpointer(**training.registered(kind)) as ckpt:
        ckpt.restore()
        for step in range(1, 4):
            if step == 2:
                training.swap()
            training.step()
            ckpt.step(step)
            assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    stale = _Ordered("tensors", 1)
    with Checkpointer(**stale.registered(kind)) as ckpt:
        with pytest.raises(StateError, match=r"parameter 0 of group 0 is (trainer\.)?model\.1\.weight in"):
            ckpt.restore()
        stale.swap()
        assert ckpt.restore() == 3
    for ours, theirs in zip(stale.optimizer.state.values(), training.optimizer.state.values(), strict=True):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


def test_another_number_of_parameter_groups_is_refused(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 3)
    with Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters())) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    groups = [{"params": [item]} for item in model.parameters()]
    with (
        Checkpointer(model=model, optimizer=torch.optim.SGD(groups)) as ckpt,
        pytest.raises(StateError, match=r"groups of \[2\] tensors in the checkpoint, of \[1, 1\]"),
    ):
        ckpt.restore()


def test_another_topology_is_refused(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(x=1) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.plan = wait_until(lambda: daemon.watermark, timeout_s=30, what="a commit")
    daemon.enter(monkeypatch, generation=2, world_size=2)
    with Checkpointer(x=5) as ckpt:
        with pytest.raises(TopologyError, match="1 ranks"):
            ckpt.restore()
        assert ckpt.values == {"x": 5}


def test_a_slot_of_another_step_is_refused(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(x=1) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.plan = (1, 4)
    daemon.enter(monkeypatch, generation=2)
    with Checkpointer(x=1) as ckpt, pytest.raises(RestoreError, match="no copy is left"):
        ckpt.restore()


def test_values_of_every_kind_come_back(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "epoch": 3,
        "names": ["a", ("b", None)],
        "big": b"x" * 100_000,
        "table": np.arange(6.0).reshape(2, 3),
        "tensor": torch.arange(5),
        "nested": {1: {True: 2.5}},
    }
    with Checkpointer(**values) as ckpt:
        ckpt.restore()
        ckpt.step(17)
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    with Checkpointer(epoch=0, rng=False) as ckpt:
        assert ckpt.restore() == 17
        assert ckpt.values.keys() == values.keys()
        for name in ("epoch", "names", "big", "nested"):
            assert ckpt.values[name] == values[name]
        assert np.array_equal(ckpt.values["table"], values["table"])
        assert torch.equal(ckpt.values["tensor"], torch.arange(5))
        ckpt.values["tensor"][0] = 9
        ckpt.step()
        assert is_committed(ckpt)


def test_an_optimizer_made_anew_is_followed(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are unfrozen at step 3: the new optimizer is captured from then on, and made before `restore()` again."""

    def make() -> tuple[torch.nn.Sequential, Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).bfloat16()
        return model, torch.optim.Adam(model[1].parameters(), foreach=False)

    def train(model: torch.nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3).bfloat16()).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        assert ckpt.planned_step == ckpt.restore() == 0
        for step in range(1, 6):
            if step == 3:
                optimizer = torch.optim.Adam(model.parameters(), foreach=False)
                ckpt.replace(optimizer=optimizer)
            train(model, optimizer)
            if step == 5:
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"].float() / 3
            ckpt.step(step)
            assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    again, stale = make()
    with Checkpointer(model=again, optimizer=stale) as ckpt:
        with pytest.raises(StateError, match=r"groups of \[4\] tensors in the checkpoint, of \[2\].*planned_step"):
            ckpt.restore()
        assert ckpt.planned_step == 5
        fresh = torch.optim.Adam(again.parameters(), foreach=False)
        ckpt.replace(optimizer=fresh)
        assert ckpt.restore() == 5
    for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert ours["exp_avg"].dtype is torch.float32
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])


def test_what_does_not_come_back_exactly_ends_the_run(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sampler:
        at, loads = torch.zeros(1), 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "loads": self.loads}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads = state["loads"] + 1

    with Checkpointer(sampler=Sampler()) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    with (
        Checkpointer(sampler=Sampler()) as ckpt,
        pytest.warns(RuntimeWarning, match=r"sampler\.loads: 0 in the checkpoint, 1 now") as caught,
    ):
        assert ckpt.restore() == 1
    assert caught[0].filename == __file__
    daemon.restart(monkeypatch, generation=3)
    late = Sampler()
    late.at = torch.ones(1)
    with Checkpointer(sampler=late) as ckpt:
        with pytest.raises(StateError, match=r"sampler\.at: 0\.0 .* in the checkpoint, 1\.0 .* now"):
            ckpt.restore()
        assert "sampler.at" in daemon.wait_for("refused")["message"]
        with pytest.raises(StateError, match="before restore"):
            ckpt.step()


def test_phases_of_one_process_are_not_taken_for_each_other(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds of a cross-validation: what the first one has made is restored as the first one's, and as no other's."""

    def fold() -> tuple[int, Checkpointer]:
        with Checkpointer(x=torch.zeros(1)) as ckpt:
            first = ckpt.restore()
            for step in range(first, 2):
                ckpt.step(step + 1)
            assert first or is_committed(ckpt)
        return first, ckpt

    assert fold()[0] == 0
    with pytest.warns(RuntimeWarning, match="another Checkpointer of this process has been at work"):
        second = Checkpointer(x=torch.zeros(1))
    assert second.restore() == 0
    assert not second.protected
    second.step()
    second.close()
    daemon.restart(monkeypatch)
    assert fold()[0] == 2
    with pytest.warns(RuntimeWarning, match="another Checkpointer"):
        second = Checkpointer(x=torch.zeros(1))
    assert second.restore() == 0
    second.close()


def test_a_step_before_the_optimizer_s_is_warned_of(daemon: SoloDaemon) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(ckpt: Checkpointer, step: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        ckpt.step(step)
        optimizer.step()

    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        train(ckpt, 1)
        with pytest.warns(
            RuntimeWarning, match=r"outlive step\(2\) .*: call Checkpointer.step\(\) after optimizer.step"
        ):
            train(ckpt, 2)


@pytest.mark.parametrize("zero", ["accumulates", "anew", "in place", "in place, at once"])
def test_gradients_that_outlive_a_step_are_warned_of(daemon: SoloDaemon, zero: str) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt, warnings.catch_warnings(record=True) as caught:
        ckpt.restore()
        warnings.simplefilter("always")
        for step in range(1, 13):
            if zero in {"anew", "in place"}:
                optimizer.zero_grad(set_to_none=zero == "anew")
            model(torch.ones(1, 3)).sum().backward()
            if zero != "accumulates" or step % 4 == 0:
                optimizer.step()
            if zero == "in place, at once":
                optimizer.zero_grad(set_to_none=False)
            if zero == "accumulates" and step % 4 == 0:
                optimizer.zero_grad()
            ckpt.step(step)
    told = [str(item.message) for item in caught if "gradients outlive" in str(item.message)]
    assert len(told) == (zero == "accumulates")
    assert "gradients outlive step(7)" in "".join(told) or zero != "accumulates"


def test_a_closure_that_makes_gradients_is_not_warned_of(daemon: SoloDaemon) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    with Checkpointer(model=model, optimizer=optimizer) as ckpt, warnings.catch_warnings():
        ckpt.restore()
        warnings.simplefilter("error")
        for step in range(1, 5):
            optimizer.step(closure)
            ckpt.step(step)


@pytest.mark.parametrize("zero", ["before", "after"])
def test_gradients_that_another_network_leaves_are_warned_of(daemon: SoloDaemon, zero: str) -> None:
    """Where a generator's loss goes through a discriminator, and that is set to zero only after its own step."""
    generator, discriminator = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, discriminator))
    with (
        Checkpointer(models=[generator, discriminator], optimizers=[ours, theirs]) as ckpt,
        warnings.catch_warnings(record=True) as caught,
    ):
        ckpt.restore()
        warnings.simplefilter("always")
        for step in range(1, 5):
            for optimizer, loss in (
                (theirs, lambda: discriminator(generator(torch.ones(1, 3)).detach())),
                (ours, lambda: -discriminator(generator(torch.ones(1, 3)))),
            ):
                if zero == "before":
                    optimizer.zero_grad()
                loss().sum().backward()
                optimizer.step()
                if zero == "after":
                    optimizer.zero_grad()
            ckpt.step(step)
    told = [str(item.message) for item in caught if "gradients outlive" in str(item.message)]
    assert len(told) == (zero == "after")


@pytest.mark.usefixtures("daemon")
def test_second_restore_is_refused_in_the_first_life_as_it_would_be_after_a_kill() -> None:
    with Checkpointer(x=1) as ckpt:
        assert ckpt.restore() == 0
        with pytest.raises(StateError, match=r"after restore\(\): call it once"):
            ckpt.restore()


def test_steps_count_up(daemon: SoloDaemon) -> None:
    with Checkpointer(x=1) as ckpt:
        ckpt.restore()
        ckpt.step()
        ckpt.step(10)
        ckpt.step()
        for wrong, why in ((11, r"after step\(11\)"), (0, "at least 1"), (-3, "at least 1")):
            with pytest.raises(ValueError, match=rf"^step\({wrong}\).*{why}") as refused:
                ckpt.step(wrong)
            daemon.wait_for("refused", message=str(refused.value))
        with pytest.raises(StateError, match="before the first step"):
            ckpt.restore()
        daemon.wait_for("progress", step=11)


def test_a_step_before_restore_is_refused_in_the_first_life_as_it_would_be_after_a_kill(daemon: SoloDaemon) -> None:
    with Checkpointer(x=1) as ckpt:
        with pytest.raises(
            StateError, match=r"^step\(1\) before restore\(\): .* this run continues from step 0$"
        ) as told:
            ckpt.step()
        daemon.wait_for("refused", message=str(told.value))
        assert ckpt.planned_step == 0, "so a script may leave the call out"
        ckpt.step()
        daemon.wait_for("progress", step=1)


def test_a_step_before_restore_is_refused_at_a_desk_too() -> None:
    with pytest.warns(RuntimeWarning, match="no checkpoints are kept"):
        ckpt = Checkpointer(x=1)
    with pytest.raises(StateError, match=r"^step\(1\) before restore\(\)"):
        ckpt.step()


def test_what_ends_the_script_is_told_by_its_digest(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(step: int, text: str) -> Any:
        with Checkpointer(x=1) as ckpt:
            ckpt.restore()
            ckpt.step(step)
            raise KeyError(text)

    told = []
    for step, text in enumerate(("a", "a", "two\nlines, and \ud800"), start=3):
        with pytest.raises(KeyError):
            train(step, text)
        told.append(daemon.wait_for("raised", step=step)["digest"])
        monkeypatch.setenv("RESILIENT_GENERATION", str(step))
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_steps_in_any_mode_of_torch_are_captured(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, mode: Callable[[], Any]
) -> None:
    model = torch.nn.Linear(200, 200)
    with Checkpointer(model=model, table=np.arange(5)) as ckpt:
        ckpt.restore()
        with mode():
            ckpt.step()
        ckpt.step()
        assert is_committed(ckpt)
        assert ckpt.stats.discarded == 0
    daemon.restart(monkeypatch)
    again = torch.nn.Linear(200, 200)
    with Checkpointer(model=again, table=np.zeros(5, dtype=np.int64)) as ckpt:
        assert ckpt.restore() == 2
        assert np.array_equal(ckpt.values["table"], np.arange(5))
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)


def test_a_step_is_any_integer_and_nothing_else(daemon: SoloDaemon) -> None:
    with Checkpointer(model=torch.nn.Linear(2, 3)) as ckpt:
        ckpt.restore()
        for wrong in (0.5, "1", torch.tensor(1.0)):
            with pytest.raises(TypeError, match=r"step\(.*\): n is the number of completed steps") as refused:
                ckpt.step(wrong)  # type: ignore[arg-type]
            assert refused.value.__context__ is None, "what is shown once, last, is nothing but the refusal"
        ckpt.step(np.int64(1))  # type: ignore[arg-type]
        ckpt.step(torch.tensor(2))  # type: ignore[arg-type]
        assert is_committed(ckpt)
    daemon.wait_for("progress", step=2)


def test_unsupported_state_is_refused_at_once(daemon: SoloDaemon) -> None:
    with pytest.raises(StateError, match=r"values\.bad\.0: values of type builtins\.set"):
        Checkpointer(bad=[{1}])
    assert not any(message["op"] == "attach" for message in daemon.seen)


# Daemons that are not there, refuse, or go away.


def test_without_resilient_run_it_warns_once_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENT_SOCKET", raising=False)
    with pytest.warns(RuntimeWarning, match="resilient-run") as caught:
        ckpt = Checkpointer(x=1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with ckpt:
        assert ckpt.restore() == 0
        ckpt.step()
        ckpt.step(5)
        with pytest.raises(ValueError, match="must increase"):
            ckpt.step(5)
        assert not ckpt.wait()
        assert ckpt.watermark is None
        assert ckpt.stats.captures == 0
    ckpt.close()


def test_an_incomplete_environment_is_an_error(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENT_RUN_ID")
    with pytest.raises(DaemonError, match="RESILIENT_RUN_ID"):
        Checkpointer(x=1)


def test_without_a_daemon_the_first_generation_warns_and_a_later_one_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.0)
    nobody = SoloDaemon(tmp_path)
    nobody.enter(monkeypatch)
    with pytest.warns(RuntimeWarning, match="no daemon at") as caught:
        ckpt = Checkpointer(x=1)
    assert caught[0].filename == __file__
    assert ckpt.restore() == 0
    ckpt.step()
    ckpt.close()
    nobody.enter(monkeypatch, generation=2)
    with pytest.raises(DaemonError, match="no daemon at"):
        Checkpointer(x=1)


def test_a_daemon_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = SoloDaemon(tmp_path)
    late.enter(monkeypatch)
    timer = threading.Timer(0.3, late.start)
    timer.start()
    with Checkpointer(x=1) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    timer.join()
    late.stop()


def test_a_job_that_does_not_fit_in_memory_is_refused_before_it_starts(daemon: SoloDaemon) -> None:
    daemon.refuse["attach"] = ("MemoryBudgetError", "2 x 16 GiB needed, 8 GiB free")
    with pytest.raises(MemoryBudgetError, match="16 GiB"):
        Checkpointer(x=1)
    daemon.refuse = {"allocate": ("MemoryBudgetError", "2 x 17 GiB needed")}
    with Checkpointer(x=1) as ckpt:
        ckpt.restore()
        with pytest.raises(MemoryBudgetError, match="17 GiB"):
            ckpt.step()


def test_the_estimate_counts_the_optimizer_state_to_come(daemon: SoloDaemon) -> None:
    model = torch.nn.Linear(100, 100)
    with Checkpointer(model=model, optimizer=torch.optim.Adam(model.parameters()), rng=False) as ckpt:
        ckpt.restore()
        estimate_bytes = daemon.wait_for("attach")["estimate_bytes"]
        assert estimate_bytes == 3 * 10_100 * 4
        model(torch.randn(1, 100)).sum().backward()
        ckpt._state.optimizers[0].step()
        ckpt.step()
        assert is_committed(ckpt)
        assert 0 <= ckpt.stats.bytes - estimate_bytes < 1000


@pytest.mark.parametrize(
    ("name", "options", "tensors"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
        ("Adam", {"amsgrad": True}, 3),
        ("Adagrad", {}, 1),
        ("Adafactor", {}, 0),
    ],
)
def test_the_estimate_is_of_what_the_kind_of_optimizer_keeps(
    daemon: SoloDaemon, name: str, options: dict[str, Any], tensors: int
) -> None:
    model = torch.nn.Linear(100, 100)
    model.bias.requires_grad_(False)
    optimizer = getattr(torch.optim, name)([model.weight], lr=0.1, **options)
    with Checkpointer(model=model, optimizer=optimizer, rng=False) as ckpt:
        estimate_bytes = daemon.wait_for("attach")["estimate_bytes"]
        assert (estimate_bytes - 400) // 40_000 == 1 + tensors
        ckpt.restore()
        model(torch.randn(1, 100)).sum().backward()
        optimizer.step()
        ckpt.step()
        assert is_committed(ckpt)
        assert 0 <= ckpt.stats.bytes - estimate_bytes < 1000


def test_training_survives_the_daemon(daemon: SoloDaemon, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(ckpt: Checkpointer) -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        ckpt.step()

    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        train(ckpt)
        assert is_committed(ckpt)
        daemon.stop()
        for _ in range(5):
            train(ckpt)
        daemon.seen.clear()
        daemon.start()
        assert daemon.wait_for("attach")["rank"] == 0
        assert daemon.wait_for("allocate")
        daemon.wait_for("complete", step=2)
        wait_until(lambda: ckpt.watermark == (1, 2), timeout_s=30, what="the news of the commit")
        train(ckpt)
        assert is_committed(ckpt)
        daemon.wait_for("complete", step=7)
    assert "training goes on" in caplog.text
    assert daemon.watermark == (1, 7)


def test_a_daemon_that_lost_its_slots_gets_new_ones(daemon: SoloDaemon) -> None:
    with Checkpointer(x=torch.zeros(1000)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        daemon.stop()
        for slot in daemon.slots():
            slot.path.unlink()
        daemon.seen.clear()
        daemon.start()
        daemon.wait_for("allocate")
        ckpt.step()
        assert is_committed(ckpt)
        daemon.wait_for("complete", step=2)
        assert [slot.verify().step for slot in daemon.slots() if slot.state() == "COMPLETE"] == [2]


def test_a_request_under_way_is_repeated_to_the_next_daemon(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(x=7) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    handle = SoloDaemon._handle
    asked = threading.Event()

    def hang_up(self: SoloDaemon, rank: int, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] == "restore" and not asked.is_set():
            asked.set()
            raise ConnectionAbortedError
        return handle(self, rank, message)

    monkeypatch.setattr(SoloDaemon, "_handle", hang_up)
    with Checkpointer(x=0) as ckpt:
        assert ckpt.restore() == 1
        assert ckpt.values == {"x": 7}
        assert asked.is_set()


def test_a_daemon_that_does_not_read_stops_nobody(daemon: SoloDaemon) -> None:
    with Checkpointer(x=1) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
        with daemon.changed:  # its threads now wait, and read nothing more
            for _ in range(3000):
                ckpt.step()
        deadline_s = time.monotonic() + 60
        while not ckpt.wait(0.02):  # captures come back while training goes on
            ckpt.step()
            assert time.monotonic() < deadline_s, "no capture since the daemon reads again"


def test_hooks_threads_and_connections_end_with_it(daemon: SoloDaemon) -> None:
    hooks = len(optimizer_module._global_optimizer_pre_hooks)
    threads = threading.active_count()
    ckpt = Checkpointer(x=1)
    ckpt.restore()
    ckpt.step()
    assert len(optimizer_module._global_optimizer_pre_hooks) == hooks + 1
    ckpt.close()
    ckpt.close()
    assert len(optimizer_module._global_optimizer_pre_hooks) == hooks
    with daemon.changed:
        assert daemon.changed.wait_for(lambda: not daemon._connections, 30)
    assert not any(thread.name.startswith("resilient") for thread in threading.enumerate())
    assert threading.active_count() <= threads + 2


class _Stages:
    """An object that makes its optimizer anew when training unfreezes a part, and when it loads."""

    def __init__(self, parts: torch.nn.ModuleList) -> None:
        self.parts = parts
        self.enter(0)

    def enter(self, stage: int) -> None:
        self.stage = stage
        self.optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in list(self.parts)[1 - stage :]])

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.enter(state["stage"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_an_optimizer_that_its_object_makes_anew_comes_back(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a step before or after the change was kept: what the former optimizer had is of no use any more."""
    for life in range(2):
        stages = _Stages(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]))
        with Checkpointer(parts=stages.parts, stages=stages) as ckpt:
            start = ckpt.restore()
            assert (start, stages.stage) == (2 * life, life)
            for step in (start, start + 1):
                if step == 1:
                    stages.enter(1)
                stages.parts[1](stages.parts[0](torch.ones(2))).sum().backward()
                stages.optimizer.step()
                ckpt.step(step + 1)
                assert is_committed(ckpt)
        daemon.restart(monkeypatch)
