"""Writes `commands.md`: every command with its options, as `--help` has them.

python docs/command_reference.py
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from resilient_run.comm.cli.main import resilient_comm
from resilient_run.daemon.cli import resilientd
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.launcher.cli import EXITS
from resilient_run.launcher.config import options
from resilient_run.launcher.inject.cli import resilient_inject

PAGE: Final = Path(__file__).with_name("commands.md")

_HEAD: Final = """# Commands

Every command and option, as `--help` has them, and the environment variable that sets the same. Defaults are in
brackets.

## Completion

`resilient-run --rr-print-completion SHELL` prints a script that completes its options and torchrun's (extra
`completion`). Print it again after an upgrade.

```sh
mkdir -p ~/.local/share/bash-completion/completions ~/.config/fish/completions ~/.zfunc
resilient-run --rr-print-completion bash > ~/.local/share/bash-completion/completions/resilient-run
resilient-run --rr-print-completion fish > ~/.config/fish/completions/resilient-run.fish
resilient-run --rr-print-completion zsh > ~/.zfunc/_resilient-run
```

Bash needs the package `bash-completion`; zsh needs `fpath+=(~/.zfunc)` before `compinit` in `~/.zshrc`. For the other
commands, put a line like this into `~/.bashrc` (or with `zsh_source`, `fish_source`):

```sh
eval "$(_RESILIENTCTL_COMPLETE=bash_source resilientctl)"
```"""
_LAUNCHER: Final = "Start a training script as `torchrun` does, with all of its options and the following ones."
_JSON: Final = "Print one JSON object."
"""What many commands have as an option; the page lists them."""
_METAVARS: Final = {"INTEGER RANGE": "N", "INTEGER": "N", "FLOAT RANGE": "X", "FLOAT": "X"}

_Row = tuple[str, str]


def page() -> str:
    """Return the text of the page."""
    launcher = click.Command("resilient-run", params=options(), help=_LAUNCHER, add_help_option=False)
    lines = [_HEAD]
    for name, command in (
        ("resilient-run", launcher),
        ("resilientctl", resilientctl),
        ("resilient-inject", resilient_inject),
        ("resilient-comm", resilient_comm),
        ("resilientd", resilientd),
    ):
        exits = (
            [_exit_row(*option.split(), meaning=meaning) for option, meaning in EXITS] if command is launcher else []
        )
        lines += ["", *_section(name, command, click.Context(command, info_name=name), depth=2, exits=exits)]
    listed = "; ".join(
        f"{name}: {', '.join(_with_json(group))}"
        for name, group in (
            ("`resilientctl`", resilientctl),
            ("`resilient-inject`", resilient_inject),
            ("`resilient-comm`", resilient_comm),
        )
    )
    return "\n".join([*lines, "", "## JSON", "", f"With `--json`, these print one JSON object. {listed}."]) + "\n"


def _with_json(group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command and any(getattr(param, "help", None) == _JSON for param in command.params):
            yield name


def _section(
    name: str, command: click.Command, context: click.Context, *, depth: int, exits: Sequence[_Row] = ()
) -> Iterator[str]:
    yield f"{'#' * depth} {name}"
    if command.help:
        for paragraph in command.help.split("\n\n"):
            yield ""
            yield _cell(paragraph)
    arguments = " ".join(param.make_metavar(context) for param in command.params if isinstance(param, click.Argument))
    if arguments:
        yield ""
        yield f"`{name} [OPTIONS] {arguments}`"
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    rows = [_row(option, context) for option in options if option.help != _JSON]
    if rows:
        yield ""
        yield from _table([*rows, *exits])
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield ""
            below = click.Context(found, info_name=child, parent=context)
            yield from _section(f"{name} {child}", found, below, depth=depth + 1)


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    yield "| option | meaning |"
    yield "|---|---|"
    for names, meaning in rows:
        yield f"| {names} | {meaning} |"


def _row(option: click.Option, context: click.Context) -> _Row:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if not option.is_flag:
        metavar = option.make_metavar(context)
        names += f" {_cell(_METAVARS.get(metavar, metavar))}"
    if option.envvar:
        names += f"<br>`{option.envvar}`"
    values = option.default if isinstance(option.default, tuple) else (option.default,)
    default = ", ".join(f"`{value}`" for value in values) if option.show_default and option.default is not None else ""
    if option.is_flag and option.secondary_opts:
        default = f"`{option.opts[0] if option.default else option.secondary_opts[0]}`"
    text = _cell(option.help or "")
    return names, f"{text.removesuffix('.')} ({default})." if default else text


def _exit_row(name: str, values: str = "", *, meaning: str) -> _Row:
    names = f"`{name}` {_cell(values.strip('[]'))}".rstrip()
    return names, _cell(meaning)


def _cell(text: str) -> str:
    """Return `text` so that nothing in it is Markdown but what stands between backticks."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([|*_])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
