"""`resilient-comm`: plan, measure and inspect gradient communication."""

from importlib import import_module
from typing import Any

import click

# Each is a function in the module of its name. Some need torch, whose import the others do not wait for.
_COMMANDS = ("advise", "plan", "profile", "tree")
_REMOVED = dict.fromkeys(("bench", "stats"), "`resilient-comm advise` measures schemes in your own job")


class _Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in _REMOVED:
            raise click.UsageError(f"resilient-comm {name} is gone: {_REMOVED[name]}")
        if name not in _COMMANDS:
            return None
        module: Any = import_module(f".{name}", __package__)
        command: click.Command = getattr(module, name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="resilient-run")
def resilient_comm() -> None:
    """Plan how gradients are compressed and communicated, and measure it."""
