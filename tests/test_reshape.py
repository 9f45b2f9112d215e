"""What a rank makes of the slots of another number of ranks: bit for bit what their export has, or a refusal."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_ranks import (
    Holders,
    capture,
    fsdp,
    fsdp_with_tp,
    hsdp,
    objects,
    part_of,
    rank_of,
    replicated,
    train,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from resilient_run.ckpt.convert.captures import of_slots
from resilient_run.ckpt.convert.export import gather
from resilient_run.ckpt.errors import RestoreError, SlotError, StateError
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot
from resilient_run.ckpt.integrations.position import ResumableLoader
from resilient_run.ckpt.state.flat import FLAT, Range, Ranges, description, encode, parse
from resilient_run.ckpt.state.state import TrainingState, get_rng, set_rng

Registered = Callable[[int, int], dict[str, Any]]
"""Returns what a rank of so many registers."""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Holders]]:
    """Return a function that captures the state of all ranks, which one host has then."""
    all_: list[Holders] = []

    def make(register: Registered, ranks: int, *, rng: bool = False) -> Holders:
        slots = {}
        for rank in range(ranks):
            with rank_of(rank, ranks):
                state = TrainingState(register(rank, ranks), rng=rng)
                slots[rank] = capture(tmp_path / f"{len(all_)}.{rank}", state, rank=rank, world_size=ranks)
        all_.append(Holders({"a": slots}))
        return all_[-1]

    yield make
    for holders in all_:
        holders.close()


def assert_has(live: Any, saved: Any, path: str = "") -> None:
    """Check that every tensor of `live` is this rank's part of the whole one in `saved`, as torch shares it out."""
    if isinstance(saved, dict):
        assert live.keys() == saved.keys(), path
        for key, item in saved.items():
            assert_has(live[key], item, f"{path}.{key}")
    elif isinstance(saved, list | tuple):
        assert len(live) == len(saved), path
        for number, item in enumerate(saved):
            assert_has(live[number], item, f"{path}.{number}")
    elif isinstance(live, DTensor):
        part = part_of(saved, live)
        assert live.dtype == part.dtype, path
        assert torch.equal(live.to_local(), part), path
    elif isinstance(saved, torch.Tensor):
        assert live.dtype == saved.dtype, path
        assert torch.equal(live, saved), path
    else:
        assert live == saved, path


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3), (3, 4), (1, 4)])
@pytest.mark.parametrize("kind", [fsdp, hsdp, fsdp_with_tp, replicated])
def test_each_rank_has_its_part_of_what_all_had(
    made: Callable[..., Holders], kind: Callable[[int, int], nn.Module], before: int, after: int
) -> None:
    def trained(rank: int, ranks: int) -> dict[str, Any]:
        held = objects(kind, 3, ranks)
        train(held)
        return {**held, "epoch": 4, "weights": np.arange(3)}

    holders = made(trained, before)
    whole = gather(of_slots(list(holders.slots["a"].values())))
    for rank in range(after):
        with rank_of(rank, after):
            held = objects(kind, 5, after)
            state = TrainingState({**held, "epoch": 0, "weights": None}, rng=False)
            told = holders.load(state, rank, after, before)[0].told
            assert_has(
                {name: dict(item.state_dict()) for name, item in held.items()}, {name: whole[name] for name in held}
            )
            assert (state.values["epoch"], state.values["weights"].tolist()) == (4, [0, 1, 2])
            assert not told


def test_only_what_a_rank_needs_is_read(made: Callable[..., Holders]) -> None:
    """Of 4 ranks, 3 read a third of the state each, in whole chunks, and nothing to compare ranks."""

    def register(rank: int, ranks: int) -> dict[str, Any]:
        held = objects(lambda seed, _: wide(seed, ranks), 3, ranks)
        train(held, 1)
        return held

    def wide(seed: int, ranks: int) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))
        return fully_shard(layers, mesh=init_device_mesh("cpu", (ranks,)))

    holders = made(register, 4)
    heads = sum(slot.header().payload_offset for slot in holders.slots["a"].values())
    for rank in range(3):
        with rank_of(rank, 3):
            state = TrainingState(objects(lambda seed, _: wide(seed, 3), 5, 3), rng=False)
            result, captures = holders.load(state, rank, 3, 4)
            # Six tensors, each of which may begin and end within a chunk of each of two ranks.
            assert captures.read_bytes <= heads + len(result.payload) + 6 * 4 * CHUNK_BYTES


