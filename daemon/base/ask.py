"""One question to the daemon of this host."""

from pathlib import Path
from typing import Any

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format import wire


def ask_daemon(address: Path, op: str, *, within_s: float, **fields: Any) -> wire.Message:
    """Return the answer to `op` of the daemon at `address`.

    Args:
        address: Its unix socket.
        op: The question.
        within_s: How long the daemon may be silent.
        fields: More of the question.

    Raises:
        OSError: None answers in time, or it is another user's.
        WireError: What answers is no daemon.
        DaemonError: It refuses.
    """
    with wire.dial(address, within_s) as sock:
        sock.settimeout(within_s)
        sock.sendall(wire.encode({"id": 1, "op": op, **fields}))
        answer = wire.recv_message(sock)
    if answer is None:
        raise DaemonError(f"the daemon at {address} closed the connection; see its log")
    if not answer.get("ok"):
        raise DaemonError(str(answer.get("message")))
    return {name: value for name, value in answer.items() if name not in {"id", "ok"}}
