"""How many standbys and replicas a run should have, and how often to persist it: what each choice is worth."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, Final

from resilient_run.ckpt.format.placement import Placement, placement
from resilient_run.ckpt.format.survival import domain_loss, survival

from .costs import DAY_S, CheckpointCost, Failures, high_frequency_s, simulate
from .goodput import Ledger

MOST_FAILURES: Final = 20_000
"""Of one simulated run."""
_BUDGET: Final = 200_000
"""Failures to simulate, where the number of runs is free."""
_RUNS: Final = (20, 2000)
_MOST_REPLICAS: Final = 4
_WORTH: Final = 0.001
"""What one more replica has to add, of the time."""
_KINDS: Final = {
    "host": ("host_lost", "unhealthy"),
    "software": ("worker_exit", "hang", "corruption", "unhealthy_steps"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        cost: What a failure costs if all hosts are there.
        failures: How often what fails.
        write_s: To write a checkpoint to the persistent tier, or to read it from there.
        tier_stall_s: Training time that each checkpoint in the tier takes away.
        most_standbys: 0 to this many are compared.
        days: Of each simulated run.
        seed: Of the simulation.
        seen: Rates of `failures` that were measured → failures seen. Each simulated run draws its own.
        seen_hosts: On so many hosts,
        seen_days: in so many days.
    """

    cost: CheckpointCost
    failures: Failures
    write_s: float
    tier_stall_s: float = 0.0
    most_standbys: int
    days: float
    seed: int = 1
    seen: Mapping[str, int] = field(default_factory=dict)
    seen_hosts: int = 0
    seen_days: float = 0.0

    @property
    def host_days(self) -> float:
        """In how much time failures were seen, times hosts."""
        return self.seen_hosts * self.seen_days


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaChoice:
    """What m replicas are worth.

    Attributes:
        replicas: m.
        at_once: Chance that the loss of m random hosts at once takes the last copy of a checkpoint.
        with_rack: The same for the loss of one rack, None without racks.
        lost_per_day: Expected losses of a last copy, also one after the other while hosts are replaced.
        persist_s: Interval of the persistent tier that costs least.
        cost: Share of the time that these losses and the tier take.
    """

    replicas: int
    at_once: float
    with_rack: float | None
    lost_per_day: float
    persist_s: float
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StandbyChoice:
    """What a number of standbys is worth.

    Attributes:
        standbys: How many.
        goodput: Expected share of the time that makes lasting progress, with the advised replicas and tier.
        error: Half of its 95 % interval.
        low: 90 % of the simulated runs lie between this
        high: and this.
        paid: `goodput` for each host, standbys included.
        idle: Standbys that are ready, on average.
        replicas: What 1, 2, … replicas are worth.
        advised: The fewest of them, at least 2, to which one more adds less than a thousandth of the time.
    """

    standbys: int
    goodput: float
    error: float
    low: float
    high: float
    paid: float
    idle: float
    replicas: tuple[ReplicaChoice, ...]
    advised: ReplicaChoice


def seen_failures(ledger: Ledger) -> tuple[dict[str, int], int, float | None]:
    """Return how many failures of a run took a host and how many none, its hosts, and the mean seconds of a recovery.

    Each host reports each recovery, so there are as many hosts as reported one. Recoveries are those without a lost
    host. What was planned or ordered, and what only follows from other failures (`memory_lost`), is left out.
    """
    seen = {name: sum(failure.kind in kinds for failure in ledger.failures) for name, kinds in _KINDS.items()}
    down_s = [each.down_s for each in ledger.failures if each.complete and each.kind in _KINDS["software"]]
    hosts = max((len(each.hosts) for each in ledger.failures), default=0)
    return seen, hosts, statistics.mean(down_s) if down_s else None


def drawn_rate(seen: int, host_days: float, rng: random.Random) -> float:
    """Return a rate per host and day at which so many failures were seen: Jeffreys' posterior of a Poisson rate."""
    return rng.gammavariate(seen + 0.5, 1 / host_days)


