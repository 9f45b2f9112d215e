"""Profiles for planners: backward passes, links, compressors, and the whole way from profile to training."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from cluster import Cluster, assert_same_training
from etcd_process import kept_ports
from launchers import run_trainers
from ranks import run_ranks
from torch import Tensor, nn

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.compress.compressors import named
from resilient_run.comm.errors import CommError
from resilient_run.comm.measure.probe import PROBED, PROBED_COMPRESSED, probe_coder, probe_link
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.plan.cluster import read_cluster
from resilient_run.comm.plan.curve import Table
from resilient_run.comm.plan.model import Model, read_model
from resilient_run.comm.plan.plan import COMPRESSED, Plan, PlanGroup
from resilient_run.comm.plan.tree import Routine
from resilient_run.comm.profiler import BackwardProfiler

pytestmark = pytest.mark.jobs

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "planned_gpt.py")
TINY = ("--layers", "2", "--width", "128", "--json")
JOB = ["--standalone", "--nproc-per-node", "2"]
ALONE = Transport(dist.ProcessGroup(0, 1))  # type: ignore[call-arg]


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


class Choosing(nn.Module):
    """Has a layer that is seldom used and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(5, 7)
        self.always = nn.Linear(64, 3)
        self.seldom = nn.Linear(3, 3)

    def forward(self, batch: Tensor, *, seldom: bool) -> Tensor:
        out: Tensor = self.always(batch)
        return self.seldom(out) if seldom else out


def test_parameters_without_gradients_are_ready_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, path = Choosing(), tmp_path / "model.json"

    def found(*, seldom_used: int) -> Model:
        profiler = BackwardProfiler(module, iterations=8, warm_up=0)
        for iteration in range(8):
            module(torch.randn(9, 64), seldom=iteration < seldom_used).sum().backward()
        profiler.write(path, name="choosing")
        assert profiler.complete
        return read_model(path)

    model = found(seldom_used=0)
    assert [tensor.name.split(".")[0] for tensor in model.tensors] == ["always"] * 2 + ["never"] * 2 + ["seldom"] * 2
    assert {tensor.name: tensor.numel for tensor in model.tensors}["never.weight"] == 35
    assert [tensor.backward_s for tensor in model.tensors[2:]] == [0.0] * 4
    assert model.backward_s > 0
    assert not caplog.records
    model = found(seldom_used=3)
    assert [tensor.name.split(".")[0] for tensor in model.tensors] == ["always"] * 2 + ["never"] * 2 + ["seldom"] * 2
    (record,) = caplog.records
    assert "3 with gradients of other parameters left out" in record.getMessage()
    assert json.loads(path.read_text())["note"].startswith("medians of 5 iterations; 3 with")
    model = found(seldom_used=5)
    assert [tensor.name.split(".")[0] for tensor in model.tensors] == ["seldom"] * 2 + ["always"] * 2 + ["never"] * 2


