"""Profiles for planners: backward passes, links, compressors, and the whole way from profile to training."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from cluster import Cluster, assert_same_training
from ranks import run_ranks
from torch import nn

from resilient_run.comm.cli import resilient_comm
from resilient_run.comm.compressors import named
from resilient_run.comm.errors import CommError
from resilient_run.comm.model import read_model
from resilient_run.comm.plan import COMPRESSED, Plan, PlanGroup
from resilient_run.comm.probe import PROBED, PROBED_COMPRESSED, probe_coder, probe_link
from resilient_run.comm.profiler import BackwardProfiler
from resilient_run.comm.system import read_system
from resilient_run.comm.transport import Transport

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "planned_gpt.py")
TINY = ("--layers", "2", "--width", "128", "--json")
JOB = ["--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 3), nn.ReLU(), nn.Linear(3, 1))


def test_profile_lists_gradients_as_they_become_ready(tmp_path: Path) -> None:
    module, path = model(), tmp_path / "model.json"
    profiler = BackwardProfiler(module, iterations=4, warm_up=2)
    for iteration in range(8):
        with torch.no_grad():
            module(torch.randn(9, 64))
        module(torch.randn(9, 64)).sum().backward()
        assert profiler.complete == (iteration >= 6), "an iteration is over when the next one begins"
    profiler.write(path, name="small")
    found = read_model(path)
    assert found.name == "small"
    assert {tensor.name: tensor.numel for tensor in found.tensors} == {
        name: parameter.numel() for name, parameter in module.named_parameters()
    }
    layers = [int(tensor.name.split(".")[0]) for tensor in found.tensors]
    assert layers == sorted(layers, reverse=True)
    assert all(tensor.backward_s >= 0 for tensor in found.tensors)
    assert found.backward_s > 0
    assert json.loads(path.read_text())["forward_s"] > 0
    assert not module[0].weight._post_accumulate_grad_hooks, "the hooks are off"


def test_profile_of_nothing_or_half_a_model_is_refused(tmp_path: Path) -> None:
    module = model()
    module(torch.randn(1, 64)).sum().backward()
    with pytest.raises(CommError, match="no backward pass was measured after the warm-up"):
        BackwardProfiler(module).write(tmp_path / "model.json", name="x")
    assert not list(tmp_path.iterdir())


def test_ranks_agree_on_what_they_measured() -> None:
    sizes = [1 << 12, 1 << 16]

    def work(transport: Transport) -> list[tuple[float, ...]]:
        links = [probe_link(transport, routine, sizes, repeats=2) for routine in PROBED]
        return links + [
            probe_link(transport, routine, sizes, repeats=2, compressor=named(name))
            for routine in PROBED_COMPRESSED
            for name in ("topk", "dgc")
        ]

    first, *others = run_ranks(3, work)
    assert all(seconds > 0 for points in first for seconds in points)
    assert all(other == first for other in others)


def test_coder_is_measured_over_dense_bytes() -> None:
    found = probe_coder(named("topk", density=0.25), [1 << 12, 1 << 16], device="cpu", repeats=2)
    assert found.ratio == 0.5
    assert found.sizes_bytes == (1 << 12, 1 << 16)
    assert all(seconds > 0 for curve in (found.compress, found.decompress, found.accumulate) for seconds in curve)


def test_profile_outside_of_a_job_is_refused(tmp_path: Path) -> None:
    result = CliRunner(env={"RANK": None}).invoke(resilient_comm, ["profile", "--out", str(tmp_path / "system.json")])
    assert result.exit_code == 2
    assert "profile runs on the ranks of a job" in result.output


@pytest.mark.slow
def test_from_profile_to_a_planned_run_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """The four commands of the example; then the same plan, made to compress, with and without a kill."""
    paths = {name: tmp_path / f"{name}.json" for name in ("model", "system", "plan", "compressing")}
    host = cluster.host("solo")
    host.launch(JOB, [EXAMPLE, "--steps", "12", *TINY, "--profile", str(paths["model"])])
    assert host.wait() == 0, host.output
    resilient_comm_path = str(Path(sys.executable).with_name("resilient-comm"))
    probe = ["profile", "--model", str(paths["model"]), "--repeats", "2", "--largest-mib", "1"]
    host.launch([*JOB, "--no-python", resilient_comm_path], [*probe, "--out", str(paths["system"])])
    assert host.wait() == 0, host.output
    assert read_system(paths["system"]).forward_s == json.loads(paths["model"].read_text())["forward_s"]
    plan = ["plan", "--model", str(paths["model"]), "--system", str(paths["system"]), "--out", str(paths["plan"])]
    result = CliRunner().invoke(resilient_comm, plan)
    assert result.exit_code == 0, result.output

    planned = Plan.read(paths["plan"])
    names = [name for group in planned.groups for name in group.tensors]
    groups = (names[:3], names[3:11], names[11:])
    compressing = Plan(
        planner="by hand", model=planned.model, compressor="topk", reason="a test", iteration_s=0.0, planning_s=0.0,
        bound_s=0.0, baselines_s={}, timeline=(),
        groups=tuple(PlanGroup(tensors=tuple(group), option=COMPRESSED) for group in groups),
    )  # fmt: skip
    compressing.write(paths["compressing"])
    script = [EXAMPLE, "--steps", "15", *TINY, "--plan", str(paths["compressing"])]
    reference = cluster.host("reference")
    reference.launch(JOB, script)
    assert reference.wait() == 0, reference.output
    killed = cluster.host("killed")
    killed.launch(JOB, [*script, "--demo-kill", "7"])
    assert killed.wait() == 0, killed.output
    assert len(killed.recoveries()) == 1
    assert_same_training([killed], reference)
