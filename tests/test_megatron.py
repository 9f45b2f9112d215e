"""Megatron's training, killed at seeded moments, ends with the same bits as one that nobody disturbed."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster import EXAMPLE, Cluster, Host, wait_until

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed (extra engines)"),
]

SCRIPT = EXAMPLE.with_name("with_megatron.py")
KILLED = Path(__file__).parent / "frameworks" / "killed.py"
ENVIRON = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
SHORT = ("--train-iters", "12", "--eval-interval", "4")

CASES = {
    # By parallelism, dtype and optimizer: how many ranks, and the options of the example.
    "dp2-fp32": (2, "--dtype fp32"),
    "dp2-bf16": (2, "--dtype bf16 --overlap"),
    "dp2-fp16": (2, "--dtype fp16"),
    "dp2-fp32-distributed": (2, "--dtype fp32 --distributed"),
    "dp2-fp32-distributed-overlap": (2, "--dtype fp32 --distributed --overlap"),
    "dp2-bf16-distributed-rampup": (2, "--dtype bf16 --distributed --rampup 4 4 60"),
    "dp2-bf16-distributed-overlap": (2, "--dtype bf16 --distributed --overlap"),
    "dp2-fp16-distributed-overlap": (2, "--dtype fp16 --distributed --overlap"),
    "tp2-fp32": (2, "--tensor 2 --dtype fp32"),
    "tp2-bf16": (2, "--tensor 2 --dtype bf16"),
    "tp2-fp16-distributed": (2, "--tensor 2 --dtype fp16 --distributed"),
    "pp2-fp32": (2, "--pipeline 2 --dtype fp32"),
    "pp2-bf16-distributed": (2, "--pipeline 2 --dtype bf16 --distributed"),
    "pp2-chunks2-bf16-distributed-overlap": (
        2,
        "--pipeline 2 --chunks 2 --layers 4 --dtype bf16 --distributed --overlap",
    ),
    "ep2-fp32": (2, "--expert 2 --experts 4 --dtype fp32"),
    "ep2-bf16-distributed": (2, "--expert 2 --experts 4 --dtype bf16 --distributed"),
    "dp2-tp2-bf16-distributed-overlap": (4, "--tensor 2 --dtype bf16 --distributed --overlap"),
    "dp2-ep2-pp2-bf16-distributed": (4, "--pipeline 2 --expert 2 --experts 4 --dtype bf16 --distributed"),
}


def undisturbed(ranks: int, options: list[str]) -> tuple[dict[tuple[int, int], Any], dict[int, Any]]:
    """Return what torchrun's workers print: of each rank and step losses and norms, and of each rank its last line."""
    torchrun = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *options], env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return sorted_out(map(json.loads, filter(lambda line: line.startswith("{"), done.stdout.splitlines())))


def sorted_out(lines: Any) -> tuple[dict[tuple[int, int], Any], dict[int, Any]]:
    steps: dict[tuple[int, int], Any] = {}
    ends: dict[int, Any] = {}
    for line in lines:
        if "step" in line:
            assert steps.setdefault((line["rank"], line["step"]), line) == line, "a step was repeated with another end"
        elif "state" in line:
            ends[line["rank"]] = line
    return steps, ends


def start(host: Host, tmp_path: Path, kills: list[Any], launcher: list[str], script: list[str]) -> None:
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    host.forked = False
    host.launch(launcher, [str(KILLED), str(tmp_path), *script], **ENVIRON)


@pytest.mark.parametrize("case", CASES)
def test_killed_run_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path, case: str) -> None:
    ranks, options = CASES[case]
    script = [*options.split(), *SHORT]
    steps, ends = undisturbed(ranks, script)
    assert (len(steps), len(ends)) == (12 * ranks, ranks)
    draw = random.Random(case)
    twice = draw.randrange(ranks)
    kills = [
        ("train", draw.randrange(1, 4), draw.randrange(ranks)),
        ("evaluate", draw.randrange(4, 8), draw.randrange(ranks)),
        ("after", draw.randrange(8, 10), draw.randrange(ranks)),
        ("after", 10, twice),
        ("train", 10, twice),
    ]
    host = cluster.host("solo")
    start(host, tmp_path, kills, ["--standalone", "--nproc-per-node", str(ranks)], [str(SCRIPT), *script])
    assert host.wait(280) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == len(kills), "a moment did not come"
    restored = [int(line) for line in (tmp_path / "restored0").read_text().split()]
    assert len(restored) >= 4, "a rank may be ended before it has restored, when another died in its first step"
    assert min(restored[1:]) > 0, "it began at the beginning"
    assert sorted_out(host.lines) == (steps, ends)


