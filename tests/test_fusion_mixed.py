"""Fusions of compressed and other groups: equal to trying all, and bounds that nothing beats."""

import random
from itertools import product

import numpy as np
import pytest
from baselines.fusions import hipress
from baselines.system import System
from fusion_instances import best_of_all, hostile_problem, problem_of

from resilient_run.comm.cupcake.cupcake import dense, optimum
from resilient_run.comm.cupcake.fusion import FusionProblem, Group, Strategy
from resilient_run.comm.cupcake.search import Bounds, Weights, best_fusion
from resilient_run.comm.plan.curve import Affine

KINDS = (True, False)


def least_s(problem: FusionProblem) -> float:
    """Return the least time of all strategies without the forward pass."""
    best_s, strategy = best_of_all(problem)
    finish_s = problem.finish_s(strategy)
    assert problem.system.forward_s + finish_s == pytest.approx(best_s, rel=1e-12)
    return finish_s


def no_more(bound_s: float, best_s: float) -> bool:
    return bound_s <= best_s * (1 + 1e-12) + 1e-15


def held_to_brute_force(seed: int, count: int, most: int) -> None:
    rng = random.Random(seed)
    mixed = 0
    for _ in range(count):
        problem = hostile_problem(rng, most=most)
        found, best_s = optimum(problem), least_s(problem)
        assert problem.finish_s(found.strategy) == found.finish_s
        assert found.finish_s == pytest.approx(best_s, rel=1e-9, abs=1e-15)
        assert found.bound_s == found.finish_s, "small models are planned exactly"
        mixed += len({group.compressed for group in found.strategy}) > 1
    assert mixed > 0.08 * count, "a mixture has to be the best often enough"


def test_the_planner_equals_brute_force() -> None:
    held_to_brute_force(41, 300, 8)
    held_to_brute_force(42, 40, 10)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_the_planner_equals_brute_force_on_many_more(seed: int) -> None:
    held_to_brute_force(100 + seed, 2000, 8)
    held_to_brute_force(200 + seed, 200, 11)


def every_strategy(count: int) -> list[Strategy]:
    """All groupings of so many tensors, each group compressed or not."""
    borders = ((*inner, True) for inner in product((False, True), repeat=count - 1))
    found = []
    for border in borders:
        ends = [place + 1 for place, here in enumerate(border) if here]
        starts = [0, *ends[:-1]]
        for modes in product(KINDS, repeat=len(ends)):
            found.append(tuple(Group(*group) for group in zip(starts, ends, modes, strict=True)))
    return found


def test_brute_force_looks_at_every_strategy() -> None:
    rng = random.Random(43)
    assert [len(every_strategy(count)) for count in (1, 2, 3)] == [2, 6, 18]
    for _ in range(50):
        problem = hostile_problem(rng, most=5)
        times_s = map(problem.iteration_s, every_strategy(len(problem)))
        assert best_of_all(problem)[0] == pytest.approx(min(times_s), rel=1e-12)


def ways_s(problem: FusionProblem, strategy: Strategy) -> tuple[float, np.ndarray]:
    """Return how long the ways of `search` are: the device's own, and that of each p <= q; others are 0."""
    costs = [problem.costs_s(group) for group in strategy]
    of_tensor = [place for place, group in enumerate(strategy) for _ in range(group.start, group.end)]
    lengths = np.zeros((len(problem), len(problem)))
    for p, first in enumerate(of_tensor):
        for q, last in list(enumerate(of_tensor))[p:]:
            encoding_s = sum(encode_s for encode_s, _, _ in costs[: first + 1])
            sending_s = sum(send_s for _, send_s, _ in costs[first : last + 1])
            decoding_s = sum(decode_s for _, _, decode_s in costs[last:])
            lengths[p, q] = problem.backward_s[strategy[first].end] + encoding_s + sending_s + decoding_s
    device_s = problem.backward_s[-1] + sum(encode_s + decode_s for encode_s, _, decode_s in costs)
    return device_s, lengths


def random_weights(rng: np.random.Generator, count: int) -> tuple[float, np.ndarray]:
    """Return weights of the device's own way and of all p <= q, 1 together, most of them next to nothing."""
    weights = np.triu(rng.random((count, count)) ** 12)
    device = rng.choice([0.0, rng.random()])
    return device, weights * (1 - device) / weights.sum()


def test_an_iteration_is_the_longest_way_and_costs_are_their_weighted_mean() -> None:
    rng, weigh = random.Random(44), np.random.default_rng(44)
    for _ in range(60):
        problem = hostile_problem(rng, most=6)
        costs, (device, pairs) = Bounds(problem, KINDS), random_weights(weigh, len(problem))
        encoding, sending = (np.append(pairs.sum(axis)[::-1].cumsum()[::-1], 0.0) for axis in (1, 0))
        mean_s = costs.mean(device, encoding, sending)
        strategy = rng.choice(every_strategy(len(problem)))
        device_s, lengths = ways_s(problem, strategy)
        assert problem.finish_s(strategy) == pytest.approx(max(device_s, lengths.max()), rel=1e-12)
        total_s = sum(mean_s[KINDS.index(group.compressed), group.start, group.end] for group in strategy)
        expected_s = device * device_s + (pairs * lengths).sum()
        assert device * problem.backward_s[-1] + total_s == pytest.approx(expected_s, rel=1e-9, abs=1e-15)


