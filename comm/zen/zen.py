"""Zen: sparse gradients over balanced parallelism, or in one piece where they hardly overlap (thesis 3.3)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import CommError
from ..net.alike import check_alike
from ..net.rounds import Rounds, RoundScheme, all_to_all
from ..net.scheme import Dense
from ..net.transport import Transport, from_bytes
from .partition import Balanced
from .plan import Route, Rows, ZenPlan, decide
from .routes import push_and_pull, sum_by_doubling, sum_by_gathering
from .sparse import compress, expand, row_width

_HOPELESS = 1 / 4


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What is known of one key since it was last profiled: steps, counts of each that was profiled, then the plan."""

    steps: int = 0
    counts: list[list[int]] = field(default_factory=list)
    plan: ZenPlan | None = None


class Zen(RoundScheme):
    """Sums sparse gradients with about the fewest bytes there can be, whatever their skew, and loses nothing.

    The first steps of each key are summed by recursive doubling (dense, where more than a quarter is not zero) and
    counted. Then all ranks choose as one between Push and Pull, recursive doubling, all-gather and dense all-reduce,
    and between single elements and rows, by bytes. Counts are the same in each run of a script, and so is the choice,
    and the sums to the last bit. In Push and Pull each message is in the format that is smallest for it.

    Args:
        transport: The ranks; with several ranks on a host use `TwoLevel` around this one.
        rows: Numbers of consecutive elements that may go under one index, apart from 1; those that do not divide the
            last dimensions of a gradient are lowered for it until they do.
        profile_steps: Steps to count before the choice, of those that are not empty. That in the middle decides: a pass
            that warms up may show gradients that are all but empty, or dense.
        replan_steps: Steps after which densities are counted and the choice is made anew, since they drift. Under the
            DDP hook what is to be all-reduced stays so: it does not come here any more (`is_all_reduced`).
        route: Choose this one without counting.
        partition: Find each rank's rows exactly, or by the hierarchical hash of the thesis; the result is the same.
        seed: Of the hash that shares rows among ranks; the same on all ranks.

    Raises:
        CommError: An option has no such value.
    """

    name = "zen"

    differs = frozenset({"_seen"})
    """Attributes in which ranks may differ."""

    def __init__(
        self,
        transport: Transport,
        *,
        rows: Sequence[int] = (16, 64, 256),
        profile_steps: int = 3,
        replan_steps: int = 1000,
        route: Route | None = None,
        partition: Literal["exact", "hash"] = "exact",
        seed: int = 0,
    ) -> None:
        super().__init__(transport)
        for option, chosen, known in (
            ("route", route, (None, *get_args(Route))),
            ("partition", partition, ("exact", "hash")),
        ):
            if chosen not in known:
                raise CommError(f"zen knows no {option} {chosen!r}; choose one of {known}")
        if not isinstance(rows, Sequence) or not all(isinstance(each, int) and each > 0 for each in rows):
            raise CommError(f"rows {rows!r} are not numbers of elements; give a list, as (16, 64, 256)")
        for option, number in (("profile_steps", profile_steps), ("replan_steps", replan_steps), ("seed", seed)):
            if not isinstance(number, int) or not 0 <= number < 1 << 63:
                raise CommError(f"{option} {number!r} is not a whole number from 0 to 2**63 - 1")
        self._rows = tuple(rows)
        self._profile_steps = profile_steps
        self._replan_steps = replan_steps
        self._route = route
        self._partition = partition
        self._seed = seed
        self._seen: dict[str, _Seen] = {}
        self._dense = Dense(transport)

    @property
    def plans(self) -> dict[str, ZenPlan]:
        """Key → how it is summed, for keys that are counted."""
        return {key: seen.plan for key, seen in self._seen.items() if seen.plan is not None}

    def rounds(self, key: str, gradient: Tensor) -> Rounds[Tensor]:
        """Sum over all ranks; the order in which an element is added depends on the plan.

        Raises:
            CommError: The ranks' seeds, options or shapes differ (found at the first step of a key).
        """
        if self.transport.size == 1 or gradient.numel() == 0:
            return gradient
        seen = self._seen.get(key)
        if seen is None:
            for group in (self.transport, self.beside):
                if group is not None:
                    check_alike(group, **{key: f"{tuple(gradient.shape)} of {gradient.dtype}"}, zen=self)
        if seen is None or (self._route is None and seen.steps >= self._profile_steps + self._replan_steps):
            seen = self._seen[key] = _Seen()
        if seen.plan is None and self._route is not None:
            width = max(self._widths(gradient)) if self._route != "dense" else 1
            seen.plan = ZenPlan(route=self._route, width=width, received_bytes=0, reason="as was asked for")
        if seen.plan is None:
            return (yield from self._profile(key, gradient, seen))
        seen.steps += 1
        if seen.plan.route == "dense":
            return self._dense.reduce(key, gradient)
        own = compress(gradient, seen.plan.width)
        rank, ranks = self.transport.rank, self.transport.size
        if seen.plan.route == "hierarchical":
            total, _ = yield from sum_by_doubling(rank, ranks, own)
        elif seen.plan.route == "gather":
            total = yield from sum_by_gathering(rank, ranks, own)
        else:
            cut = Balanced(length=own.length, servers=ranks, seed=self._seed, how=self._partition)
            total = yield from push_and_pull(rank, ranks, own, cut)
        return expand(total, gradient)

    def is_all_reduced(self, key: str) -> bool:
        """Tell whether the plan for this gradient is plain all-reduce."""
        plan = self.plans.get(key)
        return plan is not None and plan.route == "dense"

    def state_dict(self) -> dict[str, Any]:
        """Return seed, rows, counts and plans."""
        keys = {key: asdict(seen) for key, seen in self._seen.items()}
        return {"scheme": self.name, "seed": self._seed, "rows": list(self._rows), "keys": keys}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved plans, and with counts if they are of the same rows; those of older versions do not say.

        Their plans are made anew where others sum shares beside: each share had its own. A `route` that was asked for
        goes before plans.

        Raises:
            CommError: They are of another scheme.
        """
        self.check_own(state)
        self._seed = state["seed"]
        has_plans = self._route is None and ("rows" in state or self.beside is None)
        has_counts = state.get("rows") == list(self._rows)
        self._seen = {
            key: _Seen(
                steps=saved["steps"],
                counts=[list(counts) for counts in saved["counts"]] if has_counts else [],
                plan=ZenPlan(**saved["plan"]) if has_plans and saved["plan"] is not None else None,
            )
            for key, saved in state["keys"].items()
        }

    def _widths(self, gradient: Tensor) -> list[int]:
        return sorted({1, *(row_width(gradient.shape, rows) for rows in self._rows)})

    def _profile(self, key: str, gradient: Tensor, seen: _Seen) -> Rounds[Tensor]:
        """Sum this step in a way that shows the densities, and plan when enough of them are known."""
        own = compress(gradient)
        widths, numel = self._widths(gradient), gradient.numel()
        counts = yield from self._greatest([_rows(own.indices, width) for width in widths])
        if counts[0] <= _HOPELESS * numel:
            total, sent = yield from sum_by_doubling(self.transport.rank, self.transport.size, own)
            result = expand(total, gradient)
            rounds = [[_rows(indices, width) for width in widths] for indices in sent]
            # A rank that only takes part in the fold sends in no round.
            rounds += [[0] * len(widths)] * (self.transport.size.bit_length() - 1 - len(rounds))
        else:
            result, rounds = self._dense.reduce(key, gradient), []
            total = compress(result)
        counts += [_rows(total.indices, width) for width in widths]
        counts = yield from self._greatest(counts + [count for round_ in rounds for count in round_])
        seen.steps += 1
        summed_at = len(widths)
        if counts[summed_at]:
            seen.counts.append(counts)
        if len(seen.counts) >= max(1, self._profile_steps):
            by_sum = sorted(seen.counts, key=lambda each: each[summed_at])
            middle = by_sum[len(by_sum) // 2]
            by_width = [middle[index :: len(widths)] for index in range(len(widths))]
            profile = [
                Rows(width=width, own=own_rows, sent=tuple(rounds), summed=summed)
                for width, (own_rows, summed, *rounds) in zip(widths, by_width, strict=True)
            ]
            seen.plan = decide(
                profile,
                ranks=self.transport.size,
                numel=numel,
                item_bytes=gradient.itemsize,
            )
        return result

    def _greatest(self, counts: list[int]) -> Rounds[list[int]]:
        """Return the greatest of each count over all ranks.

        Those beside are asked as well: a gradient of which one share is all-reduced with others, and another one is
        not, would let ranks wait for each other for ever.
        """
        message = torch.tensor(counts, device=self.transport.device).view(torch.uint8)
        messages = yield from all_to_all(self.transport.rank, [message] * self.transport.size)
        found = torch.stack([from_bytes(each, (torch.int64, len(counts)))[0] for each in messages]).amax(0)
        if self.beside is not None:
            found = self.beside.gather_numbers(found).amax(0)
        greatest: list[int] = found.tolist()
        return greatest


def _rows(indices: Tensor, width: int) -> int:
    """Return how many rows of `width` elements the elements at ascending `indices` are in."""
    return torch.unique_consecutive(indices // width).numel() if width > 1 else indices.numel()
