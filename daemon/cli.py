"""The command `resilientd`."""

import asyncio
import logging
import os
import sys
from pathlib import Path

import click

from resilient_run.ckpt.errors import DaemonError

from .base.logs import RepeatFilter, log_formatter
from .base.process import raise_limits
from .base.settings import find_settings
from .base.spec import Finite, parse_size
from .daemon import Daemon, DaemonOptions
from .options import directories


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@directories
@click.option("--peer-addr", help="Address to listen on for peers; by default the one that each job advertises.")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    callback=parse_size,
    help="What all slots may take; by default 80 % of the tmpfs, or of half of the memory if that is more.",
)
@click.option(
    "--idle-exit",
    type=Finite(min=0),
    default=0.0,
    help="Seconds without jobs and slots after which it ends; 0: never.",
)
@click.option(
    "--orphan-ttl",
    type=Finite(min=0),
    default=900.0,
    show_default=True,
    help="Seconds that slots are kept after their launcher is gone.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Lowest severity that is logged to stderr.",
)
def resilientd(
    run_dir: Path | None,
    shm_dir: Path | None,
    peer_addr: str | None,
    memory_limit: int | None,
    idle_exit: float,
    orphan_ttl: float,
    log_level: str,
) -> None:
    """Keep checkpoints of this host's training jobs in shared memory, and replicas for its peers."""
    handler = logging.StreamHandler(sys.stderr)
    try:
        handler.setFormatter(log_formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", os.environ))
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
    repeats = RepeatFilter()
    handler.addFilter(repeats)
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    raise_limits()
    options = DaemonOptions(
        settings=find_settings(os.environ, run_dir=run_dir, shm_dir=shm_dir),
        peer_addr=peer_addr,
        memory_limit_bytes=memory_limit,
        idle_exit_s=idle_exit,
        orphan_ttl_s=orphan_ttl,
    )
    os.umask(0o077)
    try:
        asyncio.run(Daemon(options, repeats).run())
    except (DaemonError, OSError) as error:
        raise click.ClickException(str(error)) from error
    except ExceptionGroup as group:
        raise click.ClickException("; ".join(str(error) for error in group.exceptions)) from group