def test_what_makes_no_model_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommError, match="this ReLU has no trainable parameters"):
        BackwardProfiler(nn.ReLU())
    module = model()
    profiler = BackwardProfiler(module, iterations=2, warm_up=0)
    module(torch.randn(1, 64)).sum().backward()
    module(torch.randn(1, 64)).sum().backward()
    with pytest.raises(CommError, match="the model has no name"):
        profiler.write(tmp_path / "model.json", name="")
    profiler.write(tmp_path / "model.json", name="x")
    twice = BackwardProfiler(module, iterations=2, warm_up=0)
    for _ in range(2):
        loss = module(torch.randn(1, 64)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    with pytest.raises(CommError, match="called once in an iteration, with one backward pass"):
        twice.write(tmp_path / "other.json", name="x")


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
    found = probe_coder(named("topk", density=0.25), [1 << 12, 1 << 16], device="cpu", transport=ALONE, repeats=2)
    assert found.ratio == 0.5
    curves = (found.compress, found.decompress, found.accumulate)
    assert all(len(curve) == 2 and min(curve) > 0 for curve in curves)


def test_copies_of_a_coder_elsewhere_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: "cpu:1" stands for it, which torch takes for the CPU."""
    plain, copies = Tensor.to, set()

    def to(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if isinstance(arguments[0], torch.device | str):
            copies.add((sys._getframe(1).f_code.co_name, tensor.nbytes, str(arguments[0])))
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", to)
    probe_coder(named("topk", density=0.25), [1 << 12], device="cpu", transport=ALONE, gradients_on="cpu:1", repeats=1)
    measured = {copy for copy in copies if copy[0] in ("compress", "decompress", "accumulate")}
    assert measured == {
        ("compress", 1 << 12, "cpu"),
        ("compress", 1 << 11, "cpu:1"),
        ("decompress", 1 << 11, "cpu"),
        ("decompress", 1 << 12, "cpu:1"),
        ("accumulate", 1 << 11, "cpu"),
    }


def test_profile_outside_of_a_job_is_refused(tmp_path: Path) -> None:
    result = CliRunner(env={"RANK": None}).invoke(resilient_comm, ["profile", "--out", str(tmp_path / "system.json")])
    assert result.exit_code == 2
    assert "profile runs on the ranks of a job" in result.output


RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def rank_environ() -> dict[str, str]:
    """What torchrun sets for the one rank of a job."""
    (port,) = kept_ports(1)
    return {**RANK, "MASTER_PORT": str(port)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "abc"}, "RANK is 'abc' in the environment, not an integer of at least 0"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE 1"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set in the environment"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x' in the environment, not an integer of at least 1"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is ''"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
    ],
)
def test_wrong_environments_are_refused(
    tmp_path: Path, rank_environ: dict[str, str], change: dict[str, str | None], message: str
) -> None:
    runner = CliRunner(env={**rank_environ, **change})
    result = runner.invoke(resilient_comm, ["profile", "--out", str(tmp_path / "system.json")])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["bench", "stats"])
def test_a_command_that_is_gone_says_what_to_use(name: str) -> None:
    result = CliRunner().invoke(resilient_comm, [name, "--json"])
    assert result.exit_code == 2
    assert f"{name} is gone: `resilient-comm advise` measures schemes in your own job" in result.stderr


def test_profile_refuses_wrong_files_before_it_measures(tmp_path: Path, rank_environ: dict[str, str]) -> None:
    def refused(*arguments: str) -> str:
        # Nobody is at this address, so that measuring would fail in another way.
        runner = CliRunner(env={**rank_environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
        result = runner.invoke(resilient_comm, ["profile", *arguments])
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    assert "name a file that can be written" in refused("--out", str(tmp_path / "nowhere" / "system.json"))
    (tmp_path / "file").touch()
    assert "name a file that can be written" in refused("--out", str(tmp_path / "file" / "system.json"))
    path, out = tmp_path / "model.json", ["--out", str(tmp_path / "system.json")]
    tensors = [{"name": "w", "numel": 4, "backward_s": 0.1}]
    for document, message in (
        ({"forward_s": 0.1, "version": 99, "tensors": tensors}, "version = 99"),
        ({"forward_s": 0.1, "junk": 3, "tensors": tensors}, "junk = 3"),
        ({"forward_s": 0.1}, "tensors is missing"),
        ({"forward_s": "x", "tensors": tensors}, 'forward_s = "x"'),
        ({"tensors": tensors}, "forward_s is missing: take a file that BackwardProfiler wrote"),
    ):
        path.write_text(json.dumps(document))
        assert message in refused("--model", str(path), *out)


def test_measurements_that_cannot_be_written_are_printed(rank_environ: dict[str, str]) -> None:
    arguments = ["profile", "--repeats", "1", "--largest-mib", "1", "--out", "/dev/full"]
    result = CliRunner(env=rank_environ).invoke(resilient_comm, arguments)
    assert result.exit_code == 1
    assert "/dev/full is not written; what was measured stands above" in result.stderr
    assert len(json.loads(result.stdout)["compressors"]["topk"]["gpu"]["compress"]["seconds"]) == 4


def test_messages_of_one_size_are_measured_once(tmp_path: Path) -> None:
    """One element of each of the smaller tensors is sent."""
    path = tmp_path / "cluster.json"
    program = "from resilient_run.comm.cli.main import resilient_comm; resilient_comm()"
    small = ["--density", "0.00001", "--largest-mib", "1", "--repeats", "1", "--out", str(path)]
    run_trainers(["-c", program, "profile", *small], 2)
    gathered = read_cluster(path).intra.of(Routine.ALL_GATHER, compressed=True)
    assert isinstance(gathered, Table)
    assert gathered.sizes_bytes[0] == 4


@pytest.mark.parametrize("name", ["int8", "fp16", "topk"])
def test_a_measured_compressor_has_the_name_that_plan_takes(
    tmp_path: Path, rank_environ: dict[str, str], name: str
) -> None:
    system, model, out = (tmp_path / f"{each}.json" for each in ("system", "model", "plan"))
    model.write_text(json.dumps({"tensors": [{"name": "w", "numel": 4, "backward_s": 0.1}]}))
    measure = ["profile", "--compressor", name, "--repeats", "1", "--largest-mib", "1"]
    plan = ["plan", "--planner", "espresso", "--compressor", name, "--model", str(model), "--system", str(system)]
    for arguments in ([*measure, "--out", str(system)], [*plan, "--out", str(out)]):
        result = CliRunner(env=rank_environ).invoke(resilient_comm, arguments)
        assert result.exit_code == 0, result.output
    assert Plan.read(out).compressor == name


@pytest.mark.nightly
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
    assert read_cluster(paths["system"]).forward_s == json.loads(paths["model"].read_text())["forward_s"]
    plan = ["plan", "--model", str(paths["model"]), "--system", str(paths["system"]), "--out", str(paths["plan"])]
    result = CliRunner().invoke(resilient_comm, plan)
    assert result.exit_code == 0, result.output

    planned = Plan.read(paths["plan"])
    names = [name for group in planned.groups for name in group.tensors]
    groups = (names[:3], names[3:11], names[11:])
    compressing = Plan(
        planner="by hand", model=planned.model, compressor="topk", reason="a test", iteration_s=0.0, planning_s=0.0,
        bound_s=0.0, baselines_s={},
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
