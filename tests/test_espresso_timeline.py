"""F(S) against timelines worked out by hand: what Figures 4.2, 4.5, 4.9, 5.1 and 5.3 to 5.5 of the thesis show."""

import itertools
import random

import pytest
from baselines.fusions import layer_wise
from baselines.system import System
from baselines.timeline import Chain, TensorChain, Work, derive
from espresso_instances import bubbles

from resilient_run.comm.cupcake.fusion import FusionProblem
from resilient_run.comm.espresso.maxplus import Resource
from resilient_run.comm.plan.curve import Affine
from resilient_run.comm.plan.model import Tensor

GPU, CPU, INTRA, INTER = Resource.GPU, Resource.CPU, Resource.INTRA, Resource.INTER
NOTHING: Chain = ()


def chain(*works: tuple[Resource, float]) -> Chain:
    return tuple(Work(resource, seconds, "work") for resource, seconds in works)


def jobs(*parts: tuple[float, Chain]) -> tuple[TensorChain, ...]:
    return tuple(TensorChain(*part) for part in parts)


def spans(of: tuple[TensorChain, ...], lane: str) -> list[tuple[str, float, float]]:
    """Return (tensor, start, end) in a lane, without the backward pass."""
    found = derive(of).spans
    return [(f"T{s.group}", s.begin_s, s.end_s) for s in found if s.lane == lane and s.kind != "backward"]


BACKWARD = (3.0, 2.0, 2.0)
DENSE = [chain((INTER, seconds)) for seconds in (2, 6, 4)]
ON_GPU = [chain((GPU, seconds), (INTER, 1)) for seconds in (3, 3, 2)]
ON_CPU = [chain((CPU, seconds), (INTER, 1)) for seconds in (2, 4, 6)]


@pytest.mark.parametrize(
    ("strategy", "iteration_s"),
    [
        ((DENSE[0], DENSE[1], DENSE[2]), 15.0),
        ((DENSE[0], DENSE[1], ON_GPU[2]), 12.0),
        ((ON_GPU[0], ON_GPU[1], ON_GPU[2]), 16.0),
        ((ON_CPU[0], ON_CPU[1], ON_CPU[2]), 16.0),
        ((DENSE[0], ON_CPU[1], ON_GPU[2]), 11.0),
    ],
    ids=["(a) none", "(b) the last on the GPU", "(c) all on GPUs", "(d) all on CPUs", "(e) the best"],
)
def test_figure_4_2_compression_helps_or_harms(strategy: tuple[Chain, ...], iteration_s: float) -> None:
    assert derive(jobs(*zip(BACKWARD, strategy, strict=True))).iteration_s == iteration_s


def test_figure_4_2_overlaps_as_the_text_says() -> None:
    none = jobs(*zip(BACKWARD, DENSE, strict=True))
    assert spans(none, INTER) == [("T0", 3, 5), ("T1", 5, 11), ("T2", 11, 15)]
    last = jobs(*zip(BACKWARD, (DENSE[0], DENSE[1], ON_GPU[2]), strict=True))
    assert spans(last, GPU) == [("T2", 7, 9)]
    gpus = jobs(*zip(BACKWARD, ON_GPU, strict=True))
    assert spans(gpus, GPU) == [("T0", 3, 6), ("T1", 8, 11), ("T2", 13, 15)]
    assert spans(gpus, INTER) == [("T0", 6, 7), ("T1", 11, 12), ("T2", 15, 16)]
    cpus = jobs(*zip(BACKWARD, ON_CPU, strict=True))
    assert spans(cpus, CPU) == [("T0", 3, 5), ("T1", 5, 9), ("T2", 9, 15)]


def test_figure_4_2_e_is_the_best_of_all() -> None:
    strategies = itertools.product(*zip(DENSE, ON_GPU, ON_CPU, strict=True))
    assert min(derive(jobs(*zip(BACKWARD, made, strict=True))).iteration_s for made in strategies) == 11


@pytest.mark.parametrize(("backward_s", "one_step_s", "two_steps_s"), [(1.0, 11.0, 9.0), (10.0, 13.0, 15.0)])
def test_figure_4_5_ab_the_scheme_depends_on_the_next_tensor(
    backward_s: float, one_step_s: float, two_steps_s: float
) -> None:
    indivisible = chain((GPU, 1), (INTER, 8))
    divisible = chain((GPU, 1), (INTER, 2), (GPU, 2), (INTER, 2))
    last = (backward_s, chain((INTER, 1)))
    assert derive(jobs((1, indivisible), last)).iteration_s == one_step_s
    assert derive(jobs((1, divisible), last)).iteration_s == two_steps_s


