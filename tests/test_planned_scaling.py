"""`benchmarks/planned_scaling.py` paces computation as it says, and no contender of the thesis beats the planners."""

from dataclasses import replace

import pytest
from espresso_planning import cluster_of
from espresso_upper_bound import paced
from planned_scaling import (
    CASES,
    FUSED,
    PROVEN,
    TENSOR_BY_TENSOR,
    UPPER_BOUND,
    Cupcake,
    describe,
    model_of,
    with_64_gpus,
)

from resilient_run.comm.espresso.espresso import Espresso

LSTM = next(case for case in CASES if case.model == "lstm")


def test_contenders_of_the_thesis_are_predicted() -> None:
    found = describe(LSTM)
    last = found["iteration_s"][64]
    assert found["computation_s"] / last["FP32"] == pytest.approx(LSTM.scaling, rel=1e-4)
    assert set(last) == {*TENSOR_BY_TENSOR, *FUSED, "espresso-fused"}
    for gpus in LSTM.gpus:
        times_s = found["iteration_s"][gpus]
        assert times_s["espresso"] <= min(times_s[name] for name in TENSOR_BY_TENSOR)
        assert times_s["cupcake"] <= min(times_s[name] for name in FUSED) * (1 + 1e-9)


def test_the_search_of_everything_begins_where_smaller_ones_end() -> None:
    """Of hundreds of tensors it cannot look at enough: for this model CPUs alone were quicker."""
    case = next(case for case in CASES if case.model == "resnet101" and not isinstance(case, Cupcake))
    of = cluster_of(model_of(case), "pcie-25", "dgc")
    job = Espresso(paced(model_of(case), 1.13), replace(of, compressor=replace(of.compressor, ratio=0.01)))
    best_s = min(job.problem.iteration_s(strategy) for strategy in job.others.values())
    assert job.optimum.bound_s <= job.optimum.makespan_s <= best_s


def test_no_restricted_planner_and_no_contender_is_quicker_and_nothing_beats_the_bound() -> None:
    for by_compressor in with_64_gpus(paced(model_of(LSTM), 60)).values():
        assert set(by_compressor) == {"dgc", "efsignsgd", "randomk"}
        for factors in by_compressor.values():
            least = min(factors.pop(PROVEN), factors.pop(UPPER_BOUND))
            assert max(factors.values()) == factors["espresso"] <= least <= 1
