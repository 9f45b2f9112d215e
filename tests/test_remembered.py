"""What a script remembers by itself is seen to change, wherever it is kept; what a checkpoint has is not."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resilient_run.ckpt.integrations import remembered as looks
from resilient_run.ckpt.integrations.remembered import Attributes, Remembered

SCALE = [1.0]
TABLE = {"a": {"b": 1}}
COUNT = 0
DEPRECATED = torch.distributed.reduce_op
"""It warns if it is asked for anything, even its class."""


class Data(Dataset[Any]):
    """Draws from generators of its own."""

    seen = 0

    def __init__(self) -> None:
        self.random = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(1)
        self.history: list[int] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


class Model(nn.Module):
    """Counts its calls inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Counter())
        self.weight = nn.Parameter(torch.ones(2))


class Counter(nn.Module):
    calls = 0

    def forward(self) -> None:
        self.calls = self.calls + 1


def grow() -> None:
    global COUNT
    COUNT += 1


def count_in_class() -> None:
    Data.seen += 1


def collate() -> Callable[[Any], Any]:
    drawn = random.Random(2)

    def collate_items(items: Any) -> Any:
        drawn.random()
        return items

    return collate_items


ROOTS = {
    "collate": collate(),
    "model": Model(),
    "loader": DataLoader(Data(), collate_fn=collate()),
}


@pytest.fixture(autouse=True)
def this_script(only_script: Callable[..., None]) -> None:
    only_script(__name__)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: SCALE.__setitem__(0, SCALE[0] * 1.01), "SCALE[0]"),
        (lambda: TABLE["a"].__setitem__("b", TABLE["a"]["b"] + 1), "TABLE['a']['b']"),
        (grow, "COUNT"),
        (count_in_class, "Data.seen"),
        (lambda: ROOTS["collate"](()), "ROOTS['collate'].drawn"),
        (lambda: ROOTS["model"].inner[0](), "ROOTS['model'].inner.0.calls"),
        (lambda: ROOTS["loader"].collate_fn(()), "ROOTS['loader'].collate_fn.drawn"),
        (lambda: ROOTS["loader"].dataset.random.random(), "ROOTS['loader'].dataset.random"),
        (lambda: ROOTS["loader"].dataset.numpy.random(), "ROOTS['loader'].dataset.numpy"),
        (lambda: torch.rand(1, generator=ROOTS["loader"].dataset.torch), "ROOTS['loader'].dataset.torch"),
        (lambda: ROOTS["loader"].dataset.history.append(1), "ROOTS['loader'].dataset.history"),
    ],
)
def test_a_change_is_seen_and_named(change: Callable[[], Any], name: str) -> None:
    remembered = Remembered({})
    remembered.begin()
    assert remembered.changed() is None
    change()
    assert remembered.changed() == f"{name} changes in training, and no checkpoint has it"


def test_what_a_trainer_holds_is_looked_at_where_no_global_leads_there() -> None:
    data = Data()
    remembered = Remembered({"train_dataset": data})
    remembered.begin()
    data.random.random()
    assert remembered.changed() == "train_dataset.random changes in training, and no checkpoint has it"


def test_what_checkpoints_have_may_change() -> None:
    model = ROOTS["model"]
    remembered = Remembered({"model": model})
    remembered.begin()
    with torch.no_grad():
        model.weight.mul_(2)
    model.eval()
    random.random(), np.random.random(), torch.rand(1)
    assert remembered.changed() is None


def test_what_zero_3_finds_in_each_process_is_left_out() -> None:
    """It notes parameters that a module gives to others, by addresses of the process, in the first forward pass."""
    model: Any = Model()
    model._external_params = {}
    attributes, remembered = Attributes([model], model.modules()), Remembered({"model": model})
    attributes.begin()
    remembered.begin()
    model._external_params[id(model.weight)] = model.weight
    assert all("_external_params" not in nodes for nodes in attributes.state_dict().values())
    assert remembered.changed() is None


def test_more_than_can_be_looked_at_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [[[[number, inner]] for inner in range(64)] for number in range(64)]
    remembered = Remembered({"many": many})
    monkeypatch.setattr(looks, "_OBJECTS", 8000)
    remembered.begin()
    assert "more than 20000 objects" in (remembered.changed() or "")
    remembered = Remembered({"many": many[:60]})
    remembered.begin()
    assert remembered.changed() is None
    remembered._roots["many"].extend(many)
    assert remembered.changed() is not None


def test_it_looks_no_more_often_than_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered, now_s = Remembered({}), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s.__setitem__(0, now_s[0] + 1.0) or now_s[0])
    looks: list[None] = []
    look = remembered._look
    monkeypatch.setattr(remembered, "_look", lambda: looks.append(None) or look())
    remembered.begin()
    for _ in range(240):
        assert remembered.changed() is None
    # Each look seems to take a second: the first two come at once, later ones a hundred seconds after each other.
    assert 1 + 2 + 2 <= len(looks) <= 1 + 2 + 3
