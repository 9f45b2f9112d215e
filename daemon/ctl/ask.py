"""One question of a `resilientctl` command to the daemon of this host."""

from typing import Any

import click

from resilient_run.ckpt.errors import CheckpointError
from resilient_run.ckpt.format import wire

from ..base.settings import Settings

_ANSWER_TIMEOUT_S = 60.0


def ask(settings: Settings, op: str, **fields: Any) -> dict[str, Any]:
    """Return the answer of this host's daemon to `op`.

    Raises:
        click.ClickException: None answers, or it refuses.
    """
    address = settings.address()
    try:
        with wire.dial(address, _ANSWER_TIMEOUT_S) as sock:
            sock.settimeout(_ANSWER_TIMEOUT_S)
            sock.sendall(wire.encode({"id": 1, "op": op, **fields}))
            answer = wire.recv_message(sock)
    except (OSError, CheckpointError) as error:
        raise click.ClickException(
            f"no daemon answers at {address}: {error}; is another RESILIENT_RUN_DIR meant?"
        ) from error
    if answer is None:
        raise click.ClickException(f"the daemon at {address} closed the connection; see its log")
    if not answer.get("ok"):
        raise click.ClickException(str(answer.get("message")))
    return {name: value for name, value in answer.items() if name not in {"id", "ok"}}