def test_no_weights_prove_more_than_the_optimum() -> None:
    rng, weigh = random.Random(45), np.random.default_rng(45)
    tight = 0
    for _ in range(150):
        problem = hostile_problem(rng, most=8)
        costs, best_s = Bounds(problem, KINDS), least_s(problem)
        climbed = sorted(costs.climb(problem.finish_s(hipress(problem))), key=lambda weights: -weights.bound_s)
        made: list[Weights] = [*climbed, *costs.single_paths()]
        for _ in range(5):
            device, pairs = random_weights(weigh, len(problem))
            encoding, sending = (np.append(pairs.sum(axis)[::-1].cumsum()[::-1], 0.0) for axis in (1, 0))
            made.append(costs.proven(device, encoding, sending))
        assert no_more(max(weights.bound_s for weights in made), best_s)
        assert climbed[0].bound_s >= max(weights.bound_s for weights in made) * 0.97 - 1e-15, "it climbs"
        tight += climbed[0].bound_s >= best_s * 0.99
    assert tight > 100


def test_halves_of_the_strategies_have_bounds_of_their_own() -> None:
    rng = random.Random(47)
    for _ in range(60):
        problem = hostile_problem(rng, most=5)
        tensor = rng.randrange(len(problem))
        costs = Bounds(problem, KINDS)
        known_s = problem.finish_s(hipress(problem))
        costs.climb(known_s)
        for kind, compressed in enumerate(KINDS):
            half = costs.settled(tensor, kind).climb(known_s)
            these = [
                strategy
                for strategy in every_strategy(len(problem))
                if all(group.compressed == compressed for group in strategy if group.start <= tensor < group.end)
            ]
            assert no_more(max(weights.bound_s for weights in half), min(map(problem.finish_s, these)))
            assert {weights.strategy for weights in half} <= set(these)


@pytest.mark.parametrize("most", [0, 1, 30, 300])
def test_a_search_that_is_cut_off_says_how_far_the_optimum_may_be(most: int) -> None:
    rng = random.Random(48)
    open_ = 0
    for _ in range(100):
        problem = hostile_problem(rng, most=8)
        found, best_s = best_fusion(problem, kinds=KINDS, most=most), least_s(problem)
        assert no_more(found.bound_s, best_s)
        assert no_more(best_s, found.finish_s)
        assert found.finish_s <= problem.finish_s(hipress(problem))
        open_ += found.bound_s < found.finish_s
    # A single pass, which is never cut off, proves what is best of so few tensors.
    assert open_ > 0 or most
    many = best_fusion(large_problem(rng, 60), kinds=KINDS, most=most)
    assert many.bound_s < many.finish_s


def large_problem(rng: random.Random, count: int) -> FusionProblem:
    """Return a model in which few tensors have most of the bytes, behind a link that is balanced with the device."""
    sizes = [rng.choice([10**3, 10**5]) for _ in range(count - 3)] + [10**7, 10**4, 4 * 10**7]
    line = Affine(alpha_s=3e-4, beta_s_per_byte=1e-10)
    system = System(
        forward_s=0.01,
        bytes_per_element=4.0,
        compress=line,
        communicate=Affine(alpha_s=1e-4, beta_s_per_byte=2e-11),
        decompress=Affine(alpha_s=1e-4, beta_s_per_byte=5e-11),
        communicate_dense=Affine(alpha_s=2e-4, beta_s_per_byte=1.4e-10),
    )
    return problem_of(sizes, [rng.random() * 3e-4 for _ in range(count)], system)


def test_large_models_are_planned_within_a_hundredth() -> None:
    rng = random.Random(49)
    for _ in range(3):
        problem = large_problem(rng, 100)
        found = optimum(problem)
        assert found.bound_s <= found.finish_s <= found.bound_s * 1.01
        for other in (best_fusion(problem).strategy, dense(problem), hipress(problem)):
            assert found.finish_s <= problem.finish_s(other)


def test_a_large_tensor_is_settled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that its kind would keep the bound far below."""
    problem = large_problem(random.Random(50), 60)
    settled = []
    original = Bounds.settled
    monkeypatch.setattr(
        Bounds, "settled", lambda costs, tensor, kind: settled.append(tensor) or original(costs, tensor, kind)
    )
    best_fusion(problem, kinds=KINDS)
    assert settled
    assert settled[0] in (57, 59), "the largest ones"
