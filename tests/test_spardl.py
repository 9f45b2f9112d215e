"""SparDL on real connections, 1 to 16 ranks: nothing is lost, all ranks agree, and words are as the paper says."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from baselines.cost import log2_rounds, spardl_cost
from baselines.residuals import LocalResiduals, PartialResiduals
from gradients import Run, check_all_agree, check_nothing_lost, gradient, lost_share, run_steps
from ranks import run_ranks
from tiers import nightly_but
from torch import Tensor

from resilient_run.comm.errors import CommError
from resilient_run.comm.net.entries import kept_count
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.spardl.spardl import SparDL
from resilient_run.comm.spardl.srs import sending_bags
from resilient_run.comm.spardl.teams import Teams, Width
from resilient_run.comm.spardl.topk_a import TopkA

STEPS = 3
NUMEL = 3001


def divisors(count: int) -> list[int]:
    return [teams for teams in range(1, count + 1) if count % teams == 0]


@pytest.mark.parametrize("ranks", nightly_but([*range(1, 9), 11, 16], range(1, 17)))
def test_nothing_is_lost_all_agree_and_words_are_those_of_the_equations(ranks: int) -> None:
    numel = 64 * ranks * ranks
    recursive = [teams for teams in divisors(ranks) if teams & (teams - 1) == 0]
    kept = kept_count(numel, 1 / 32)

    def work(transport: Transport) -> list[Run]:
        made = [SparDL(transport, density=1 / 32, teams=teams, gather="recursive") for teams in recursive]
        made += [SparDL(transport, density=1 / 32, teams=teams, gather="bruck") for teams in divisors(ranks)[1:]]
        return [run_steps(scheme, (gradient(transport.rank, step, numel) for step in range(STEPS))) for scheme in made]

    for number, runs in enumerate(zip(*run_ranks(ranks, work), strict=True)):
        check_all_agree(list(runs))
        check_nothing_lost(list(runs))
        if number < len(recursive):
            teams = recursive[number]
            cost = spardl_cost(ranks, kept, teams=teams)
            assert {run.rounds for run in runs} == {cost.rounds}
            assert all(run.received_words == pytest.approx(cost.most_words, abs=1e-6) for run in runs)
            assert int(runs[0].totals[0].count_nonzero()) == kept
        else:
            teams = divisors(ranks)[1:][number - len(recursive)]
            cost = spardl_cost(ranks, kept, teams=teams, gather="bruck")
            headers = 2 * ranks
            assert {run.rounds for run in runs} == {cost.rounds}
            assert all(cost.least_words - 1 <= run.received_words <= cost.most_words + headers for run in runs)
            assert int(runs[0].totals[0].count_nonzero()) <= kept


def test_one_team_receives_four_words_of_each_kept_element() -> None:
    for ranks in (1, 5, 14):
        cost = spardl_cost(ranks, 700)
        assert cost.most_words == pytest.approx(4 * 700 * (ranks - 1) / ranks)
        assert cost.rounds == 2 * log2_rounds(ranks)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_odd_gradients(ranks: int) -> None:
    """Fewer kept elements than ranks, more than there are, empty, zero, equal and single elements."""
    one = torch.ones(NUMEL)
    cases: dict[str, tuple[float, Callable[[int], Tensor]]] = {
        "k below the ranks": (0.001, lambda rank: gradient(rank, 0, 700)),
        "k of all": (1.0, lambda rank: gradient(rank, 0, 50)),
        "fewer elements than ranks": (0.5, lambda rank: gradient(rank, 0, 3)),
        "one element": (0.01, lambda rank: torch.tensor(float(rank + 1))),
        "empty": (0.01, lambda rank: torch.empty(0, 4)),
        "zero": (0.01, lambda rank: torch.zeros(30, 7)),
        "ties": (0.01, lambda rank: one.clone()),
        "ties that cancel": (0.01, lambda rank: one * (1 - 2 * (rank % 2))),
        "not contiguous": (0.05, lambda rank: gradient(rank, 0, 600).view(20, 30).T),
    }

    def work(transport: Transport) -> dict[str, list[Run]]:
        return {
            name: [
                run_steps(SparDL(transport, density=density, gather=gather), [make(transport.rank)] * STEPS)
                for gather in ("recursive", "bruck")
            ]
            for name, (density, make) in cases.items()
        }

    found = run_ranks(ranks, work)
    for name, (_, make) in cases.items():
        for runs in zip(*(rank[name] for rank in found), strict=True):
            check_all_agree(list(runs))
            assert runs[0].totals[0].shape == make(0).shape, name
            check_nothing_lost(list(runs))
    exact = sum(gradient(rank, 0, 50) for rank in range(ranks))
    torch.testing.assert_close(found[0]["k of all"][0].totals[0], exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_keep_what_rounding_leaves(dtype: torch.dtype) -> None:
    def work(transport: Transport) -> list[Run]:
        return [
            run_steps(
                SparDL(transport, density=0.05, teams=teams, gather=gather),
                (gradient(transport.rank, step, NUMEL).to(dtype) for step in range(STEPS)),
            )
            for teams, gather in ((1, None), (4, "recursive"), (8, "recursive"), (4, "bruck"))
        ]

    for runs in zip(*run_ranks(8, work), strict=True):
        check_all_agree(list(runs))
        check_nothing_lost(list(runs))
        assert runs[0].totals[0].dtype == dtype


def test_finite_values_that_float16_cannot_hold_stay_finite() -> None:
    def work(transport: Transport) -> Run:
        large = torch.full((8,), 60000.0, dtype=torch.float16)
        return run_steps(SparDL(transport, density=1.0), [large, torch.zeros_like(large), torch.zeros_like(large)])

    runs = run_ranks(2, work)
    assert runs[0].totals[0].tolist() == [65504.0] * 8
    check_nothing_lost(runs)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("ranks", "teams", "gather"), [(3, 1, None), (4, 2, "recursive"), (6, 3, "bruck")])
def test_a_step_with_inf_or_nan_leaves_no_trace(poison: float, ranks: int, teams: int, gather: str | None) -> None:
    def work(transport: Transport) -> tuple[Run, Run]:
        good = [gradient(transport.rank, step, NUMEL) for step in range(2)]
        bad = gradient(transport.rank, 5, NUMEL)
        if transport.rank == ranks - 1:
            bad[7:300] = poison
        make = [SparDL(transport, teams=teams, gather=gather) for _ in range(2)]  # type: ignore[arg-type]
        return run_steps(make[0], [good[0], bad, good[1]]), run_steps(make[1], good)

    for disturbed, undisturbed in run_ranks(ranks, work):
        assert not disturbed.totals[1].isfinite().all()
        assert torch.equal(disturbed.residuals[1], disturbed.residuals[0])
        assert torch.equal(disturbed.totals[2], undisturbed.totals[1])
        assert torch.equal(disturbed.residuals[2], undisturbed.residuals[1])


@pytest.mark.parametrize("gather", ["recursive", "bruck"])
def test_restored_state_goes_on_bit_for_bit(gather: str) -> None:
    def work(transport: Transport) -> tuple[Run, Run]:
        scheme, restored = (SparDL(transport, gather=gather) for _ in range(2))  # type: ignore[arg-type]
        inputs = [gradient(transport.rank, step, NUMEL) for step in range(4)]
        run_steps(scheme, inputs[:2])
        saved = {
            **scheme.state_dict(),
            "residuals": {key: value.clone() for key, value in scheme.state_dict()["residuals"].items()},
        }
        undisturbed = run_steps(scheme, inputs[2:])
        restored.load_state_dict(saved)
        return undisturbed, run_steps(restored, inputs[2:])

    for undisturbed, restored in run_ranks(4, work):
        assert all(map(torch.equal, undisturbed.totals, restored.totals))
        assert all(map(torch.equal, undisturbed.residuals, restored.residuals))


def way_of(scheme: SparDL, key: str = "w") -> tuple[int, str]:
    memory = scheme.state_dict()["memories"][key]
    return memory["teams"], memory["gather"]


@pytest.mark.parametrize(("ranks", "teams"), [(1, 1), (4, 2), (6, 2), (7, 1)])
def test_there_are_two_teams_where_that_is_possible(ranks: int, teams: int) -> None:
    def work(transport: Transport) -> tuple[int, str]:
        scheme = SparDL(transport)
        scheme.reduce("w", gradient(transport.rank, 0, 2000))
        return way_of(scheme)

    assert set(run_ranks(ranks, work)) == {(teams, "recursive")}


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ({"teams": 3}, {"teams": 6}, (6, "bruck")),
        ({"teams": 6}, {"teams": 3}, (3, "bruck")),
        ({"teams": 2, "gather": "bruck"}, {"teams": 2}, (2, "recursive")),
        ({"teams": 3}, {}, (2, "recursive")),
    ],
)
def test_restored_state_goes_on_with_other_teams(
    first: dict[str, Any], then: dict[str, Any], expected: tuple[int, str]
) -> None:
    """Nothing of the residuals is lost, and widths, which are those of other teams, begin again."""

    def work(transport: Transport) -> tuple[Run, Run, tuple[int, str]]:
        scheme, restored = SparDL(transport, density=0.05, **first), SparDL(transport, density=0.05, **then)
        before = run_steps(scheme, [gradient(transport.rank, step, NUMEL) for step in range(3)])
        restored.load_state_dict(deepcopy(scheme.state_dict()))
        after = run_steps(restored, [gradient(transport.rank, step, NUMEL) for step in range(3, 6)])
        joined = Run(
            inputs=before.inputs + after.inputs,
            totals=before.totals + after.totals,
            residuals=before.residuals + after.residuals,
            received_words=after.received_words,
            rounds=after.rounds,
        )
        return joined, after, way_of(restored)

    found = run_ranks(6, work)
    check_all_agree([run for run, _, _ in found])
    check_nothing_lost([run for run, _, _ in found])
    assert {way for _, _, way in found} == {expected}


@pytest.mark.parametrize("memory", [{"h": 7.0, "step": 2.0, "again": False}, {"ranks": 6, "teams": 4}])
def test_widths_of_another_number_of_ranks_or_of_an_old_version_begin_again(memory: dict[str, Any]) -> None:
    def work(transport: Transport) -> float:
        scheme = SparDL(transport, teams=4, gather="bruck")
        residual = gradient(transport.rank, 0, NUMEL)
        memories = {"w": {**memory, "gather": "bruck", "width": {"h": 1e9, "step": 1.0}}}
        scheme.load_state_dict({"scheme": "spardl", "residuals": {"w": residual}, "memories": memories})
        scheme.reduce("w", gradient(transport.rank, 1, NUMEL))
        width: float = scheme.state_dict()["memories"]["w"]["width"]["h"]
        return width

    assert all(30 / 4 <= width <= 30 for width in run_ranks(4, work))


def test_ranks_that_would_not_do_the_same_are_refused() -> None:
    """Otherwise they wait for each other, or take messages of other sizes for theirs."""

    def other_teams(transport: Transport) -> str:
        scheme = SparDL(transport, teams=2 if transport.rank == 2 else 4)
        with pytest.raises(CommError, match="give all ranks the same arguments") as raised:
            scheme.reduce("w", gradient(transport.rank, 0, NUMEL))
        return str(raised.value)

    (message,) = set(run_ranks(4, other_teams))
    assert "w: rank 0 says [30, 4, 0, 30] and rank 2 [30, 2, 0, 15] (elements kept, teams, " in message

    def only_one_restored(transport: Transport) -> None:
        saved = SparDL(transport, teams=2, gather="bruck", density=0.1)
        for step in range(4):
            saved.reduce("w", gradient(transport.rank, step, NUMEL))
        assert saved.state_dict()["memories"]["w"]["width"]["h"] > 150 / 2 + 1
        scheme = SparDL(transport, density=0.1, teams=2, gather="bruck")  # the same teams, another width
        if transport.rank == 1:
            scheme.load_state_dict(saved.state_dict())
        with pytest.raises(CommError, match=r"rank [13] \[300, 2, 1, .* restore all from one checkpoint"):
            scheme.reduce("w", gradient(transport.rank, 1, NUMEL))

    run_ranks(4, only_one_restored)


@pytest.mark.parametrize("said", [(5, 5, 0, 0), (5, 5, 3, 0), (5, 5, -1, 1), (5, 5, 2, 2), (10, 0, 0, 5)])
def test_what_ranks_say_is_not_trusted(said: tuple[int, ...]) -> None:
    def work(transport: Transport) -> None:
        send = transport.send_to_all

        def lie(message: Tensor, **options: Any) -> list[Tensor]:
            return send(torch.tensor(said).view(torch.uint8) if transport.rank else message, **options)

        transport.send_to_all = lie  # type: ignore[method-assign]
        with pytest.raises(CommError, match=r"w: rank 0 says \[10, 2, 0, 10\] and rank 1 "):
            SparDL(transport, density=0.1, teams=2).reduce("w", torch.ones(100))

    run_ranks(2, work)


def test_a_contiguous_gradient_has_the_sum_afterwards_and_others_are_left() -> None:
    def work(transport: Transport) -> None:
        for made in (SparDL(transport, density=0.1), TopkA(transport, density=0.1)):
            for dtype in (torch.float32, torch.bfloat16):
                given = gradient(transport.rank, 0, 600).to(dtype).view(20, 30)
                across = given.t().contiguous().t()
                untouched = across.clone()
                total = made.reduce(f"{dtype} across", across)
                assert torch.equal(across, untouched)
                assert made.reduce(f"{dtype}", given) is given
                assert torch.equal(given, total)

    run_ranks(2, work)


def test_sparse_layout_is_kept() -> None:
    def work(transport: Transport) -> tuple[Tensor, Tensor]:
        dense = torch.zeros(20, 3)
        dense[transport.rank :: 5] = 1.0 + transport.rank
        made = [SparDL(transport, density=0.1) for _ in range(2)]
        return made[0].reduce("w", dense.to_sparse(1)), made[1].reduce("w", dense)

    for sparse, dense in run_ranks(2, work):
        assert sparse.is_sparse
        assert sparse.sparse_dim() == 1
        assert torch.equal(sparse.to_dense(), dense)


def test_residuals_other_than_global_lose_something() -> None:
    def work(transport: Transport) -> dict[str, Run]:
        return {
            kind: run_steps(
                made(transport, density=0.05, teams=2),
                (gradient(transport.rank, step, NUMEL) for step in range(STEPS)),
            )
            for kind, made in (("global", SparDL), ("partial", PartialResiduals), ("local", LocalResiduals))
        }

    found = run_ranks(6, work)
    for kind in found[0]:
        check_all_agree([rank[kind] for rank in found])
    lost = {kind: lost_share([rank[kind] for rank in found]) for kind in found[0]}
    assert lost["global"] < 1e-6 < 1e-3 < lost["partial"] < lost["local"]


@pytest.mark.parametrize("count", range(1, 40))
def test_bags_hold_each_other_block_once_and_go_where_they_are_held(count: int) -> None:
    bags = sending_bags(3 % count, count)
    blocks = [block for bag in bags for block in bag]
    assert sorted([*blocks, 3 % count]) == list(range(count))
    assert len(bags) == log2_rounds(count)
    held = set(range(count))
    for bag in bags:  # what a rank receives is what it holds on to, by the symmetry of places
        held -= set(bag)
        distance = (bag[0] - 3) % count
        assert {(block - distance) % count for block in bag} <= held


def test_width_finds_the_union_that_fits_and_stays_in_its_range() -> None:
    """Half of each team's elements are also those of the others; then all are, then none."""
    width, teams, quota = Width.first(600, 3), 3, 600
    assert (width.h, width.step) == (200.0, 4.0)
    for share, expected in ((0.5, 300.0), (1.0, 600.0), (0.0, 200.0), (0.5, 300.0)):
        for _ in range(60):
            union = round(width.h) * (share + (1 - share) * teams)
            width = width.after(round(union), quota, teams)
            assert 200 <= width.h <= 600
            assert 1 <= abs(width.step) <= 400
        assert abs(width.h - expected) <= 0.06 * expected