def test_lost_host_is_replaced(cluster: Cluster, tmp_path: Path, etcd_endpoint: str) -> None:
    script = [*CASES["dp2-tp2-bf16-distributed-overlap"][1].split(), "--train-iters", "60"]
    steps, ends = undisturbed(4, script)
    launcher = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd_endpoint}"]
    launcher += [f"--rdzv-id={cluster.name}", "--local-addr=127.0.0.1", "--rdzv-conf=lease_ttl=3"]
    first, second, standby = (cluster.host(name) for name in "abc")
    for host in (first, second):
        start(host, tmp_path, [], launcher, [str(SCRIPT), *script])
    wait_until(lambda: first.reached(2), timeout_s=100, what="step 2", host=first)
    start(standby, tmp_path, [], launcher, [str(SCRIPT), *script])
    wait_until(lambda: first.reached(15) and second.committed_step() > 10, timeout_s=100, what="step 15", host=first)
    assert not standby.starts(), "the standby trains though nobody was lost"
    second.lose()
    for host in (first, standby):
        assert host.wait(250) == 0, host.output
    assert any("from peer memory" in line for line in standby.text), standby.output
    assert sorted_out([*first.lines, *second.lines, *standby.lines]) == (steps, ends)


MISTAKES = {
    # What stands in place of the example's MegatronState, and what is told.
    "not covered": ("Checkpointer(model=model[0].module)", "keeps fp32 weights, optimizer states and random states"),
    "not supported": (
        "Checkpointer(megatron=[setattr(model[0].config, 'fp8', 'e4m3'), MegatronState(model, optimizer)][1])",
        "Megatron's fp8 is not supported",
    ),
    "another optimizer": (
        "Checkpointer(megatron=MegatronState(model, type('Layers', (), vars(optimizer))()))",
        "Megatron's Layers is not supported",
    ),
    "another model": (
        "Checkpointer(megatron=MegatronState([torch.nn.Linear(1, 1)], optimizer))",
        "the optimizer trains what is not in model",
    ),
    "another schedule": (
        "Checkpointer(megatron=MegatronState(model, optimizer, object()))",
        "object is not Megatron's OptimizerParamScheduler",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_kept_ends_the_run_at_once(cluster: Cluster, tmp_path: Path, mistake: str) -> None:
    made, told = MISTAKES[mistake]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.read_text().replace("Checkpointer(megatron=state)", made))
    assert made in script.read_text()
    host = cluster.host("solo")
    start(host, tmp_path, [], ["--standalone", "--nproc-per-node=2", "--max-restarts=3"], [str(script), *SHORT])
    assert host.wait() == 1
    assert host.starts() == 2, host.output
    assert host.output.count(told) == 1, host.output
    assert "no Checkpointer was at work" not in host.output


def test_optimizer_that_comes_after_the_checkpointer_ends_the_run_at_once(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = SCRIPT.read_text().replace("Checkpointer(megatron=state)", "early")
    begins = "    initialize_megatron(args)\n"
    assert begins in text
    script.write_text(text.replace(begins, "    early = Checkpointer(model=torch.nn.Linear(1, 1))\n" + begins))
    host = cluster.host("solo")
    start(host, tmp_path, [], ["--standalone", "--nproc-per-node=2", "--max-restarts=3"], [str(script), *SHORT])
    assert host.wait() == 1
    assert host.starts() == 2, host.output
    assert host.output.count("Register it: Checkpointer(megatron=MegatronState(") == 1, host.output
