"""The notebook of the site runs as it is written: a worker is killed, and the run ends with the same bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = pytest.mark.jobs

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tutorials" / "killed-worker.ipynb"


def test_the_notebook_kills_a_worker_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    copy = Path(shutil.copy(NOTEBOOK, tmp_path))
    programs = Path(sys.executable).parent
    with TemporaryDirectory(dir="/dev/shm") as memory:
        environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RESILIENT_RUN_DIR": str(tmp_path / "run"),
            "RESILIENT_SHM_DIR": memory,
            "IPYTHONDIR": str(tmp_path / "ipython"),
        }
        command = [programs / "jupyter-execute", "--inplace", copy]
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads(copy.read_text())["cells"]
    printed = ["".join("".join(output["text"]) for output in cell.get("outputs", [])) for cell in cells]
    assert any("was killed by SIGKILL" in text and "from local memory" in text for text in printed)
    assert "bit-identical\n" in printed
