"""Fusions with options of the tree: the search equals trying all, and no fusion beats the bound."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from espresso_instances import affine, cluster

from resilient_run.comm.espresso import fusion_search, maxplus
from resilient_run.comm.espresso.espresso import Espresso, espresso_plan
from resilient_run.comm.espresso.fused import alone_or_dense, fused_plan
from resilient_run.comm.espresso.fusion_search import Fusions
from resilient_run.comm.plan.cluster import Cluster, LinkCost
from resilient_run.comm.plan.constraints import allowed, uncompressed
from resilient_run.comm.plan.curve import Table
from resilient_run.comm.plan.model import Model, Tensor
from resilient_run.comm.plan.plan import CLOSE, Plan
from resilient_run.comm.plan.tree import Option

Job = tuple[Model, Cluster, tuple[Option, ...]]


def random_job(rng: random.Random, most: int, *, cpu: float = 0.2) -> Job:
    """Return a model and a cluster with start-ups and bytes that matter, with one link or two, with CPUs or without."""
    on = cluster(hosts=rng.choice((1, 2, 4, 8)), gpus=rng.choice((1, 2, 8)), cpu=rng.random() < cpu)
    links = [LinkCost(cost=affine(10 ** rng.uniform(-6, -3), 10 ** rng.uniform(-11, -8))) for _ in range(2)]
    on = replace(on, intra=links[0], inter=links[1], links_overlap=rng.random() < 0.3)
    count = rng.randint(1, most)
    sizes = rng.choice(
        (
            [10**7 if place % 2 else 10**3 for place in range(count)],
            [10**6] * count,
            [int(10 ** rng.uniform(2, 7.5)) for _ in range(count)],
            [rng.choice((0, 10**4, 10**7)) for _ in range(count)],
        )
    )
    computing_s = 10 ** rng.uniform(-3, -1)
    tensors = tuple(Tensor(name=f"t{i}", numel=n, backward_s=computing_s * rng.random()) for i, n in enumerate(sizes))
    options = allowed(rng.choice(([], ["gpu-only"], ["rootless"], ["flat"], ["uncompressed"])))
    return Model(name="random", tensors=tensors), on, options


def merged(model: Model, ends: tuple[int, ...]) -> Model:
    groups = [model.tensors[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    return Model(
        name="merged",
        tensors=tuple(
            Tensor(name=own[0].name, numel=sum(t.numel for t in own), backward_s=sum(t.backward_s for t in own))
            for own in groups
        ),
    )


def best_s(model: Model, on: Cluster, options: tuple[Option, ...]) -> float:
    """Return the least time without the forward pass of all groupings and options that can be best."""
    count, found = len(model.tensors), []
    for size in range(count):
        for inner in combinations(range(1, count), size):
            problem = Espresso(merged(model, (*inner, count)), on, options).problem
            fronts = problem.fronts(range(len(problem.choices)))
            states = np.zeros((1, maxplus.WIDTH))
            for kind, backward_s in zip(problem.kinds, problem.backward_s, strict=True):
                ready = maxplus.compute(states, backward_s)
                states = maxplus.apply(ready, problem.matrices(kind, fronts[kind])).reshape(-1, maxplus.WIDTH)
                states = states[maxplus.pareto(states)]
            found.append(states.max(axis=1).min())
    return float(min(found))


def held_to_brute_force(seed: int, count: int, most: int, *, cpu: float = 0.2) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        model, on, options = random_job(rng, most, cpu=cpu)
        least_s, fusions = best_s(model, on, options), Fusions(model, on, options)
        assert fusions.bound_s <= least_s * (1 + 1e-9) + 1e-12
        ends = fusions.search(np.inf)
        assert ends is not None
        problem = Espresso(merged(model, ends), on, options).problem
        found = espresso_plan(merged(model, ends), on, options=options, baselines=False)
        assert found.iteration_s - on.forward_s == pytest.approx(least_s, rel=1e-9, abs=1e-12)
        assert fusions.bound_s == pytest.approx(least_s, rel=1e-9, abs=1e-12)
        assert len(problem) == len(ends)
        assert fusions.search(least_s) is None, "nothing is better"


def test_the_search_equals_brute_force() -> None:
    held_to_brute_force(61, 60, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_the_search_equals_brute_force_on_many_more(seed: int) -> None:
    held_to_brute_force(300 + seed, 150, 4)
    # Brute force with the thousands of options for CPUs as well would take hours.
    held_to_brute_force(400 + seed, 100, 6, cpu=0.0)


def test_sizes_that_count_as_one_prove_less_and_never_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rooted collectives, which cut large tensors into blocks, and with measured costs that fall."""
    rng = random.Random(62)
    falling = Table(sizes_bytes=(1e4, 1e6, 2e6, 1e7), seconds=(1e-3, 4e-3, 2e-3, 9e-3))
    for place in range(40):
        model, on, options = random_job(rng, 5)
        if place % 4 == 0:
            on = replace(on, inter=LinkCost(cost=falling), flat=LinkCost(cost=falling))
        exact_s = Fusions(model, on, options).bound_s
        least_s = best_s(model, on, options)
        with monkeypatch.context() as patched:
            patched.setattr(fusion_search, "_MOST_SIZES", 0)
            patched.setattr(fusion_search, "_BIN", 1.9)
            thinned = Fusions(model, on, options)
        assert thinned.bound_s <= least_s * (1 + 1e-9) + 1e-12
        assert thinned.bound_s >= exact_s * 0.2 - 1e-12
        assert thinned.search(np.inf) is None, "its groups are none of the model's"


