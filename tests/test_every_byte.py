"""Every dtype comes back with the bytes that `step()` saw, whatever they are: torch's copies change those of flags."""

from typing import Any

import numpy as np
import pytest
import torch
from solo_daemon import SoloDaemon, is_committed
from torch import nn

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.format.manifest import ITEM_BYTES

LARGE = 1 << 17  # bytes: read behind training
SMALL = 1 << 11
PATTERNS = {
    "zeros": lambda n: np.zeros(n, np.uint8),
    "ones": lambda n: np.ones(n, np.uint8),
    "0x80": lambda n: np.full(n, 0x80, np.uint8),
    "random": lambda n: np.random.default_rng(0).integers(0, 256, n, np.uint8),
    "all": lambda n: np.arange(n).astype(np.uint8),
    "heap": lambda n: np.full(n, 193, np.uint8),
}


def made(dtype: torch.dtype, pattern: str, size: int) -> torch.Tensor:
    return torch.from_numpy(PATTERNS[pattern](size)).view(dtype)


def every(dtype: torch.dtype, size: int) -> dict[str, torch.Tensor]:
    return {pattern: made(dtype, pattern, size) for pattern in PATTERNS}


def strided(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As `[::2]` makes them: each of its elements lies apart, and they are copied one by one."""
    return {f"{name} strided": each.view(2, -1).t()[:, 0] for name, each in every(dtype, SMALL).items()} | {
        f"{name} turned": each.view(2, -1).t() for name, each in every(dtype, SMALL).items()
    }


def content(tensor: torch.Tensor) -> bytes:
    """Without a copy by torch: one byte of each element after the other."""
    plain = tensor.detach()
    memory = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    there = np.lib.stride_tricks.as_strided(
        memory.numpy()[plain.storage_offset() * plain.element_size() :],
        (*plain.shape, plain.element_size()),
        (*(step * plain.element_size() for step in plain.stride()), 1),
    )
    return there.tobytes()


class Ring:
    """Copies what it is given, as replay buffers do."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [self.tensors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state["nested"][0].items():
            self.tensors[name].copy_(tensor)


class Kept:
    """Takes what it is given."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = dict(state)


class Training:
    def __init__(self, dtype: torch.dtype, *, fresh: bool) -> None:
        self.tensors = {
            "module": every(dtype, SMALL) | {f"{name} large": each for name, each in every(dtype, LARGE).items()},
            "strided": strided(dtype),
            "ring": every(dtype, SMALL) | {"large": made(dtype, "all", LARGE)},
            "kept": every(dtype, SMALL) | strided(dtype),
            "values": every(dtype, LARGE) | strided(dtype),
            "optimizer": every(dtype, SMALL),
        }
        if fresh:
            for tensors in self.tensors.values():
                for tensor in tensors.values():
                    tensor.untyped_storage().fill_(0)
        self.module = nn.Module()
        for name, tensor in {**self.tensors["module"], **self.tensors["strided"]}.items():
            self.module.register_buffer(name, tensor)
        weight = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([weight], lr=0.1)
        self.module.weight = weight
        self.optimizer.state[weight] = {} if fresh else dict(self.tensors["optimizer"])
        self.ring, self.kept = Ring(self.tensors["ring"]), Kept(self.tensors["kept"])
        self.arrays = (
            {}
            if dtype is not torch.bool
            else {name: np.zeros(SMALL, bool) if fresh else PATTERNS[name](SMALL).view(bool) for name in PATTERNS}
        )

    def objects(self) -> dict[str, Any]:
        values = {"values": self.tensors["values"], "arrays": self.arrays}
        objects = {"module": self.module, "optimizer": self.optimizer, "ring": self.ring, "kept": self.kept}
        return objects | values

    def contents(self) -> dict[str, bytes]:
        state = next(iter(self.optimizer.state.values()))
        return {
            f"{part}: {name}": content(tensor)
            for part, tensors in {
                "module": dict(self.module.named_buffers()),
                "ring": self.ring.tensors,
                "kept": self.kept.held,
                "values": self.tensors["values"],
                "optimizer": state,
            }.items()
            for name, tensor in tensors.items()
        } | {f"array {name}": array.tobytes() for name, array in self.arrays.items()}


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning", "ignore:Casting complex values:UserWarning")
@pytest.mark.parametrize("name", ITEM_BYTES)
def test_every_byte_comes_back(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dtype = getattr(torch, name)
    before = Training(dtype, fresh=False)
    expected = before.contents()
    with Checkpointer(**before.objects()) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    assert before.contents() == expected, "a capture changes nothing"
    daemon.restart(monkeypatch)
    after = Training(dtype, fresh=True)
    with Checkpointer(**after.objects()) as ckpt:
        assert ckpt.restore() == 1
    found = after.contents()
    assert found.keys() == expected.keys()
    assert [place for place in expected if found[place] != expected[place]] == []


def test_flags_that_an_object_loads_wrong_are_no_less_refused(
    daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resilient_run.ckpt.errors import StateError

    class Negating(Ring):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            for name, tensor in state["nested"][0].items():
                self.tensors[name].copy_(~tensor)

    with Checkpointer(ring=Negating(every(torch.bool, SMALL))) as ckpt:
        ckpt.restore()
        ckpt.step()
        assert is_committed(ckpt)
    daemon.restart(monkeypatch)
    with (
        Checkpointer(ring=Negating(every(torch.bool, SMALL))) as ckpt,
        pytest.raises(StateError, match="was not restored exactly"),
    ):
        ckpt.restore()
