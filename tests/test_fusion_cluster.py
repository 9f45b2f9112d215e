"""The fusion planners on cluster files: the costs of groups are those of Espresso's options."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from baselines.timeline import plan_timeline
from click.testing import CliRunner

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.cupcake.cupcake import PLANNERS, cupcake, dense
from resilient_run.comm.cupcake.fusion import FusionProblem, groups_of
from resilient_run.comm.errors import FileError
from resilient_run.comm.espresso.espresso import Espresso, espresso_plan
from resilient_run.comm.espresso.fused import alone_or_dense, fused_plan
from resilient_run.comm.espresso.fusion_cluster import BETWEEN_HOSTS, cluster_plan, fusion_costs
from resilient_run.comm.plan.cluster import Cluster, read_cluster
from resilient_run.comm.plan.model import Model, Tensor
from resilient_run.comm.plan.plan import ALL_REDUCE, CLOSE, COMPRESSED, FEW_GROUPS, FLAT, Plan
from resilient_run.comm.plan.tree import parse
from resilient_run.comm.runtime.execute import options_of

POINTS = {"sizes_bytes": [4e6, 8e6], "seconds": [2.5e-4, 5e-4]}
CLUSTER: dict[str, Any] = {
    "hosts": 4,
    "gpus_per_host": 2,
    "forward_s": 0.02,
    "bytes_per_element": 4,
    "intra": {"alpha_s": 1e-5, "beta_s_per_byte": 8e-11},
    "inter": {"alpha_s": 3e-5, "beta_s_per_byte": 3e-9},
    "compressors": {
        "dgc": {
            "ratio": 0.02,
            "gpu": {
                "compress": POINTS,
                "decompress": {"alpha_s": 5e-5, "beta_s_per_byte": 5e-12},
                "accumulate": {"alpha_s": 1e-5, "beta_s_per_byte": 1e-12},
            },
        }
    },
}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**CLUSTER, **changes}))
    return path


def model_of(*numels: int) -> Model:
    return Model(name="net", tensors=tuple(Tensor(name=f"t{n}", numel=n, backward_s=0.001) for n in numels))


@pytest.mark.parametrize("numel", [1000, 1_500_000, 30_000_000])
@pytest.mark.parametrize("option", [FLAT, BETWEEN_HOSTS])
def test_a_group_takes_what_espresso_says_of_one_tensor(tmp_path: Path, option: str, numel: int) -> None:
    cluster, model = read_cluster(write(tmp_path / "cluster.json")), model_of(numel)
    problem = FusionProblem(model.tensors, fusion_costs(cluster, option))
    theirs = Espresso(model, cluster, [parse(option)]).problem
    assert problem.finish_s(groups_of((1,))) == pytest.approx(theirs.iteration_s((0,)))
    theirs = Espresso(model, cluster, [parse("all_reduce@flat")]).problem
    assert problem.finish_s(groups_of((1,), compressed=False)) == pytest.approx(theirs.iteration_s((0,)))


@pytest.mark.parametrize("numel", [1000, 260_000, 2_000_000, 30_000_000])
@pytest.mark.parametrize("option", [FLAT, BETWEEN_HOSTS])
@pytest.mark.parametrize("key", ["routines", "compressed"])
@pytest.mark.parametrize("link", ["inter", "intra", "flat"])
def test_measured_collectives_are_no_straight_lines(
    tmp_path: Path, link: str, key: str, option: str, numel: int
) -> None:
    points = {"sizes_bytes": [1e3, 1e6, 1e7, 2e8], "seconds": [1e-4, 1e-3, 5.0, 6.0]}
    measured = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), points)
    changed = {"flat": CLUSTER["inter"], link: {**CLUSTER["inter"], key: measured}}
    cluster, model = read_cluster(write(tmp_path / "cluster.json", **changed)), model_of(numel)
    problem = FusionProblem(model.tensors, fusion_costs(cluster, option))
    theirs = Espresso(model, cluster, [parse(option)]).problem
    assert problem.finish_s(groups_of((1,))) == pytest.approx(theirs.iteration_s((0,)))


@pytest.mark.parametrize("planner", [*PLANNERS])
def test_a_single_gpu_has_nothing_to_communicate(tmp_path: Path, planner: str) -> None:
    cluster = read_cluster(write(tmp_path / "cluster.json", hosts=1, gpus_per_host=1))
    plan = cluster_plan(model_of(1000, 1_000_000), cluster, planner=planner)
    timeline = plan_timeline(plan, model_of(1000, 1_000_000), cluster)
    assert not any(span.kind == "communicate" for span in timeline.spans)
    dense = cluster_plan(model_of(1000, 1_000_000), cluster, planner="dense")
    assert dense.iteration_s == pytest.approx(0.02 + 0.002)


@pytest.mark.parametrize("key", ["routines", "compressed"])
@pytest.mark.parametrize("link", ["inter", "intra"])
def test_measured_collectives_need_those_of_all_gpus(tmp_path: Path, link: str, key: str) -> None:
    changed = {link: {**CLUSTER[link], key: {"all_gather": POINTS}}}
    with pytest.raises(FileError, match="flat is missing: where links are measured points"):
        read_cluster(write(tmp_path / "cluster.json", **changed))
    alone = read_cluster(write(tmp_path / "cluster.json", gpus_per_host=1, **changed))
    assert cluster_plan(model_of(1000), alone).iteration_s > 0


@pytest.mark.parametrize(("hosts", "gpus", "option"), [(4, 2, BETWEEN_HOSTS), (4, 1, COMPRESSED), (1, 4, COMPRESSED)])
def test_plans_name_options_that_the_run_time_has(tmp_path: Path, hosts: int, gpus: int, option: str) -> None:
    intra = CLUSTER["intra"] if hosts > 1 else CLUSTER["inter"]
    cluster = read_cluster(write(tmp_path / "cluster.json", hosts=hosts, gpus_per_host=gpus, intra=intra))
    plan = cluster_plan(model_of(1_000_000, 2_000_000, 3_000_000), cluster)
    assert {group.option for group in plan.groups} == {option}
    assert plan.compressor == "dgc"
    assert options_of({group.tensors[0]: group.option for group in plan.groups})


def test_compression_that_gains_next_to_nothing_is_left_out(tmp_path: Path) -> None:
    model = model_of(1_000_000, 2_000_000, 3_000_000)
    gains: dict[bool, list[float]] = {True: [], False: []}
    for beta in np.geomspace(3e-11, 3e-9, 60).tolist():
        inter = {"alpha_s": 3e-5, "beta_s_per_byte": beta}
        cluster = read_cluster(write(tmp_path / "cluster.json", gpus_per_host=1, inter=inter))
        problem = FusionProblem(model.tensors, fusion_costs(cluster, FLAT))
        best_s, dense_s = (problem.iteration_s(planner(problem)) for planner in (cupcake, dense))
        plan = cluster_plan(model, cluster)
        if plan.compress:
            assert plan.iteration_s == best_s
        else:
            assert dense_s <= plan.iteration_s <= min((1 + FEW_GROUPS) * dense_s, (1 + CLOSE) * best_s)
        gains[plan.compress].append(dense_s / best_s - 1)
    assert 0 < max(gains[False]) <= CLOSE < min(gains[True])


@pytest.mark.parametrize("plan_of", [cluster_plan, alone_or_dense, fused_plan])
def test_what_is_not_compressed_has_few_groups(tmp_path: Path, plan_of: Callable[[Model, Cluster], Plan]) -> None:
    """Where links are quick, single tensors are as quick as any fusion by the model, and DDP's buckets in fact."""
    model = Model(name="net", tensors=tuple(Tensor(name=f"t{n}", numel=100_000, backward_s=0.001) for n in range(160)))
    inter = {"alpha_s": 1e-6, "beta_s_per_byte": 1e-10}
    cluster = read_cluster(write(tmp_path / "cluster.json", gpus_per_host=1, inter=inter))
    plan = plan_of(model, cluster)
    assert not plan.compress
    assert len(plan.groups) <= 20
    alone_s = espresso_plan(model, cluster, options=[parse(ALL_REDUCE)]).iteration_s
    assert plan.iteration_s <= (1 + FEW_GROUPS) * alone_s


