"""Other people's training stacks, with the real libraries: what works ends with the same bits, the rest is refused."""

import json
import math
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import EXAMPLE, Cluster
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

pytestmark = pytest.mark.jobs

STACKS = Path(__file__).parent / "frameworks"
KILLED = STACKS / "killed.py"
TORCHRUN = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
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
TITAN = ("torchtitan", "datasets", "tokenizers", "tyro", "triton")
LAYOUTS = {
    "fsdp": {},
    "hsdp": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "tp": {"tensor_parallel": 2},
    "pp": {"pipeline_parallel": 2},
    "pp-tp": {"pipeline_parallel": 2, "tensor_parallel": 2},
    "fsdp-tp": {"data_parallel_shard": 2, "tensor_parallel": 2},
    "ep": {"expert_parallel": 2},
}
"""Degrees of parallelism of torchtitan by name; its pipelines have two model parts a rank (Interleaved1F1B)."""
STEPS = 14


def need(*libraries: str) -> None:
    """Skip the test if a library is missing."""
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def saved(folder: Path) -> dict[str, Any]:
    """Return what checkpoint files have, by the steps' folders and the paths in them."""
    found: dict[str, Any] = {}
    for step in folder.iterdir():
        state: dict[str, Any] = {}
        _load_state_dict(state, FileSystemReader(step), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        paths, _ = flatten_state_dict(state)
        found |= {f"{step.name} {path}": value for path, value in paths.items()}
    return found


def logged(output: str) -> set[str]:
    """Return the losses and gradient norms that torchtitan logged; a step that is done again logs them again."""
    return set(re.findall(r"step: +\d+ +loss: +[-\d.]+ +(?:grad_norm: +[\d.]+)?", re.sub(r"\x1b\[[\d;]*m", "", output)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_of_torchtitan_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path, layout: str) -> None:
    """Killed in a step, again in the one that is done anew, in a validation, and right after a step."""
    need(*TITAN)
    degrees = LAYOUTS[layout]
    ranks = math.prod(degrees.values()) if degrees else 2

    def arguments(name: str) -> list[str]:
        options = {
            **{f"parallelism.{each}_degree": degree for each, degree in degrees.items()},
            "training.steps": STEPS,
            "checkpoint.interval": 5,
            "validator.freq": 4,
            "dump_folder": tmp_path / name,
        }
        given = [each for name, value in options.items() for each in (f"--{name}", str(value))]
        experts = ["--config", "experts"] if layout == "ep" else []
        return [str(EXAMPLE.with_name("with_torchtitan.py")), *experts, *given]

    command = [sys.executable, *TORCHRUN, str(ranks), *arguments("undisturbed")]
    reference = subprocess.run(command, env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=200)
    assert reference.returncode == 0, reference.stderr
    draw = random.Random(layout)
    twice, after = draw.randrange(1, 4), draw.randrange(9, STEPS - 1)
    moments = [("train", twice), ("train", twice), ("evaluate", draw.choice((4, 8))), ("after", after)]
    kills = [(where, step, draw.randrange(ranks)) for where, step in moments]
    (tmp_path / "kills.json").write_text(json.dumps(kills))
    host = cluster.host("solo")
    host.forked = False
    host.launch(
        ["--standalone", "--nproc-per-node", str(ranks)],
        [str(KILLED), str(tmp_path), *arguments("killed")],
        **ENVIRON,
    )
    assert host.wait(280) == 0, host.output
    assert len(list(tmp_path.glob("struck*"))) == len(kills), "a moment did not come"
    # A rank may be ended while it restores, if another one dies as soon as it has.
    restored = [int(line) for line in (tmp_path / "restored0").read_text().split()]
    assert min(restored[1:]) > 0, "it began at the beginning"
    files, expected = (saved(tmp_path / name / "checkpoint") for name in ("killed", "undisturbed"))
    assert files.keys() == expected.keys() != set()
    differing = [path for path, value in expected.items() if not same(files[path], value)]
    assert differing == []
    assert logged(host.output) == logged(reference.stdout + reference.stderr) != set()


def same(one: Any, other: Any) -> bool:
    """Tell whether two values of checkpoint files are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    return bool(one == other)


def test_a_killed_run_with_files_of_dcp_ends_like_one_that_was_not(cluster: Cluster, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        return [str(STACKS / "dcp_beside.py"), "--steps", str(STEPS), "--dump-folder", str(tmp_path / name)]

    command = [sys.executable, *TORCHRUN, "2", *arguments("undisturbed")]
    reference = subprocess.run(command, env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=200)
    assert reference.returncode == 0, reference.stderr
    (undisturbed,) = [line for line in reference.stdout.splitlines() if line.startswith("parameters ")]
    draw = random.Random("dcp")
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
