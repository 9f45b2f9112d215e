"""Loaders that Accelerate deals out, in which ranks come and go: no sample of the epoch is lost or given twice."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resilient_run.ckpt.errors import StateError
from resilient_run.ckpt.state.state import get_rng, set_rng

pytest.importorskip("accelerate")
from accelerate.data_loader import prepare_data_loader

from resilient_run.ckpt.integrations.accelerate import PreparedLoader

SAMPLES, BATCH = 50, 4


@pytest.fixture(autouse=True)
def _random_states() -> Iterator[None]:
    before = get_rng()
    yield
    set_rng(before)


Make = Callable[[int, int], tuple[PreparedLoader, Any]]


def prepared(dealing: dict[str, Any], **loading: Any) -> Make:
    def make(rank: int, ranks: int) -> tuple[PreparedLoader, Any]:
        torch.manual_seed(7)  # as every rank is seeded
        made = {name: value() if callable(value) else value for name, value in loading.items()}
        loader = DataLoader(range(SAMPLES), **{"batch_size": BATCH, "shuffle": True, **made})  # type: ignore[arg-type]
        shard = prepare_data_loader(loader, num_processes=ranks, process_index=rank, **dealing)
        return PreparedLoader(shard), shard

    return make


def read(loader: Any, batches: int | None = None) -> tuple[Any, list[int]]:
    """Return the iterator, which has to be held, and what it gave first, or all of it."""
    iterator = iter(loader)
    return iterator, [sample for batch in islice(iterator, batches) for sample in batch.tolist()]


def changed(make: Make, states: dict[int, Any], ranks: int) -> list[tuple[PreparedLoader, Any]]:
    """Return the loaders of so many ranks, which go on from the states of others."""
    loaders = [make(rank, ranks) for rank in range(ranks)]
    for rank, (place, _) in enumerate(loaders):
        place.load_state_dict(place.reshard(states, rank, ranks))
    return loaders


CUT = {"split_batches": True}
CASES = {
    "seedable": ({"use_seedable_sampler": True}, {}, (4, 2, 3)),
    "grows": ({"use_seedable_sampler": True}, {}, (2, 4, 1)),
    "from one": ({"use_seedable_sampler": True}, {}, (1, 3, 2)),
    "random": ({}, {}, (3, 2, 4)),
    "random from one": ({}, {}, (1, 2, 1)),
    "random from one, workers": ({}, {"num_workers": 1}, (1, 2, 3)),
    "a generator": ({}, {"generator": lambda: torch.Generator().manual_seed(5)}, (2, 3, 1)),
    "a generator of one": ({}, {"generator": lambda: torch.Generator().manual_seed(5)}, (1, 2, 3)),
    "in order": ({}, {"shuffle": False}, (4, 3, 2)),
    "cut": (CUT, {"batch_size": 12}, (2, 3, 1)),
    "not filled": ({"even_batches": False}, {}, (2, 3, 4)),
    "whole batches": ({}, {"drop_last": True}, (3, 2, 1)),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("case", CASES)
def test_each_sample_of_an_epoch_is_given_once(case: str) -> None:
    """Also if ranks come and go twice in one epoch, and a restart comes between."""
    dealing, loading, (first, second, third) = CASES[case]
    make = prepared(dealing, **loading)
    begun = [make(rank, first) for rank in range(first)]
    parts = [read(shard, 1) for _, shard in begun]
    seen = [sample for _, given in parts for sample in given]
    order = [sample for samples in zip(*(given for _, given in parts), strict=True) for sample in samples]
    assert len(order) == len(seen)
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    middle = changed(make, states, second)
    held = []
    for _, shard in middle:
        iterator, given = read(shard, 1)
        held.append(iterator)
        seen += given
    restarted = [make(rank, second) for rank in range(second)]
    for (place, _), (before, _) in zip(restarted, middle, strict=True):
        place.load_state_dict(before.state_dict())
    if case != "not filled":
        left = len(restarted[0][1])
    for place, shard in restarted:
        iterator, given = read(shard, 1)
        held.append(iterator)
        seen += given
        assert place.positioned.given == 3
    assert len(seen) == len(set(seen))
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(restarted)}
    last = [read(shard)[1] for _, shard in changed(make, states, third)]
    seen += [sample for given in last for sample in given]
    if case == "whole batches":
        assert len(seen) == len(set(seen)) == SAMPLES - SAMPLES % BATCH
        return
    assert set(seen) == set(range(SAMPLES))
    unit = loading.get("batch_size", BATCH) if dealing is CUT else BATCH * third
    assert len(seen) - SAMPLES < (unit if third > 1 and case != "not filled" else 1)
    if case != "not filled":
        assert left >= 3


def test_an_epoch_at_its_end_is_over_for_others_too() -> None:
    make = prepared({"use_seedable_sampler": True})
    begun = [make(rank, 2) for rank in range(2)]
    held = [read(shard, 7) for _, shard in begun]  # the last one is drawn, and the step with it completed
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    assert len(held) == 2
    for place, shard in changed(make, states, 3):
        assert (place.positioned.given, place.positioned.batches(place.state_dict()["at"])) == (7, 7)
        assert read(shard)[1] == []
        assert shard.iteration == 1
        assert len(read(shard)[1]) == 20, "the next epoch"


@pytest.mark.parametrize("second", [1, 3])
def test_an_epoch_at_its_end_is_over_after_a_restart_too(second: int) -> None:
    """In as many ranks, though others had begun it; Accelerate knows the end with the last batch."""
    make = prepared({})
    begun = [make(rank, 2) for rank in range(2)]
    held = [read(shard, 1)[0] for _, shard in begun]
    middle = changed(make, {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}, second)
    states = {}
    for rank, (place, shard) in enumerate(middle):
        for _ in (iterator := iter(shard)):
            states[rank] = place.state_dict()
        held.append(iterator)
    restarted = [make(rank, second) for rank in range(second)]
    for rank, (place, _) in enumerate(restarted):
        place.load_state_dict(states[rank])
    assert [read(shard)[1] for _, shard in restarted] == [[]] * second
    given = [sample for _, shard in restarted for sample in read(shard)[1]]
    assert set(given) == set(range(SAMPLES))


def test_another_order_is_refused() -> None:
    make, other = prepared({"use_seedable_sampler": True}), prepared({"use_seedable_sampler": True}, batch_size=3)
    begun = [make(rank, 2) for rank in range(2)]
    held = [read(shard, 2) for _, shard in begun]
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    assert len(held) == 2
    with pytest.raises(StateError, match=r"does not give the first 3 batches of this epoch again that rank 0 of 2 had"):
        read(changed(other, states, 1)[0][1])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["stream", "dispatched stream", "dispatched"])
def test_what_is_dealt_out_in_another_way_is_refused_in_the_middle_of_an_epoch(
    kind: str, ranks: tuple[int, int]
) -> None:
    def make(rank: int, ranks: int) -> tuple[PreparedLoader, Any]:
        data = range(SAMPLES) if kind == "dispatched" else Stream()
        shard = prepare_data_loader(
            DataLoader(data, BATCH),  # type: ignore[arg-type]
            num_processes=ranks,
            process_index=rank,
            put_on_device=True,
            dispatch_batches=kind != "stream",
        )
        return PreparedLoader(shard), shard

    before, after = ranks
    begun = [make(rank, before) for rank in range(before)]
    reading = begun if kind == "stream" else begun[:1]
    held = [iter(shard.base_dataloader) for _, shard in reading]
    assert all(next(each) is not None for each in held)
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    with pytest.raises(StateError, match="is in the middle of an epoch"):
        changed(make, states, after)


def test_process_0_alone_reads_what_is_dispatched_so_that_others_may_have_other_generators() -> None:
    def make(rank: int, ranks: int) -> tuple[PreparedLoader, Any]:
        generator = torch.Generator().manual_seed(rank)
        loader = DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=generator)  # type: ignore[arg-type,var-annotated]
        shard = prepare_data_loader(
            loader, num_processes=ranks, process_index=rank, put_on_device=True, dispatch_batches=True
        )
        return PreparedLoader(shard), shard

    states = {rank: make(rank, 2)[0].state_dict() for rank in range(2)}
    for place, _ in changed(make, states, 3):
        assert [state.tolist() for state in place.state_dict()["generators"].values()] == [
            torch.Generator().manual_seed(0).get_state().tolist()
        ]


def test_a_loader_that_nobody_has_read_since_ranks_changed_may_change_again() -> None:
    make = prepared({"use_seedable_sampler": True})
    begun = [make(rank, 2) for rank in range(2)]
    parts = [read(shard, 3) for _, shard in begun]
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    for ranks in (3, 4):
        states = {rank: place.state_dict() for rank, (place, _) in enumerate(changed(make, states, ranks))}
    seen = [sample for _, given in parts for sample in given]
    seen += [sample for _, shard in changed(make, states, 1) for sample in read(shard)[1]]
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize(("ranks", "own"), [((2, 3), 34 % 12), ((3, 2), 26 % 8)])
def test_metrics_leave_out_what_fills_up_the_last_round(ranks: tuple[int, int], own: int) -> None:
    before, after = ranks
    make = prepared({"use_seedable_sampler": True})
    begun = [make(rank, before) for rank in range(before)]
    held = [read(shard, 2) for _, shard in begun]
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    assert len(held) == before
    for _, shard in changed(make, states, after):
        iterator, rest = read(shard, 1)
        assert shard.remainder == own
        rest += [sample for batch in iterator for sample in batch.tolist()]
        assert len(rest) == BATCH * -(-(SAMPLES - 2 * BATCH * before) // (BATCH * after))
        held.append(read(shard, 1))
        assert shard.remainder == SAMPLES % (BATCH * after), "that of a whole epoch"


class Noisy(Dataset[Any]):
    """Gives a random number with each sample, drawn where it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(())


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_rest_of_an_epoch_is_augmented_with_other_random_numbers(workers: int) -> None:
    def make(rank: int, ranks: int) -> tuple[PreparedLoader, Any]:
        torch.manual_seed(7)
        loader = DataLoader(Noisy(), BATCH, num_workers=workers)
        shard = prepare_data_loader(loader, num_processes=ranks, process_index=rank)
        return PreparedLoader(shard), shard

    begun = [make(rank, 2) for rank in range(2)]
    iterators = [iter(shard) for _, shard in begun]
    had = [number for each in iterators for _ in range(2) for number in next(each)[1].tolist()]
    states = {rank: place.state_dict() for rank, (place, _) in enumerate(begun)}
    for _, shard in changed(make, states, 3):
        assert not {number for _, numbers in shard for number in numbers.tolist()} & set(had)