@pytest.mark.parametrize(("backward_s", "between_s", "throughout_s"), [(1.0, 10.0, 9.0), (6.0, 12.0, 13.0)])
def test_figure_4_5_cd_where_to_compress_depends_on_the_next_tensor(
    backward_s: float, between_s: float, throughout_s: float
) -> None:
    between_hosts = chain((INTRA, 3), (GPU, 1), (INTER, 1))
    throughout = chain((GPU, 2), (INTRA, 1), (INTER, 1))
    last = (backward_s, chain((INTRA, 2), (INTER, 2)))
    assert derive(jobs((1, between_hosts), last)).iteration_s == between_s
    assert derive(jobs((1, throughout), last)).iteration_s == throughout_s


def test_links_have_one_queue() -> None:
    two = jobs((1, chain((INTRA, 3), (INTER, 4))), (1, chain((INTRA, 2), (INTER, 2))))
    assert spans(two, INTRA) == [("T0", 1, 4), ("T1", 8, 10)]
    assert spans(two, INTER) == [("T0", 4, 8), ("T1", 10, 12)]
    assert derive(two).iteration_s == 12


def test_figure_4_9_bubbles() -> None:
    dense, small = chain((INTER, 4)), chain((GPU, 1), (INTER, 1))
    first = (1.0, chain((INTER, 1)))
    none = derive(jobs(first, (3, dense), (2, dense)))
    assert (none.iteration_s, bubbles(none)) == (12, [(1, 2, 4)])
    second = derive(jobs(first, (3, small), (2, dense)))
    assert second.iteration_s == 11
    assert bubbles(second) == [(1, 2, 5), (2, 6, 7)]
    third = derive(jobs(first, (3, dense), (2, small)))
    assert (third.iteration_s, len(bubbles(third))) == (9, 1)


def test_figure_5_1_waiting_overlapping_and_compressing_every_tensor() -> None:
    assert derive(jobs((5, chain((INTER, 10))))).iteration_s == 15
    assert derive(jobs(*[(1.0, chain((INTER, 2)))] * 5)).iteration_s == 11
    assert derive(jobs(*[(1.0, chain((GPU, 1), (INTER, 1)))] * 5)).iteration_s == 11


def fused(*counts: int) -> tuple[TensorChain, ...]:
    """Return groups of tensors of one second each; compression and communication are affine."""
    return jobs(*((float(n), chain((GPU, 0.8 + 0.2 * n), (INTER, 0.5 + 0.5 * n))) for n in counts))


@pytest.mark.parametrize(
    ("counts", "iteration_s"), [((5,), 9.8), ((1, 1, 1, 1, 1), 11.0), ((3, 2), 9.1), ((4, 1), 9.1), ((1, 4), 10.1)]
)
def test_figures_5_3_and_5_4_groups_trade_compression_for_overlap(counts: tuple[int, ...], iteration_s: float) -> None:
    assert derive(fused(*counts)).iteration_s == pytest.approx(iteration_s)


def test_figure_5_5_both_cases_of_the_delay() -> None:
    at_once = spans(fused(3, 2), INTER)
    assert [start for _, start, _ in at_once] == pytest.approx([4.4, 7.6])
    assert derive(fused(4, 1)).spans[-1].begin_s == pytest.approx(8.1), "it is ready at 7.6"


def test_the_last_decompressions_yield_to_the_backward_pass() -> None:
    coded = chain((GPU, 1), (INTER, 1), (GPU, 2))
    found = jobs((1, coded), (5, coded))
    assert spans(found, "gpu decode") == [("T0", 8, 10), ("T1", 10, 12)]
    assert derive(found).iteration_s == 12


def test_cpus_decompress_while_they_compress() -> None:
    coded = chain((CPU, 2), (INTER, 3), (CPU, 2))
    found = jobs((1, coded), (1, coded))
    assert spans(found, CPU) == [("T0", 1, 3), ("T1", 3, 5)]
    assert spans(found, "cpu late") == [("T0", 6, 8), ("T1", 9, 11)]


def test_nothing_to_communicate_takes_the_backward_pass_alone() -> None:
    assert derive(jobs((1, NOTHING), (2, NOTHING))).iteration_s == 3
    assert derive(()).iteration_s == 0


def test_groups_take_as_long_as_cupcake_predicts() -> None:
    seeded = random.Random(7)
    for _ in range(200):
        tensors = [
            Tensor(name=str(i), numel=seeded.randint(0, 9), backward_s=seeded.choice([0.0, 1.0, 2.5]))
            for i in range(seeded.randint(1, 6))
        ]
        h, g, d = (Affine(alpha_s=seeded.random(), beta_s_per_byte=seeded.random()) for _ in range(3))
        system = System(
            forward_s=0.0, bytes_per_element=4, compress=h, communicate=g, decompress=d, communicate_dense=None
        )
        problem = FusionProblem(tensors, system)
        own = jobs(
            *(
                (tensor.backward_s, chain((GPU, h(size)), (INTER, g(size)), (GPU, d(size))))
                for tensor in tensors
                for size in [4.0 * tensor.numel]
            )
        )
        expected_s = problem.iteration_s(layer_wise(problem))
        assert derive(own).iteration_s == pytest.approx(expected_s)
