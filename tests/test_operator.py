"""Who is asked for another host: what a command gets, how it may end, and that it is never waited for in vain."""

import asyncio
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cluster import has_ended, wait_until

from resilient_run.daemon.base.policy import RootPolicy
from resilient_run.daemon.root.operator import HostRequest, Operator

pytestmark = pytest.mark.jobs

REQUEST = HostRequest(run_id="run", host="b", generation=3, reason="host b is lost")


def ask(operator: Operator) -> str:
    return asyncio.run(operator.provide(REQUEST))


def command(tmp_path: Path, text: str, timeout_s: float = 30.0) -> Operator:
    script = tmp_path / "asks.py"
    script.write_text(text)
    words = f"{sys.executable} {script}"
    return by_command(f"{words} 'two words'", f"{words} back", timeout_s)


def by_command(command: str, release_command: str = "", timeout_s: float = 5.0) -> Operator:
    return Operator(RootPolicy(operator_command=command, release_command=release_command, operator_timeout_s=timeout_s))


def by_slurm(script: Path | str) -> Operator:
    return Operator(RootPolicy(slurm_script=str(script), operator_command="never", operator_timeout_s=30.0))


def test_standby_says_what_to_do() -> None:
    assert ask(by_command(" ")) == "waiting for a standby for host b: start a launcher with --rdzv-id run on it"


def test_command_gets_the_request_and_its_exit_code_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = tmp_path / "seen"
    text = (
        "import json, os, sys\n"
        f"with open({str(seen)!r}, 'w') as file:\n"
        "    json.dump([sys.argv[1:], json.load(sys.stdin), os.environ['RESILIENT_OPERATOR_REQUEST']], file)\n"
        "print('no machine left', file=sys.stderr)\n"
        "sys.exit(4)\n"
    )
    with caplog.at_level("INFO"):
        assert ask(command(tmp_path, text)) == "operator command for host b exited with code 4"
    arguments, from_stdin, from_environ = json.loads(seen.read_text())
    assert arguments == ["two words"]
    assert from_stdin == json.loads(from_environ) == asdict(REQUEST)
    assert "no machine left" in caplog.text
    given_back = command(tmp_path, text).release(REQUEST)
    assert asyncio.run(given_back) == "release command for host b exited with code 4"
    assert json.loads(seen.read_text()) == [["back"], asdict(REQUEST), json.dumps(asdict(REQUEST))]


def test_request_for_a_standby_names_no_host() -> None:
    request = HostRequest(run_id="run", host="", generation=3, reason="1 of 1 standby(s) missing")
    said = asyncio.run(Operator(RootPolicy()).provide(request))
    assert said == "waiting for another standby: start a launcher with --rdzv-id run on it"
    missing = by_command("/no/such/program", "/nor/this")
    assert "operator command for a standby cannot be started" in asyncio.run(missing.provide(request))
    said = asyncio.run(missing.release(REQUEST))
    assert said.startswith("release command for host b cannot be started")
    assert said.endswith("see root.release_command")


def test_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    assert "was killed after 5 s; see root.operator_timeout_s" in ask(command(tmp_path, text, timeout_s=5.0))
    wait_until(lambda: has_ended(int(child.read_text())), timeout_s=30, what="the end of the child")


@pytest.mark.parametrize("words", ["/no/such/program", "'unbalanced"])
def test_command_that_cannot_be_started_is_named(words: str) -> None:
    assert "operator command for host b cannot be started" in ask(by_command(words))


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A batch script, and on the path commands of Slurm that write down how they are called."""
    for name in ("sbatch", "scancel"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n{{ echo "$0 $*"; echo "$RUN_ID"; cat; }} >{tmp_path}/called\n')
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("RUN_ID", raising=False)
    script = tmp_path / "launch"
    script.write_text("#!/bin/sh\nexec launch\n")
    script.chmod(0o644)
    return script


def test_slurm_gets_the_script_and_the_run(batch: Path) -> None:
    assert ask(by_slurm(batch)) == "sbatch for host b exited with code 0"
    called = (batch.parent / "called").read_text()
    assert called == f"{batch.parent}/sbatch --job-name=resilient-run\nrun\n#!/bin/sh\nexec launch\n"


def test_slurm_cancels_the_job_of_one_host(batch: Path) -> None:
    assert (
        asyncio.run(by_slurm(batch).release(replace(REQUEST, host="b#1"))) == "scancel for host b#1 exited with code 0"
    )
    words = f"--verbose --user={os.geteuid()} --name=resilient-run --nodelist=b"
    assert (batch.parent / "called").read_text() == f"{batch.parent}/scancel {words}\n\n"


@pytest.mark.parametrize("changes", [{"host": "b,c"}, {"host": "b[1-9]"}, {"run_id": "run,other"}])
def test_name_that_slurm_takes_for_several_cancels_nothing(batch: Path, changes: dict[str, str]) -> None:
    said = asyncio.run(by_slurm(batch).release(replace(REQUEST, **changes)))
    assert "Slurm may read its name or the run id as a list" in said
    assert not (batch.parent / "called").exists()


@pytest.mark.parametrize(
    ("mode", "path", "message"),
    [
        (0o664, "launch", "others may change"),
        (0o646, "launch", "others may change"),
        (0o644, "missing", "No such file"),
        (0o644, ".", "Is a directory"),
    ],
)
def test_script_that_others_may_change_is_not_submitted(batch: Path, mode: int, path: str, message: str) -> None:
    batch.chmod(mode)
    said = ask(by_slurm(batch.parent / path))
    assert said.startswith("no job for host b: ")
    assert message in said
    assert said.endswith("see root.slurm_script")
    assert not (batch.parent / "called").exists()


def test_script_needs_an_absolute_path() -> None:
    assert "launch must be an absolute path" in ask(by_slurm("launch"))
