"""`benchmarks/etcd_scale.py` in its smallest size: a step costs etcd what the protocol says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "etcd_scale.py"


def test_a_step_costs_etcd_the_same_however_many_hosts_there_are(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--hosts", "2", "19", "--steps", "2", "--json", str(out)], check=True, timeout=200
    )
    for found in json.loads(out.read_text())["results"].values():
        assert found["puts per step"]["median"] == 2, "the watermark, and what is next"
        assert found["events per step"]["median"] == 2, "to the root"
        assert found["watches"]["median"] == 2, "both of the root's host"
