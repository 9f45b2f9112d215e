"""One question of a `resilientctl` command to the daemon of this host."""

from typing import Any

import click

from resilient_run.ckpt.errors import DaemonError, WireError

from ..base.ask import ask_daemon
from ..base.settings import Settings

_ANSWER_TIMEOUT_S = 60.0


def ask(settings: Settings, op: str, **fields: Any) -> dict[str, Any]:
    """Return the answer of this host's daemon to `op`.

    Raises:
        click.ClickException: None answers, or it refuses.
    """
    address = settings.address()
    try:
        return ask_daemon(address, op, within_s=_ANSWER_TIMEOUT_S, **fields)
    except (OSError, WireError) as error:
        why = getattr(error, "strerror", None) or error
        raise click.ClickException(
            f"no daemon answers at {address} ({why}): start a run on this host, or "
            "say which daemon is asked: --run-dir and --shm-dir, or RESILIENT_RUN_DIR and RESILIENT_SHM_DIR"
        ) from error
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
