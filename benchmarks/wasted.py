"""Wasted time (Gemini, Equation 6.1) and effective training time ratio (Section 6.7.3) in closed form.

The model is that of `resilient_run.daemon.base.costs`, which simulates it, with software failures only. Memory survives
the loss of some hosts with a probability that is sampled here, and counted in `resilient_run.ckpt.format.survival`.
"""

import math
import random

from resilient_run.ckpt.format.placement import Placement
from resilient_run.daemon.base.costs import DAY_S, CheckpointCost


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


def sampled_survival(plan: Placement, failures: int, *, samples: int, rng: random.Random) -> float:
    """Return the share of `samples` random losses of `failures` hosts that leave every checkpoint somewhere."""
    holders = plan.holders()
    survived = 0
    for _ in range(samples):
        lost = set(rng.sample(range(len(holders)), failures))
        # A checkpoint whose own host lives is safe, so only those of lost hosts are looked at.
        survived += not any(lost.issuperset(holders[host]) for host in lost)
    return survived / samples