def test_steps_of_a_bin_take_no_longer_than_those_of_any_size_in_it() -> None:
    on = cluster(hosts=4, gpus=2)
    sizes = np.unique(np.geomspace(1000, 10**8, 4000).astype(np.int64))
    first = fusion_search._bins(sizes)
    last = np.append(first[1:], len(sizes)) - 1
    assert (sizes[last] <= sizes[first] * 1.03).all()
    low = fusion_search._no_longer(sizes[first], sizes[last], on, allowed([]))
    real = Espresso(fusion_search._of_sizes(sizes), on, allowed([])).problem
    shrunk = 0
    for choice in random.Random(63).sample(range(len(real.choices)), 200):
        for lower, step in zip(low.choices[choice], real.choices[choice], strict=True):
            assert (np.repeat(lower.seconds, np.diff(np.append(first, len(sizes)))) <= step.seconds + 1e-15).all()
            assert (lower.seconds >= step.seconds[first] * 0.6).all()
            shrunk += int((np.diff(step.seconds) < 0).any())
    assert shrunk > 0, "rooted collectives take less time when they begin to cut"


@pytest.mark.parametrize("make", [fused_plan, alone_or_dense])
def test_plans_say_how_far_the_best_plan_may_be(make: Callable[..., Plan]) -> None:
    rng = random.Random(64)
    for _ in range(40):
        model, on, options = random_job(rng, 4)
        plan = make(model, on, options=options)
        without = tuple(option for option in options if uncompressed(option))
        least_s = on.forward_s + best_s(model, on, options if make is fused_plan else without)
        assert plan.bound_s <= plan.iteration_s
        assert plan.bound_s <= least_s * (1 + 1e-9) + 1e-12
        assert plan.gap >= plan.iteration_s / max(least_s, plan.bound_s) - 1 - 1e-9
        if make is fused_plan:
            assert plan.iteration_s <= least_s * (1 + CLOSE) ** 2 + 1e-9


def test_many_tensors_have_a_bound_too() -> None:
    rng = random.Random(65)
    tensors = tuple(Tensor(name=f"t{i}", numel=rng.randint(10**3, 10**6), backward_s=1e-4) for i in range(60))
    plan = fused_plan(Model(name="many", tensors=tensors), cluster(hosts=4, gpus=2, cpu=False))
    assert 0 < plan.bound_s <= plan.iteration_s <= plan.bound_s * 1.5
