"""The command `resilientctl`: questions to the daemon of this host."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import click

from resilient_run.ckpt.errors import DaemonError

from ..base.settings import Settings, find_settings, server_pid
from ..daemon import holding
from ..jobs import Jobs
from ..options import directories
from ..slots.memory import MemoryBudget
from ..slots.vault import Vault
from ..trust.private import open_directory
from .advise import advise
from .ask import ask
from .doctor import doctor
from .drain import drain
from .export import export
from .exporter import exporter
from .forget import forget
from .goodput import goodput
from .import_ import import_
from .keygen import keygen
from .placement import plan_placement
from .rollback import rollback
from .status import status


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@directories
@click.pass_context
def resilientctl(context: click.Context, run_dir: Path | None, shm_dir: Path | None) -> None:
    """Look at the daemon of this host, and clean up after dead jobs."""
    context.obj = find_settings(os.environ, run_dir=run_dir, shm_dir=shm_dir)


@resilientctl.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def gc(settings: Settings, as_json: bool) -> None:
    """Remove the slots of jobs that nobody has open, also when no daemon runs."""
    found = server_pid(settings.address()) is not None
    answer = ask(settings, "gc") if found else _collect_without_daemon(settings)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        names = ", ".join(answer["removed"]) or "nothing"
        click.echo(f"removed {names}; {answer['freed_bytes'] / (1 << 20):.1f} MiB freed")


def _collect_without_daemon(settings: Settings) -> dict[str, Any]:
    if not settings.shm_dir.exists():
        return {"removed": [], "freed_bytes": 0}
    try:
        open_directory(settings.shm_dir)
        with holding(settings.vault_lock_path):
            jobs = Jobs(Vault(settings.shm_dir, MemoryBudget(settings.shm_dir, None)), asyncio.create_task)
            jobs.scan()
            return asyncio.run(jobs.collect_garbage())
    except DaemonError as error:
        raise click.ClickException(str(error)) from error


resilientctl.add_command(advise)
resilientctl.add_command(doctor)
resilientctl.add_command(drain)
resilientctl.add_command(export)
resilientctl.add_command(exporter)
resilientctl.add_command(forget)
resilientctl.add_command(goodput)
resilientctl.add_command(import_)
resilientctl.add_command(keygen)
resilientctl.add_command(plan_placement)
resilientctl.add_command(rollback)
resilientctl.add_command(status)
