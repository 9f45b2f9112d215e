"""Espresso on whole models: plans, baselines, bounds, `resilient-comm plan`, and when compression does not pay."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from baselines import planners
from baselines.timeline import plan_timeline
from click.testing import CliRunner
from espresso_instances import affine, cluster
from espresso_planning import upper_bound_s
from ranks import run_hosts
from torch import nn

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.compress.compressors import named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.espresso.espresso import ESPRESSO_PLANNERS, Espresso, NoPlanError, espresso_plan
from resilient_run.comm.espresso.fused import alone_or_dense, fused_plan
from resilient_run.comm.espresso.fusion_cluster import cluster_plan
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.plan import constraints
from resilient_run.comm.plan.cluster import Cluster, LinkCost
from resilient_run.comm.plan.model import Model, Tensor
from resilient_run.comm.plan.plan import ALL_REDUCE, CLOSE, DENSE, Plan, PlanGroup
from resilient_run.comm.plan.tree import Option, parse
from resilient_run.comm.runtime.execute import OptionScheme, options_of
from resilient_run.comm.synchronizer import synchronize_by

EVERY = {**ESPRESSO_PLANNERS, **planners.CHOOSING}
SIZES = (400, 250_000, 0, 4_000_000, 1024, 4_000_000, 16_000_000, 30_000)
MODEL = Model(
    name="small",
    tensors=tuple(Tensor(name=f"T{i}", numel=numel, backward_s=numel * 3e-10) for i, numel in enumerate(SIZES)),
)


# Flat collectives pass the adapters of hosts that have a much quicker network inside; compression is slow.
TWO = Model(name="two", tensors=tuple(Tensor(name=name, numel=13_000_000, backward_s=0.02) for name in "ab"))
HIERARCHICAL = cluster(hosts=8, gpus=8, inter_s_per_byte=8e-11)
HIERARCHICAL = replace(HIERARCHICAL, intra=LinkCost(cost=affine(5e-6, 4e-12)))


def written(plan: Plan) -> list[Option]:
    """Return the options that a plan says groups take."""
    return [parse(ALL_REDUCE if group.option == DENSE else group.option) for group in plan.groups]


def test_the_exact_plan_is_no_slower_than_any_other() -> None:
    plan = espresso_plan(MODEL, cluster(hosts=8, gpus=8))
    assert set(plan.baselines_s) == set(ESPRESSO_PLANNERS) - {"espresso"}
    assert plan.iteration_s <= min(plan.baselines_s.values()) * (1 + 1e-9)
    assert plan.bound_s <= plan.iteration_s <= plan.bound_s * 1.05
    assert upper_bound_s(MODEL, cluster(hosts=8, gpus=8)) <= plan.iteration_s
    assert plan.compress
    assert plan.groups[2].option == DENSE, "a tensor of no elements is not compressed"
    assert plan_timeline(plan, MODEL, cluster(hosts=8, gpus=8)).iteration_s == pytest.approx(plan.iteration_s)
    assert "speed against espresso-dense" in plan.reason


def test_it_says_not_to_compress_where_that_does_not_pay() -> None:
    plan = espresso_plan(MODEL, cluster(hosts=2, gpus=1, inter_s_per_byte=1e-13))
    assert not plan.compress
    assert plan.iteration_s == pytest.approx(plan.baselines_s["espresso-dense"])
    assert {group.option for group in plan.groups} == {DENSE}
    assert plan.reason == "compression does not pay here: do not compress"


@pytest.mark.parametrize("planner", EVERY)
def test_each_planner_keeps_its_restriction(planner: str) -> None:
    job = Espresso(MODEL, cluster(hosts=4, gpus=2))
    chosen = [job.options[choice] for choice in EVERY[planner](job)]
    compressed = [option for option in chosen if option.compressions]
    meets = {
        "espresso-gpu": constraints.gpu_only,
        "espresso-cpu": constraints.cpu_only,
        "espresso-inter-allgather": planners.inter_all_gather,
        "espresso-inter-alltoall": planners.inter_all_to_all,
        "espresso-alltoall-twice": planners.all_to_all_twice,
        "espresso-hipress": lambda option: constraints.gpu_only(option) and constraints.dense_in_hosts(option),
        "espresso-hitopkcomm": lambda option: constraints.gpu_only(option) and planners.inter_all_gather(option),
        "espresso-byteps": lambda option: constraints.cpu_only(option) and planners.inter_all_to_all(option),
    }
    assert all(meets.get(planner, constraints.compressed)(option) for option in compressed)
    if planner in ("espresso-all", "espresso-hitopkcomm"):
        assert compressed == chosen
    if planner == "espresso-dense":
        assert not compressed
    if planner == "espresso-byteps":
        assert [bool(option.compressions) for option in chosen] == [4 * size >= 65536 for size in SIZES]


def test_constraints_and_missing_devices_leave_planners_out() -> None:
    gpus = cluster(hosts=4, gpus=2, cpu=False)
    plan = espresso_plan(MODEL, gpus, options=constraints.allowed(["flat"]))
    assert "espresso-cpu" not in plan.baselines_s
    assert "espresso-gpu" in plan.baselines_s
    with pytest.raises(NoPlanError, match="no option is left that this planner may use"):
        planners.byteps(Espresso(MODEL, gpus))
    assert all(option.flat for option in written(plan))
    with pytest.raises(NoPlanError, match="no option is left that this planner may use"):
        espresso_plan(MODEL, gpus, planner="espresso-all", options=constraints.allowed(["uncompressed"]))
    with pytest.raises(NoPlanError, match="dgc has no costs for their devices"):
        espresso_plan(MODEL, gpus, options=constraints.allowed(["cpu-only", "compressed"]))


def test_offloading_to_cpus_is_never_worse_than_the_greedy_algorithm_alone() -> None:
    both = espresso_plan(MODEL, cluster(hosts=8, gpus=8), planner="espresso-greedy", baselines=False)
    alone = espresso_plan(MODEL, cluster(hosts=8, gpus=8, cpu=False), planner="espresso-greedy", baselines=False)
    assert both.iteration_s <= alone.iteration_s * (1 + 1e-12)


CLUSTER = {
    "hosts": 8,
    "gpus_per_host": 8,
    "forward_s": 0.01,
    "bytes_per_element": 4,
    "intra": {"alpha_s": 1e-5, "beta_s_per_byte": 8e-11},
    "inter": {"alpha_s": 3e-5, "beta_s_per_byte": 3.2e-10},
    "compressors": {
        "dgc": {
            "ratio": 0.02,
            "gpu": {
                "compress": {"alpha_s": 3e-4, "beta_s_per_byte": 6e-11},
                "decompress": {"alpha_s": 5e-5, "beta_s_per_byte": 5e-12},
                "accumulate": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-12},
            },
        }
    },
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    tensors = [{"name": t.name, "numel": t.numel, "backward_s": t.backward_s} for t in MODEL.tensors]
    (tmp_path / "model.json").write_text(json.dumps({"tensors": tensors}))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    return ["plan", "--model", str(tmp_path / "model.json"), "--system", str(tmp_path / "cluster.json")]


def test_the_command_plans(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = CliRunner().invoke(
        resilient_comm,
        [
            *files,
            "--planner",
            "espresso",
            "--compressor",
            "dgc",
            "--json",
            "--out",
            str(out),
        ],
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert answer["groups"] == [[tensor.name] for tensor in MODEL.tensors]
    assert (answer["planner"], answer["compressor"], answer["compress"]) == ("espresso", "dgc", True)
    assert Plan.read(out).document() == answer
    text = CliRunner().invoke(resilient_comm, [*files, "--planner", "espresso-greedy", "--constraint", "rootless"])
    assert text.exit_code == 0, text.output
    assert "espresso-dense" in text.output
    for planner in ("espresso", "espresso-greedy", "espresso-fused"):
        found = CliRunner().invoke(resilient_comm, [*files, "--planner", planner])
        assert re.search(r"planned in [\d.]+ ms; within [\d.]+ % of the optimum", found.output), planner


def test_the_command_refuses_with_the_remedy(files: list[str]) -> None:
    unknown = CliRunner().invoke(resilient_comm, [*files, "--planner", "espresso", "--compressor", "topk"])
    assert unknown.exit_code == 2
    assert "choose one of dgc" in unknown.output
    absent = CliRunner().invoke(resilient_comm, [*files, "--planner", "espresso-all", "--constraint", "uncompressed"])
    assert absent.exit_code == 2
    assert "no option is left" in absent.output
    misplaced = CliRunner().invoke(resilient_comm, [*files, "--planner", "cupcake", "--constraint", "flat"])
    assert misplaced.exit_code == 2
    assert "leave it out" in misplaced.output


def test_fusion_helps_where_tensors_are_small_and_changes_nothing_else() -> None:
    many = Model(
        name="many", tensors=tuple(Tensor(name=f"t{index}", numel=5000, backward_s=1e-5) for index in range(60))
    )
    expensive = replace(cluster(), inter=LinkCost(cost=affine(1e-3, 8 / 1e9)))
    alone, fused = espresso_plan(many, expensive), fused_plan(many, expensive)
    assert fused.iteration_s < 0.5 * alone.iteration_s == 0.5 * fused.baselines_s["espresso"]
    assert [name for group in fused.groups for name in group.tensors] == [tensor.name for tensor in many.tensors]
    assert len(fused.groups) < 60
    assert fused.bound_s <= fused.iteration_s
    assert plan_timeline(fused, many, expensive).iteration_s == pytest.approx(fused.iteration_s)


def test_one_bucket_for_everything_is_considered_however_large_that_is() -> None:
    """With a latency of 50 ms, each further collective costs more than all bytes."""
    tensors = tuple(Tensor(name=f"t{n}", numel=1_000_000, backward_s=0.0) for n in range(60))
    many = Model(name="many", tensors=tensors)
    far = replace(cluster(hosts=4, gpus=1), inter=LinkCost(cost=affine(0.05, 1e-9)))
    found = fused_plan(many, far)
    assert [len(group.tensors) for group in found.groups] == [60]
    others_s = (cluster_plan(many, far).iteration_s, found.baselines_s["espresso"])
    assert found.iteration_s <= min(others_s) * (1 + 1e-9)


def test_fused_plan_that_compresses_nothing_all_reduces_its_groups() -> None:
    plan = fused_plan(MODEL, cluster(hosts=2, gpus=1, inter_s_per_byte=1e-13))
    assert not plan.compress
    assert {group.option for group in plan.groups} == {DENSE}


def test_single_tensors_are_left_to_buckets_where_compression_gains_nothing() -> None:
    many = Model(
        name="many", tensors=tuple(Tensor(name=f"t{index}", numel=5000, backward_s=1e-5) for index in range(60))
    )
    slow, fast = cluster(hosts=4, gpus=1), cluster(hosts=4, gpus=1, inter_s_per_byte=1e-13)
    fast = replace(fast, inter=LinkCost(cost=affine(1e-3, 1e-13)))
    dense = alone_or_dense(many, fast)
    assert not dense.compress
    assert len(dense.groups) < 60
    assert dense.iteration_s < espresso_plan(many, fast).iteration_s
    assert [name for group in dense.groups for name in group.tensors] == [tensor.name for tensor in many.tensors]
    large = Model(name="large", tensors=(Tensor(name="t", numel=10**8, backward_s=1e-5),))
    assert alone_or_dense(large, slow).groups == espresso_plan(large, slow).groups
    assert alone_or_dense(large, slow).compress


def test_compression_that_gains_next_to_nothing_is_left_out() -> None:
    """On a link where it gains half a percent the tensors are all-reduced, on a slower one compressed."""
    one = Model(name="one", tensors=(Tensor(name="t", numel=10**7, backward_s=1.0),))
    found = {}
    for bits_per_s in (1e9, 1e11):
        job = replace(cluster(hosts=4, gpus=1), inter=LinkCost(cost=affine(0.0, 8 / bits_per_s)))
        found[bits_per_s] = fused_plan(one, job)
        assert found[bits_per_s].iteration_s <= (1 + CLOSE) * found[bits_per_s].baselines_s["espresso"]
    assert found[1e9].compress
    assert not found[1e11].compress
    assert found[1e11].iteration_s > found[1e11].baselines_s["espresso"], "compression gains nothing at all here"


@pytest.mark.parametrize("make", [alone_or_dense, fused_plan])
def test_other_sums_that_gain_next_to_nothing_are_left_to_the_all_reduce(make: Callable[..., Plan]) -> None:
    """A hierarchical sum is much quicker than a flat one, and then hardly, beside a long backward pass."""
    found = {}
    for backward_s in (0.0, 1.0):
        model = Model(name="one", tensors=(Tensor(name="t", numel=10**7, backward_s=backward_s),))
        found[backward_s] = make(model, HIERARCHICAL, options=constraints.allowed(["uncompressed"]))
    assert not found[0.0].plain
    assert found[1.0].plain
    assert found[1.0].baselines_s["espresso-dense"] < found[1.0].iteration_s


@pytest.mark.parametrize("make", [alone_or_dense, fused_plan, espresso_plan])
def test_plans_without_compression_may_sum_in_other_ways_than_the_all_reduce(make: Callable[..., Plan]) -> None:
    plan = make(TWO, HIERARCHICAL, options=constraints.allowed(["uncompressed"]))
    dense = espresso_plan(TWO, HIERARCHICAL, planner="espresso-dense")
    assert not plan.compress
    assert plan.iteration_s <= dense.iteration_s
    assert not any(str(option) == ALL_REDUCE for option in (*written(plan), *written(dense)))
    assert plan.reason.endswith("this planner compresses nothing here")
    assert make(TWO, HIERARCHICAL, options=constraints.allowed(["hierarchical"])).iteration_s <= dense.iteration_s


def random_jobs(seed: int, count: int) -> Iterator[tuple[Model, Cluster, tuple[Option, ...]]]:
    """Yield models, clusters and what may be used there."""
    rng = random.Random(seed)
    for _ in range(count):
        on = cluster(hosts=rng.choice((1, 2, 8)), gpus=rng.choice((1, 2, 8)), cpu=rng.random() < 0.3)
        intra, inter = (
            LinkCost(cost=affine(rng.choice((0, 1e-6, 1e-4)), 10 ** rng.uniform(-12, -8))) for _ in range(2)
        )
        sizes = [rng.choice((0, 1000, 10**5, 10**7)) for _ in range(rng.randint(1, 6))]
        model = Model(
            name="random",
            tensors=tuple(
                Tensor(name=f"t{index}", numel=numel, backward_s=rng.choice((0, 1e-5, 1e-3)))
                for index, numel in enumerate(sizes)
            ),
        )
        names = rng.choice(([], ["hierarchical"], ["flat"], ["rootless"], ["uncompressed"], ["compressed", "gpu-only"]))
        yield model, replace(on, intra=intra, inter=inter), constraints.allowed(names)


@pytest.mark.parametrize("make", [alone_or_dense, fused_plan])
def test_plans_are_what_they_predict_keep_constraints_and_are_no_slower_than_their_baselines(
    make: Callable[..., Plan],
) -> None:
    """What gains less than `CLOSE` over something simpler may be left out."""
    uncompressed = 0
    for model, on, options in random_jobs(12, 30):
        plan = make(model, on, options=options)
        assert set(written(plan)) <= set(options)
        assert plan.compress == any(option.compressions for option in written(plan))
        assert plan.iteration_s <= (1 + CLOSE) * min(plan.baselines_s.values()) + 1e-9
        if plan.compress:
            assert plan.iteration_s <= plan.baselines_s.get("espresso-dense", plan.iteration_s)
        numels = {tensor.name: tensor for tensor in model.tensors}
        members = [[numels[name] for name in group.tensors] for group in plan.groups]
        fused = Model(
            name="fused",
            tensors=tuple(
                Tensor(name=own[0].name, numel=sum(t.numel for t in own), backward_s=sum(t.backward_s for t in own))
                for own in members
            ),
        )
        job = Espresso(fused, on, options)
        found_s = job.problem.iteration_s(tuple(job.options.index(option) for option in written(plan)))
        assert plan.iteration_s == pytest.approx(on.forward_s + found_s, rel=1e-9, abs=1e-11)
        uncompressed += not plan.compress and {group.option for group in plan.groups} != {DENSE}
    assert uncompressed > 5


def test_equally_quick_ways_are_written_as_the_plain_all_reduce() -> None:
    """Rounded times of two steps may be less than that of one; this is such a size."""
    one = Model(name="one", tensors=(Tensor(name="t", numel=1000, backward_s=0.02),))
    on = replace(cluster(hosts=4, gpus=1), inter=LinkCost(cost=affine(0.0, 1.5188259731012094e-10)))
    assert {group.option for group in espresso_plan(one, on).groups} == {DENSE}


def test_plan_that_sums_hierarchically_runs_on_real_ranks() -> None:
    plan = alone_or_dense(TWO, HIERARCHICAL, options=constraints.allowed(["hierarchical", "uncompressed"]))
    options = options_of({group.tensors[0]: group.option for group in plan.groups})
    assert options.keys() == {group.tensors[0] for group in plan.groups}

    def work(fabric: Fabric) -> tuple[list[torch.Tensor], int]:
        scheme = OptionScheme(fabric, ErrorFeedback(named("topk")), options)
        sums = [scheme.reduce(key, torch.arange(5.0) + fabric.flat.rank) for key in options]
        return sums, fabric.flat.traffic.rounds

    for sums, flat_rounds in run_hosts(2, 2, work):
        assert all(torch.equal(found, 4 * torch.arange(5.0) + 6) for found in sums)
        assert flat_rounds == 0, "the hosts have their own collectives"


@pytest.fixture
def _job_of_one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_job_of_one_rank")
@pytest.mark.parametrize(
    ("option", "all_reduces"), [(DENSE, 2), ("reduce_scatter@intra1 > all_reduce@inter > all_gather@intra2", 0)]
)
def test_the_run_time_fuses_nothing_that_the_plan_has_apart(option: str, all_reduces: int) -> None:
    """The prediction is of one all-reduce for each; a plan that sums in another way has none of the flat ones."""
    module = nn.Linear(3, 2)
    groups = tuple(PlanGroup(tensors=(name,), option=option) for name in ("bias", "weight"))
    averaging = synchronize_by(replace(espresso_plan(TWO, HIERARCHICAL), groups=groups), module, named("topk"))
    traffic = averaging.scheme.transport.traffic
    before = traffic.rounds
    module(torch.ones(3)).sum().backward()
    averaging.synchronize()
    averaging.close()
    assert traffic.rounds - before == all_reduces
