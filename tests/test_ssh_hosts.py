"""`examples/ssh/run.sh`, with a stand-in for ssh: each host is a home directory."""

import os
import subprocess
from pathlib import Path

import psutil
from cluster import EXAMPLE, wait_until

SCRIPT = EXAMPLE.parent / "ssh" / "run.sh"

# As sshd does, it gives all that follows the host's name to a shell there, as one text.
_SSH = """#!/bin/sh
cd "$HOMES/$1" && shift && exec sh -c "$*"
"""

_COMMAND = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(1000)"


def test_command_runs_on_every_host_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(_SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "my.key").write_text("secret\n")
    homes = [tmp_path / "alpha", tmp_path / "beta"]
    for home in homes:
        home.mkdir()
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOMES": str(tmp_path)}
    env |= {"HOSTS": "alpha beta", "KEY": str(tmp_path / "my.key")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True, check=True, timeout=60)

    words = ["two words", "it's", "$HOME", 'a"b', ""]
    run("start", "python3", "-c", _COMMAND, *words)
    started = []
    for home in homes:
        log = home / "run.log"
        wait_until(lambda log=log: log.exists() and "\n" in log.read_text(), timeout_s=60, what="the command's output")
        started.append(psutil.Process(int((home / "run.pid").read_text())))
        assert log.read_text() == f"{words}\n"
        assert ((home / "run.key").read_text(), (home / "run.key").stat().st_mode & 0o777) == ("secret\n", 0o600)
        assert os.getsid(started[-1].pid) != os.getsid(0), "it would end with the login"
    assert not run("stop").stderr
    for process in started:
        wait_until(lambda process=process: _is_gone(process), timeout_s=60, what="the command's end")
    assert run("stop").stderr.count("nothing to stop") == 2


def _is_gone(process: psutil.Process) -> bool:
    """Tell whether a process has ended; it may not be ours to wait for."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
