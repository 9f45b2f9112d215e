"""A loop goes on in the middle of an epoch with the batches and random numbers that it would have had."""

import json
import os
import random
import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from launchers import run_apart, run_python
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.integrations.position import PositionedLoader
from resilient_run.integrations.torch import ResumableLoader


class Noisy(Dataset[torch.Tensor]):
    """Augments by all three generators, in the process that reads it."""

    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item() + random.random() + np.random.rand()])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        yield from torch.rand(19, 2, generator=generator)


class Drawing(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(19):
            yield torch.rand(2)


class Forgetful:
    """A sampler with a random state that nobody knows."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __len__(self) -> int:
        return 19

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(19), 19))


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 20.0), 30)),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream in a worker": lambda: DataLoader(Stream(), 4, num_workers=1),
}


def ahead(batches: Any) -> Iterator[Any]:
    """Give batches while the next one is drawn already, as Accelerate does."""
    batches = iter(batches)
    for batch in batches:
        for following in batches:
            yield batch
            batch = following
        yield batch


def train(kind: str, *, draws_ahead: int, until: int = 1000, position: Any = None) -> Any:
    """Return what two epochs of a loop saw, and the position when it stopped."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loader = PositionedLoader(LOADERS[kind](), ahead=draws_ahead)
    seen: list[float] = []
    first = 0
    if position is not None:
        first, seen, state = deepcopy(position)
        loader.go_to(state)
        torch.rand(7)  # whatever happens at a start
    for epoch in range(first, 2):
        for batch in ahead(loader) if draws_ahead else loader:
            seen.append(batch.sum().item() + torch.rand(()).item() * np.random.rand() + random.random())
            if len(seen) == until:
                return epoch, seen, loader.position()
        torch.rand(1)
    return seen


def goes_on(kind: str, draws_ahead: int) -> None:
    undisturbed = train(kind, draws_ahead=draws_ahead)
    half = len(undisturbed) // 2
    for until in (1, half - 1, half, half + 1, len(undisturbed)):  # `half`: an epoch is over, and its loop is not
        position = train(kind, draws_ahead=draws_ahead, until=until)
        assert train(kind, draws_ahead=draws_ahead, position=position) == undisturbed, until


def goes_on_with_a_loader_of_the_scripts_own(workers: int) -> None:
    loader = ResumableLoader(Moving(list(range(12)), 2, shuffle=True, num_workers=workers))
    seen, state = [], {}
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 3:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == seen[3:]


@pytest.mark.parametrize("draws_ahead", [0, 1])
@pytest.mark.parametrize("kind", LOADERS)
def test_goes_on_as_if_nothing_had_happened(kind: str, draws_ahead: int) -> None:
    if LOADERS[kind]().num_workers:
        run_apart(goes_on, kind, draws_ahead)
    else:
        goes_on(kind, draws_ahead)


def test_who_looks_into_the_data_after_a_restore_is_told() -> None:
    """The look took up the position, and the loop begins the epoch anew."""
    loader = ResumableLoader(DataLoader(list(range(8))))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = ResumableLoader(DataLoader(list(range(8))))
    again.load_state_dict(state)
    assert next(iter(again)) == 1
    with pytest.warns(RuntimeWarning, match=r"no step was completed with it: the epoch starts over\. Read data before"):
        assert next(iter(again)) == 0
    again.load_state_dict(state)
    assert list(again) == [torch.tensor([number]) for number in range(1, 8)]
    assert next(iter(again)) == 0


def test_a_loop_that_was_left_begins_at_the_beginning() -> None:
    loader = ResumableLoader(DataLoader(list(range(8))))
    for batch in loader:
        if batch == 3:
            inside = loader.state_dict()
            break
    assert loader.state_dict()["at"] is None
    loader.load_state_dict(inside)
    assert [int(batch) for batch in loader] == [4, 5, 6, 7]
    assert [int(batch) for batch in loader] == list(range(8))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers=False"),
        ({"num_workers": 1, "in_order": False}, "in_order=True"),
    ],
)
def test_refuses_what_cannot_be_repeated(options: dict[str, Any], named: str) -> None:
    with pytest.raises(StateError, match=named):
        ResumableLoader(DataLoader(Noisy(), **options))


def test_refuses_a_stream_that_takes_training_s_random_numbers() -> None:
    batches = iter(ResumableLoader(DataLoader(Drawing(), 4)))
    next(batches)
    with pytest.raises(StateError, match="a generator of its own"):
        next(batches)


def test_refuses_another_order() -> None:
    loader = ResumableLoader(DataLoader(Noisy(), 4, sampler=Forgetful()))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="Seed it where its iterator begins"):
        iter(loader)


