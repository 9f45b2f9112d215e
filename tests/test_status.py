"""What `resilientctl status` tells of a job beside its slots."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from resilient_run.daemon.base.settings import Settings
from resilient_run.daemon.ctl.status import _status_text, status


def text(**job: Any) -> str:
    about = {"launcher_pid": 7, "generation": 1, "own_ranks": [], "world_size": 2, **job}
    return told(**about)


def told(**job: Any) -> str:
    about = {"run_id": "r", "host": "a", "slots": [], **job}
    return _status_text({"pid": 1, "used_bytes": 0, "limit_bytes": 1 << 30, "jobs": [about]})


def test_a_standby_and_a_member() -> None:
    assert "launcher pid 7, generation 1, standby for 2 ranks, committed nothing" in text(own_ranks=[])
    assert "launcher pid 7, generation 1, ranks [1] of 2, committed nothing" in text(own_ranks=[1])
    assert "no launcher, generation 1, ranks [] of 2, committed nothing" in text(own_ranks=[], launcher_pid=None)


def test_a_daemon_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"pid": 7, "used_bytes": 0, "limit_bytes": 1 << 30, "jobs": [{"run_id": "r", "host": "a"}]}
    monkeypatch.setattr("resilient_run.daemon.ctl.status.ask", lambda *_: answer)
    settings = Settings(run_dir=tmp_path, shm_dir=tmp_path)
    done = CliRunner().invoke(status, obj=settings)
    assert done.exit_code == 1
    assert "the daemon (pid 7) tells no 'slots': it is of another resilient-run" in done.stderr
    assert CliRunner().invoke(status, ["--json"], obj=settings).exit_code == 0


def test_what_an_earlier_daemon_left() -> None:
    """Only a launcher that comes back tells where etcd is, which knows what is committed."""
    assert told().endswith(
        "r on host a: left by an earlier daemon, and no launcher has come back: what it committed is not known here"
    )


def test_how_replicas_travel_where_there_are_some() -> None:
    paced = {"every": 2, "reason": "the network is slow"}
    assert "  replicas every 2 step(s): the network is slow" in text(holders=["a", "b"], replication=paced)
    assert "replicas" not in text(holders=["a"], replication=paced)


def test_an_etcd_that_is_silent() -> None:
    assert "  etcd: e:2379, silent for 21 s\n" in text(etcd="e:2379", etcd_silent_s=21.2, observations=SEEN)
    assert "  etcd: e:2379\n" in text(etcd="e:2379", etcd_silent_s=2.0, observations=SEEN)


def test_a_persistent_tier_and_what_is_wrong_with_it() -> None:
    tier = {"target": "s3://b", "written": [1, 180], "error": None}
    assert text(persist=tier).endswith("  persistent tier s3://b: this host wrote step 180")
    away = {**tier, "written": None, "error": "s3://b: cannot list"}
    assert text(persist=away).endswith("this host wrote nothing yet; the last attempt: s3://b: cannot list")


SEEN = [{"severity": "warn", "kind": "disk", "message": "full"}]
