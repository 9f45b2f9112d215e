"""Modules that load what has another form than they have decide themselves; what they make of it is compared."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from saved import assert_same, save
from solo_daemon import SoloDaemon, is_committed
from torch import nn
from torch.ao import quantization

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.errors import StateError


class Bank(nn.Module):
    """A memory bank, whose buffer has as many rows as were put into it."""

    def __init__(self, how: str = "resized") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("rows", torch.zeros(0, 4))
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, x.detach()])
        return self.layer(self.rows)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        rows = state_dict[f"{prefix}rows"]
        match self.how:
            case "resized":
                self.rows.resize_(rows.shape)
            case "anew":
                self.rows = torch.empty_like(rows)
            case "cut":
                state_dict = {**state_dict, f"{prefix}rows": rows[:0]}
            case "wrong":
                state_dict = {**state_dict, f"{prefix}rows": rows + 1}
                self.rows = torch.empty_like(rows)
            case "raises":
                raise RuntimeError("rows of other steps")
        super()._load_from_state_dict(state_dict, prefix, *others)


class Late(nn.Module):
    """Makes its buffer in its first forward pass, or when it loads one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().abs().amax(0))
        return x / self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if f"{prefix}scale" in state_dict:
            self.register_buffer("scale", torch.zeros_like(state_dict[f"{prefix}scale"]))
        super()._load_from_state_dict(state_dict, prefix, *others)


def quantized(config: Any) -> nn.Module:
    model = nn.Sequential(
        quantization.QuantStub(), nn.Conv1d(4, 6, 1), nn.Flatten(), nn.Linear(6, 1), quantization.DeQuantStub()
    )
    model.qconfig = config
    quantization.prepare_qat(model.train(), inplace=True)
    return nn.Sequential(nn.Unflatten(1, (4, 1)), model)


def quantized_as(backend: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own defaults
        return quantized(quantization.get_default_qat_qconfig(backend))


class Optional(nn.Module):
    """Has a lazy part that no step has used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.LazyLinear(3), nn.LazyLinear(2)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.used(x))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "fbgemm": lambda: quantized_as("fbgemm"),
    "qnnpack": lambda: quantized_as("qnnpack"),
    "resized": Bank,
    "anew": lambda: nn.Sequential(Bank("anew")),
    "late": lambda: nn.Sequential(nn.Linear(4, 4), Late()),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1)),
    "compiled": lambda: torch.compile(nn.Sequential(nn.LazyLinear(3)), backend="eager"),
    "optional": Optional,
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_that_takes_form_in_its_first_pass_goes_on_bit_by_bit(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And nobody is told that it will be refused."""

    def training() -> dict[str, Any]:
        torch.manual_seed(0)
        model = MODULES[kind]()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()

    before = training()
    with Checkpointer(**before) as ckpt:
        assert ckpt.restore() == 0
        for _ in range(2):
            step(**before)
            ckpt.step()
            assert is_committed(ckpt)
    step(**before)
    daemon.restart(monkeypatch)
    after = training()
    with Checkpointer(**after) as ckpt:
        assert ckpt.restore() == 2
        step(**after)
        ckpt.step()
        assert is_committed(ckpt)
    assert_same(before, after)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_what_no_step_had_has_no_place_in_a_checkpoint() -> None:
    before, after = Optional(), Optional()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (before, after)]
    saved = save(model=before, optimizer=optimizers[0])
    assert saved.load(model=after, optimizer=optimizers[1]) == []
    after(torch.randn(2, 4))
    with pytest.raises(StateError, match=r"nothing was loaded: model\.used\.weight: in the model, but not in the che"):
        saved.load(model=after, optimizer=optimizers[1])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "plain",
            r"model: load_state_dict\(\): .*size mismatch for rows: .*loaded in part.* does not fit: model\.rows: ",
        ),
        ("raises", r"model: load_state_dict\(\): rows of other steps; .*loaded in part.* does not fit: model\.rows: "),
        ("cut", r"was not restored exactly.* model\.rows: float32 \[5, 4\] in the checkpoint, float32 \[0, 4\] now"),
    ],
)
def test_nothing_wrong_is_taken_for_what_was_loaded(monkeypatch: pytest.MonkeyPatch, how: str, message: str) -> None:
    before = Bank()
    before(torch.ones(5, 4))
    with pytest.raises(StateError) as refused:
        save(model=before).load(model=Bank(how))
    assert re.search(message, str(refused.value)), refused.value
    if "does not fit" in message:
        assert "Register the same objects with the same shapes" in str(refused.value)


def test_what_a_module_makes_otherwise_of_what_it_adapts_to_is_put_right() -> None:
    before, after = Bank(), Bank("wrong")
    before(torch.ones(5, 4))
    save(model=before).load(model=after)
    assert after.rows.eq(1).all()


class Renaming(nn.Linear):
    """Has a hook that is called before it loads."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 4)),
        (nn.Sequential(nn.BatchNorm1d(3)), nn.Sequential(nn.BatchNorm1d(4))),
        (nn.Sequential(nn.Linear(2, 3)), nn.Sequential()),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 4)),
        ),
        (nn.Sequential(nn.Linear(2, 3), Renaming(2, 3)), nn.Sequential(nn.Linear(2, 4), Renaming(2, 4))),
    ],
    ids=["plain", "norm", "fewer", "parametrized", "beside"],
)
def test_what_torch_itself_would_refuse_is_refused_before_anything_is_loaded(
    before: nn.Module, after: nn.Module
) -> None:
    kept = {key: value.clone() for key, value in after.state_dict().items()}
    with pytest.raises(
        StateError, match=r"does not fit, nothing was loaded: .* Register the same objects with the same"
    ):
        save(model=before).load(model=after)
    assert all(torch.equal(value, kept[key]) for key, value in after.state_dict().items())