class Moving(DataLoader[torch.Tensor]):
    """Makes its iterator at the first batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + 1


class Pairs(DataLoader[torch.Tensor]):
    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return zip(batches, batches, strict=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_a_class_of_the_scripts_own_goes_on(workers: int) -> None:
    run_apart(goes_on_with_a_loader_of_the_scripts_own, workers)


def test_refuses_random_numbers_drawn_by_a_loader_of_the_scripts_own() -> None:
    batches = iter(ResumableLoader(Moving(Noisy(), 4)))
    next(batches)
    with pytest.raises(StateError, match="Noisy draws from the random generators"):
        next(batches)


def test_refuses_a_loader_that_makes_a_batch_of_two() -> None:
    with pytest.raises(StateError, match="Pairs has made 1 batches of 2 that its sampler gave"):
        next(iter(ResumableLoader(Pairs(list(range(12)), 2))))


def test_several_loaders_set_the_random_numbers_back_once() -> None:
    """The second one begins when the first has drawn: those numbers are not drawn again."""

    def both(state: Any = None) -> tuple[list[float], Any]:
        torch.manual_seed(3)
        one, other = (PositionedLoader(DataLoader(Noisy(), 4, shuffle=True), ahead=1) for _ in range(2))
        if state is not None:
            one.go_to(state[0])
            other.go_to(state[1])
        seen: list[float] = []
        for left, right in zip(ahead(one), ahead(other), strict=True):
            seen.append(left.sum().item() + right.sum().item())
            if len(seen) == 2 and state is None:
                state = [one.position(), other.position()]
        return seen, state

    random.seed(3)
    np.random.seed(3)
    undisturbed, state = both()
    assert both(state)[0] == undisturbed[2:]


def dealt(rank: int, ranks: int, *, even: bool = False, epoch: int = 1) -> ResumableLoader:
    """Return a loader of what a sampler deals this rank of 103 samples."""
    sampler = DistributedSampler(range(103), num_replicas=ranks, rank=rank, seed=3, drop_last=even)
    sampler.set_epoch(epoch)
    return ResumableLoader(DataLoader(range(103), batch_size=4, sampler=sampler))


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4, 3), (3, 4, 1), (1, 4), (2, 2, 5), (4, 3, 3, 2)])
def test_another_number_of_ranks_gets_what_is_left_of_the_epoch(sizes: tuple[int, ...], even: bool) -> None:
    """Every sample once, but for those with which a DistributedSampler makes the ranks' shares equal."""
    drawn: list[int] = []
    states: dict[int, dict[str, Any]] = {}
    for number, ranks in enumerate(sizes):
        loaders = [dealt(rank, ranks, even=even) for rank in range(ranks)]
        for rank, loader in enumerate(loaders):
            if states:
                same = len(states) == ranks
                loader.load_state_dict(deepcopy(states[rank] if same else loader.reshard(states, rank, ranks)))
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            batches = list(iterator) if number == len(sizes) - 1 else [next(iterator) for _ in range(2)]
            drawn += torch.cat(batches).tolist()
        states = {rank: deepcopy(loader.state_dict()) for rank, loader in enumerate(loaders)}
    missing = set(range(103)) - set(drawn)
    if even:
        assert len(missing) < sizes[-1]
        assert len(drawn) == len(set(drawn))
    else:
        assert missing == set()
        assert len(drawn) - len(set(drawn)) < max(sizes)


def test_another_number_of_ranks_is_refused_where_what_is_left_is_not_known() -> None:
    loaders = [dealt(rank, 2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    states = {rank: deepcopy(loader.state_dict()) for rank, loader in enumerate(loaders)}
    other = dealt(0, 3, epoch=2)
    other.load_state_dict(other.reshard(states, 0, 3))
    with pytest.raises(StateError, match="does not give the first 1 batches of this epoch again that rank 0 of 2 had"):
        next(iter(other))
    with pytest.raises(StateError, match="change the number of ranks between two epochs"):
        ResumableLoader(DataLoader(range(103), batch_size=4, shuffle=True)).reshard(states, 0, 3)
    next(iterators[0])
    ahead = states | {0: deepcopy(loaders[0].state_dict())}
    with pytest.raises(StateError, match="as many batches on each rank"):
        other.reshard(ahead, 0, 3)
    for iterator in iterators:
        assert list(iterator)
    ended = {rank: deepcopy(loader.state_dict()) for rank, loader in enumerate(loaders)}
    anew = dealt(0, 3)
    anew.load_state_dict(anew.reshard(ended, 0, 3))
    assert len(torch.cat(list(anew))) == 35


@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_says_how_to_install_what_is_missing(library: str) -> None:
    script = f"""
import sys
sys.modules[{library!r}] = sys.modules[{library + ".pytorch"!r}] = None
from resilient_run.integrations import {library}
from types import SimpleNamespace
{"" if library != "transformers" else "transformers.protect(SimpleNamespace())"}
{"" if library != "accelerate" else "accelerate.AcceleratorCheckpointer(None)"}
"""
    done = run_python(["-c", script], os.environ)
    assert f"pip install '{library}>=" in done.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))