def rate_interval(seen: int, host_days: float) -> tuple[float, float]:
    """Return the rates per host and day between which the true one lies with 90 %."""
    rng = random.Random(0)
    return _middle([drawn_rate(seen, host_days, rng) for _ in range(10_000)])


def compare(question: Question) -> list[StandbyChoice]:
    """Return what each number of standbys is worth, given the same failures."""
    failures, days, numbers = question.failures, question.days, range(question.most_standbys + 1)
    runs = int(min(_RUNS[1], max(_RUNS[0], _BUDGET / max(1.0, failures.per_day * days * len(numbers)))))
    replicas = _ReplicaWorth(question)
    choices = []
    for standbys in numbers:
        simulated = []
        for run in range(runs):
            rng = random.Random(f"{question.seed} {run}")
            rates: dict[str, Any] = {n: drawn_rate(seen, question.host_days, rng) for n, seen in question.seen.items()}
            drawn = replace(failures, **rates)
            simulated.append(simulate(question.cost, drawn, standbys=standbys, days=days, rng=rng))
        losses = sum((run.losses for run in simulated), Counter())
        worth = replicas.compared(losses, runs * days)
        enough = (few for few, more in pairwise(worth[1:]) if few.cost - more.cost < _WORTH)
        advised = next(enough, worth[-1])
        ratios = [run.ratio * (1 - advised.cost) for run in simulated]
        goodput, (low, high) = statistics.mean(ratios), _middle(ratios)
        choices.append(
            StandbyChoice(
                standbys=standbys,
                goodput=goodput,
                error=1.96 * statistics.stdev(ratios) / math.sqrt(runs),
                low=low,
                high=high,
                paid=goodput * failures.hosts / (failures.hosts + standbys),
                idle=statistics.mean(run.idle for run in simulated),
                replicas=worth,
                advised=advised,
            )
        )
    return choices


class _ReplicaWorth:
    """What 1, 2, … replicas are worth, placed across the racks."""

    def __init__(self, question: Question) -> None:
        size, count = question.failures.rack_hosts, question.failures.hosts
        self._question = question
        self._hosts = tuple(map(str, range(count)))
        self._racks = tuple(str(host // size) for host in range(count)) if size else None
        self._plans = [placement(count, m, labels=self._racks) for m in range(1, min(_MOST_REPLICAS, count) + 1)]
        self._chance = cache(domain_loss)

    def compared(self, losses: Mapping[tuple[int, int], int], days: float) -> tuple[ReplicaChoice, ...]:
        """Return what they are worth, given the losses of hosts in so many days, as `SimulatedRun` counts them."""
        return tuple(self._choice(plan, losses, days) for plan in self._plans)

    def _choice(self, plan: Placement, losses: Mapping[tuple[int, int], int], days: float) -> ReplicaChoice:
        lost = 0.0
        for (together, missing), count in losses.items():
            labels = self._racks if together > 1 and self._racks else self._hosts
            lost += count * self._chance(plan, labels, missing)
        write_s, stall_s = self._question.write_s, self._question.tier_stall_s
        # The interval that costs least (Young 1974) as Equation 6.2 allows it, for at least one loss.
        wanted_s = max(write_s, math.sqrt(2 * stall_s * days * DAY_S / max(1.0, lost)))
        persist_s = high_frequency_s(wanted_s, self._question.cost.interval_s)
        tier = CheckpointCost(interval_s=persist_s, checkpoint_s=write_s, retrieval_s=write_s)
        return ReplicaChoice(
            replicas=plan.replicas,
            at_once=1 - float(survival(plan, plan.replicas)),
            with_rack=None if self._racks is None else self._chance(plan, self._racks, 0),
            lost_per_day=lost / days,
            persist_s=persist_s,
            cost=min(1.0, lost * tier.wasted_s / days / DAY_S + stall_s / persist_s),
        )


def _middle(values: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[0], cuts[-1]
