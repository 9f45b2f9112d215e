"""The examples do what the README says: the same script under `python`, `torchrun` and `resilient-run`."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from cluster import EXAMPLE, Cluster
from launchers import run_python, run_trainers

pytestmark = pytest.mark.jobs

MINIMAL = EXAMPLE.with_name("minimal.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SMALL = ("--json", "--steps", "12", "--layers", "1", "--width", "64", "--context", "32", "--batch", "2")


def run(*arguments: str, forked: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and return what it printed; torchrun, if forked, starts its workers as ever."""
    if forked:
        done = run_python(arguments, os.environ)
    else:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def lines_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


def digest_of(lines: list[dict[str, Any]]) -> str:
    (digest,) = [line["params_sha256"] for line in lines if "params_sha256" in line]
    return str(digest)


def test_plain_python_trains_warns_once_and_repeats_itself() -> None:
    first = run(str(EXAMPLE), *SMALL, forked=False)
    lines = lines_of(first.stdout)
    assert lines[0].keys() == {"rank", "pid"}
    assert [line["step"] for line in lines[1:-1]] == list(range(1, 13))
    assert first.stderr.count("no checkpoints are kept") == 1
    again = lines_of(run(str(EXAMPLE), *SMALL).stdout)
    assert again[1:] == lines[1:]
    assert lines_of(run(str(EXAMPLE), *SMALL, "--seed", "1").stdout)[-1] != lines[-1]


def test_schemes_sum_the_gradients_of_ddp() -> None:
    """How they recover is tested with the schemes."""
    lines = lines_of(run_trainers([str(EXAMPLE), *SMALL, "--scheme", "spardl"], 2))
    losses = [line["loss"] for line in lines if line.get("rank") == 0 and "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    done = run_python([str(EXAMPLE), "--scheme", "spardl", "--fsdp"], os.environ)
    assert (done.returncode, "leave out --fsdp" in done.stderr) == (2, True)


def test_text_output_ends_with_the_hash() -> None:
    text = run(str(EXAMPLE), *SMALL[1:]).stdout.splitlines()
    assert len(text) == 13
    assert text[0].startswith("step    1/12  loss 5.")
    assert text[-1].startswith("parameters ")


@pytest.mark.parametrize(
    "mode", [pytest.param((), id="ddp"), pytest.param(("--fsdp",), id="fsdp", marks=pytest.mark.nightly)]
)
def test_killed_run_ends_like_one_that_was_not(cluster: Cluster, mode: tuple[str, ...]) -> None:
    """With three ranks the order of a sum shows in its last bit."""
    undisturbed = lines_of(run_trainers([str(EXAMPLE), *SMALL, *mode], 3))
    host = cluster.host("solo")
    host.forked = False
    arguments = [str(EXAMPLE), *SMALL, *mode, "--demo-kill", "6"]
    host.launch(["--standalone", "--nproc-per-node", "3"], arguments)
    assert host.wait() == 0, host.output
    assert host.starts() == 6, "the killed worker did not come back, or more than once"
    losses = {(line["rank"], line["step"]): line["loss"] for line in undisturbed if "loss" in line}
    assert {(rank, step): loss for rank, step, loss in host.steps()} == losses
    assert host.params_sha256() == digest_of(undisturbed)


def test_minimal_script(cluster: Cluster) -> None:
    host = cluster.host("solo")
    host.launch(["--standalone", "--nproc-per-node", "2"], [str(MINIMAL)])
    assert host.wait() == 0, host.output
    theirs = run(*TORCHRUN, "2", str(MINIMAL)).stdout
    assert theirs.startswith("largest weight error: 0.0")
    assert theirs in host.output
