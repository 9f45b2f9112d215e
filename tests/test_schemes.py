"""Every scheme sums what dense all-reduce sums, on any number of ranks, with the bytes its formula says."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from baselines import IndexFree, Strawman, named
from every_scheme import LOSSLESS
from formulas import RECEIVED_BYTES, Sparsity
from ranks import run_hosts, run_ranks
from sparse_gradients import gradients, in_order
from sparsity import densities, skewness
from tiers import nightly_but
from torch import Tensor

from resilient_run.comm import schemes
from resilient_run.comm.errors import CommError
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.net.scheme import laid_out
from resilient_run.comm.net.transport import Traffic, Transport
from resilient_run.comm.net.two_level import TwoLevel
from resilient_run.comm.runtime.bucket import BucketSum
from resilient_run.comm.zen.formats import ALL
from resilient_run.comm.zen.zen import Zen

IN_RANK_ORDER = ("agsparse", "index-free", "omnireduce", "sparse-ps")
SUMMING = (*LOSSLESS, *IN_RANK_ORDER, "sparcml")


def cases(ranks: int) -> dict[str, list[Tensor]]:
    """Return gradients by what is peculiar about them; small, as every scheme sums each of them."""
    shape = (37, 20)
    made = {
        "sparse": gradients(ranks, shape, density=0.05),
        "skewed": gradients(ranks, shape, density=0.1, skew=6),
        "apart": gradients(ranks, shape, density=0.02, overlap=0),
        "half": gradients(ranks, shape, density=0.6),
        "rows": gradients(ranks, shape, density=0.1, by_row=True),
        "all zero": gradients(ranks, shape, density=0),
        "dense": gradients(ranks, shape, density=1),
        "vector": gradients(ranks, (331,), density=0.1),
        "one element": gradients(ranks, (1,), density=1),
        "double": gradients(ranks, shape, density=0.1, dtype=torch.float64),
    }
    made["some empty"] = [part * (rank % 3 == 0) for rank, part in enumerate(made["sparse"])]
    made["not contiguous"] = [part.t() for part in made["sparse"]]
    return made


@pytest.mark.parametrize("ranks", nightly_but([*range(1, 9), 11, 16], range(1, 17)))
def test_every_scheme_sums_as_all_reduce(ranks: int) -> None:
    given = cases(ranks)
    if ranks not in (1, 2, 3):
        given = {case: given[case] for case in ("skewed", "some empty")}

    def work(transport: Transport) -> dict[tuple[str, str], list[Tensor]]:
        found = {}
        for name in SUMMING:
            # Steps that are of another kind: the one that Zen profiles, the one that exchanges indices.
            options, steps = ({"profile_steps": 1}, 2) if name == "zen" else ({}, 1 + (name == "index-free"))
            scheme = named(name, transport, **options)
            for case, parts in given.items():
                found[name, case] = [scheme.reduce(case, parts[transport.rank].clone()) for _ in range(steps)]
        return found

    by_rank = run_ranks(ranks, work)
    for (name, case), results in by_rank[0].items():
        expected = in_order(given[case])
        for result in results:
            assert result.shape == expected.shape, (name, case)
            torch.testing.assert_close(
                result,
                expected,
                rtol=1e-6,
                atol=1e-6,
                msg=lambda m, c=case, n=name: f"{n}/{c}: {m}\nLOSSY of every_scheme.py has those that may lose",
            )
            if name in IN_RANK_ORDER:
                assert torch.equal(result, expected), (name, case)
        for found in by_rank[1:]:
            same = all(map(torch.equal, found[name, case], results))
            assert same, f"{name}: ranks differ in {case}"


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["agsparse", "sparcml", "sparse-ps"])
def test_baselines_send_rows_and_bitmaps_where_they_are_told(name: str, ranks: int) -> None:
    """As benchmarks let them, to be fair; what they sum is the same, and it takes fewer bytes."""
    given = cases(ranks)

    def work(transport: Transport) -> tuple[dict[str, Tensor], list[int]]:
        received = []
        for options in ({}, {"row": 20, "formats": ALL}):
            scheme = named(name, transport, **options)
            sums = {case: scheme.reduce(case, parts[transport.rank].clone()) for case, parts in given.items()}
            transport.traffic.reset()
            scheme.reduce("rows", given["rows"][transport.rank].clone())
            received.append(transport.traffic.received_bytes)
        return sums, received

    for sums, (alone, rows) in run_ranks(ranks, work):
        assert rows < alone
        for case, result in sums.items():
            torch.testing.assert_close(result, in_order(given[case]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("route", ["parallel", "hierarchical", "gather"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_like_a_sum_in_float32(dtype: torch.dtype, route: str, ranks: int) -> None:
    given = gradients(ranks, (40, 12), density=0.3, dtype=dtype)

    def work(transport: Transport) -> Tensor:
        return Zen(transport, route=route).reduce("weight", given[transport.rank].clone())  # type: ignore[arg-type]

    results = run_ranks(ranks, work)
    exact = in_order([part.float() for part in given])
    if route == "parallel":
        assert all(torch.equal(result, exact.to(dtype)) for result in results)
    torch.testing.assert_close(results[0].float(), exact, rtol=0.03, atol=0.03)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", SUMMING)
def test_infinities_and_nans_arrive(name: str) -> None:
    given = gradients(3, (30, 8), density=0.1)
    given[0].view(-1)[5] = torch.inf
    given[1].view(-1)[5] = -torch.inf
    given[2].view(-1)[100] = torch.nan
    given[2].view(-1)[200] = -torch.inf

    def work(transport: Transport) -> list[Tensor]:
        scheme = named(name, transport)
        return [scheme.reduce("weight", given[transport.rank].clone()) for _ in range(3)]

    for results in run_ranks(3, work):
        for result in results:
            torch.testing.assert_close(result, in_order(given), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", [*SUMMING, "strawman"])
def test_sparse_tensors_stay_sparse(name: str) -> None:
    dense = gradients(3, (50, 8), density=0.1, by_row=True)

    def work(transport: Transport) -> list[Tensor]:
        scheme = named(name, transport)
        rows = dense[transport.rank].to_sparse(1)
        # As autograd gives it: not coalesced, rows may come twice.
        given = torch.sparse_coo_tensor(
            rows.indices().repeat(1, 2), rows.values().repeat(2, 1) / 2, rows.shape, check_invariants=True
        )
        return [scheme.reduce("table", given) for _ in range(3)]

    for results in run_ranks(3, work):
        for result in results:
            assert result.is_sparse
            assert result.sparse_dim() == 1
            if name != "strawman":
                torch.testing.assert_close(result.to_dense(), in_order(dense), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("ranks", "density", "skew"), [(2, 0.0113, 1), (4, 0.0247, 4), (8, 0.0113, 4), (6, 0.2, 1)])
def test_bytes_are_those_of_the_formulas(ranks: int, density: float, skew: float) -> None:
    """Within 1 % and headers; the mean over ranks, as the formulas know nothing of chance."""
    given = gradients(ranks, (120_000,), density=density, skew=skew)
    found = Sparsity(
        dense_bytes=given[0].nbytes,
        # Two gradients have d² only on average: of 2, 4, … ranks it depends on which.
        densities=[
            sum(column) / ranks
            for column in zip(*(densities(given[r:] + given[:r]) for r in range(ranks)), strict=True)
        ],
    )

    def work(transport: Transport) -> dict[str, Traffic]:
        traffics = {}
        for name in RECEIVED_BYTES:
            scheme = Zen(transport, route="parallel", rows=()) if name == "zen" else named(name, transport)
            if name == "sparcml" and ranks & (ranks - 1):
                continue
            scheme.reduce("weight", given[transport.rank].clone())
            transport.traffic.reset()
            scheme.reduce("weight", given[transport.rank].clone())
            traffic = transport.traffic
            traffics[name] = Traffic(received_bytes=traffic.received_bytes, header_bytes=traffic.header_bytes)
        return traffics

    by_rank = run_ranks(ranks, work)
    for name in by_rank[0]:
        mean = sum(traffic[name].received_bytes for traffic in by_rank) / ranks
        limit = RECEIVED_BYTES[name](found)
        tags = 2 * ranks
        if name == "zen" and (density > 1 / 32 or found.densities[-1] > 31 / 32):
            assert mean <= 1.01 * limit + tags, "a smaller format was not taken"
        elif name == "zen" and found.densities[-1] < 1 / 32:
            assert mean <= 1.01 * limit + tags
        else:
            assert mean == pytest.approx(limit, rel=0.01, abs=tags), name


@pytest.mark.parametrize(("shape", "sparse_dim"), [((9, 4), 1), ((9, 4), 2), ((9,), 1), ((5, 4, 3), 2), ((0, 4), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_sum_is_laid_out_as_torch_lays_it_out(shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype) -> None:
    dense = torch.randn(shape).to(dtype)
    dense[::2] = 0
    dense[1:2] = torch.nan
    wanted = dense.to_sparse(sparse_dim)
    found = laid_out(dense, wanted)
    assert found.is_coalesced()
    assert torch.equal(found.indices(), wanted.indices())
    assert torch.equal(found.values().nan_to_num(), wanted.values().nan_to_num())
    assert found.shape == wanted.shape
    assert laid_out(dense, dense) is dense


def test_a_skewed_gradient_overloads_one_sparse_server_but_none_of_zen() -> None:
    given = gradients(8, (400_000,), density=0.02, skew=5)
    even = Sparsity(dense_bytes=given[0].nbytes, densities=densities(given))

    def work(transport: Transport) -> tuple[int, int]:
        received = []
        for scheme in (named("sparse-ps", transport), Zen(transport, route="parallel", rows=())):
            transport.traffic.reset()
            scheme.reduce("weight", given[transport.rank].clone())
            received.append(transport.traffic.sent_bytes)
        return received[0], received[1]

    servers, zen = zip(*run_ranks(8, work), strict=True)
    assert max(servers) > 3 * RECEIVED_BYTES["sparse-ps"](even) * 0.5
    assert max(zen) < 1.1 * sum(zen) / 8
    assert skewness(given[0], 8) > 3


def test_strawman_loses_what_it_reports() -> None:
    given = gradients(2, (20_000,), density=0.2)

    def work(transport: Transport) -> tuple[Tensor, int]:
        scheme = Strawman(transport, memory=2)
        return scheme.reduce("weight", given[transport.rank].clone()), scheme.losses["weight"].lost

    (result, lost), (_, lost_there) = run_ranks(2, work)
    # Both lose what both have beside the same other one.
    assert max(lost, lost_there) <= int((result != in_order(given)).sum()) <= lost + lost_there


def test_strawman_reports_what_it_loses() -> None:
    given = gradients(2, (20_000,), density=0.2, overlap=1)

    def work(transport: Transport) -> tuple[Tensor, float]:
        scheme = Strawman(transport, memory=2)
        result = scheme.reduce("weight", given[transport.rank].clone())
        loss = scheme.losses["weight"]
        assert loss.elements == int(given[transport.rank].count_nonzero())
        return result, loss.lost / loss.elements

    expected = in_order(given)
    for result, lost in run_ranks(2, work):
        assert 0.03 < lost < 0.07  # of k indices in m places about k / 2m meet
        assert (result != expected).sum().item() / expected.count_nonzero().item() == pytest.approx(lost, abs=0.01)


def test_index_free_refuses_other_zeros() -> None:
    def work(transport: Transport) -> None:
        scheme = IndexFree(transport)
        scheme.reduce("weight", torch.tensor([0.0, 1.0]))
        scheme.reduce("weight", torch.tensor([1.0, 0.0]))

    with pytest.raises(CommError, match="benchmarks only"):
        run_ranks(1, work)


@pytest.mark.parametrize("shape", [(37, 20), (13,), (3, 4, 5), (1, 41), (5, 1), (1,)])
@pytest.mark.parametrize("sparse", [False, True])
def test_two_levels_sum_over_all_ranks(shape: tuple[int, ...], sparse: bool) -> None:
    """Three hosts of two ranks."""
    given = gradients(6, shape, density=0.2)
    store = dist.HashStore()

    def group(name: str, rank: int, size: int) -> Transport:
        members = dist.PrefixStore(name, store)
        return Transport(dist.ProcessGroupGloo(members, rank, size, timedelta(seconds=60)))

    def work(transport: Transport) -> Tensor:
        host, place = divmod(transport.rank, 2)
        inner, outer = group(f"host {host}", place, 2), group(f"place {place}", host, 3)
        scheme = TwoLevel(inner, Zen(outer, profile_steps=1))
        own = given[transport.rank]
        results = [scheme.reduce("weight", own.to_sparse(1) if sparse else own.clone()) for _ in range(2)]
        assert all(result.is_sparse == sparse for result in results)
        return results[-1].to_dense()

    for result in run_ranks(6, work):
        torch.testing.assert_close(result, in_order(given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 6000), (5, 1200), (6000, 1), (100, 60)])
def test_hosts_send_each_other_no_more_of_a_gradient_than_there_is(shape: tuple[int, ...]) -> None:
    """Also of one that has fewer rows than a host has ranks."""

    def work(fabric: Fabric) -> int:
        TwoLevel(fabric.intra, named("dense", fabric.inter)).reduce("weight", torch.ones(shape))
        return fabric.inter.traffic.sent_bytes

    assert sum(run_hosts(2, 4, work)[:4]) <= 1.125 * 4 * 6000


def test_low_rank_between_hosts_takes_two_all_reduces_a_bucket() -> None:
    def work(fabric: Fabric) -> int:
        scheme = TwoLevel(fabric.intra, named("powersgd", fabric.inter))
        sums = scheme.reduce_together([(key, torch.ones(64, 48)) for key in "abc"])
        for total in sums:
            torch.testing.assert_close(total, torch.full((64, 48), 4.0))
        return fabric.inter.traffic.rounds

    assert run_hosts(2, 2, work) == [2] * 4


@pytest.mark.parametrize("sparse_share", [0, 1])
@pytest.mark.parametrize(("density", "sparse_steps"), [(0.0, 1), (0.0, 5), (0.05, 5)])
def test_all_shares_of_a_gradient_are_all_reduced_with_others_or_none(
    sparse_share: int, density: float, sparse_steps: int
) -> None:
    """Two hosts of two ranks; half of the rows has few gradients, or none, in the first step or in all."""
    shape, steps = (64, 16), 5
    given = [gradients(4, shape, density=1, seed=step) for step in range(steps)]
    for of_ranks in given[:sparse_steps]:
        for own in of_ranks:
            half = own[32 * sparse_share :][:32]
            half *= torch.rand(32, 1, generator=torch.Generator().manual_seed(1)) < density

    def work(fabric: Fabric) -> list[tuple[bool, Tensor]]:
        scheme = TwoLevel(fabric.intra, Zen(fabric.inter))
        bucket = BucketSum(scheme=scheme, world=fabric.flat, least_elements=100)
        found = []
        for of_ranks in given:
            buffer = torch.cat([of_ranks[fabric.flat.rank].view(-1), torch.ones(4)])
            bucket.sum_bucket(buffer, [("weight", buffer[:-4].view(shape)), ("bias", buffer[-4:])])
            found.append((scheme.is_all_reduced("weight"), buffer))
        return found

    for found in run_hosts(2, 2, work):
        assert [fuses for fuses, _ in found] == [False, False, True, True, True]
        for (_, buffer), of_ranks in zip(found, given, strict=True):
            torch.testing.assert_close(buffer[:-4].view(shape), in_order(of_ranks), rtol=1e-5, atol=1e-5)
            assert buffer[-4:].tolist() == [4.0] * 4


def test_plans_of_an_older_version_are_made_anew_where_each_share_had_its_own() -> None:
    def work(fabric: Fabric) -> list[bool]:
        alone, shared = Zen(fabric.flat), Zen(fabric.inter)
        between = TwoLevel(fabric.intra, shared)
        plan = {"route": "dense", "width": 1, "received_bytes": 1, "reason": ""}
        older = {"scheme": "zen", "seed": 0, "keys": {"weight": {"steps": 9, "counts": [16384] * 16, "plan": plan}}}
        for scheme in (alone, between):
            scheme.load_state_dict(older)
        found = [alone.is_all_reduced("weight"), between.is_all_reduced("weight")]
        between.load_state_dict(
            {**older, "rows": [16, 64, 256], "keys": {"weight": {"steps": 9, "counts": [[16384] * 16], "plan": plan}}}
        )
        return [*found, between.is_all_reduced("weight")]

    assert run_hosts(2, 2, work) == [[True, False, True]] * 4


def test_ranks_with_other_seeds_or_shapes_are_told() -> None:
    with pytest.raises(CommError, match=r"zen\._seed is 0 on rank 0 and 1 on rank 1; give all ranks the same"):
        run_ranks(2, lambda transport: Zen(transport, seed=transport.rank).reduce("weight", torch.ones(4)))
    with pytest.raises(CommError, match=r"weight is '\(4,\) of torch.float32' on rank 0 and '\(5,\) of"):
        run_ranks(2, lambda transport: Zen(transport).reduce("weight", torch.ones(4 + transport.rank)))


@pytest.mark.parametrize("options", [("route", "gather", "parallel"), ("profile_steps", 1, 2), ("rows", (4,), (2,))])
def test_ranks_that_would_go_different_ways_are_told_at_once(options: tuple[str, Any, Any]) -> None:
    """A message of an all-gather looks like one that is pushed to a server."""
    name, *values = options

    def work(transport: Transport) -> None:
        Zen(transport, **{name: values[transport.rank]}).reduce("weight", torch.eye(8))

    with pytest.raises(CommError, match=rf"zen\._{name}\S* is \S+ on rank 0 and \S+ on rank 1; give"):
        run_ranks(2, work)


def test_ranks_with_other_dtypes_or_shapes_of_one_size_are_told() -> None:
    given = [torch.eye(8, dtype=torch.bfloat16), torch.eye(8, dtype=torch.float16), torch.ones(4, 16)]
    for mine, other, told in ((0, 1, "bfloat16' on rank 0 and .*float16'"), (1, 2, r"\(8, 8\) .*\(4, 16\)")):
        with pytest.raises(CommError, match=f"w is .*{told}"):
            run_ranks(2, lambda transport, pair=(mine, other): Zen(transport).reduce("w", given[pair[transport.rank]]))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"route": "ring"}, "zen knows no route 'ring'"),
        ({"partition": "even"}, "zen knows no partition 'even'"),
        ({"rows": 16}, "rows 16 are not numbers of elements"),
        ({"rows": (16, 0)}, "are not numbers of elements"),
        ({"profile_steps": -1}, "profile_steps -1 is not a whole number"),
        ({"seed": 1 << 70}, "is not a whole number from 0"),
    ],
)
def test_options_that_zen_does_not_have_are_refused(option: dict[str, Any], told: str) -> None:
    with pytest.raises(CommError, match=re.escape(told)):
        run_ranks(1, lambda transport: Zen(transport, **option))


def test_a_route_that_is_asked_for_goes_before_a_saved_plan() -> None:
    def work(transport: Transport) -> str:
        saved = Zen(transport, route="hierarchical")
        saved.reduce("weight", torch.eye(8))
        scheme = Zen(transport, route="gather")
        scheme.load_state_dict(saved.state_dict())
        scheme.reduce("weight", torch.eye(8))
        return scheme.plans["weight"].route

    assert run_ranks(2, work) == ["gather", "gather"]


def test_zen_plans_anew_as_densities_drift() -> None:
    """As in the warm-up of DGC: dense at first, sparse later; also when the state moves to another object."""
    early, late = gradients(2, (5000,), density=1), gradients(2, (5000,), density=0.01)

    def work(transport: Transport) -> list[str]:
        def make() -> Zen:
            return Zen(transport, profile_steps=1, replan_steps=3, rows=())

        scheme, routes = make(), []
        for step in range(9):
            given = (early if step < 2 else late)[transport.rank]
            total = scheme.reduce("weight", given.clone())
            torch.testing.assert_close(total, in_order(early if step < 2 else late))
            routes.append(scheme.plans["weight"].route)
            again = make()
            again.load_state_dict(scheme.state_dict())
            scheme = again
        return routes

    for routes in run_ranks(2, work):
        assert routes[:4] == ["dense"] * 4
        assert "dense" not in routes[4:]


@pytest.mark.parametrize(
    ("name", "told"),
    [("zero", "known are dense"), ("sparcml", 'only of its benchmarks: use "zen", route="hierarchical"')],
)
def test_unknown_names_are_refused(name: str, told: str) -> None:
    with pytest.raises(CommError, match=told):
        run_ranks(1, lambda transport: schemes.named(name, transport))


def test_dgc_sends_the_rest_later() -> None:
    """Of a constant gradient all elements arrive in time; sums and residuals make up everything that was given."""
    given = [torch.linspace(1, 2, 600).view(30, 20) * (rank + 1) for rank in range(3)]

    def work(transport: Transport) -> list[Tensor]:
        scheme = named("dgc", transport, density=0.25)
        sums = [scheme.reduce("weight", given[transport.rank].clone()) for _ in range(3)]
        other = named("dgc", transport, density=0.25)
        other.load_state_dict(scheme.state_dict())
        sums += [other.reduce("weight", given[transport.rank].clone()) for _ in range(5)]
        left = other.memory.state_dict()["kept"]["weight"][1].view(30, 20)
        return [*sums, left]

    by_rank = run_ranks(3, work)
    assert all(
        torch.equal(mine, first) for found in by_rank for mine, first in zip(found[:-1], by_rank[0], strict=False)
    )
    assert 0.6 < (by_rank[0][0] == 0).float().mean() < 0.8, "three quarters were to stay"
    arrived = in_order(by_rank[0][:-1]) + in_order([found[-1] for found in by_rank])
    torch.testing.assert_close(arrived, 8 * in_order(given), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", ["zen", "dense"])
def test_dgc_remembers_nothing_of_a_step_that_overflowed_on_one_rank(scheme: str) -> None:
    given = [torch.linspace(1, 2, 600).view(30, 20) * (rank + 1) for rank in range(3)]

    def work(transport: Transport) -> bool:
        dgc = named("dgc", transport, density=0.25, scheme=scheme)
        dgc.reduce("weight", given[transport.rank].clone())
        before = [kept.clone() for kept in dgc.memory.state_dict()["kept"]["weight"]]
        poisoned = given[transport.rank].clone()
        poisoned[3, 4] = torch.inf if transport.rank == 1 else 0.0
        assert not dgc.reduce("weight", poisoned).isfinite().all()
        return all(map(torch.equal, dgc.memory.state_dict()["kept"]["weight"], before))

    assert run_ranks(3, work) == [True] * 3


@pytest.mark.parametrize(("warm_density", "density"), [(0, 1), (0.001, 1), (1, 0.01), (0, 0.01)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_pass_that_warms_up_does_not_mislead_zen(warm_density: float, density: float, ranks: int) -> None:
    """As the pass that settles DDP's buckets: where it has one word, recurrent weights have no gradient at all."""
    warm, real = (gradients(ranks, (256, 64), density=each) for each in (warm_density, density))

    def work(transport: Transport) -> str:
        scheme = Zen(transport)
        for given in (warm, warm, warm, real, real) if warm_density == 0 else (warm, real, real):
            assert not scheme.plans
            torch.testing.assert_close(scheme.reduce("weight", given[transport.rank].clone()), in_order(given))
        if warm_density == 0:
            assert not scheme.plans, "a step without gradients shows nothing"
            scheme.reduce("weight", real[transport.rank].clone())
        return scheme.plans["weight"].route

    routes = run_ranks(ranks, work)
    assert len(set(routes)) == 1
    assert (routes[0] == "dense") == (density == 1)


def test_zen_counts_anew_what_an_older_version_has_counted_together() -> None:
    given = gradients(2, (256, 64), density=0.01)

    def work(transport: Transport) -> list[bool]:
        scheme = Zen(transport)
        scheme.load_state_dict(
            {"scheme": "zen", "seed": 0, "keys": {"weight": {"steps": 1, "counts": [16384] * 16, "plan": None}}}
        )
        planned = []
        for _ in range(3):
            scheme.reduce("weight", given[transport.rank].clone())
            planned.append("weight" in scheme.plans)
        assert scheme.plans["weight"].route != "dense"
        return planned

    assert run_ranks(2, work) == [[False, False, True]] * 2


def test_zen_that_is_to_profile_no_step_profiles_one() -> None:
    def work(transport: Transport) -> list[int]:
        scheme = Zen(transport, profile_steps=0)
        planned = []
        for gradient in (torch.zeros(64), torch.ones(64)):
            scheme.reduce("weight", gradient)
            planned.append(len(scheme.plans))
        return planned

    assert run_ranks(2, work) == [[0, 1]] * 2
