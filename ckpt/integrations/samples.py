"""Where a run is in its data, in samples of all ranks: so another number of ranks goes on in the middle of an epoch.

One order of the data set is dealt out to ranks in turn: samples by a `DistributedSampler`, batches or parts of batches
by Accelerate. Once all ranks have drawn the same number of batches, what was drawn is the beginning of that order, and
another number of ranks deals out what is left of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash
from torch.utils.data import BatchSampler, DistributedSampler

from ..errors import StateError
from ..state.rng import derived_rng
from ..state.state import set_rng

_TORCHDATA: Final = "torchdata.stateful_dataloader.sampler"
_NOTHING: Final = xxhash.xxh3_128().hexdigest()

Share = tuple[Any, ...]
"""Which rank of how many a loader is for; of Accelerate also whether each batch is cut, and whether rounds are filled.

Empty where whoever iterates the loader gets all that it gives; `UNKNOWN` where that is dealt out in another way.
"""
UNKNOWN: Final[Share] = (None,)


def reshard(
    loader: Any, states: Mapping[int, Mapping[str, Any]], rank: int, *, share: Share, ahead: int = 0
) -> dict[str, Any]:
    """Return the position of `rank` in another number of ranks than that of `states`, which `position()` returned.

    Args:
        loader: The loader that goes on.
        states: Of each rank.
        rank: That of this process.
        share: What `loader` gives of the order.
        ahead: How many batches were drawn before the loop got them.

    Raises:
        StateError: Some of the epoch would be lost or given twice.
    """
    # A version before this one has not written them.
    filled = {other: state["at"] and {"skipped": 0, "share": (), **state["at"]} for other, state in states.items()}
    first, positions = states[min(states)], list(filled.values())
    if len({_bytes_of(state["generators"]) for state in states.values()}) > 1:
        raise StateError(
            "the generators of the loader were seeded by rank, and another number of ranks has others: seed them alike"
        )
    if not any(positions) or (not ahead and all(at is not None and at["finished"] for at in positions)):
        return {**first, "at": None}
    at = filled.get(rank, filled[min(states)])
    if at is None:
        raise _unknown(loader)
    order = at.get("order") or {name: filled[min(states)][name] for name in ("made", "first", "made_generators")}
    if rank not in states:
        # Else it would draw what rank 0 draws.
        at = {**at, **dict.fromkeys(("made", "first", "last", "now"), derived_rng(at["now"], rank))}
    alike = {(each["seen"], each["drawn"], each["finished"], *each["share"]) if each else None for each in positions}
    if len(alike) == 1 and not at["share"] and not share:
        return {**first, "at": at}
    dealing = _dealing(loader, share)
    read = {
        (each["drawn"], each["skipped"], each["finished"], *each["share"][1:]) if each else None for each in positions
    }
    if len(read) > 1 or len(at["share"]) != len(share):
        raise _unknown(loader)
    # Where nothing was drawn since the last change, nothing was drawn ahead either.
    given = max(0, at["drawn"] - (0 if at["finished"] else ahead))
    before = {"drawn": at["drawn"], "skipped": at["skipped"], "share": at["share"]}
    before["seen"] = {each["share"][0]: each["seen"] for each in positions if each}
    gone = {
        "drawn": 0,
        "seen": _NOTHING,
        "skipped": at["skipped"] + given * dealing.round(at["share"]),
        "given": at.get("given", 0) + given,
        "order": order,
        "was": before,
        # Else workers would augment the rest with the random numbers of the beginning.
        **dict.fromkeys(("made", "first", "last"), at["now"]),
    }
    return {**first, "at": {**at, **gone}}


def share_of(loader: Any) -> Share:
    """Return which share of the data a `DistributedSampler` or Accelerate gives a loader; nothing without them."""
    batches = loader.batch_sampler
    if _is_shard(batches):
        return batches.process_index, batches.num_processes, batches.split_batches, batches.even_batches
    sampler: Any = getattr(batches, "sampler", None)
    return (sampler.rank, sampler.num_replicas) if _is_dealt(sampler) else ()


def rest(loader: Any, at: Mapping[str, Any], share: Share) -> Any:
    """Return a sampler of batches that gives this rank's share of what the run has not drawn at the position `at`.

    Raises:
        StateError: The order of the epoch is not the one of which `at` is.
    """
    dealing = _dealing(loader, share)
    order = _order(loader, dealing.sampler, at)
    if (was := at.get("was")) is not None:
        ranks, *how = was["share"][1:] if "share" in was else (was["ranks"],)
        for rank, digest in was["seen"].items():
            seen = xxhash.xxh3_128()
            for _, batch in zip(
                range(was["drawn"]), dealing.deal(order, was["skipped"], (rank, ranks, *how)), strict=False
            ):
                seen.update(repr(batch).encode())
            if seen.hexdigest() != digest:
                raise StateError(
                    f"the loader of {type(loader.dataset).__qualname__} does not give the first {was['drawn']} batches "
                    f"of this epoch again that rank {rank} of {ranks} had: give the sampler the same seed, call "
                    "set_epoch() before the loop, and let the batch size be as it was"
                )
    return [] if _is_over(at) else list(dealing.deal(order, at["skipped"], share))


def batches_in_epoch(loader: Any, at: Mapping[str, Any], share: Share) -> int:
    """Return how many batches this rank has in the epoch of the position `at`, in which the number of ranks changed."""
    dealing = _dealing(loader, share)
    sampler = dealing.sampler
    sized: Any = sampler.dataset if _is_dealt(sampler) else sampler
    order = range(len(sized))
    left = [] if _is_over(at) else dealing.deal(order, at["skipped"], share)
    return int(at.get("given", 0)) + sum(1 for _ in left)


@dataclass(frozen=True, slots=True)
class _Dealing:
    """How an order is dealt out.

    Attributes:
        sampler: It gives the order, or knows it.
        batch_size: What the loader was made with.
        trims: Whether the order is cut, not filled up, so that all ranks get as much.
        drop_last: Whether a rank's last batch is left out if it is not full.
    """

    sampler: Any
    batch_size: int
    trims: bool
    drop_last: bool

    def round(self, share: Share) -> int:
        """Return how many samples all ranks draw together, each a batch."""
        is_cut = len(share) > 2 and share[2]
        return self.batch_size if is_cut else self.batch_size * int(share[1])

    def deal(self, order: Sequence[int], skipped: int, share: Share) -> Iterator[list[int]]:
        """Yield the batches that a rank gets of `order` from `skipped` on.

        What is missing in the last round comes from the beginning of the order, as where nothing was skipped.
        """
        rank, ranks, *how = share
        left = list(order[skipped:])
        unit = self.round(share) if how else ranks
        if self.trims:
            left = left[: len(left) - len(left) % unit]
        elif left and (not how or (how[1] and ranks > 1)) and (missing := -len(left) % unit):
            left += (list(order) * (missing // len(order) + 1))[:missing]
        if not how:
            yield from BatchSampler(left[rank::ranks], self.batch_size, self.drop_last)
            return
        size = self.batch_size // ranks if how[0] else self.batch_size
        for begin in range(rank * size, len(left), unit):
            yield left[begin : begin + size]


def _order(loader: Any, sampler: Any, at: Mapping[str, Any]) -> list[int]:
    """Return the order of the epoch, as the sampler gives it under the random states at which it was drawn first."""
    if _is_dealt(sampler):
        dealer = DistributedSampler[Any](
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        dealer.set_epoch(sampler.epoch)
        return list(dealer)
    drawn = at.get("order") or at
    set_rng(drawn["made"] if loader.num_workers else drawn["first"])
    states = drawn["made_generators"]
    own = [state for name, state in states.items() if name.endswith("sampler.generator") and "dataset" not in name]
    state = own[0] if own else states.get("generator")
    generator = getattr(sampler, "generator", None)
    used = None if state is None else torch.Generator() if generator is None else generator
    if used is not None:
        used.set_state(state)
    # An iterator of a DataLoader draws its seed before it asks for the first index.
    if loader.num_workers or (used is not None and not own):
        torch.empty((), dtype=torch.int64).random_(generator=used if not own else loader.generator)
    if not hasattr(sampler, "generator"):
        return list(sampler)
    sampler.generator = used
    try:
        return list(sampler)
    finally:
        if generator is not None:
            sampler.generator = generator


def _dealing(loader: Any, share: Share) -> _Dealing:
    """Return how the data of a loader is dealt out.

    Raises:
        StateError: That is not known.
    """
    batches: Any = loader.batch_sampler
    if _is_shard(batches):
        batches = batches.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    known = len(share) > 2 or (len(share) == 2 and _is_dealt(sampler))
    if not known or not (type(batches) is BatchSampler or _name_of(batches) == (_TORCHDATA, "BatchSampler")):
        raise _unknown(loader)
    trims = batches.drop_last if len(share) > 2 else sampler.drop_last
    return _Dealing(sampler, batches.batch_size, trims, batches.drop_last)


def _is_over(at: Mapping[str, Any]) -> bool:
    """Tell whether the epoch had come to its end before the number of ranks changed."""
    return at.get("finished", False) and not at["drawn"]


def _is_dealt(sampler: Any) -> bool:
    """Tell whether a sampler is a `DistributedSampler`, or torchdata's, which gives the same."""
    return type(sampler) is DistributedSampler or _name_of(sampler) == (_TORCHDATA, "StatefulDistributedSampler")


def _is_shard(batches: Any) -> bool:
    """Tell whether a sampler of batches is Accelerate's."""
    return _name_of(batches) == ("accelerate.data_loader", "BatchSamplerShard")


def _name_of(item: Any) -> tuple[str, str]:
    """Return module and name of a class of a library that need not be installed."""
    return type(item).__module__, type(item).__qualname__


def _unknown(loader: Any) -> StateError:
    return StateError(
        f"the loader of {type(loader.dataset).__qualname__} is in the middle of an epoch: what is left is known only "
        "for a DataLoader with a batch_size and a DistributedSampler, or Accelerate without dispatch_batches, and as "
        "many batches on each rank: change the number of ranks between two epochs"
    )


def _bytes_of(generators: Mapping[str, Any]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, bytes(state.tolist())) for name, state in sorted(generators.items()))
