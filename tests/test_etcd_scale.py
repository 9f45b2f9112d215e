"""`benchmarks/etcd_scale.py` in its smallest size: a step of two hosts costs etcd what the protocol says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "etcd_scale.py"


def test_every_host_reports_a_step_and_the_root_commits_it(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--hosts", "2", "3", "--steps", "4", "--json", str(out)], check=True, timeout=200
    )
    for hosts, found in json.loads(out.read_text())["results"].items():
        assert found["puts per step"]["median"] == int(hosts) + 2, "a report of each, the watermark, what is next"
        assert found["watches"]["median"] == int(hosts) + 1, "one of each host, one of the root"
