"""Where a run is in its data, in samples of all ranks: so another number of ranks goes on in the middle of an epoch.

A `DistributedSampler` deals one order of the data set out to ranks in turn. Once all of them have drawn the same number
of batches, what was drawn is the beginning of that order, and another number of ranks deals out what is left of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch.utils.data import BatchSampler, DistributedSampler

from ..errors import StateError
from ..state.rng import derived_rng


def reshard(loader: Any, states: Mapping[int, Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return the position of `rank` in another number of ranks than that of `states`, which `position()` returned.

    Raises:
        StateError: Some of the epoch would be lost or given twice.
    """
    # A version before this one has written neither.
    filled = {other: state["at"] and {"skipped": 0, "share": (), **state["at"]} for other, state in states.items()}
    first, positions = states[min(states)], list(filled.values())
    if len({_bytes_of(state["generators"]) for state in states.values()}) > 1:
        raise StateError(
            "the generators of the loader were seeded by rank, and another number of ranks has others: seed them alike"
        )
    if not any(positions) or all(at is not None and at["finished"] for at in positions):
        return {**first, "at": None}
    at = filled.get(rank, filled[min(states)])
    if at is None:
        raise _unknown(loader)
    if rank not in states:
        # Else it would draw what rank 0 draws.
        at = {**at, **dict.fromkeys(("made", "first", "last", "now"), derived_rng(at["now"], rank))}
    alike = {(each["seen"], each["drawn"], each["finished"], *each["share"]) if each else None for each in positions}
    if len(alike) == 1 and not at["share"] and not share_of(loader):
        return {**first, "at": at}
    _, batch_size = _dealt(loader)
    read = {(each["drawn"], each["skipped"], each["share"][1:]) if each else None for each in positions}
    if len(read) > 1 or not at["share"]:
        raise _unknown(loader)
    ranks = at["share"][1]
    was = {"drawn": at["drawn"], "skipped": at["skipped"], "ranks": ranks}
    was["seen"] = {each["share"][0]: each["seen"] for each in positions if each}
    skipped = at["skipped"] + at["drawn"] * batch_size * ranks
    return {**first, "at": {**at, "drawn": 0, "seen": xxhash.xxh3_128().hexdigest(), "skipped": skipped, "was": was}}


def share_of(loader: Any) -> tuple[int, int] | tuple[()]:
    """Return which rank of how many a `DistributedSampler` of the loader is for; nothing without one."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return (sampler.rank, sampler.num_replicas) if type(sampler) is DistributedSampler else ()


def rest(loader: Any, at: Mapping[str, Any]) -> Any:
    """Return a sampler of batches that gives this rank's share of what the run has not drawn at the position `at`.

    Raises:
        StateError: The order of the epoch is not the one of which `at` is.
    """
    sampler, batch_size = _dealt(loader)
    order = list(_dealer(sampler, 1, 0))
    if (was := at.get("was")) is not None:
        for rank, digest in was["seen"].items():
            seen, ranks = xxhash.xxh3_128(), was["ranks"]
            batches = BatchSampler(_share(sampler, order, was["skipped"], ranks, rank), batch_size, loader.drop_last)
            for _, batch in zip(range(was["drawn"]), batches, strict=False):
                seen.update(repr(batch).encode())
            if seen.hexdigest() != digest:
                raise StateError(
                    f"the loader of {type(loader.dataset).__qualname__} does not give the first {was['drawn']} batches "
                    f"of this epoch again that rank {rank} of {ranks} had: give the sampler the same seed, call "
                    "set_epoch() before the loop, and let the batch size be as it was"
                )
    share = _share(sampler, order, at["skipped"], sampler.num_replicas, sampler.rank)
    return BatchSampler(share, batch_size, loader.drop_last)


def _share(sampler: Any, order: Sequence[int], skipped: int, ranks: int, rank: int) -> Sequence[int]:
    """Return what `rank` gets of `order` from `skipped` on: as DistributedSampler, the same number as every other."""
    if not skipped:
        return list(_dealer(sampler, ranks, rank))
    left = list(order[skipped:])
    if sampler.drop_last:
        left = left[: len(left) - len(left) % ranks]
    elif left and (missing := -len(left) % ranks):
        left += (list(order) * (missing // len(order) + 1))[:missing]
    return left[rank::ranks]


def _dealer(sampler: Any, ranks: int, rank: int) -> DistributedSampler[Any]:
    dealer = DistributedSampler[Any](
        sampler.dataset,
        num_replicas=ranks,
        rank=rank,
        shuffle=sampler.shuffle,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )
    dealer.set_epoch(sampler.epoch)
    return dealer


def _dealt(loader: Any) -> tuple[Any, int]:
    """Return the sampler that deals the data out to ranks, and how many samples a batch has.

    Raises:
        StateError: It is none of which that is known.
    """
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or type(sampler) is not DistributedSampler:
        raise _unknown(loader)
    return sampler, batches.batch_size


def _unknown(loader: Any) -> StateError:
    return StateError(
        f"the loader of {type(loader.dataset).__qualname__} is in the middle of an epoch, whose rest is known "
        "only for a DataLoader with a batch_size and a DistributedSampler, and as many batches on each rank: "
        "change the number of ranks between two epochs"
    )


def _bytes_of(generators: Mapping[str, Any]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, bytes(state.tolist())) for name, state in sorted(generators.items()))
