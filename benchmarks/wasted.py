"""What failures cost by model: wasted time (Gemini, Equation 6.1) and effective training time ratio (Section 6.7.3).

The model: training makes `interval_s` of progress, then stands still for `stall_s` to take a checkpoint, which can be
restored `checkpoint_s` later. Failures come at random. Each costs `overhead_s` and `retrieval_s`, from the start if
another one interrupts it, and the progress since the newest checkpoint that can be restored. Memory survives the loss
of some hosts with a probability that is sampled here, and counted in `resilient_run.ckpt.format.survival`.
"""

import math
import random
from dataclasses import dataclass

from resilient_run.ckpt.format.placement import Placement

DAY_S = 86_400.0


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


def high_frequency_s(checkpoint_s: float, iteration_s: float) -> float:
    """Return the interval of the HighFreq baseline: as often as its storage allows (Section 6.7.1, Equation 6.2)."""
    return math.ceil(checkpoint_s / iteration_s) * iteration_s


def expected_wasted_s(scheme: CheckpointCost, fallback: CheckpointCost, survival: float) -> float:
    """Return the average wasted time when memory survives with this probability and else `fallback` is used."""
    return survival * scheme.wasted_s + (1 - survival) * fallback.wasted_s


def linear_ratio(scheme: CheckpointCost, failures_per_day: float) -> float:
    """Return the effective training time ratio as Figure 6.15 adds it up: stalls plus failures, at least 0."""
    stalled = scheme.stall_s / scheme.interval_s
    return max(0.0, 1 - stalled - failures_per_day / DAY_S * (scheme.wasted_s + scheme.overhead_s))


def effective_ratio(scheme: CheckpointCost, failures_per_day: float) -> float:
    """Return the effective training time ratio of the model in the long run, exact for exponential failures.

    Between two recoveries training lasts 1/λ on average and saves one interval for each checkpoint that can be restored
    before the failure; a recovery that must not be interrupted for R seconds takes (exp(λR) - 1)/λ.
    """
    rate = failures_per_day / DAY_S
    cycle_s = scheme.interval_s + scheme.stall_s
    if not rate:
        return scheme.interval_s / cycle_s
    recovery_s = scheme.overhead_s + scheme.retrieval_s
    exponent = rate * (scheme.checkpoint_s + recovery_s)
    return rate * scheme.interval_s * math.exp(-exponent) / math.expm1(rate * cycle_s)


def simulated_ratio(scheme: CheckpointCost, failures_per_day: float, *, days: float, rng: random.Random) -> float:
    """Return the effective training time ratio of one simulated run of `days` days with exponential failures."""
    now_s, saved_s, end_s = 0.0, 0.0, days * DAY_S
    rate = failures_per_day / DAY_S
    cycle_s = scheme.interval_s + scheme.stall_s
    recovery_s = 0.0
    while now_s < end_s:
        lived_s = rng.expovariate(rate) if rate else math.inf
        trained_s = min(lived_s, end_s - now_s) - recovery_s
        saved_s += scheme.interval_s * max(0, math.floor((trained_s - scheme.checkpoint_s) / cycle_s))
        now_s += lived_s
        recovery_s = scheme.overhead_s + scheme.retrieval_s
    return saved_s / end_s


def sampled_survival(plan: Placement, failures: int, *, samples: int, rng: random.Random) -> float:
    """Return the share of `samples` random losses of `failures` hosts that leave every checkpoint somewhere."""
    holders = plan.holders()
    survived = 0
    for _ in range(samples):
        lost = set(rng.sample(range(len(holders)), failures))
        # A checkpoint whose own host lives is safe, so only those of lost hosts are looked at.
        survived += not any(lost.issuperset(holders[host]) for host in lost)
    return survived / samples