class Schedules:
    """Schedules in a container that yields them, as torchtitan has."""

    def __init__(self, schedule: Any) -> None:
        self.schedules = [schedule]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.schedules)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.schedules[0].state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedules[0].load_state_dict(state)


def test_a_container_of_schedules_is_no_loader(made: Callable[..., Holders]) -> None:
    def register(rank: int, ranks: int) -> dict[str, Any]:
        held = objects(replicated, 3, ranks)
        train(held)
        return {**held, "schedule": Schedules(held["schedule"])}

    holders = made(register, 2)
    held = objects(replicated, 5, 1)
    container = Schedules(held["schedule"])
    holders.load(TrainingState({**held, "schedule": container}, rng=False), 0, 1, 2)
    assert container.schedules[0].last_epoch == 3


def test_generators_are_a_ranks_own_or_derived(made: Callable[..., Holders]) -> None:
    def seeded(rank: int, ranks: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        return {"epoch": 1}

    before = get_rng()
    try:
        holders = made(seeded, 2, rng=True)
        drawn = []
        for rank in range(4):
            told = holders.load(TrainingState({"epoch": 0}, rng=True), rank, 4, 2)[0].told
            assert told == [
                "ranks from 2 on are new, and their random number generators begin with what is derived from those of "
                "rank 0"
            ]
            drawn.append((torch.rand(1).item(), np.random.rand()))
        again = holders.load(TrainingState({"epoch": 0}, rng=True), 3, 4, 2)
        assert (torch.rand(1).item(), np.random.rand()) == drawn[3]
        assert len({torch_ for torch_, _ in drawn}) == 4
        assert again
        for rank in range(2):
            torch.manual_seed(rank)
            assert torch.rand(1).item() == drawn[rank][0]
    finally:
        set_rng(before)


@pytest.mark.parametrize("digests", [4096, 2])
def test_buffers_that_differ_are_the_lowest_ranks(
    made: Callable[..., Holders], monkeypatch: pytest.MonkeyPatch, digests: int
) -> None:
    # With few digests, each is of parameters and buffers.
    monkeypatch.setattr("resilient_run.ckpt.format.digests.MAX_DIGESTS", digests)

    def register(rank: int, ranks: int) -> dict[str, Any]:
        held = objects(replicated, 3, ranks)
        held["model"](torch.full((3, 6), float(rank + 1)))
        return held

    holders = made(register, 3)
    held = objects(replicated, 5, 2)
    told = holders.load(TrainingState(held, rng=False), 1, 2, 3)[0].told
    expected = gather(of_slots(list(holders.slots["a"].values())))["model"]
    assert_has(dict(held["model"].state_dict()), expected)
    assert len(told) == 1
    assert "model.1.running_mean" in told[0]
    assert "what rank 0 had" in told[0]


class Own:
    """What ranks have for themselves."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "tensor": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Shared(Own):
    """What ranks have for themselves and can share out."""

    def reshard(self, states: dict[int, Any], rank: int, world_size: int) -> dict[str, Any]:
        at = sum(state["at"] for state in states.values()) + 100 * rank + world_size
        assert [state["tensor"].item() for state in states.values()] == [state["at"] for state in states.values()]
        return {"at": at, "tensor": torch.tensor([at])}


def test_an_object_shares_out_what_ranks_have_for_themselves(made: Callable[..., Holders]) -> None:
    holders = made(lambda rank, _: {"own": Shared(rank + 1)}, 3)
    own = Shared(0)
    holders.load(TrainingState({"own": own}, rng=False), 1, 2, 3)
    assert own.at == 6 + 100 + 2


class Failing(Own):
    def reshard(self, states: dict[int, Any], rank: int, world_size: int) -> dict[str, Any]:
        raise KeyError("boom")


class Apart(Own):
    """An object in which ranks differ on purpose, as DeepSpeed's and Megatron's states tell of themselves."""

    def differs_between_ranks(self) -> list[Any]:
        return [self]


class Reader(Own):
    """A loader, whose ranks have all had as many batches."""

    def __iter__(self) -> Iterator[int]:
        yield self.at


class Flats(Own):
    """What a partitioned engine has: flat weights with their states, and what they have of which parameters."""

    def __init__(self, ranges: Ranges, value: float = 1.0, step: float = 3.0) -> None:
        self._ranges, self._value, self._step = ranges, value, step

    def differs_between_ranks(self) -> list[Any]:
        return [self]

    def state_dict(self) -> dict[str, Any]:
        states = [{"step": torch.tensor(self._step), "moment": torch.full((4,), self._value)}]
        return {"masters": [torch.full((4,), self._value)], "states": states, FLAT: encode({"masters.0": self._ranges})}


def half(rank: int, shape: tuple[int, ...] = (8,)) -> list[Range]:
    """Return what a rank of two has of one parameter of eight elements."""
    return [Range("weight", shape, 4 * (rank % 2), 0, 4)]


class Odd(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda rank: {"own": Own(rank)}, r"ranks have own\.at differently\. Give the object a method reshard"),
        (lambda rank: {"own": Failing(rank)}, r"own: its reshard\(\) failed: KeyError: 'boom'"),
        (lambda rank: {"own": Apart(5)}, r"own differs between ranks on purpose\. Give the object a method reshard"),
        (lambda rank: {"own": Reader(5)}, r"own \(Reader\) yields data, .* ResumableLoader\. Give the object a method"),
        (lambda rank: {"own": Flats(half(0))}, r"own\.masters\.0: no rank holds 4 of the 8 elements of weight"),
        (lambda rank: {"own": Flats(half(0), rank)}, r"own\.masters\.0: ranks 0 and 1 hold different values of weight"),
        (lambda rank: {"own": Flats([Range("weight", (8,), 3 * (rank % 2), 0, 4)])}, "weight: the part of .* overlaps"),
        (lambda rank: {"own": Flats(half(rank, (2, 4) if rank == 7 else (8,)))}, r"weight is \[8\] in the checkpoint"),
        (lambda rank: {"own": Flats("MoE gives ranks other parameters")}, r"own\.masters\.0: MoE gives ranks other"),
        (lambda rank: {"own": Flats(half(rank), step=rank)}, r"ranks have own\.states\.0\.step differently"),
        (lambda rank: {"own": Flats(half(rank)) if rank < 7 else Apart(5)}, "own is sharded .* only in the checkpoint"),
        (lambda rank: {"own": rank}, r"ranks have values\.own differently"),
        (lambda rank: {"own": [1.5] * (rank + 1)}, r"ranks have values\.own differently"),
        (lambda rank: {"own": torch.tensor([rank])}, r"ranks have values\.own differently"),
        (lambda rank: {"model": Odd(float(rank))}, r"ranks have model\.weight differently"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(
    made: Callable[..., Holders], register: Callable[[int], dict[str, Any]], message: str
) -> None:
    holders = made(lambda rank, _: register(rank), 2)
    state = TrainingState(register(7), rng=False)
    with pytest.raises(StateError, match=message):
        holders.load(state, 0, 1, 2)
    assert "own" not in state.values or state.values["own"] in (7, [1.5] * 8)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([["weight", [8], -1, 0, 4]], "4 elements of 'weight', from -1 on at 0"),
        ([["weight", [8], 0, 2**59, 4]], f"at {2**59}"),
        ([["weight", [2**58, 2**58], 0, 0, 5]], r"own\.masters\.0 that is not there, or is shorter"),
        ([["weight", [8], 0, 1, 4]], r"own\.masters\.0 that is not there, or is shorter"),
        ([["weight", [3], 0, 0, 4]], r"4 elements of 'weight' of shape \[3\]"),
        ([["weight", [8], 0, 0, 2], ["bias", [8], 0, 1, 3]], "'weight' and 'bias' overlap at 1"),
        ([["weight", [8], 0, 0, 4], ["weight", [8], 4, 0, 4]], "'weight' and 'weight' overlap at 0"),
        ([[0, [8], 0, 0, 4]], "4 elements of 0"),
    ],
)
def test_ranges_that_cannot_be_are_refused(made: Callable[..., Holders], ranges: Any, message: str) -> None:
    holders = made(lambda rank, _: {"own": Flats(ranges)}, 2)
    with pytest.raises(SlotError, match=message):
        holders.load(TrainingState({"own": Flats(half(0))}, rng=False), 0, 1, 2)


def test_flat_tensors_are_described_again_where_they_are_others() -> None:
    first, second = nn.Identity(), nn.Identity()
    describe = lambda name: lambda: {"at": [Range(name, (8,), 0, 0, 4)]}  # noqa: E731
    told = [
        description(owner, names, describe(str(number)))
        for number, (names, owner) in enumerate(
            [(["a"], first), (["a"], first), (["b"], first), (["b"], second), (["b"], second), (["b"], first)]
        )
    ]
    assert [parse(text)["at"][0][0] for text in told] == ["0", "0", "2", "3", "3", "2"]


def test_an_optimizer_of_other_parameters_is_refused(made: Callable[..., Holders]) -> None:
    def trained(rank: int, ranks: int) -> dict[str, Any]:
        held = objects(replicated, 3, ranks)
        train(held)
        return held

    holders = made(trained, 2)
    held = objects(replicated, 5, 1)
    optimizer = torch.optim.AdamW(list(held["model"].parameters())[:-1])
    registered = {"model": held["model"], "optimizer": optimizer, "schedule": held["schedule"]}
    with pytest.raises(StateError, match="optimizer: the parameter groups are others than in the checkpoint"):
        holders.load(TrainingState(registered, rng=False), 0, 1, 2)


def test_parameters_are_found_by_name(made: Callable[..., Holders]) -> None:
    """As ranks of ZeroRedundancyOptimizer have them: each the states of some parameters, now of others."""

    def register(rank: int, ranks: int, seed: int = 3) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(2, size) for size in (2, 3, 4)))
        return {"model": model, "optimizer": torch.optim.Adam(list(model.parameters())[rank::ranks])}

    def trained(rank: int, ranks: int) -> dict[str, Any]:
        held = register(rank, ranks)
        for number, parameter in enumerate(held["model"].parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        held["optimizer"].step()
        # All ranks have been sent what the others have made of theirs.
        for parameter in held["model"].parameters():
            parameter.data.fill_(2.5)
        return held

    holders = made(trained, 3)
    for rank in range(2):
        held = register(rank, 2, seed=5)
        holders.load(TrainingState(held, rng=False), rank, 2, 3)
        numbers = {id(parameter): number for number, parameter in enumerate(held["model"].parameters())}
        assert len(held["optimizer"].state) == 3
        for parameter, state in held["optimizer"].state.items():
            torch.testing.assert_close(state["exp_avg"], torch.full_like(parameter, 0.1 * (numbers[id(parameter)] + 1)))


@pytest.mark.parametrize("is_moved", [False, True])
def test_objects_that_groups_share_and_their_classes_are_kept(made: Callable[..., Holders], is_moved: bool) -> None:
    """Also those of states, unless parameters come in another order."""

    def register(rank: int, ranks: int, *, is_moved: bool = False) -> dict[str, Any]:
        torch.manual_seed(3)
        model, options = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), [1, ranks]
        groups = [{"params": [*layer.parameters()][:: -1 if is_moved else 1], "options": options} for layer in model]
        groups[0]["by_name"] = OrderedDict(a=ranks)
        return {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)}

    def trained(rank: int, ranks: int) -> dict[str, Any]:
        held, seen = register(rank, ranks), {"step": 3}
        for parameter in held["model"].parameters():
            held["optimizer"].state[parameter] = {"seen": seen}
        return held

    holders = made(trained, 2)
    held = register(0, 1, is_moved=is_moved)
    holders.load(TrainingState(held, rng=False), 0, 1, 2)
    first, second = held["optimizer"].param_groups
    assert first["options"] == [1, 2]
    assert first["options"] is second["options"]
    assert (type(first["by_name"]), first["by_name"]) == (OrderedDict, {"a": 2})
    seen = [state["seen"] for state in held["optimizer"].state.values()]
    assert seen == [{"step": 3}] * 4
    assert is_moved or {id(each) for each in seen} == {id(seen[0])}


def corrupt(slot: Slot, at: int) -> None:
    slot.buffer[at] ^= 1


@pytest.mark.parametrize("where", ["page", "manifest", "payload"])
def test_what_is_damaged_comes_from_elsewhere(tmp_path: Path, made: Callable[..., Holders], where: str) -> None:
    def register(rank: int, ranks: int) -> dict[str, Any]:
        return {"model": fsdp(3, ranks)}

    holders = made(register, 2)
    other = made(register, 2)
    holders.slots["b"] = other.slots["a"]
    slot = holders.slots["a"][1]
    at = {"page": 30, "manifest": 4096 + 50, "payload": slot.header().used_bytes - 1}[where]
    corrupt(slot, at)
    with rank_of(0, 1):
        model = fsdp(5, 1)
        holders.load(TrainingState({"model": model}, rng=False), 0, 1, 2)
        assert_has(dict(model.state_dict()), gather(of_slots(list(other.slots["a"].values())))["model"])
        assert holders.asked[-1]["avoid"] == (["a"] if holders.asked[-1]["rank"] == 1 else [])
        corrupt(other.slots["a"][1], at)
        with pytest.raises(RestoreError, match="no verified copy of rank 1 is left"):
            holders.load(TrainingState({"model": fsdp(5, 1)}, rng=False), 0, 1, 2)


def rank_loader(rank: int, ranks: int, kinds: Any = (DataLoader, DistributedSampler), epoch: int = 2) -> Any:
    """Return the loader of a rank in an epoch of 47 samples in batches of 3."""
    sampler = kinds[1](range(47), ranks, rank, seed=5)
    sampler.set_epoch(epoch)
    return ResumableLoader(kinds[0](range(47), batch_size=3, sampler=sampler))


def stateful(sampler: str) -> tuple[Any, Any]:
    """Return torchdata's loader, and a sampler for it."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader, getattr(loaders.sampler, sampler, DistributedSampler)


def read(loader: ResumableLoader, batches: int | None = None) -> tuple[Any, list[int]]:
    """Return the iterator, which has to be held, and what it gave first, or all of it."""
    iterator = iter(loader)
    given = [sample for batch in islice(iterator, batches) for sample in batch.tolist()]
    return iterator, given


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("first", "second", "third", "kind"),
    [(4, 2, 3, None), (2, 4, 1, None), (3, 4, 2, "DistributedSampler"), (2, 3, 1, "StatefulDistributedSampler")],
)
def test_each_sample_of_an_epoch_is_read_once(
    made: Callable[..., Holders], first: int, second: int, third: int, kind: str | None
) -> None:
    """Also if ranks come and go twice in one epoch, and a restart comes between."""
    loader_of = rank_loader if kind is None else partial(rank_loader, kinds=stateful(kind))
    seen: list[int] = []
    held: list[Any] = []

    def begin(rank: int, ranks: int) -> dict[str, Any]:
        loader = loader_of(rank, ranks)
        iterator, given = read(loader, 2)
        held.append(iterator)
        seen.extend(given)
        return {"loader": loader}

    before = get_rng()
    try:
        holders = made(begin, first, rng=True)

        def go_on(rank: int, ranks: int) -> dict[str, Any]:
            loader = loader_of(rank, ranks)
            holders.load(TrainingState({"loader": loader}, rng=True), rank, ranks, first)
            iterator, given = read(loader, 1)
            held.append(iterator)
            seen.extend(given)
            again = loader_of(rank, ranks)
            again.load_state_dict(loader.state_dict())
            iterator, given = read(again, 1)
            held.append(iterator)
            seen.extend(given)
            return {"loader": again}

        others = made(go_on, second, rng=True)
        assert len(seen) == len(set(seen)) == 6 * (first + second)
        for rank in range(third):
            loader = loader_of(rank, third)
            others.load(TrainingState({"loader": loader}, rng=True), rank, third, second)
            seen.extend(read(loader)[1])
        # What is left over for the last rank is filled up, as a DistributedSampler does.
        assert set(seen) == set(range(47))
        assert len(seen) - 47 < third
        loader = loader_of(0, third, epoch=3)
        others.load(TrainingState({"loader": loader}, rng=True), 0, third, second)
        with pytest.raises(StateError, match="does not give the first"):
            iter(loader)
    finally:
        set_rng(before)


