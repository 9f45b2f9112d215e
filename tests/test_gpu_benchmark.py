"""`benchmarks/gpu.py` says what a part ended with, whatever it does, and refuses a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import HERE, PARTS, RUN, TRAIN, Part, run
from launchers import run_python

WRITES = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{\"a\": 1}'); print('done')"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "gpu.py"), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "torch finds none here" in done.stderr
    assert not (tmp_path / "found.json").exists()


def test_a_part_tells_what_it_measured() -> None:
    found = run(Part(arguments=("-c", WRITES), limit_s=60, writes=True))
    assert (found["status"], found["measured"], found["output"]) == (0, {"a": 1}, "done\n")


def test_a_part_that_fails_costs_only_itself() -> None:
    found = run(Part(arguments=("-c", "raise SystemExit('out of memory')"), limit_s=60, writes=True))
    assert (found["status"], found["output"]) == (1, "out of memory\n")
    assert "measured" not in found


def test_a_part_that_hangs_ends_with_what_it_started() -> None:
    hangs = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    found = run(Part(arguments=("-c", hangs), limit_s=3))
    assert found["status"] is None
    assert not Path("/proc", found["output"].strip(), "exe").exists()


@pytest.mark.jobs
@pytest.mark.nightly
def test_a_killed_training_tells_its_hash() -> None:
    killed = run(Part(arguments=(*RUN, *TRAIN[:-1], "6", "--demo-kill", "3"), limit_s=300))
    assert killed["status"] == 0, killed["output"]
    assert len(killed["hash"]) == 64


def test_parts_fit_into_ten_minutes() -> None:
    assert sum(part.limit_s for part in PARTS.values()) <= 600


@pytest.mark.parametrize(
    "part", [part for part in PARTS.values() if part.writes], ids=lambda part: Path(part.arguments[0]).name
)
def test_scripts_of_parts_find_what_they_import(part: Part) -> None:
    done = run_python([part.arguments[0], "--help"], os.environ)
    assert done.returncode == 0, done.stderr
