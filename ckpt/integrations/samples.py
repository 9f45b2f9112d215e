"""Where a run is in its data, in samples of all ranks: so another number of ranks goes on in the middle of an epoch.

A `DistributedSampler` deals one order of the data set out to ranks in turn. Once all of them have drawn the same number
of batches, what was drawn is the beginning of that order, and another number of ranks deals out what is left of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from torch.utils.data import BatchSampler, DistributedSampler

from ..errors import StateError


def reshard(loader: Any, states: Mapping[int, Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return the position of `rank` in another number of ranks than that of `states`, which `position()` returned.

    Raises:
        StateError: Some of the epoch would be lost or given twice.
    """
    first = states[min(states)]
    positions = [state["at"] for state in states.values()]
    own = states.get(rank, first)
    if not any(positions) or all(at is not None and at["finished"] for at in positions):
        return {**own, "at": None}
    _, batch_size = _dealt(loader)
    at = own["at"] or {}
    if len({(each["drawn"], each["skipped"], each["share"][1:]) if each else None for each in positions}) > 1:
        raise StateError("ranks have drawn different numbers of batches of an epoch, so what is left is not known")
    if not at["share"]:
        raise StateError("the position is of a loader without a DistributedSampler")
    seen = {each["share"][0]: each["seen"] for each in positions if each}
    was = {"drawn": at["drawn"], "skipped": at["skipped"], "ranks": at["share"][1], "seen": seen}
    skipped = at["skipped"] + at["drawn"] * batch_size * at["share"][1]
    return {**own, "at": {**at, "drawn": 0, "seen": xxhash.xxh3_128().hexdigest(), "skipped": skipped, "was": was}}


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
        raise StateError(
            f"the loader of {type(loader.dataset).__qualname__} is in the middle of an epoch, and another number of "
            "ranks can go on there only with a DistributedSampler and a batch_size of torch's DataLoader: change the "
            "number of ranks at the end of an epoch"
        )
    return sampler, batches.batch_size
