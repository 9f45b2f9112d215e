"""`resilientctl forget` on a real etcd: everything of a dead run goes, nothing of a live one or of a neighbour."""

import json
from pathlib import Path
from typing import TypeVar

import pytest
from click.testing import CliRunner, Result
from etcd_process import ask

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig

pytestmark = pytest.mark.jobs

T = TypeVar("T")
KEYS = ("rdzv/job", "rdzv/round", "state/watermark", "state/persisted/a")


def leave_behind(config: EtcdConfig, run_id: str, *names: str) -> None:
    async def write(etcd: Etcd) -> None:
        for name in names:
            await etcd.put(f"/resilient-run/{run_id}/{name}", {"some": "value"})

    ask(config, write)


def names(config: EtcdConfig, run_id: str) -> set[str]:
    prefix = f"/resilient-run/{run_id}/"
    return {key.removeprefix(prefix) for key in ask(config, lambda etcd: etcd.list(prefix))}


def forget(*arguments: str) -> Result:
    return CliRunner().invoke(resilientctl, ["forget", *arguments])


def test_a_dead_run_is_forgotten_and_its_neighbour_is_not(etcd_endpoint: str, etcd_config: EtcdConfig) -> None:
    leave_behind(etcd_config, "forget-me", *KEYS)
    leave_behind(etcd_config, "forget-me-not", *KEYS)
    done = forget("forget-me", "--etcd-endpoint", etcd_endpoint)
    assert (done.exit_code, done.stdout) == (0, "4 key(s) of run 'forget-me' deleted\n")
    assert names(etcd_config, "forget-me") == set()
    assert names(etcd_config, "forget-me-not") == set(KEYS)
    assert "nothing of run" in forget("forget-me", "--etcd-endpoint", etcd_endpoint).stdout
    answer = forget("forget-me-not", "--etcd-endpoint", etcd_endpoint, "--json")
    assert json.loads(answer.stdout) == {"run_id": "forget-me-not", "deleted": 4}


def test_a_live_run_is_refused(etcd_endpoint: str, etcd_config: EtcdConfig) -> None:
    leave_behind(etcd_config, "alive", *KEYS, "rdzv/members/host-7")
    done = forget("alive", "--etcd-endpoint", etcd_endpoint)
    assert done.exit_code == 1
    assert "still has live launchers on host-7" in done.stderr
    assert names(etcd_config, "alive") == {*KEYS, "rdzv/members/host-7"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a/b",), "printable, not empty, and without '/'"),
        (("",), "printable, not empty, and without '/'"),
        (("a", "--etcd-endpoint", "host:port"), "neither host[:port]"),
        (("a", "--etcd-endpoint", "e", "--etcd-conf", "cert"), "--etcd-conf takes NAME=VALUE, separated by commas"),
        (("a", "--etcd-endpoint", "e", "--etcd-conf", "cert=/x"), "both cert= and key="),
        (("a",), "or give --etcd-endpoint (the run's --rdzv-endpoint)"),
        ((), "RUN_ID"),
    ],
)
def test_bad_values_are_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENT_RUN_DIR", str(tmp_path))  # where no daemon is
    done = forget(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


def test_runs_of_one_name_on_several_etcds_are_not_confused(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [{"run_id": "a", "etcd": f"127.0.0.1:{port}"} for port in (2, 1, 1)]
    monkeypatch.setattr("resilient_run.daemon.ctl.etcd.ask", lambda *_: {"jobs": jobs})
    done = forget("a")
    assert done.exit_code == 2
    assert "several etcds: give --etcd-endpoint, one of 127.0.0.1:1, 127.0.0.1:2" in done.stderr
    done = forget("b")
    assert done.exit_code == 2
    assert "does not know run 'b': give --etcd-endpoint" in done.stderr


def test_an_etcd_that_does_not_answer_is_an_error() -> None:
    done = forget("a", "--etcd-endpoint", "127.0.0.1:1")
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.stderr
