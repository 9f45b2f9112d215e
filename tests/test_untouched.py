"""A script's tensors are as it left them after every call: nothing refers to them, and nothing about them is fixed."""

import copy
import gc
import io
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from solo_daemon import SoloDaemon, is_committed
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.integrations.common import AfterRestore
from resilient_run.ckpt.integrations.position import _digest
from resilient_run.ckpt.state.state import TrainingState
from resilient_run.ckpt.state.tree import share

LARGE = 20_000


class Model(nn.Module):
    """Has a tensor of every kind: some in its state, some not, some that a hook gives otherwise, large and small."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, LARGE)
        self.norm = nn.BatchNorm1d(4)
        self.base = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("cache", torch.zeros(2, 4), persistent=False)
        self.register_buffer("flags", torch.ones(LARGE * 4, dtype=torch.bool)[::2])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if key != "base"}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.norm(self.small(x))).sum()


class Masters:
    """Are in no module; of one that is frozen it hands out a copy."""

    def __init__(self) -> None:
        self.weight, self.frozen = torch.ones(16, requires_grad=True), torch.zeros(16)
        self.optimizer = torch.optim.Adam([self.weight, self.frozen])

    def state_dict(self) -> dict[str, Any]:
        copied = {"weight": self.weight, "frozen": self.frozen.clone()}
        return copied | {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.data.copy_(state["weight"])
        self.optimizer.load_state_dict(state["optimizer"])


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.masters = Model(), Masters()
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        array = np.zeros(64)
        self.values = {"table": torch.zeros(LARGE), "step": 0, "view": array[2:], "array": array}

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "masters": self.masters, "values": self.values}

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.randn(3, 4)) + self.masters.weight.sum()).backward()
        self.optimizer.step()
        self.masters.optimizer.step()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        masters = [("weight of masters", self.masters.weight), ("frozen of masters", self.masters.frozen)]
        trained = [*self.model.named_parameters(), *masters]
        yield from trained
        yield from self.model.named_buffers()
        yield from ((f"grad of {name}", each.grad) for name, each in trained if each.grad is not None)
        for optimizer in (self.optimizer, self.masters.optimizer):
            for state in optimizer.state.values():
                yield from ((f"state {key}", value) for key, value in state.items() if isinstance(value, torch.Tensor))
        yield "values.table", self.values["table"]


def marks(training: Training) -> list[tuple[Any, ...]]:
    """Return all that one can see of what looks at a tensor, or did; refers to it while it is at it only."""
    return [
        (
            name,
            sys.getrefcount(tensor),
            tensor._use_count(),
            len(weakref.getweakrefs(tensor)),
            tensor.untyped_storage().resizable(),
            tensor._version,
            tensor.requires_grad,
            tensor.is_leaf,
            bool(tensor._backward_hooks),
            bool(getattr(tensor, "_post_accumulate_grad_hooks", None)),
            vars(tensor).keys(),
        )
        for name, tensor in training.tensors()
    ]


def test_after_every_call_tensors_are_as_before(daemon: SoloDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.step()
    gc.disable()  # nor may anything wait for it
    try:
        before = marks(training)
        with Checkpointer(**training.objects()) as ckpt:
            assert marks(training) == before, "the constructor"
            ckpt.restore()
            assert marks(training) == before, "restore() of nothing"
            for _ in range(3):
                training.step()
                before = marks(training)
                ckpt.step()
                assert is_committed(ckpt)
                assert marks(training) == before, "step()"
        assert marks(training) == before, "close()"
        daemon.restart(monkeypatch)
        training = Training()
        training.step()  # an optimizer refers to the parameters that it has a state for
        before = marks(training)
        with Checkpointer(**training.objects()) as ckpt:
            assert ckpt.restore() == 3
            now = {name: rest for name, *rest in marks(training)}
            for name, *rest in before:
                rest[4] = now[name][4]  # it was written
                assert now[name] == rest, f"{name} after restore()"
    finally:
        gc.enable()


def test_what_a_capture_has_while_it_waits_is_let_go_when_it_is_given_up(daemon: SoloDaemon) -> None:
    training = Training()
    daemon.frozen = True  # nothing is committed: from the third step on no slot is free
    with Checkpointer(**training.objects()) as ckpt:
        ckpt.restore()
        for _ in range(4):
            training.step()
            before = marks(training)
            ckpt.step()
            assert ckpt._capturer is not None
            ckpt._capturer.release()
            assert marks(training) == before
        gone = [StorageWeakRef(tensor.untyped_storage()) for tensor in training.model.parameters()]
        for parameter in training.model.parameters():
            parameter.data = torch.zeros(parameter.shape)
        assert all(each.expired() for each in gone)


def swap(training: Training) -> None:
    """As `model.to()` does for parameters of FSDP2, or for all if torch is told to."""
    for name, tensor in list(training.tensors()):
        if not name.startswith("grad"):
            torch.utils.swap_tensors(tensor, copy.deepcopy(tensor))


def resize(training: Training) -> None:
    for _, tensor in training.tensors():
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        storage.resize_(size + 64)
        storage.resize_(size)
    with torch.no_grad():
        training.model.cache.resize_(int(training.model.cache.shape[0]) + 1, 4).zero_()


def free(training: Training) -> None:
    """As FSDP does with the memory of what it gathers, and a script that fills what it uses later."""
    base = training.model.base.untyped_storage()
    kept, size = training.model.base.tolist(), base.nbytes()
    base.resize_(0)
    base.resize_(size)
    training.model.base.data.copy_(torch.tensor(kept))


def duplicate(training: Training) -> None:
    copy.deepcopy((training.model, training.optimizer, training.masters))
    pickle.loads(pickle.dumps(training.model.state_dict()))
    torch.save([training.model.state_dict(), training.optimizer.state_dict()], io.BytesIO())


def share_memory(training: Training) -> None:
    for _, tensor in training.tensors():
        if not tensor.is_shared():
            tensor.share_memory_()


def view(training: Training) -> None:
    views = [tensor.view(-1) for _, tensor in training.tensors() if tensor.is_contiguous()]
    [each.detach() for each in views]


@pytest.mark.filterwarnings("ignore:model.cache changes")
@pytest.mark.parametrize("look", [swap, resize, free, duplicate, share_memory, view])
def test_whatever_a_script_does_to_its_tensors_between_steps_it_can_do(
    daemon: SoloDaemon, look: Callable[[Training], None]
) -> None:
    training = Training()
    with Checkpointer(**training.objects()) as ckpt:
        ckpt.restore()
        for _ in range(3):
            training.step()
            ckpt.step()  # a capture of large leaves is under way; where their memory moves, it is given up
            look(training)
            ckpt.wait()
            look(training)
        training.step()
        ckpt.step()
        assert is_committed(ckpt)


def test_a_tensor_that_is_replaced_is_gone(daemon: SoloDaemon) -> None:
    training = Training()
    with Checkpointer(**training.objects()) as ckpt:
        ckpt.restore()
        for _ in range(2):
            training.step()
            ckpt.step()
            assert is_committed(ckpt)
            gone = [StorageWeakRef(tensor.untyped_storage()) for _, tensor in training.tensors()]
            training.model, training.masters = Model(), Masters()
            training.optimizer = torch.optim.Adam([p for p in training.model.parameters() if p.requires_grad])
            training.values["table"] = torch.zeros(LARGE)
            ckpt.values["values"]["table"] = training.values["table"]
            ckpt.replace(model=training.model, optimizer=training.optimizer, masters=training.masters)
            assert all(each.expired() for each in gone)


def test_a_new_tensor_in_the_memory_of_one_that_is_gone_is_another() -> None:
    """Frozen, and in no state: of the same id, address and version, and hashed again all the same."""
    model = nn.Module()
    model.register_buffer("shift", torch.zeros(LARGE), persistent=False)
    state = TrainingState({"model": model}, rng=False)
    digests = set()
    places = set()
    for number in range(50):
        model.shift = torch.empty(0)
        model.shift = torch.full((LARGE,), float(number))
        state.flatten()
        digests.add(state.unsaved.digests["buffers"]["model.shift"])
        places.add((id(model.shift), model.shift.data_ptr(), model.shift._version))
    assert len(digests) == 50
    assert len(places) < 50, "the heap gave none of them out again, so that this shows nothing"


def test_what_integrations_hash_stays_resizable() -> None:
    model, batch = Model(), torch.zeros(4)
    AfterRestore([model], [], []).put_back()
    _digest(xxhash.xxh3_128(), {"x": [batch]})
    assert all(tensor.untyped_storage().resizable() for tensor in [batch, *model.state_dict().values()])
    tensor, array = torch.zeros(6)[1:4], np.zeros(3)
    assert not share(tensor, array)
    assert tensor.untyped_storage().resizable()


def test_sharded_tensors_are_left_alone(alone: None, daemon: SoloDaemon) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, LARGE), nn.Linear(LARGE, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        ckpt.restore()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            ckpt.step()
            model.to("cpu")
            assert is_committed(ckpt)
            model.to("cpu")
            assert all(not weakref.getweakrefs(each) for each in model.parameters())


def test_no_code_that_looks_at_a_state_makes_what_would_stay() -> None:
    """What there is of numpy's views is of memory of our own, or of the slot's."""
    room = Path(__file__).parent.parent / "ckpt"
    stays = re.compile(r"\.numpy\(\)|weakref\.ref\b|__dlpack__|dlpack|\.register_hook\(|\.retain_grad\(|np\.asarray\(")
    own = re.compile(r"\b(data|target|piece|batch_sampler)\.numpy\(\)|weakref\.ref\[_Draws\]|weakref\.ref\(draws\)")
    paths = [*(room / "state").glob("*.py"), *(room / "integrations").glob("*.py"), room / "capture" / "copying.py"]
    found = [
        f"{path.name}: {line.strip()}"
        for path in paths
        for line in path.read_text().splitlines()
        if stays.search(own.sub("", line)) and "get_state().numpy()" not in line
    ]
    assert found == []
