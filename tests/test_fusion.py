"""Tensor fusion: the timeline, and planners that must equal trying every strategy."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from baselines.algorithm_5_1 import algorithm_5_1
from baselines.fusions import best_bucketed, best_evenly_split, evenly_split, hipress, layer_wise, one_group
from baselines.system import System
from baselines.timeline import fusion_timeline

from resilient_run.comm.cupcake.cupcake import cupcake, dense, optimum
from resilient_run.comm.cupcake.fusion import FusionProblem, Group, Strategy, bucketed, groups_of
from resilient_run.comm.cupcake.search import best_fusion
from resilient_run.comm.plan.curve import FREE, Affine, Curve, Table
from resilient_run.comm.plan.model import Tensor


def affine(alpha_s: float, beta_s_per_byte: float) -> Affine:
    return Affine(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)


SYSTEM = System(forward_s=1.0, bytes_per_element=4.0, compress=affine(1.0, 0.0), communicate=affine(0.0, 0.25))


def problem_of(sizes: list[int], backward_s: list[float], system: System = SYSTEM) -> FusionProblem:
    pairs = enumerate(zip(sizes, backward_s, strict=True))
    return FusionProblem([Tensor(name=f"t{i}", numel=n, backward_s=b) for i, (n, b) in pairs], system)


def random_affine(rng: random.Random) -> Affine:
    return affine(rng.choice([0.0, rng.random(), rng.random() * 5]), rng.choice([0.0, rng.random() * 0.2]))


def random_curve(rng: random.Random) -> Curve:
    """Return an affine cost, a flat one that rises later, or one that goes up and down."""
    if rng.random() < 0.3:
        return random_affine(rng)
    sizes = sorted(rng.sample(range(100), rng.randint(1, 4)))
    seconds = [rng.random() * 8 for _ in sizes]
    return Table(
        sizes_bytes=tuple(map(float, sizes)), seconds=tuple(sorted(seconds) if rng.random() < 0.8 else seconds)
    )


def random_problem(
    rng: random.Random, *, most: int, decode: bool, cost: Callable[[random.Random], Curve] = random_affine
) -> FusionProblem:
    """Return a problem with ties, empty tensors and free operations among its costs."""
    count = rng.randint(1, most)
    system = replace(
        SYSTEM,
        compress=cost(rng),
        communicate=cost(rng),
        decompress=cost(rng) if decode else FREE,
        communicate_dense=cost(rng),
    )
    sizes = [rng.choice([0, 1, rng.randint(1, 30)]) for _ in range(count)]
    return problem_of(sizes, [rng.choice([0.0, 1.0, rng.random() * 4]) for _ in range(count)], system)


def strategies(count: int) -> list[Strategy]:
    """Every one of the 2^(N-1)."""
    inner = range(1, count)
    return [groups_of((*ends, count)) for size in range(count) for ends in itertools.combinations(inner, size)]


def least_s(problem: FusionProblem) -> float:
    return min(map(problem.iteration_s, strategies(len(problem))))


def ends(strategy: Strategy) -> list[int]:
    return [group.end for group in strategy]


def timeline(problem: FusionProblem, strategy: Strategy) -> list[list[tuple[float, float]]]:
    """Return when each group is encoded, communicated and decoded; checks that the device does one thing at a time."""
    spans = fusion_timeline(problem, strategy).spans
    busy = sorted((span.begin_s, span.end_s) for span in spans if span.lane != "inter" and span.end_s > span.begin_s)
    assert all(end_s <= begin_s for (_, end_s), (begin_s, _) in itertools.pairwise(busy))
    return [
        [(span.begin_s, span.end_s) for span in spans if span.group == group and span.kind != "backward"]
        for group in range(len(strategy))
    ]


def test_compression_of_every_tensor_may_not_pay_but_fused() -> None:
    """As in Figures 5.1 and 5.3: five tensors, without overlap, with overlap, compressed each, compressed in groups."""
    system = replace(SYSTEM, communicate=affine(0.0, 0.125), communicate_dense=affine(0.0, 0.375))
    problem = problem_of([1] * 5, [1.0] * 5, system)
    assert problem.finish_s(one_group(problem, compressed=False)) == 5 + 5 * 1.5
    assert problem.finish_s(layer_wise(problem, compressed=False)) == 1 + 5 * 1.5
    assert problem.finish_s(layer_wise(problem)) == 5 + 5 * 1 + 0.5
    assert problem.finish_s(groups_of((4, 5))) == 5 + 2 * 1 + 0.5
    assert ends(best_fusion(problem).strategy) == [4, 5]
    assert problem.finish_s(cupcake(problem)) < 5 + 2 * 1 + 0.5, "better still if some stay as they are"


def test_timeline_by_hand() -> None:
    """Both cases of Figure 5.5: the first group travels when it is encoded, the second waits for the first."""
    problem = problem_of([4, 4, 8], [2.0, 1.0, 1.0], replace(SYSTEM, decompress=affine(0.5, 0.0)))
    strategy = groups_of((2, 3))
    assert timeline(problem, strategy) == [[(3, 4), (4, 12), (12, 12.5)], [(5, 6), (12, 20), (20, 20.5)]]
    assert problem.iteration_s(strategy) == 21.5


def test_fusion_is_between_all_and_nothing() -> None:
    """As in Figure 5.3: one group cannot overlap, one for each of the five tensors pays latencies, two are best."""
    problem = problem_of([1] * 5, [1.0] * 5, replace(SYSTEM, communicate=affine(1.0, 0.25)))
    assert problem.finish_s(one_group(problem)) == 5 + 1 + 6
    assert problem.finish_s(layer_wise(problem)) == 2 + 5 * 2
    assert problem.finish_s(groups_of((2, 5))) == 5 + 2 + 4
    assert best_fusion(problem).finish_s == 11


def test_decoding_waits_for_the_device() -> None:
    problem = problem_of([1, 1], [1.0, 9.0], replace(SYSTEM, decompress=affine(2.0, 0.0)))
    assert timeline(problem, layer_wise(problem)) == [[(1, 2), (2, 3), (12, 14)], [(11, 12), (12, 13), (14, 16)]]


def test_groups_without_compression_cost_the_device_nothing() -> None:
    system = replace(SYSTEM, decompress=affine(2.0, 0.0), communicate_dense=affine(0.0, 1.0))
    problem = problem_of([1, 1], [1.0, 1.0], system)
    strategy = (Group(0, 1, False), Group(1, 2))
    assert timeline(problem, strategy) == [[(1, 1), (1, 5), (5, 5)], [(2, 3), (5, 6), (6, 8)]]


@pytest.mark.parametrize("cost", [random_affine, random_curve])
@pytest.mark.parametrize("decode", [False, True])
def test_exact_planner_equals_brute_force(decode: bool, cost: Callable[[random.Random], Curve]) -> None:
    rng = random.Random(9)
    for most, repetitions in ((8, 300), (12, 15)):
        for _ in range(repetitions):
            problem = random_problem(rng, most=most, decode=decode, cost=cost)
            found = best_fusion(problem)
            assert found.bound_s == found.finish_s
            assert problem.iteration_s(found.strategy) == pytest.approx(least_s(problem), rel=1e-9)


def without_latency(problem: FusionProblem, rng: random.Random) -> FusionProblem:
    """Return the problem with communication that has no latency, or next to none, and decoding that has."""
    latency_s = rng.choice([0.0, 0.0, rng.random() * 1e-3])
    communicate = affine(latency_s, rng.choice([0.05, rng.random() * 0.2]))
    decompress = affine(0.01 + rng.random(), rng.choice([0.0, rng.random() * 0.1]))
    return FusionProblem(problem.tensors, replace(problem.system, communicate=communicate, decompress=decompress))


def test_without_latency_of_communication_the_result_equals_brute_force() -> None:
    rng = random.Random(13)
    for most, repetitions in ((8, 150), (12, 15)):
        for _ in range(repetitions):
            problem = without_latency(random_problem(rng, most=most, decode=True), rng)
            assert problem.iteration_s(best_fusion(problem).strategy) == pytest.approx(least_s(problem), rel=1e-9)


@pytest.mark.parametrize("prunings", [(1, 2), (1,), (2,), ()])
def test_algorithm_5_1_equals_brute_force(prunings: tuple[int, ...]) -> None:
    rng = random.Random(6)
    for _ in range(500):
        problem = random_problem(rng, most=8, decode=False)
        best_s = least_s(problem)
        for start in (None, layer_wise(problem)):
            found = algorithm_5_1(problem, prunings, start)
            assert problem.iteration_s(found) == pytest.approx(best_s, rel=1e-12)


def test_each_pruning_of_algorithm_5_1_saves_work() -> None:
    """Counted are the times of sending that are asked for, as each look at a group asks for."""
    rng = random.Random(6)
    problems = [random_problem(rng, most=12, decode=False) for _ in range(20)]
    asked: Counter[tuple[int, ...]] = Counter()

    def counted(problem: FusionProblem, prunings: tuple[int, ...]) -> FusionProblem:
        communicate = problem.system.communicate
        assert isinstance(communicate, Affine)

        @dataclass(frozen=True)
        class Counted(Affine):
            def __call__(self, size_bytes: float) -> float:
                asked[prunings] += 1
                return communicate(size_bytes)

        counting = Counted(alpha_s=communicate.alpha_s, beta_s_per_byte=communicate.beta_s_per_byte)
        return FusionProblem(problem.tensors, replace(problem.system, communicate=counting))

    for prunings in ((1, 2), (1,), (2,), ()):
        for problem in problems:
            algorithm_5_1(counted(problem, prunings), prunings)
    assert asked[1, 2] < min(asked[1,], asked[2,]) < max(asked[1,], asked[2,]) < asked[()]


def test_exact_planner_equals_algorithm_5_1_on_larger_models() -> None:
    rng = random.Random(7)
    for _ in range(30):
        problem = random_problem(rng, most=24, decode=False)
        assert best_fusion(problem).finish_s == pytest.approx(problem.finish_s(algorithm_5_1(problem)), rel=1e-9)


def test_models_of_many_tensors_are_planned_exactly() -> None:
    """As many as a GPT of 36 blocks has."""
    rng = random.Random(3)
    sizes = [rng.choice([4096, 1 << 20, 3 << 20, 4 << 20]) for _ in range(435)]
    affine_cost = {
        "compress": affine(3e-5, 2e-11),
        "communicate": affine(1e-4, 8e-10),
        "decompress": affine(3e-5, 2e-11),
    }
    found = best_fusion(problem_of(sizes, [1e-3] * len(sizes), replace(SYSTEM, **affine_cost)))
    assert found.bound_s == found.finish_s


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        ({"decompress": affine(1.0, 0.0)}, "does not know decoding"),
        ({"compress": Table(sizes_bytes=(0.0,), seconds=(1.0,))}, "needs affine costs"),
    ],
)
def test_algorithm_5_1_knows_neither_decoding_nor_curves(cost: dict[str, Any], told: str) -> None:
    problem = problem_of([1], [1.0], replace(SYSTEM, **cost))
    with pytest.raises(ValueError, match=told):
        algorithm_5_1(problem)


@pytest.mark.parametrize("cost", [random_affine, random_curve])
def test_nothing_is_faster_than_the_bound_and_no_baseline_than_the_plan(
    cost: Callable[[random.Random], Curve],
) -> None:
    rng = random.Random(8)
    for decode in (False, True):
        for _ in range(40):
            problem = random_problem(rng, most=30, decode=decode, cost=cost)
            found = optimum(problem)
            plan_s = problem.iteration_s(found.strategy)
            assert found.bound_s <= problem.finish_s(found.strategy) == found.finish_s
            for baseline in (one_group, layer_wise, best_bucketed, best_evenly_split, hipress, dense):
                assert plan_s <= problem.iteration_s(baseline(problem)) * (1 + 1e-12)


def test_compression_that_does_not_pay_is_left_out() -> None:
    fast = problem_of([4, 4], [1.0, 1.0], replace(SYSTEM, communicate_dense=affine(0.0, 0.001)))
    assert not any(group.compressed for group in cupcake(fast))
    slow = problem_of([4, 4], [1.0, 1.0], replace(SYSTEM, communicate_dense=affine(0.0, 10.0)))
    assert all(group.compressed for group in cupcake(slow))


def test_hipress_compresses_what_is_large() -> None:
    """Compression takes 1 s and saves 0.25 s a byte: it pays above 4 bytes."""
    problem = problem_of([1, 2, 3], [1.0] * 3, replace(SYSTEM, communicate_dense=affine(0.0, 0.5)))
    assert [group.compressed for group in hipress(problem)] == [False, True, True]
    assert ends(hipress(problem)) == [1, 2, 3]


def test_baselines() -> None:
    problem = problem_of([1, 2, 3, 4, 5], [1.0] * 5)
    assert ends(one_group(problem)) == [5]
    assert ends(layer_wise(problem)) == [1, 2, 3, 4, 5]
    assert ends(evenly_split(problem, 2)) == [2, 5]
    assert ends(evenly_split(problem, 9)) == [1, 2, 3, 4, 5]
    assert ends(bucketed(problem.size_bytes, 12)) == [2, 3, 4, 5]
    assert ends(bucketed(problem.size_bytes, 1)) == [1, 2, 3, 4, 5]
    assert ends(bucketed(problem.size_bytes, 1 << 20)) == [5]


def test_a_model_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        problem_of([], [])
