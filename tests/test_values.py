"""Plain values of a script: `restore()` fills what the script already refers to."""

import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from solo_daemon import SoloDaemon, is_committed

from resilient_run.ckpt.checkpointer import Checkpointer


class Script:
    """What a script makes at its start and goes on to use by its own names."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self.seen: defaultdict[str, list[int]] = defaultdict(list)
        self.order: OrderedDict[str, int] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self.average = torch.zeros(300)
        self.table = np.zeros((2, 3))
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.scale], lr=0.5, momentum=0.5)
        self.nested = {"masters": [torch.zeros(4), torch.zeros(())]}

    def values(self) -> dict[str, Any]:
        names = ("history", "seen", "order", "counts", "average", "table", "scale", "nested")
        return {name: getattr(self, name) for name in names}

    def train(self, step: int) -> None:
        self.history.append(step / 3)
        self.seen[f"kind {step % 2}"].append(step)
        self.order[str(-step)] = step
        self.counts["steps"] += 1
        self.average.mul_(0.9).add_(step)
        self.table[step % 2] += step
        for tensor in self.nested["masters"]:
            tensor += step
        self.optimizer.zero_grad()
        (self.scale**2 * step).sum().backward()
        self.optimizer.step()

    def shown(self) -> str:
        return repr((self.values(), self.optimizer.state_dict()))


def test_scripts_that_keep_their_own_references_go_on_with_what_was_restored(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_printoptions(precision=12)
    script = Script()
    with Checkpointer(optimizer=script.optimizer, **script.values()) as ckpt:
        ckpt.restore()
        for step in range(1, 4):
            script.train(step)
            ckpt.step()
            assert is_committed(ckpt)
    restored = script.shown()
    script.train(4)
    daemon.restart(monkeypatch)
    again = Script()
    with Checkpointer(optimizer=again.optimizer, **again.values()) as ckpt:
        assert ckpt.restore() == 3
        assert again.shown() == restored
        for name, value in again.values().items():
            assert ckpt.values[name] is value
        again.train(4)
        assert again.shown() == script.shown()
        ckpt.step()
        assert is_committed(ckpt)


def test_what_is_a_view_or_has_another_form_is_filled_too(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> dict[str, Any]:
        first, second = torch.zeros(2, 3)
        return {
            "rows": torch.zeros(4, 6)[1:3],
            "column": torch.zeros(4, 6)[:, 5],
            "element": torch.zeros(4)[2],
            "transposed": torch.zeros(3, 2).T,
            "first": first,
            "second": second,
            "empty": torch.empty(0),
            "grows": torch.empty(0),
            "table": np.arange(6.0).reshape(2, 3),
            "numpy": torch.zeros(5).numpy(),
            "tuple": (torch.zeros(2), [torch.zeros(2)]),
            "weight": torch.nn.Parameter(torch.zeros(3)),
        }

    values = made()
    with Checkpointer(**values) as ckpt, torch.no_grad():
        ckpt.restore()
        for at, name in enumerate(values):
            if name not in ("tuple", "empty", "grows"):
                values[name] += at + 1
        values["tuple"][0].add_(50)
        values["tuple"][1][0].add_(60)
        values["empty"].data = torch.ones(1)
        values["grows"].data = torch.full((2,), 2.0)
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    again = made()
    with Checkpointer(**again) as ckpt:
        ckpt.restore()
        assert repr(again) == repr(values)
        for name, value in again.items():
            assert ckpt.values[name] is value


class Holder:
    """An object that takes over what it loads, or copies it."""

    def __init__(self, average: torch.Tensor, *, copies: bool) -> None:
        self.average = average
        self._copies = copies

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._copies:
            self.average.copy_(state["average"])
        else:
            self.average = state["average"]


@pytest.mark.parametrize("copies", [True, False])
def test_a_tensor_of_a_value_and_of_an_object_stays_one(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, *, copies: bool
) -> None:
    average = torch.zeros(4)
    with Checkpointer(holder=Holder(average, copies=copies), average=average) as ckpt:
        ckpt.restore()
        average += 3
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    own = torch.zeros(4)
    holder = Holder(own, copies=copies)
    with Checkpointer(holder=holder, average=own) as ckpt:
        if copies:
            ckpt.restore()
            assert holder.average is own
        else:
            with pytest.warns(RuntimeWarning, match=r"could not fill what the script registered as average"):
                ckpt.restore()
        assert holder.average.tolist() == [3, 3, 3, 3]
        assert ckpt.values["average"].data_ptr() == holder.average.data_ptr()


def _of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("registered", [True, False])
def test_a_learning_rate_that_the_script_has_a_name_for_is_filled(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, *, registered: bool
) -> None:
    def made() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        rate = torch.tensor(0.5)
        parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        groups = [{"params": [parameter], "lr": rate} for parameter in parameters]
        return rate, torch.optim.Adam(groups, lr=rate)

    rate, optimizer = made()
    with Checkpointer(optimizer=optimizer, parameters=_of(optimizer), **({"rate": rate} if registered else {})) as ckpt:
        ckpt.restore()
        rate.mul_(0.5)
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    rate, optimizer = made()
    with Checkpointer(optimizer=optimizer, parameters=_of(optimizer), **({"rate": rate} if registered else {})) as ckpt:
        ckpt.restore()
        assert rate.item() == 0.25
        assert all(group["lr"] is rate for group in optimizer.param_groups)
        assert not registered or ckpt.values["rate"] is rate


def test_tensors_in_a_tuple_of_options_are_filled(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        beta = torch.tensor(0.5)
        return beta, torch.optim.Adam(
            [torch.nn.Parameter(torch.zeros(3))], betas=(beta, torch.tensor(0.9)), foreach=False
        )

    beta, optimizer = made()
    with Checkpointer(optimizer=optimizer, parameters=_of(optimizer)) as ckpt:
        ckpt.restore()
        beta.mul_(0.5)
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    beta, optimizer = made()
    with Checkpointer(optimizer=optimizer, parameters=_of(optimizer)) as ckpt:
        ckpt.restore()
        assert beta.item() == 0.25
        assert optimizer.param_groups[0]["betas"][0] is beta


def test_what_is_one_object_under_two_names_and_was_not_is_named(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> dict[str, Any]:
        both: dict[str, int] = {}
        tensor = torch.zeros(3)
        row = [1]
        return {"best": both, "current": both, "one": tensor, "other": tensor[:2], "row": row, "rows": [[0], row]}

    values = made()
    with Checkpointer(**values) as ckpt:
        ckpt.restore()
        values["current"]["x"] = 5
        values["row"].append(2)
        ckpt.values["best"] = {"x": 1}
        ckpt.values["one"] = torch.ones(3)
        values["other"] += 7
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    again = made()
    with Checkpointer(**again) as ckpt:
        with pytest.warns(RuntimeWarning, match=r"registered as current, other: read it from checkpointer\.values"):
            ckpt.restore()
        assert ckpt.values["best"] == {"x": 1}
        assert ckpt.values["current"] == {"x": 5}
        assert ckpt.values["current"] is not ckpt.values["best"]
        assert ckpt.values["one"].tolist() == [1, 1, 1]
        assert ckpt.values["other"].tolist() == [7, 7]
        assert ckpt.values["rows"][1] is ckpt.values["row"] is again["row"]
        assert again["row"] == [1, 2]


def test_what_cannot_be_written_is_left_alone(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def made(*numbers: float) -> torch.Tensor:
        path = tmp_path / f"{len(numbers)}{numbers[0]}"
        path.write_bytes(np.array(numbers).tobytes())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(np.memmap(path, mode="r", dtype=np.float64))

    with Checkpointer(same=made(1.0, 2.0), other=made(3.0, 4.0, 5.0)) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    same, other = made(1.0, 2.0), made(9.0, 9.0, 9.0)
    with Checkpointer(same=same, other=other) as ckpt:
        with pytest.warns(RuntimeWarning, match="registered as other: read it"):
            ckpt.restore()
        assert ckpt.values["same"] is same
        assert ckpt.values["other"].tolist() == [3.0, 4.0, 5.0]


def test_values_that_share_memory_in_the_checkpoint_share_it_again(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = torch.zeros(6)
    with Checkpointer(buffer=buffer, window=torch.zeros(3), kind=[1]) as ckpt:
        ckpt.restore()
        ckpt.values["window"] = buffer[2:5]
        ckpt.values["kind"] = (1, 2)
        buffer += 4
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    with Checkpointer(buffer=torch.zeros(6), window=torch.zeros(3), kind=[1]) as ckpt:
        with pytest.warns(RuntimeWarning, match="registered as buffer, window, kind: read it"):
            ckpt.restore()
        ckpt.values["buffer"] += 1
        assert ckpt.values["window"].tolist() == [5, 5, 5]


class Table(torch.nn.Module):
    """Keeps a numpy array that is its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros(5)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.table)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.table = state.numpy()