def test_a_loader_that_cannot_be_shared_out_is_refused_in_the_middle_of_an_epoch(made: Callable[..., Holders]) -> None:
    held: list[Any] = []

    def begin(rank: int, ranks: int) -> dict[str, Any]:
        loader = ResumableLoader(DataLoader(range(rank, 40, ranks), batch_size=3))  # type: ignore[arg-type]
        held.append(read(loader, 2 if begins else None)[0])
        if not begins:
            held.clear()
        return {"loader": loader}

    def begin_other(rank: int, ranks: int) -> dict[str, Any]:
        sampler = SequentialSampler(range(rank, 40))
        loader = ResumableLoader(DataLoader(range(40), batch_size=3 + rank, sampler=sampler))  # type: ignore[arg-type]
        held.append(read(loader, 2)[0])
        return {"loader": loader}

    begins = False
    holders = made(begin, 2)
    loader = ResumableLoader(DataLoader(range(40), batch_size=3))  # type: ignore[arg-type]
    holders.load(TrainingState({"loader": loader}, rng=False), 0, 1, 2)
    assert len(read(loader)[1]) == 40
    holders = made(begin_other, 2)
    with pytest.raises(StateError, match="loader: the loader of range is in the middle of an epoch"):
        holders.load(TrainingState({"loader": loader}, rng=False), 0, 1, 2)
