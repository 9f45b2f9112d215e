"""`benchmarks/engine_costs.py` in its smallest size."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "engine_costs.py"


@pytest.mark.parametrize(("engine", "library"), [("zero3", "deepspeed"), ("megatron", "megatron")])
def test_checkpoints_of_an_engine_are_measured(tmp_path: Path, engine: str, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed (extra engines)")
    out = tmp_path / "found.json"
    size = ["--engine", engine, "--mb", "1", "--rounds", "1", "--kills", "1", "--kill-after", "2"]
    subprocess.run([sys.executable, str(SCRIPT), *size, "--json", str(out)], check=True, timeout=280)
    results = json.loads(out.read_text())["results"]
    for name in ("resilient-run", "own"):
        assert results["costs"][name]["ratio"]["median"] > 0
        assert results["seconds"][name]["count"] == 1