def test_what_a_module_takes_over_outlives_the_slot(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Table()
    with Checkpointer(module=module) as ckpt:
        ckpt.restore()
        module.table += 3
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    module = Table()
    with Checkpointer(module=module) as ckpt:
        ckpt.restore()
    others = [np.full(5, 7.0) for _ in range(100)]
    assert module.table.tolist() == [3.0] * len(others[0])


def test_what_shares_memory_or_has_another_form_is_replaced(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 3)
    one, other = torch.arange(3), torch.arange(3) * 2
    with Checkpointer(model=model, same=model.weight, split=model.bias.detach().clone(), one=one, other=other) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    again = torch.nn.Linear(3, 3)
    alone, both, wrong = torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(7)
    with Checkpointer(model=again, same=alone, split=again.bias, one=both, other=both, lost=wrong) as ckpt:
        with (
            pytest.warns(RuntimeWarning, match=r"values\.lost is not in the checkpoint"),
            pytest.warns(RuntimeWarning, match=r"registered as same, split, other: read it"),
        ):
            ckpt.restore()
        assert torch.equal(again.bias, model.bias)
        assert torch.equal(again.weight, model.weight)
        assert ckpt.values["same"].data_ptr() == again.weight.data_ptr()
        assert ckpt.values["split"].data_ptr() != again.bias.data_ptr()
        assert torch.equal(ckpt.values["split"], model.bias)
        assert ckpt.values["one"].tolist() == [0, 1, 2]
        assert ckpt.values["other"].tolist() == [0, 2, 4]
        assert ckpt.values["lost"] is wrong
