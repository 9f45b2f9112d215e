"""Espresso's planners: the exact one equals brute force, the others are what the paper says."""

import random
import statistics

import numpy as np
import pytest
from baselines.timeline import timeline_of
from espresso_instances import (
    ALL_RESOURCES,
    GPU,
    INTER,
    bubbles,
    every_time_s,
    random_problem,
    random_problems,
    random_strategy,
    steps,
)
from tensor_sizes import brute_force

from resilient_run.comm.cupcake.front import pareto
from resilient_run.comm.espresso import maxplus
from resilient_run.comm.espresso.exact import search
from resilient_run.comm.espresso.greedy import greedy, offload
from resilient_run.comm.espresso.legs import Future, Legs, Slack
from resilient_run.comm.espresso.strategy import Problem
from resilient_run.comm.espresso.sweep import Sweep, improve


def optimum(problem: Problem) -> tuple[float, float]:
    """Return what the exact planner finds, and the bound it proves."""
    among = range(len(problem.choices))
    found = search(problem, problem.fronts(among), [problem.quickest(among)])
    assert timeline_of(problem, found.strategy).iteration_s == pytest.approx(found.makespan_s, rel=1e-12, abs=1e-12)
    return found.makespan_s, found.bound_s


def test_matrices_say_the_same_as_the_timeline() -> None:
    seeded = random.Random(1)
    for problem in random_problems(1, 500, tensors=(1, 8), choices=(1, 6)):
        strategy = random_strategy(seeded, problem)
        expected_s = timeline_of(problem, strategy).iteration_s
        assert problem.iteration_s(strategy) == pytest.approx(expected_s, rel=1e-12, abs=1e-12)


def test_bubbles_are_the_same_as_in_the_timeline() -> None:
    seeded = random.Random(2)
    compared = 0
    for problem in random_problems(2, 500, tensors=(1, 8), choices=(1, 6)):
        alone_s = problem.alone_s(np.arange(len(problem.choices)))
        # Rounding may make a bubble of nothing.
        if all(float(seconds).is_integer() for seconds in (*problem.backward_s, *alone_s.flat)):
            strategy = random_strategy(seeded, problem)
            last = max((before for before, *_ in bubbles(timeline_of(problem, strategy))), default=0)
            assert Sweep(problem, strategy).last_bubble() == last
            compared += 1
    assert compared > 100


