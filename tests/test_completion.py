"""Completion of `resilient-run` by real shells."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from resilient_run.launcher.cli import ResilientRun

pytestmark = pytest.mark.fast


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the launcher prints for a shell."""
    with pytest.raises(SystemExit) as end:
        ResilientRun().make_context("resilient-run", ["--rr-print-completion", shell])
    assert not end.value.code
    return capsys.readouterr().out


def typed(lines: Sequence[str], directory: Path, until: str) -> str:
    """Return what an interactive bash shows to its answer that holds `until`, when these lines are typed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(directory)
        os.execve(
            "/bin/bash",
            ["bash", "--norc", "--noprofile", "-i"],
            {"PATH": os.environ["PATH"], "TERM": "dumb", "INPUTRC": "/dev/null", "HISTFILE": "/dev/null"},
        )
    shown = b""
    try:
        for line in lines:
            os.write(terminal, line.encode() + b"\n")
        deadline_s = time.monotonic() + 60
        while until.encode() not in shown and time.monotonic() < deadline_s:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)
    return shown.decode(errors="replace")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("--rr-repl\t 2", "<--rr-replicas><2>", id="an option of ours"),
        pytest.param("--standa\t", "<--standalone>", id="an option of torchrun"),
        pytest.param("--rr-print-completion z\t", "<--rr-print-completion><zsh>", id="a choice"),
        pytest.param("--start-method forks\t", "<--start-method><forkserver>", id="a choice of torchrun"),
        pytest.param("--rr-config set\t", "<--rr-config><settings.toml>", id="a file"),
        pytest.param("--rr-shm-dir mem\t", "<--rr-shm-dir><memory/>", id="a directory"),
        pytest.param("--rr-auto tra\t", "<--rr-auto><train.py>", id="the script"),
    ],
)
def test_bash_completes(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("settings.toml", "train.py"):
        (tmp_path / name).touch()
    (tmp_path / "memory").mkdir()
    (tmp_path / "completion").write_text(script("bash", capsys))
    told = "resilient-run() { printf '<%s>' \"$@\"; echo .; }"
    assert words + "." in typed(["source completion", told, f"resilient-run {line}"], tmp_path, words + ".")


@pytest.mark.parametrize(("shell", "check"), [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute"), ("tcsh", "-n")])
def test_the_shell_reads_its_script(shell: str, check: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    options = (name for param in ResilientRun().params for name in (*param.opts, *param.secondary_opts))
    assert [name for name in options if name.removeprefix("--") not in text] == []
    assert "SUPPRESS" not in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "completion").write_text(text)
    done = subprocess.run([program, check, "completion"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_shtab_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(click.UsageError, match=r"needs shtab: pip install 'shtab>=1.8'"):
        ResilientRun().make_context("resilient-run", ["--rr-print-completion", "bash"])
