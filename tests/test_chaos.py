"""A training run on a laboratory network that is broken by a short seeded campaign ends bit-identical."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from netlab import unavailable

CHAOS = Path(__file__).parent.parent / "benchmarks" / "chaos.py"


@pytest.mark.nightly
@pytest.mark.lab
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_broken_run_ends_bit_identical(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    command = [sys.executable, str(CHAOS), "--quick", "--json", str(file), "--timeout", "120"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-20000:]}"
    results = json.loads(file.read_text())["results"]
    assert results["comparison"]["identical"]
    assert results["summary"]["struck"] >= 8
    assert results["summary"]["max_steps_lost"] <= 3  # most of it is the beginning of a generation
