"""`benchmarks/step_cost.py` in its smallest size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "step_cost.py"


def test_steps_with_and_without_checkpoints_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    size = ["--mb", "1", "--tensors", "8", "--rounds", "1"]
    subprocess.run([sys.executable, str(SCRIPT), *size, "--json", str(out)], check=True, timeout=200)
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["resilient-run", "async_save", "torch.save"]
    for found in results.values():
        assert found["ratio"]["median"] > 0
        assert found["bytes"] > 1 << 19
