"""All-reduce in 8 bits as plans have it: the sums of the scheme, the bytes of the model, the same after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from cluster import Cluster, assert_same_training
from ranks import run_hosts
from torch import Tensor

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.comm.compress.compressors import named as compressor_named
from resilient_run.comm.compress.feedback import ErrorFeedback
from resilient_run.comm.espresso.cost import Costs
from resilient_run.comm.espresso.maxplus import Resource
from resilient_run.comm.net.fabric import Fabric
from resilient_run.comm.plan.cluster import Cluster as PlannedCluster
from resilient_run.comm.plan.cluster import Coder, CompressorCost, LinkCost
from resilient_run.comm.plan.curve import FREE, Affine
from resilient_run.comm.plan.plan import Plan
from resilient_run.comm.plan.tree import Device, parse
from resilient_run.comm.runtime.execute import OptionScheme
from resilient_run.comm.schemes import named

pytestmark = pytest.mark.jobs

NAMES = ("int8", "fp8")
TWO_STEPS = "comp:gpu > all_to_all@flat > decomp:gpu > comp:gpu > all_gather@flat > decomp:gpu"
GATHERED = "comp:gpu > all_gather@flat > decomp:gpu"
BETWEEN_HOSTS = (
    "reduce_scatter@intra1 > comp:gpu > all_to_all@inter > decomp:gpu > comp:gpu > all_gather@inter > decomp:gpu"
    " > all_gather@intra2"
)
BLOCK = 256


EXAMPLE = str(Path(__file__).parent.parent / "examples" / "planned_gpt.py")


def gradient(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + step)) ** 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_two_steps_of_a_plan_are_the_scheme(ranks: int, name: str) -> None:
    """Bit by bit where shares are whole blocks; else a block may begin elsewhere."""
    numel = ranks * 3 * BLOCK

    def work(fabric: Fabric) -> tuple[list[Tensor], list[Tensor]]:
        scheme = named(name, fabric.flat)
        plan = OptionScheme(fabric, ErrorFeedback(compressor_named(name)), {"w": parse(TWO_STEPS)})
        steps = [gradient(fabric.flat.rank, step, numel) for step in range(4)]
        return [scheme.reduce("w", each.clone()) for each in steps], [plan.reduce("w", each.clone()) for each in steps]

    for ours, planned in run_hosts(1, ranks, work):
        assert all(map(torch.equal, ours, planned))


def bytes_of(option: str, hosts: int, per_host: int, numel: int, ratio: float) -> dict[str, float]:
    """Return what planners take the adapters to move, by link: seconds, where a byte takes one and nothing else any."""
    link = LinkCost(cost=Affine(alpha_s=0.0, beta_s_per_byte=1.0))
    coder = Coder(compress=FREE, decompress=FREE, accumulate=FREE)
    cluster = PlannedCluster(
        hosts=hosts,
        gpus_per_host=per_host,
        intra=link,
        inter=link,
        compressor=CompressorCost(name="int8", ratio=ratio, coders={Device.GPU: coder}),
    )
    ((_, steps),) = Costs(cluster, [4.0 * numel]).options([parse(option)])
    found: dict[str, float] = {}
    for step in (step for step in steps if step.resource in (Resource.INTRA, Resource.INTER)):
        found[step.resource] = found.get(step.resource, 0.0) + float(step.seconds[0])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("hosts", "per_host", "option"),
    [
        (1, 4, GATHERED),
        (1, 3, TWO_STEPS),
        (4, 1, TWO_STEPS),
        (5, 1, TWO_STEPS),
        (3, 2, BETWEEN_HOSTS),
        (2, 2, BETWEEN_HOSTS),
    ],
)
def test_bytes_of_the_model_are_those_that_are_counted(hosts: int, per_host: int, option: str, name: str) -> None:
    numel = 60 * 16 * BLOCK
    compressor = compressor_named(name)
    message_bytes = compressor.compress(torch.ones(numel), seed=0).numel()

    def work(fabric: Fabric) -> dict[str, float]:
        scheme = OptionScheme(fabric, ErrorFeedback(compressor_named(name)), {"w": parse(option)})
        scheme.reduce("w", gradient(fabric.flat.rank, 0, numel))
        flat, intra, inter = (
            each.traffic.sent_bytes + each.traffic.header_bytes for each in (fabric.flat, fabric.intra, fabric.inter)
        )
        if hosts == 1 or per_host == 1:
            return {"intra" if hosts == 1 else "inter": flat}
        return {"intra": intra, "inter": per_host * inter}

    model = bytes_of(option, hosts, per_host, numel, message_bytes / (4 * numel))
    for counted in run_hosts(hosts, per_host, work):
        assert counted.keys() == model.keys()
        for link, moved_bytes in model.items():
            assert counted[link] == pytest.approx(moved_bytes, rel=0.002)


def cluster_file(path: Path, **changes: Any) -> Path:
    """Write what three ranks over a slow network would measure; only that plan is here that does not depend on it."""
    coder = {"alpha_s": 1e-4, "beta_s_per_byte": 2e-10}
    link = {"alpha_s": 1e-4, "beta_s_per_byte": 8e-8}
    document = {
        "hosts": 1,
        "gpus_per_host": 3,
        "forward_s": 0.01,
        "bytes_per_element": 4,
        "intra": link,
        "inter": link,
        "compressors": {"int8": {"ratio": 65 / 256, "gpu": {"compress": coder, "decompress": coder}}},
    }
    path.write_text(json.dumps({**document, **changes}))
    return path


def planned(folder: Path, planner: str, **changes: Any) -> Plan:
    """Return the plan for the model file of a folder."""
    system, out = cluster_file(folder / "system.json", **changes), folder / "plan.json"
    files = ["--model", str(folder / "model.json"), "--system", str(system), "--out", str(out)]
    result = CliRunner().invoke(resilient_comm, ["plan", "--planner", planner, "--compressor", "int8", *files])
    assert result.exit_code == 0, result.output
    return Plan.read(out)


@pytest.mark.parametrize("planner", ["espresso", "espresso-fused"])
def test_planners_sum_in_two_steps_where_many_ranks_would_gather_more_than_an_all_reduce(
    tmp_path: Path, planner: str
) -> None:
    tensors = [{"name": f"t{n}", "numel": 4_000_000, "backward_s": 0.001} for n in range(3)]
    (tmp_path / "model.json").write_text(json.dumps({"tensors": tensors}))
    for per_host in (3, 16):
        found = planned(tmp_path, planner, gpus_per_host=per_host)
        assert {group.option for group in found.groups} == {TWO_STEPS}
        # A quarter of the bytes of an all-reduce.
        assert found.iteration_s < 0.35 * found.baselines_s["espresso-dense"]
    between = planned(tmp_path, planner, hosts=8, gpus_per_host=2, intra={"alpha_s": 1e-5, "beta_s_per_byte": 1e-11})
    assert all(
        "> all_to_all@inter > decomp:gpu > comp:gpu > all_gather@inter >" in group.option for group in between.groups
    )


def test_a_plan_in_two_steps_trains_the_same_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    job = ["--standalone", "--nproc-per-node", "3"]
    small = ("--layers", "1", "--width", "64", "--context", "32", "--batch", "2", "--json")
    host = cluster.host("profile")
    host.launch(job, [EXAMPLE, "--steps", "6", *small, "--profile", str(tmp_path / "model.json")])
    assert host.wait() == 0, host.output
    plan = planned(tmp_path, "espresso-fused")
    assert TWO_STEPS in {group.option for group in plan.groups}
    script = [EXAMPLE, "--steps", "12", *small, "--plan", str(tmp_path / "plan.json"), "--compressor", "int8"]
    reference = cluster.host("reference")
    reference.launch(job, script)
    assert reference.wait() == 0, reference.output
    killed = cluster.host("killed")
    killed.launch(job, [*script, "--demo-kill", "6"])
    assert killed.wait() == 0, killed.output
    assert len(killed.recoveries()) == 1
    assert_same_training([killed], reference)
