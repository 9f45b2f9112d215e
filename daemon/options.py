"""Options that the commands of this package share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def directories(command: _Command) -> _Command:
    """Add the options that say where the daemon lives."""
    directory = click.Path(path_type=Path, file_okay=False, readable=False)
    for name, what in (("run", "the socket and the lock"), ("shm", "the slots (tmpfs)")):
        help_text = f"Directory of {what} [env: RESILIENT_{name.upper()}_DIR]."
        command = click.option(f"--{name}-dir", type=directory, help=help_text)(command)
    return command