def test_width_of_few_elements_is_at_least_one() -> None:
    width = Width.first(1, 4)
    for union in (1, 4, 4, 1):
        width = width.after(union, 1, 4)
        assert width.h == 1.0


def test_what_cannot_be_is_refused() -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(CommError, match=r"6 ranks cannot form 4 equal teams; choose one of \[1, 2, 3, 6\]"):
            SparDL(transport, teams=4)
        with pytest.raises(CommError, match="power of two of teams, not 3"):
            SparDL(transport, teams=3, gather="recursive")
        with pytest.raises(CommError, match=r"density 0 is not in \(0, 1\]"):
            SparDL(transport, density=0)
        with pytest.raises(CommError, match="spardl cannot go on from the state of 'topk-a'; name the same scheme"):
            SparDL(transport).load_state_dict(TopkA(transport).state_dict())
        with pytest.raises(CommError, match="teams cannot gather 'ring'"):
            SparDL(transport, gather="ring")  # type: ignore[arg-type]
        scheme = SparDL(transport)
        scheme.reduce("w", torch.ones(8))
        with pytest.raises(CommError, match=r"w is \(9,\) of torch.float32, its residual \(8,\)"):
            scheme.reduce("w", torch.ones(9))

    run_ranks(6, work)
    with pytest.raises(CommError, match="cannot form 0"):
        Teams.of(0, ranks=4, count=0)