def test_fewer_groups_are_no_end_in_themselves(tmp_path: Path) -> None:
    """Buckets of any size would hold the network up: tensors of 40 KB are ready, and sent, one a second."""
    model = Model(name="net", tensors=tuple(Tensor(name=f"t{n}", numel=10_000, backward_s=1.0) for n in range(3)))
    none = {"alpha_s": 0.0, "beta_s_per_byte": 0.0}
    slow = {"alpha_s": 60.0, "beta_s_per_byte": 0.0}
    coder = {"ratio": 0.5, "gpu": {"compress": slow, "decompress": slow, "accumulate": slow}}
    inter = {"alpha_s": 0.0, "beta_s_per_byte": 1 / 40_000}
    changes = {"hosts": 2, "gpus_per_host": 1, "intra": none, "inter": inter, "compressors": {"dgc": coder}}
    cluster = read_cluster(write(tmp_path / "cluster.json", **changes))
    plan = cluster_plan(model, cluster)
    assert [group.option for group in plan.groups] == ["dense"] * 3
    assert plan.iteration_s == pytest.approx(0.02 + 4.0)


def test_the_command_takes_cluster_files(tmp_path: Path) -> None:
    cluster = write(tmp_path / "cluster.json")
    tensors = [{"name": f"t{n}", "numel": n, "backward_s": 0.001} for n in (1_000_000, 20, 3_000_000)]
    (tmp_path / "model.json").write_text(json.dumps({"tensors": tensors}))
    files = ["plan", "--model", str(tmp_path / "model.json"), "--system", str(cluster)]
    result = CliRunner().invoke(resilient_comm, [*files, "--planner", "cupcake", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["compress"] is True
    assert set(found["baselines_s"]) == {"dense"}
    refused = CliRunner().invoke(resilient_comm, [*files, "--compressor", "topk"])
    assert refused.exit_code == 2
    assert "there is no 'topk' in it" in refused.stderr


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["dgc", "topk"], "name one with --compressor: dgc, topk"),
        ([], "compressors = {}: describe one"),
        ([""], "write a name as the key"),
        (["\ud800"], "write a name as the key"),
    ],
)
def test_compressors_have_names_of_which_one_is_chosen(tmp_path: Path, names: list[str], message: str) -> None:
    compressors = dict.fromkeys(names, CLUSTER["compressors"]["dgc"])
    with pytest.raises(FileError, match=re.escape(message)):
        read_cluster(write(tmp_path / "cluster.json", compressors=compressors))


def test_compressors_without_the_device_are_refused(tmp_path: Path) -> None:
    on_cpu = {"dgc": {"ratio": 0.02, "cpu": CLUSTER["compressors"]["dgc"]["gpu"]}}
    cluster = read_cluster(write(tmp_path / "cluster.json", compressors=on_cpu))
    with pytest.raises(FileError, match=r"compressors\.dgc\.gpu is missing"):
        cluster_plan(model_of(10), cluster)
