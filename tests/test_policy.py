"""The configuration file: what it may say, and how it says no."""

from pathlib import Path
from typing import Any

import pytest

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.spec import JobSpec
from resilient_run.daemon.etcd.config import EtcdConfig
from resilient_run.launcher import cli
from resilient_run.launcher.config import RunConfig


def test_nothing_said_is_the_default_and_what_is_said_comes_back() -> None:
    assert Policy.parse({}) == Policy() == Policy.parse(Policy().to_value())
    changed = Policy.parse({"root": {"stalled_recoveries": 2}})
    assert changed.root.stalled_recoveries == 2
    assert Policy.parse(changed.to_value()) == changed


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"rot": {}}, "no setting 'rot'; did you mean 'root'"),
        ({"root": 3}, "field 'root' must be an object, got 3"),
        ({"root": {"stalled_recovery": 1}}, "root: no setting 'stalled_recovery'; did you mean 'stalled_recoveries'"),
        (
            {"root": {"stalled_recoveries": "5"}},
            "root: field 'stalled_recoveries' must be an integer of at least 1",
        ),
        ({"root": {"stalled_recoveries": 0}}, "must be an integer of at least 1, got 0"),
        ({"root": {"stalled_recoveries": 1 << 63}}, f"must be an integer from 1 to {(1 << 63) - 1}, got {1 << 63}"),
        ({"detect": {"hang_floor_s": float("inf")}}, r"must be a number from 0.1 to 1e\+09, got inf"),
        ({"root": {"stalled_recoveries": True}}, "must be an integer of at least 1, got True"),
    ],
)
def test_wrong_settings_are_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(DaemonError, match=message):
        Policy.parse(tables)


def test_ports_of_a_job_are_in_order() -> None:
    etcd = EtcdConfig(endpoints=("host:2379",))
    job = JobSpec(run_id="run", host="a", replicas=2, nproc=1, etcd=etcd, addr="a", policy=Policy(), first_port=29600)
    assert JobSpec.parse(job.to_value()) == job
    assert JobSpec.parse({**job.to_value(), "last_port": 29601}).ports == range(29600, 29602)
    with pytest.raises(DaemonError, match="field 'last_port' must be an integer from 29600 to 65535, got 29599"):
        JobSpec.parse({**job.to_value(), "last_port": 29599})


def test_launcher_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[root]\nstalled_recoveries = 9\n")
    params = cli.ResilientRun().make_context("resilient-run", [f"--rr-config={file}", "train.py"]).params
    assert RunConfig.from_params(params).policy.root.stalled_recoveries == 9


@pytest.mark.parametrize("text", ["[root", "[root]\nstalled = 1\n", "\xff"])
def test_launcher_names_a_wrong_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(Exception, match=r"run\.toml: "):
        cli.ResilientRun().make_context("resilient-run", [f"--rr-config={file}", "train.py"])
