"""Who is asked for another host: what a command gets, how it may end, and that it is never waited for in vain."""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from cluster import wait_until

from resilient_run.daemon.base.policy import RootPolicy
from resilient_run.daemon.root.operator import Command, HostRequest, NoOperator, Operator, make_operator

pytestmark = pytest.mark.jobs

REQUEST = HostRequest(run_id="run", host="b", generation=3, reason="host b is lost")


def ask(operator: Operator) -> str:
    return asyncio.run(operator.provide(REQUEST))


def command(tmp_path: Path, text: str, timeout_s: float = 30.0) -> Command:
    script = tmp_path / "asks.py"
    script.write_text(text)
    return Command(f"{sys.executable} {script} 'two words'", f"{sys.executable} {script} back", timeout_s)


def test_standby_says_what_to_do() -> None:
    operator = make_operator(RootPolicy(operator_command=" "))
    assert isinstance(operator, NoOperator)
    assert ask(operator) == "waiting for a standby for host b: start a launcher with --rdzv-id run on it"


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
    said = asyncio.run(NoOperator().provide(request))
    assert said == "waiting for another standby: start a launcher with --rdzv-id run on it"
    missing = Command("/no/such/program", "/nor/this", 5.0)
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
    pid = int(child.read_text())

    def is_over() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(is_over, timeout_s=10, what="the end of the child")


@pytest.mark.parametrize("words", ["/no/such/program", "'unbalanced"])
def test_command_that_cannot_be_started_is_named(words: str) -> None:
    assert "operator command for host b cannot be started" in ask(Command(words, "", 5.0))
