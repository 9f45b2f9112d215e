"""The zygote that begins with the launcher is used if the guess at the command was right, and replaced if not."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resilient_run.daemon.trust import secret
from resilient_run.launcher.workers import early
from resilient_run.launcher.workers.handler import warm_workers
from resilient_run.launcher.workers.warm import WarmProcess, WorkerStarter

pytestmark = pytest.mark.jobs


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nopen('threads', 'w').write(str(torch.get_num_threads()))")
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "RESILIENT_PRELOAD", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before, "a zygote is left"


def _run(starter: WorkerStarter, *arguments: str, threads: str) -> None:
    command = (sys.executable, "-u", "train.py", *arguments)
    env = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": threads}
    starter.expect(command, env)
    with open(os.devnull, "w") as null:
        process = starter.start(command, {**env, "RANK": "0"}, null, null)
    assert isinstance(process, WarmProcess)
    assert process.wait(60) == 0
    assert Path("threads").read_text() == threads


def test_right_guess(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient_run.launcher.workers.warm")
    with early.begun(["--nproc_per_node=2", "train.py", "--epochs", "3"]), warm_workers() as starter:
        _run(starter, "--epochs", "3", threads="1")
    assert caplog.text.count("the zygote is ready") == 1
    assert "made for other workers" not in caplog.text


@pytest.mark.parametrize(("arguments", "threads"), [(["--epochs", "4"], "1"), (["--epochs", "3"], "2")])
def test_wrong_guess(arguments: list[str], threads: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resilient_run.launcher.workers.warm")
    with early.begun(["--nproc-per-node", "2", "train.py", "--epochs", "3"]), warm_workers() as starter:
        _run(starter, *arguments, threads=threads)
    assert caplog.text.count("made for other workers") == 1


def test_guess_at_a_command_that_is_refused_refuses_no_other() -> None:
    Path("other.py").write_text("import os\nos.environ['MKL_NUM_THREADS'] = '2'")
    with early.begun(["--rr-events", "other.py", "train.py"]), warm_workers() as starter:
        _run(starter, threads="1")


def test_zygote_that_nobody_takes_ends() -> None:
    with pytest.raises(SystemExit), early.begun(["train.py"]):
        sys.exit(2)
    with early.begun(["train.py"]), warm_workers(enabled=False) as starter, open(os.devnull, "w") as null:
        process = starter.start((sys.executable, "-u", "-c", ""), dict(os.environ), null, null)
        assert not isinstance(process, WarmProcess)
        assert process.wait(60) == 0
    with early.begun(["train.py"]), warm_workers(preload=["yaml"]) as starter:
        assert starter.preload == ["yaml"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no_such.py"],
        ["--rr-off", "train.py"],
        ["--rr-no-warm-workers", "train.py"],
        ["--no_python", "train.py"],
        ["-m", "package", "train.py"],
        ["train.py", "--rank=${local_rank}"],
    ],
)
def test_nothing_to_guess(arguments: list[str]) -> None:
    assert early.guessed(arguments, {}) is None


def test_guess_has_what_torch_adds_and_no_secrets() -> None:
    environ = {secret.VARIABLE: "k", secret.PASSWORD_VARIABLE: "p", "HOME": "/h", "RESILIENT_PRELOAD": "a,b"}
    command, env, preload = early.guessed(["--nproc-per-node=4", "train.py", "x.py"], environ) or pytest.fail(
        "no guess"
    )
    assert command == (sys.executable, "-u", "train.py", "x.py")
    assert env == {
        "HOME": "/h",
        "RESILIENT_PRELOAD": "a,b",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert preload == ("a", "b")
    assert (early.guessed(["--rr-preload", "none", "train.py"], environ) or pytest.fail("no guess"))[2] == ()
    assert (early.guessed(["--rr-preload=learn", "train.py"], environ) or pytest.fail("no guess"))[2] is None
