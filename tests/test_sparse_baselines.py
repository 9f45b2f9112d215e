"""TopkA, TopkDSA, gTopk and Ok-Topk on real connections: what they promise, and what they cost."""

import pytest
import torch
from baselines import GTopk, OkTopk, TopkDSA
from baselines.cost import gtopk_cost, log2_rounds, ok_topk_cost, topk_a_cost, topk_dsa_cost
from gradients import Run, check_all_agree, check_nothing_lost, gradient, lost_share, run_steps
from ranks import run_ranks
from tiers import nightly_but
from torch import Tensor

from resilient_run.comm.errors import CommError
from resilient_run.comm.net.entries import kept_count
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.spardl.sparse_scheme import SparseScheme
from resilient_run.comm.spardl.topk_a import TopkA

DENSITY = 1 / 32
LOSSLESS: tuple[type[SparseScheme], ...] = (TopkA, TopkDSA, OkTopk)


@pytest.mark.parametrize("ranks", nightly_but([*range(1, 9), 11, 16], range(1, 17)))
def test_nothing_is_lost_all_agree_and_words_are_those_of_table_1(ranks: int) -> None:
    numel = 64 * ranks * ranks
    kept = kept_count(numel, DENSITY)

    def work(transport: Transport) -> list[Run]:
        return [
            run_steps(scheme(transport, density=DENSITY), (gradient(transport.rank, step, numel) for step in range(3)))
            for scheme in LOSSLESS
        ]

    topk_a, topk_dsa, ok_topk = (list(runs) for runs in zip(*run_ranks(ranks, work), strict=True))
    for runs in (topk_a, topk_dsa, ok_topk):
        check_all_agree(runs)
        check_nothing_lost(runs)
    for gathered, split in zip(topk_a, topk_dsa, strict=True):
        assert all(map(torch.equal, gathered.totals, split.totals))
        assert all(map(torch.equal, gathered.residuals, split.residuals))
    cost = topk_a_cost(ranks, kept)
    assert {(run.rounds, run.received_words) for run in topk_a} == {(cost.rounds, cost.most_words)}

    headers = 2 * ranks
    cost = topk_dsa_cost(ranks, kept, numel)
    direct_sends = ranks - 1  # one exchange
    assert {run.rounds for run in topk_dsa} == {cost.rounds - direct_sends + 1}
    mean = sum(run.received_words for run in topk_dsa) / ranks
    assert cost.least_words <= mean <= cost.most_words + headers
    mean = sum(run.received_words for run in ok_topk) / ranks
    assert mean <= 2 * ok_topk_cost(ranks, kept).most_words + 4 * headers  # thresholds may select twice of k
    assert 1 + 2 * log2_rounds(ranks) <= max(run.rounds for run in ok_topk) <= 2 + 3 * log2_rounds(ranks)


def test_ok_topk_agrees_on_regions_and_keeps_thresholds_until_they_do_not_fit() -> None:
    """All large values are at the start, where equal regions would leave all work to the first rank."""

    def work(transport: Transport) -> tuple[list[Run], dict[str, object], dict[str, object]]:
        scheme = OkTopk(transport, density=0.05)

        def skewed(step: int, scale: float = 1.0) -> Tensor:
            values = gradient(transport.rank, step, 4000)
            values[500:] /= 1e6
            return scale * values

        runs = [run_steps(scheme, (skewed(step) for step in range(5)))]
        steady = scheme.state_dict()["memories"]["w"]
        runs.append(run_steps(scheme, (skewed(step, 100.0) for step in range(5, 9))))
        return runs, steady, scheme.state_dict()["memories"]["w"]

    found = run_ranks(4, work)
    for phase in range(2):
        check_all_agree([runs[phase] for runs, _, _ in found])
    for _, steady, later in found:
        assert steady["step"] == 5
        assert steady["ends"] == found[0][1]["ends"]
        assert steady["ends"][-2] <= 510  # type: ignore[index]
        assert later["local"] > 10 * steady["local"]  # type: ignore[operator]
    kept = int(found[0][0][1].totals[-1].count_nonzero())
    assert 100 <= kept <= 400


