"""Where a host's daemon lives: its run directory (socket, lock, log) and its tmpfs directory (slots)."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM_RUN_DIR = Path("/run/resilientd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The two directories of one daemon.

    Attributes:
        run_dir: Directory of the socket, the lock and the log.
        shm_dir: tmpfs directory of the slots.
    """

    run_dir: Path
    shm_dir: Path

    @property
    def socket_path(self) -> Path:
        """Unix socket that the daemon listens on."""
        return self.run_dir / "resilientd.sock"

    @property
    def lock_path(self) -> Path:
        """File that the daemon keeps locked; it contains its pid."""
        return self.run_dir / "resilientd.lock"

    @property
    def log_path(self) -> Path:
        """Log of a daemon that a launcher started."""
        return self.run_dir / "resilientd.log"


def find_settings(environ: Mapping[str, str], *, run_dir: Path | None = None, shm_dir: Path | None = None) -> Settings:
    """Return the directories that arguments, then `environ`, then the defaults name (docs/protocol.md, Environment).

    Args:
        environ: Usually `os.environ`.
        run_dir: Wins over `RESILIENT_RUN_DIR`.
        shm_dir: Wins over `RESILIENT_SHM_DIR`.
    """
    uid = os.getuid()
    if run_dir is None and "RESILIENT_RUN_DIR" in environ:
        run_dir = Path(environ["RESILIENT_RUN_DIR"])
    if shm_dir is None and "RESILIENT_SHM_DIR" in environ:
        shm_dir = Path(environ["RESILIENT_SHM_DIR"])
    return Settings(
        run_dir=(run_dir or _default_run_dir(environ, uid)).absolute(),
        shm_dir=(shm_dir or Path(f"/dev/shm/resilient-run-{uid}")).absolute(),
    )


def listens(socket_path: Path) -> bool:
    """Tell whether a process accepts connections at `socket_path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(socket_path))
        except OSError:
            return False
        return True


def _default_run_dir(environ: Mapping[str, str], uid: int) -> Path:
    if listens(SYSTEM_RUN_DIR / "resilientd.sock"):
        return SYSTEM_RUN_DIR
    if "XDG_RUNTIME_DIR" in environ:
        return Path(environ["XDG_RUNTIME_DIR"]) / "resilient-run"
    return Path(f"/tmp/resilient-run-{uid}")
