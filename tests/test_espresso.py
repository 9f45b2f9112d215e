"""Espresso on whole models: plans, baselines, bounds, `resilient-comm plan`, and when compression does not pay."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from espresso_instances import affine, cluster

from resilient_run.comm import constraints
from resilient_run.comm.cli import resilient_comm
from resilient_run.comm.cluster import Link
from resilient_run.comm.espresso import (
    ESPRESSO_PLANNERS,
    Espresso,
    NoPlanError,
    espresso_plan,
    upper_bound_s,
)
from resilient_run.comm.espresso_fused import alone_or_dense, fused_plan
from resilient_run.comm.model import Model, Tensor
from resilient_run.comm.plan import DENSE, Plan
from resilient_run.comm.tree import parse

SIZES = (400, 250_000, 0, 4_000_000, 1024, 4_000_000, 16_000_000, 30_000)
MODEL = Model(
    name="small",
    tensors=tuple(Tensor(name=f"T{i}", numel=numel, backward_s=numel * 3e-10) for i, numel in enumerate(SIZES)),
)


def test_the_exact_plan_is_no_slower_than_any_other() -> None:
    plan = espresso_plan(MODEL, cluster(hosts=8, gpus=8))
    assert set(plan.baselines_s) == set(ESPRESSO_PLANNERS) - {"espresso"}
    assert plan.iteration_s <= min(plan.baselines_s.values()) * (1 + 1e-9)
    assert plan.bound_s <= plan.iteration_s <= plan.bound_s * 1.03
    assert upper_bound_s(MODEL, cluster(hosts=8, gpus=8)) <= plan.iteration_s
    assert plan.compress
    assert [parse(group.option).compressions > 0 for group in plan.groups][2] is False
    assert max(span.end_s for span in plan.timeline) == pytest.approx(plan.iteration_s)
    assert "speed against the best without compression" in plan.reason


def test_it_says_not_to_compress_where_that_does_not_pay() -> None:
    plan = espresso_plan(MODEL, cluster(hosts=4, gpus=1, inter_s_per_byte=1e-13))
    assert not plan.compress
    assert plan.iteration_s == pytest.approx(plan.baselines_s["espresso-dense"])
    assert {group.option for group in plan.groups} == {DENSE}
    assert plan.reason == "compression does not pay here: do not compress"


@pytest.mark.parametrize("planner", ESPRESSO_PLANNERS)
def test_each_planner_keeps_its_restriction(planner: str) -> None:
    job = Espresso(MODEL, cluster(hosts=4, gpus=2))
    chosen = [job.options[choice] for choice in ESPRESSO_PLANNERS[planner](job).strategy]
    compressed = [option for option in chosen if option.compressions]
    meets = {
        "espresso-gpu": constraints.gpu_only,
        "espresso-cpu": constraints.cpu_only,
        "espresso-inter-allgather": constraints.inter_all_gather,
        "espresso-inter-alltoall": constraints.inter_all_to_all,
        "espresso-alltoall-twice": constraints.all_to_all_twice,
        "espresso-hipress": lambda option: constraints.gpu_only(option) and constraints.dense_in_hosts(option),
        "espresso-hitopkcomm": lambda option: constraints.gpu_only(option) and constraints.inter_all_gather(option),
        "espresso-byteps": lambda option: constraints.cpu_only(option) and constraints.inter_all_to_all(option),
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
    assert "espresso-byteps" not in plan.baselines_s
    assert "espresso-hitopkcomm" not in plan.baselines_s
    assert all(parse(group.option).flat for group in plan.groups)
    with pytest.raises(NoPlanError, match="no option is left that this planner may use"):
        espresso_plan(MODEL, gpus, planner="espresso-byteps")
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
    out, picture = tmp_path / "plan.json", tmp_path / "timeline.svg"
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
            "--picture",
            str(picture),
        ],
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert answer["groups"] == [[tensor.name] for tensor in MODEL.tensors]
    assert (answer["planner"], answer["compressor"], answer["compress"]) == ("espresso", "dgc", True)
    assert Plan.read(out).document() == answer
    assert picture.read_text().startswith("<?xml")
    text = CliRunner().invoke(resilient_comm, [*files, "--planner", "espresso-greedy", "--constraint", "rootless"])
    assert text.exit_code == 0, text.output
    assert "espresso-hitopkcomm" in text.output


def test_the_command_refuses_with_the_remedy(files: list[str]) -> None:
    unknown = CliRunner().invoke(resilient_comm, [*files, "--planner", "espresso", "--compressor", "topk"])
    assert unknown.exit_code == 2
    assert "choose one of dgc" in unknown.output
    absent = CliRunner().invoke(resilient_comm, [*files, "--planner", "espresso-byteps"])
    assert absent.exit_code == 2
    assert "no option is left" in absent.output
    misplaced = CliRunner().invoke(resilient_comm, [*files, "--planner", "cupcake", "--constraint", "flat"])
    assert misplaced.exit_code == 2
    assert "leave it out" in misplaced.output


def test_fusion_helps_where_tensors_are_small_and_changes_nothing_else() -> None:
    many = Model(
        name="many", tensors=tuple(Tensor(name=f"t{index}", numel=5000, backward_s=1e-5) for index in range(60))
    )
    expensive = replace(cluster(), inter=Link(cost=affine(1e-3, 8 / 1e9)))
    alone, fused = espresso_plan(many, expensive), fused_plan(many, expensive)
    assert fused.iteration_s < 0.5 * alone.iteration_s == 0.5 * fused.baselines_s["espresso"]
    assert [name for group in fused.groups for name in group.tensors] == [tensor.name for tensor in many.tensors]
    assert len(fused.groups) < 60
    assert fused.bound_s <= fused.iteration_s
    assert max(span.end_s for span in fused.timeline) == pytest.approx(fused.iteration_s)


def test_fused_plan_that_compresses_nothing_all_reduces_its_groups() -> None:
    plan = fused_plan(MODEL, cluster(hosts=4, gpus=1, inter_s_per_byte=1e-13))
    assert not plan.compress
    assert {group.option for group in plan.groups} == {DENSE}


def test_single_tensors_are_left_to_buckets_where_compression_gains_nothing() -> None:
    many = Model(
        name="many", tensors=tuple(Tensor(name=f"t{index}", numel=5000, backward_s=1e-5) for index in range(60))
    )
    slow, fast = cluster(hosts=4, gpus=1), cluster(hosts=4, gpus=1, inter_s_per_byte=1e-13)
    fast = replace(fast, inter=Link(cost=affine(1e-3, 1e-13)))
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
        job = replace(cluster(hosts=4, gpus=1), inter=Link(cost=affine(0.0, 8 / bits_per_s)))
        found[bits_per_s] = fused_plan(one, job)
        assert found[bits_per_s].iteration_s <= 1.01 * found[bits_per_s].baselines_s["espresso"]
    assert found[1e9].compress
    assert not found[1e11].compress
    assert found[1e11].iteration_s > found[1e11].baselines_s["espresso"], "compression gains nothing at all here"