def test_gtopk_costs_what_its_trees_do_and_loses_what_they_discard() -> None:
    kept = kept_count(2048, DENSITY)
    for ranks in (1, 2, 4, 8, 16):

        def work(transport: Transport) -> Run:
            scheme = GTopk(transport, density=DENSITY)
            return run_steps(scheme, (gradient(transport.rank, step, 2048) for step in range(3)))

        runs = run_ranks(ranks, work)
        check_all_agree(runs)
        assert {run.rounds for run in runs} == {gtopk_cost(ranks, kept).rounds}
        assert max(run.received_words for run in runs) == gtopk_cost(ranks, kept).most_words / 2  # the root's
        assert int(runs[0].totals[0].count_nonzero()) == kept
        if ranks <= 2:
            check_nothing_lost(runs)
        else:
            assert 1e-3 < lost_share(runs) < 0.5


def test_gtopk_refuses_other_numbers_of_ranks() -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(CommError, match="gtopk needs a power of two of ranks, not 3; use spardl"):
            GTopk(transport)

    run_ranks(3, work)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_odd_gradients(ranks: int) -> None:
    cases = {
        "k of all": (1.0, lambda rank: gradient(rank, 0, 50)),
        "fewer elements than ranks": (0.5, lambda rank: gradient(rank, 0, 3)),
        "one element": (0.01, lambda rank: torch.tensor(float(rank + 1))),
        "empty": (0.01, lambda rank: torch.empty(0, 4)),
        "zero": (0.01, lambda rank: torch.zeros(30, 7)),
        "ties": (0.01, lambda rank: torch.ones(300)),
        "ties that cancel": (0.01, lambda rank: torch.ones(300) * (1 - 2 * (rank % 2))),
        "float64": (0.05, lambda rank: gradient(rank, 0, 300).double()),
        "bfloat16": (0.05, lambda rank: gradient(rank, 0, 300).bfloat16()),
        "not contiguous": (0.05, lambda rank: gradient(rank, 0, 600).view(20, 30).T),
    }
    schemes = (*LOSSLESS, GTopk)

    def work(transport: Transport) -> dict[str, list[Run]]:
        return {
            name: [run_steps(scheme(transport, density=density), [make(transport.rank)] * 3) for scheme in schemes]
            for name, (density, make) in cases.items()
        }

    found = run_ranks(ranks, work)
    for name, (_, make) in cases.items():
        for scheme, runs in zip(schemes, zip(*(rank[name] for rank in found), strict=True), strict=True):
            check_all_agree(list(runs))
            assert runs[0].totals[0].shape == make(0).shape, name
            assert runs[0].totals[0].dtype == make(0).dtype, name
            if scheme is not GTopk:
                assert lost_share(list(runs)) <= (1e-2 if name == "bfloat16" else 1e-6), (name, scheme.name)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", [*LOSSLESS, GTopk])
def test_a_step_with_inf_or_nan_leaves_no_trace(scheme: type[SparseScheme], poison: float) -> None:
    def work(transport: Transport) -> tuple[Run, Run]:
        good = [gradient(transport.rank, step, 2000) for step in range(2)]
        bad = gradient(transport.rank, 5, 2000)
        if transport.rank == 1:
            bad[7:300] = poison
        return run_steps(scheme(transport), [good[0], bad, good[1]]), run_steps(scheme(transport), good)

    for disturbed, undisturbed in run_ranks(4, work):
        assert not disturbed.totals[1].isfinite().all()
        assert torch.equal(disturbed.residuals[1], disturbed.residuals[0])
        assert torch.equal(disturbed.totals[2], undisturbed.totals[1])
        assert torch.equal(disturbed.residuals[2], undisturbed.residuals[1])
