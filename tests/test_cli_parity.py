"""Every option of torchrun means the same to `resilient-run`: the cases come from torch's parser itself."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.run import config_from_args, get_args_parser, parse_args

from resilient_run.launcher.cli import ResilientRun, main
from resilient_run.launcher.rendezvous.patience import Patience

SCRIPT = ["train.py", "--lr", "1"]
OPTIONS = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]


def ours(args: Sequence[str]) -> dict[str, Any] | str:
    """Return what `resilient-run` reads from `args`, or "error 2"; another number where an option ends the command."""
    try:
        return dict(vars(ResilientRun().make_context("resilient-run", list(args)).obj))
    except click.UsageError as error:
        return f"error {error.exit_code}"
    except SystemExit as end:
        return f"error {end.code}"


def theirs(args: Sequence[str]) -> dict[str, Any] | str:
    """Return what torchrun reads from `args`, or "error 2"; another number where an option ends the command."""
    try:
        return dict(vars(parse_args(list(args))))
    except SystemExit as end:
        return f"error {end.code}"


def values(action: argparse.Action) -> list[str]:
    """Return values for an option, usable ones first."""
    if action.choices:
        return [*action.choices, "no-choice"]
    if action.type is int:
        return ["3", "-1", "x"]
    if action.type is float:
        return ["0.5", "7", "x"]
    return ["value", "a,b,,c", "", "--rr-off"]


def uses(action: argparse.Action, option: str) -> Iterator[list[str]]:
    """Return every way to write an option."""
    if action.nargs == 0:
        yield [option]
        yield [f"{option}=1"]
        return
    yield [option]
    for value in values(action):
        yield [option, value]
        yield [f"{option}={value}"]
        if not option.startswith("--"):
            yield [f"{option}{value}"]


def test_the_parsers_agree() -> None:
    command = ResilientRun()
    parser = command.torch_parser(click.Context(command), [])

    def facts(action: argparse.Action) -> tuple[Any, ...]:
        kind = getattr(action.type, "__qualname__", action.type)
        return (type(action), action.option_strings, action.dest, action.nargs, action.default, kind, action.choices)

    added = [action for action in parser._actions if any(name.startswith("--rr-") for name in action.option_strings)]
    rest = [facts(action) for action in parser._actions if action not in added]
    assert rest == [facts(action) for action in get_args_parser()._actions]
    # The two spellings of --rr-warm-workers, --rr-print-completion and --rr-version.
    assert len(added) == len(command.params) + 3


@pytest.mark.parametrize("action", OPTIONS, ids=lambda action: action.dest)
def test_option(action: argparse.Action, capfd: pytest.CaptureFixture[str]) -> None:
    parsed = 0
    for option in action.option_strings:
        for use in uses(action, option):
            expected = theirs([*use, *SCRIPT])
            assert ours([*use, *SCRIPT]) == expected, use
            assert ours(["--rr-replicas", "3", *use, "--rr-no-warm-workers", *SCRIPT]) == expected, use
            parsed += expected != "error 2"
    assert parsed


@pytest.mark.parametrize("action", OPTIONS, ids=lambda action: action.dest)
def test_abbreviations(action: argparse.Action, capfd: pytest.CaptureFixture[str]) -> None:
    for option in action.option_strings:
        for length in range(3, len(option)):
            use = [option[:length]] if action.nargs == 0 else [f"{option[:length]}={values(action)[0]}"]
            assert ours([*use, *SCRIPT]) == theirs([*use, *SCRIPT]), use


@pytest.mark.parametrize(
    "action", [a for a in OPTIONS if isinstance(a, (env, check_env))], ids=lambda action: action.dest
)
def test_environment(
    action: argparse.Action, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for value in ["0", "1"] if isinstance(action, check_env) else values(action):
        monkeypatch.setenv(f"PET_{action.dest.upper()}", value)
        assert ours(SCRIPT) == theirs(SCRIPT), value
        for use in uses(action, action.option_strings[0]):
            assert ours([*use, *SCRIPT]) == theirs([*use, *SCRIPT]), (value, use)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--"],
        ["train.py"],
        ["--", "train.py", "--x"],
        ["train.py", "--", "--x"],
        ["--nnodes=2", "--", "train.py", "--", "--nnodes=3"],
        ["train.py", "--rr-off", "--rr-replicas", "x", "--rr-version"],
        ["train.py", "--help"],
        ["train.py", "-h", "--nnodes=9", "-m"],
        ["train.py", "positional", "--nproc-per-node", "8"],
        ["-m", "package.train", "--module"],
        ["--no-python", "./train.sh", "--no-python"],
        ["--run-path", "/train.py", "-m"],
        ["-m", "--standalone", "--nproc-per-node=gpu", "package.train", "--epochs=3", "--", "x"],
        ["-r", "0:1,1:2", "-t3", "train.py"],
        ["-mr3", "package.train"],
        ["--unknown", "train.py"],
        ["--nnodes"],
        ["--r=1", "train.py"],
        ["--no", "train.py"],
        ["--nnodes=1", "--nnodes=2", "train.py"],
        ["-1", "train.py"],
        ["train.py", "-1", "@file", ""],
        ["", "x"],
    ],
    ids=" ".join,
)
def test_command_lines(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert ours(args) == theirs(args)


def test_our_options_leave_no_trace_in_torchs_namespace(capfd: pytest.CaptureFixture[str]) -> None:
    line = ["--rr-off", "--rr-memory=1G", "--nnodes=2", "--rr-replicas", "1", *SCRIPT]
    assert ours(line) == theirs(["--nnodes=2", *SCRIPT])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_documents_every_option(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) is None
    text = capfd.readouterr().out
    torch_part, our_part = text.split("Options of resilient-run")
    for action in get_args_parser()._actions:
        for option in action.option_strings:
            assert option in torch_part
        if isinstance(action, (env, check_env)):
            assert f"PET_{action.dest.upper()}" in " ".join(torch_part.split())
    for param in ResilientRun().params:
        for option in (*param.opts, *param.secondary_opts):
            assert option in our_part


def test_error_message_and_exit_code(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["resilient-run", "--max-restarts=many", "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    output = capfd.readouterr()
    assert "Usage: resilient-run" in output.err
    assert "argument --max-restarts/--max_restarts: invalid int value: 'many'" in output.err
    assert not output.out


def test_hosts_wait_for_each_other_as_long_as_documented() -> None:
    """The default of the `timeout` that torch gives every rendezvous is ours (docs/operations/etcd.md)."""
    config, *_ = config_from_args(parse_args(["--rdzv-backend=etcd-v3", "--rdzv-endpoint=etcd", *SCRIPT]))  # type: ignore[no-untyped-call]
    params = RendezvousParameters("etcd-v3", "etcd", "r", 1, 1, **config.rdzv_configs)
    assert Patience.from_params(params).join_timeout_s == 900
