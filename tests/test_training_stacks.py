"""Other people's training stacks, with the real libraries: what works ends with the same bits, the rest is refused."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster import EXAMPLE, Cluster

pytestmark = pytest.mark.jobs

STACKS = Path(__file__).parent / "frameworks"
KILLED = STACKS / "killed.py"
TORCHRUN = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRON = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
REFUSED = {
    "deepspeed": (
        "deepspeed_engine.py",
        2 * (2 + 12 * 5),
        r"deepspeed\.runtime\.engine\.DeepSpeedEngine keeps fp32 weights",
    ),
    "megatron.core": ("megatron_optimizer.py", 2 * 4 * 3, r"megatron\.core\.optimizer\..* keeps fp32 weights"),
}
"""By library: the script that makes what is refused, how many refusals it prints, and their message."""
NEEDS = {"torchtitan": ("torchtitan", "datasets", "tokenizers", "tyro", "triton"), "dcp": ()}
STEPS = 14


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def need(*libraries: str) -> None:
    """Skip the test if a library is missing."""
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize("stack", NEEDS)
def test_a_killed_run_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path, stack: str) -> None:
    need(*NEEDS[stack])
    example = str(EXAMPLE.with_name("with_torchtitan.py") if stack == "torchtitan" else STACKS / "dcp_beside.py")

    def arguments(name: str) -> list[str]:
        return [example, "--steps", str(STEPS), "--dump-folder", str(tmp_path / name)]

    command = [sys.executable, *TORCHRUN, *arguments("undisturbed")]
    reference = subprocess.run(command, env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=200)
    assert reference.returncode == 0, reference.stderr
    (undisturbed,) = [line for line in reference.stdout.splitlines() if line.startswith("parameters ")]
    draw = random.Random(stack)
    steps = sorted(draw.sample(range(2, STEPS - 1), 3))
    kills = [(where, step, draw.randrange(2)) for where, step in zip(("train", "after", "train"), steps, strict=True)]
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    host = cluster.host("solo")
    host.forked = False
    host.launch(
        ["--standalone", "--nproc-per-node", "2"], [str(KILLED), str(tmp_path), *arguments("killed")], **ENVIRON
    )
    assert host.wait(280) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == len(kills), "a moment did not come"
    restored = [int(line) for line in (tmp_path / "restored0").read_text().split()]
    assert len(restored) == 1 + len(kills)
    assert min(restored[1:]) > 0, "it began at the beginning"
    assert undisturbed in host.output
    files = [
        sorted(path.name for path in (tmp_path / name / "checkpoint").iterdir()) for name in ("undisturbed", "killed")
    ]
    assert files[0] == files[1] != [], "its own checkpoint files are written as before"


@pytest.mark.parametrize("library", REFUSED)
def test_what_no_checkpoint_could_have_is_refused(cluster: Cluster, library: str) -> None:
    need(library.partition(".")[0], library)
    script, count, message = REFUSED[library]
    host = cluster.host("solo")
    host.forked = False
    host.launch(["--standalone", "--nproc-per-node", "2"], [str(STACKS / script)], **ENVIRON)
    assert host.wait(250) == 0, host.output
    told = [line for line in host.lines if "registered" in line]
    assert len(told) == count, host.output
    accepted = [line for line in told if line["error"] != "StateError" or not re.match(message, line["text"])]
    assert accepted == []


def test_what_is_not_imported_is_not_looked_for() -> None:
    code = "import resilient_run.ckpt.checkpointer as c, sys; assert c.foreign([]) is None; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"deepspeed", "megatron"} & {name.partition(".")[0] for name in out.stdout.split()}
