"""What failures cost by model: Gemini's simulation of training (Section 6.7.3), with hosts that must be replaced.

Training makes `interval_s` of progress, then stands still for `stall_s` to take a checkpoint, which can be restored
`checkpoint_s` later. Failures come at random, at the same rate whether or not training goes on. Each costs the progress
since the newest checkpoint that can be restored, the wait for hosts that were lost, and then `overhead_s` and the
retrieval, from the start if another failure interrupts them.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Final

DAY_S: Final = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCost:
    """How one way of checkpointing behaves in one job; all in seconds.

    Attributes:
        interval_s: Training between two checkpoints, 1/f.
        checkpoint_s: From a checkpoint's beginning until it can be restored, t_ckpt.
        retrieval_s: To get it back, t_rtvl.
        stall_s: Training time that each checkpoint takes away.
        overhead_s: What else a failure costs: detection, new processes, warm-up.
    """

    interval_s: float
    checkpoint_s: float
    retrieval_s: float
    stall_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def wasted_s(self) -> float:
        """Average wasted time of one failure (Equation 6.1)."""
        return self.checkpoint_s + self.interval_s / 2 + self.retrieval_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What fails in a job, how often, and how lost hosts are replaced.

    Attributes:
        hosts: Hosts that train, N.
        host: Losses of each host a day, standbys included.
        software: Failures a day, for each host that trains, that take no host.
        rack: Losses of each rack a day, with all of its hosts.
        rack_hosts: Hosts of a rack; 0 if none are lost together.
        replace_s: From the loss of a host until another one is there.
        fetch_s: To fetch the state of a replaced host from its peers.
    """

    hosts: int
    host: float = 0.0
    software: float = 0.0
    rack: float = 0.0
    rack_hosts: int = 0
    replace_s: float = 0.0
    fetch_s: float = 0.0

    @property
    def racks(self) -> int:
        """Racks of hosts that train; the last may have fewer hosts."""
        return -(-self.hosts // self.rack_hosts) if self.rack_hosts else 0

    @property
    def per_day(self) -> float:
        """Failures of the whole job a day."""
        return self.hosts * (self.host + self.software) + self.racks * self.rack


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """What became of one simulated run.

    Attributes:
        ratio: Effective training time ratio: the share of its time that made lasting progress.
        idle: Standbys that were ready, on average.
        losses: (hosts lost at once, hosts whose replicas were missing already) → how often.
    """

    ratio: float
    idle: float
    losses: Counter[tuple[int, int]]


def high_frequency_s(checkpoint_s: float, step_s: float) -> float:
    """Return the shortest interval of whole steps between checkpoints that take `checkpoint_s` (Equation 6.2)."""
    return max(1, math.ceil(checkpoint_s / step_s)) * step_s


def simulate(
    cost: CheckpointCost, failures: Failures, *, standbys: int, days: float, rng: random.Random
) -> SimulatedRun:
    """Return one run of `days` days that starts with all standbys ready.

    A lost host is replaced by the standby that has been ready longest, and another host is ordered at once
    (Section 6.6.2). Without one, training waits for the ordered host.
    """
    rate, end_s = failures.per_day / DAY_S, days * DAY_S
    losses = (0, 1, min(failures.rack_hosts, failures.hosts))
    weights = (failures.hosts * failures.software, failures.hosts * failures.host, failures.racks * failures.rack)
    pool = _Standbys(failures, standbys, random.Random(rng.random()))
    seen: Counter[tuple[int, int]] = Counter()
    now_s = saved_s = 0.0
    missing = 0
    while now_s < end_s:
        failed_s = now_s + rng.expovariate(rate) if rate else math.inf
        trained_s = min(failed_s, end_s) - now_s
        saved_s += cost.interval_s * max(
            0, math.floor((trained_s - cost.checkpoint_s) / (cost.interval_s + cost.stall_s))
        )
        if trained_s >= cost.checkpoint_s:
            missing = 0
        now_s = there_s = failed_s
        while now_s < end_s:
            (lost,) = rng.choices(losses, weights)
            if lost:
                seen[lost, missing] += 1
                missing = min(missing + lost, failures.hosts)
                there_s = max(there_s, *(pool.take(now_s) for _ in range(lost)))
            retrieval_s = max(cost.retrieval_s, failures.fetch_s) if missing else cost.retrieval_s
            back_s = max(now_s, there_s) + cost.overhead_s + retrieval_s
            now_s += rng.expovariate(rate)
            if now_s >= back_s:
                now_s = back_s
                break
    return SimulatedRun(ratio=saved_s / end_s, idle=pool.idle_s(end_s) / end_s, losses=seen)


class _Standbys:
    """When each standby is ready. Its own generator keeps the failures of a seed the same for any number of them."""

    def __init__(self, failures: Failures, standbys: int, rng: random.Random) -> None:
        self._ready_s = [0.0] * standbys
        self._rate = failures.host / DAY_S
        self._replace_s = failures.replace_s
        self._rng = rng
        self._idle_s = 0.0

    def take(self, now_s: float) -> float:
        """Order a host, and return when the place of one lost now is taken."""
        heappush(self._ready_s, now_s + self._replace_s)
        # A standby may be lost while it waits, which makes no difference before it is wanted.
        while (ready_s := self._ready_s[0]) < now_s:
            lost_s = ready_s + self._rng.expovariate(self._rate) if self._rate else math.inf
            self._idle_s += min(lost_s, now_s) - ready_s
            if lost_s >= now_s:
                break
            heapreplace(self._ready_s, lost_s + self._replace_s)
        return heappop(self._ready_s)

    def idle_s(self, end_s: float) -> float:
        """Return the seconds that all standbys together were ready until the end."""
        return self._idle_s + sum(max(0.0, end_s - ready_s) for ready_s in self._ready_s)