def test_pareto_keeps_what_no_other_dominates() -> None:
    seeded = np.random.default_rng(3)
    for _ in range(200):
        points = seeded.integers(0, 4, size=(30, 3)).astype(float)
        points[seeded.random(points.shape) < 0.2] = maxplus.NEVER
        kept = set(map(int, pareto(points)))
        for index, point in enumerate(points):
            others = [i for i in range(30) if (points[i] <= point).all() and ((points[i] < point).any() or i < index)]
            assert (index in kept) == (not others)


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_planner_equals_brute_force(seed: int) -> None:
    for problem in random_problems(seed, 500, tensors=(1, 6), choices=(1, 5)):
        least_s = every_time_s(problem).min()
        assert optimum(problem) == pytest.approx((least_s, least_s), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_planner_equals_brute_force_over_a_dozen_tensors(seed: int) -> None:
    for problem in random_problems(100 + seed, 25, tensors=(9, 12), choices=(2, 2), one_link=True):
        least_s = every_time_s(problem).min()
        assert optimum(problem) == pytest.approx((least_s, least_s), rel=1e-9, abs=1e-12)


def test_settled_states_are_no_smaller_and_every_future_takes_as_long_and_no_less_than_bounded() -> None:
    seeded = np.random.default_rng(8)
    moved = 0
    for problem in random_problems(8, 200, tensors=(2, 6), choices=(2, 4)):
        legs = Legs(problem, problem.fronts(range(len(problem.choices))))
        if not legs.kinds:
            continue
        leg = int(seeded.integers(len(legs.kinds)))
        states = seeded.uniform(0, 10, size=(5, len(legs.queues)))
        settled = Slack(legs).settle(leg, states)
        assert (settled >= states).all()
        moved += int((settled > states).any())
        times_s = futures_s(legs, leg, states)
        assert futures_s(legs, leg, settled) == pytest.approx(times_s, rel=1e-12)
        bounds_s = Future(legs).after(leg, states)
        assert (bounds_s <= times_s.min(axis=1) * (1 + 1e-12)).all()
    assert moved > 50


def futures_s(legs: Legs, leg: int, states: np.ndarray) -> np.ndarray:
    """Return when each of these states behind a leg ends, for all choices of the later legs (states, strategies)."""
    reached = states[:, None, :]
    for kind, before in zip(legs.kinds[leg + 1 :], legs.before[leg + 1 : -1], strict=True):
        passed = (reached[..., None, :] + before).max(axis=-1)
        passed = (passed[:, :, None, None, :] + legs.matrices[kind]).max(axis=-1)
        reached = passed.reshape(len(states), -1, states.shape[1])
    times: np.ndarray = (reached[..., None, :] + legs.before[-1]).max(axis=(-1, -2))
    return times


def test_one_tensor_and_tensors_of_no_time() -> None:
    seeded = random.Random(5)
    for _ in range(100):
        one = random_problem(seeded, tensors=1, choices=8, kinds=1)
        assert optimum(one)[0] == pytest.approx(every_time_s(one).min())
    nothing = Problem(
        backward_s=[0.0, 0.0],
        kinds=[0, 0],
        choices=[steps(chain, np.zeros((len(chain), 1))) for chain in ALL_RESOURCES],
    )
    assert optimum(nothing) == (0.0, 0.0)


def test_improving_never_makes_worse_and_ends_where_no_tensor_gains() -> None:
    seeded = random.Random(6)
    for problem in random_problems(6, 200, tensors=(1, 8), choices=(2, 5)):
        start = random_strategy(seeded, problem)
        fronts = problem.fronts(range(len(problem.choices)))
        sweep = Sweep(problem, improve(problem, fronts, start))
        assert sweep.makespan_s <= problem.iteration_s(start) * (1 + 1e-12)
        for index, kind in enumerate(problem.kinds):
            times_s = sweep.times_s(index, fronts[kind])
            for choice, time_s in zip(fronts[kind], times_s, strict=True):
                changed = list(sweep.strategy)
                changed[index] = int(choice)
                assert time_s == pytest.approx(problem.iteration_s(tuple(changed)), rel=1e-12, abs=1e-12)


def greedy_of(problem: Problem) -> float:
    fronts = problem.fronts(range(len(problem.choices)))
    sizes = [float(problem.alone_s(np.array([0]))[kind, 0]) for kind in problem.kinds]
    start = (0,) * len(problem)
    found = problem.iteration_s(greedy(problem, fronts, start, sizes))
    assert found <= problem.iteration_s(start) * (1 + 1e-12)
    return found


def test_the_greedy_algorithm_is_never_better_than_the_exact_planner_and_often_worse() -> None:
    gaps = [greedy_of(problem) / optimum(problem)[0] - 1 for problem in compression_problems(7, 200)]
    assert min(gaps) >= -1e-9
    assert statistics.median(gaps) < 0.2
    assert max(gaps) > 0.01


def compression_problems(seed: int, count: int) -> list[Problem]:
    """Return tensors of some sizes, to be left dense or compressed on the GPU."""
    seeded = random.Random(seed)
    found = []
    for _ in range(count):
        sizes = np.array([[seeded.uniform(0.1, 5) for _ in range(4)]])
        found.append(
            Problem(
                backward_s=[seeded.uniform(0, 2) for _ in range(8)],
                kinds=[seeded.randrange(4) for _ in range(8)],
                choices=[
                    steps((INTER,), sizes),
                    steps((GPU, INTER), np.concatenate([0.3 + 0.2 * sizes, 0.1 * sizes])),
                    steps((GPU, INTER), np.concatenate([0.2 + 0.1 * sizes, 0.4 * sizes])),
                ],
            )
        )
    return found


def test_figure_4_9_the_greedy_algorithm_compresses_the_last_of_two_equal_tensors() -> None:
    problem = Problem(
        backward_s=[1.0, 3.0, 2.0],
        kinds=[0, 1, 1],
        choices=[
            steps((INTER,), np.array([[1.0, 4.0]])),
            steps((GPU, INTER), np.array([[1.0, 1.0], [0.5, 1.0]])),
        ],
    )
    fronts = problem.fronts([0, 1])
    assert greedy(problem, fronts, (0, 0, 0), [1, 4, 4]) == (0, 0, 1)


def offloading_problem(seeded: random.Random, tensors: int) -> Problem:
    """Return tensors to be compressed on the GPU (0) or on CPUs (1)."""
    sizes = np.array([[1.0, seeded.uniform(0.5, 3)]])
    return Problem(
        backward_s=[seeded.uniform(0, 2) for _ in range(tensors)],
        kinds=[seeded.randrange(2) for _ in range(tensors)],
        choices=[
            steps((GPU, INTER), np.concatenate([0.5 * sizes, 0.5 * sizes])),
            steps((ALL_RESOURCES[5][0], INTER), np.concatenate([1.5 * sizes, 0.5 * sizes])),
        ],
    )


def test_offloading_finds_the_best_of_the_first_tensors_of_each_group() -> None:
    seeded = random.Random(9)
    for _ in range(100):
        problem = offloading_problem(seeded, 6)
        start = (0,) * 6
        groups = [[i for i, kind in enumerate(problem.kinds) if kind == which] for which in (0, 1)]
        least_s = min(
            problem.iteration_s(tuple(int(i in groups[0][:first] or i in groups[1][:second]) for i in range(6)))
            for first in range(len(groups[0]) + 1)
            for second in range(len(groups[1]) + 1)
        )
        assert problem.iteration_s(offload(problem, start, {0: 1})) == pytest.approx(least_s)


def test_offloading_the_first_of_a_group_is_not_always_best() -> None:
    seeded = random.Random(10)
    worse = 0
    for _ in range(100):
        problem = offloading_problem(seeded, 6)
        least_s = every_time_s(problem).min()
        assert brute_force(problem, (0,) * 6, {0: 1})["best_iteration_s"] == pytest.approx(least_s)
        worse += problem.iteration_s(offload(problem, (0,) * 6, {0: 1})) > least_s * (1 + 1e-9)
    assert worse > 0


def test_offloading_many_groups_is_searched_group_by_group() -> None:
    seeded = random.Random(11)
    problem = Problem(
        backward_s=[seeded.uniform(0, 1) for _ in range(26)],
        kinds=[index // 2 for index in range(26)],
        choices=[
            steps((GPU, INTER), np.full((2, 13), 0.5)),
            steps((ALL_RESOURCES[5][0], INTER), np.full((2, 13), 0.6)),
        ],
    )
    found = offload(problem, (0,) * 26, {0: 1})
    assert any(found)
    assert problem.iteration_s(found) < problem.iteration_s((0,) * 26)
