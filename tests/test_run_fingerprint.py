"""What identifies a run: the same script counts as the same wherever it lies, and no argument leaves the host."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args, parse_args

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.run.records import Agreement, Fingerprint
from resilient_run.launcher.fingerprint import fingerprint

KEY = "sk-abc123"


def of(*words: str) -> Fingerprint:
    """Return the fingerprint of a launcher with this command line, as torch's own code reads it."""
    _, entrypoint, arguments = config_from_args(parse_args(["--nproc-per-node=1", *words]))
    return fingerprint(entrypoint, arguments)


def made(path: Path, text: str = "print(1)") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_script_is_its_name_and_content_wherever_it_lies(tmp_path: Path) -> None:
    there = of(made(tmp_path / "x" / "train.py"))
    assert there == of(made(tmp_path / "y" / "train.py"))
    assert there.script == "train.py"
    assert len(there.content) == 64
    edited = of(made(tmp_path / "x" / "train.py", "print(2)"))
    assert (edited.script, edited.arguments) == (there.script, there.arguments)
    assert edited.content != there.content
    renamed = of(made(tmp_path / "x" / "test.py"))
    assert (renamed.content, renamed.script) == (there.content, "test.py")


def test_arguments_are_compared_and_never_told(tmp_path: Path) -> None:
    script = made(tmp_path / "train.py")
    one, other = of(script, "--key", KEY), of(script, "--key", "another")
    assert one == of(script, "--key", KEY)
    assert one == replace(other, arguments=one.arguments)
    assert one.arguments != other.arguments != of(script).arguments
    assert of(script, "a b").arguments != of(script, "a", "b").arguments
    assert KEY not in str(asdict(one))


def test_without_the_run_key_nobody_can_try_arguments() -> None:
    """Who reads etcd knows the script and guesses a password among its arguments."""
    one, again, other = (fingerprint(train, (KEY,), key) for key in ("k" * 40, "k" * 40, "l" * 40))
    assert one == again == replace(other, arguments=one.arguments)
    assert len({one.arguments, other.arguments, fingerprint(train, (KEY,)).arguments}) == 3


def test_a_program_of_pythons_is_compared() -> None:
    assert of("--no-python", "python", "-c", "1") == of("--no-python", "python", "-c", "1")
    assert of("--no-python", "python", "-c", "1") != of("--no-python", "python", "-c", "2")


def test_the_same_command_from_another_directory_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "train.py")
    made(tmp_path / "pkg" / "train.py")
    found = []
    for directory, script in (
        (tmp_path, "train.py"),
        (tmp_path / "pkg", "../train.py"),
        (tmp_path, f"{tmp_path}/train.py"),
    ):
        monkeypatch.chdir(directory)
        found.append(of(script, "--data", "data"))
    assert found[0] == found[1] == found[2]
    assert of("-m", "pkg.train") == of("--no-python", sys.executable, "-u", "-m", "pkg.train")


@pytest.mark.parametrize(
    ("words", "script", "has_content"),
    [
        (["-m", "pkg.train", "--lr", "1"], "-m pkg.train", False),
        (["--no-python", "python", "-c", f"key = '{KEY}'", "x"], "python", False),
        (["--no-python", "python", "-m", "pkg.train", KEY], "python", False),
        (["--no-python", sys.executable, "-c", f"key = '{KEY}'"], os.path.basename(sys.executable), True),
        (["--no-python", sys.executable, "-u"], os.path.basename(sys.executable), True),
        (["--no-python", "bash", "-c", KEY], "bash", False),
        (["--no-python", "/bin/sh", "-c", KEY], "sh", True),
        (["/nowhere/train.py"], "train.py", False),
        (["/tmp"], "tmp", False),
    ],
)
def test_what_is_no_script_has_a_name(words: list[str], script: str, has_content: bool) -> None:
    found = of(*words)
    assert (found.script, bool(found.content)) == (script, has_content)
    assert KEY not in str(asdict(found))
    assert found == of(*words)


def test_scripts_that_torch_runs_by_path_are_found(tmp_path: Path) -> None:
    script = made(tmp_path / "train.py")
    assert of("--run-path", script, KEY) == of(script, KEY)


def train(*arguments: Any) -> None:
    """What a notebook would start."""


def other(*arguments: Any) -> None:
    """Something else."""


@pytest.mark.parametrize("entrypoint", [train, partial(train, 1), print, train.__call__])
def test_functions_have_a_name(entrypoint: Callable[..., Any]) -> None:
    assert fingerprint(entrypoint, (1,)).script.rpartition(".")[2] in ("train", "partial", "print", "__call__")
    assert fingerprint(train, ()).script != fingerprint(other, ()).script


def test_arguments_of_functions_say_the_same_on_every_host() -> None:
    settings = {"lr": 0.1, "layers": [1, None, True], "data": Path("/data")}
    assert fingerprint(train, (settings, object())) == fingerprint(train, (dict(settings), object()))
    for changed in ({**settings, "lr": 0.2}, {**settings, "layers": [1]}):
        assert fingerprint(train, (changed,)) != fingerprint(train, (settings,))
    assert fingerprint(train, (1,)) != fingerprint(train, ("1", "")) != fingerprint(train, ("\udc80",))


def test_versions_are_part_of_it() -> None:
    found = fingerprint(train, ())
    assert found.user
    assert found.torch
    assert {name.split()[0] for name in found.formats.split(", ")} == {"wire", "slot", "manifest"}


def test_agreements_of_others_are_read_with_care() -> None:
    job = Agreement(incarnation="i", min_nodes=1, max_nodes=2, token="t", fingerprint=fingerprint(train, ()))
    assert Agreement.parse(job.to_value()) == job
    older = job.to_value()
    del older["fingerprint"]
    assert Agreement.parse(older).fingerprint == Fingerprint()
    for wrong in (3, {"user": ["root"]}, {"script": "x" * 5000}):
        with pytest.raises(DaemonError, match="fingerprint"):
            Agreement.parse({**older, "fingerprint": wrong})
