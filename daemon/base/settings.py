"""Where a host's daemon lives: its run directory (socket, lock, log) and its vault, the tmpfs directory of slots."""

import os
import pwd
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resilient_run.ckpt.format import wire

from ..trust.private import own_directory

SERVICES_DIR = Path("/run/resilientd")
"""Below it is the run directory of each user whose daemon is a service (`resilientd@<user>`)."""

_SOCKET_NAME = "resilientd.sock"
_PROBE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The two directories of one daemon.

    Attributes:
        run_dir: Directory of a socket, the lock and the log.
        shm_dir: The vault: tmpfs directory of the slots, which one daemon at a time owns.
    """

    run_dir: Path
    shm_dir: Path

    @property
    def socket_path(self) -> Path:
        """Unix socket of the daemon in its run directory."""
        return self.run_dir / _SOCKET_NAME

    @property
    def vault_socket_path(self) -> Path:
        """Unix socket of the daemon in its vault: whoever owns the slots is found there, whatever its run directory."""
        return self.shm_dir / _SOCKET_NAME

    @property
    def lock_path(self) -> Path:
        """File that the daemon of this run directory keeps locked; it contains its pid."""
        return self.run_dir / "resilientd.lock"

    @property
    def vault_lock_path(self) -> Path:
        """File that the owner of the vault keeps locked; it contains its pid."""
        return self.shm_dir / "vault.lock"

    @property
    def log_path(self) -> Path:
        """Log of a daemon that a launcher started."""
        return self.run_dir / "resilientd.log"

    @property
    def service_path(self) -> Path:
        """Mark of a run directory whose daemon a service manager starts."""
        return self.run_dir / "service"

    @property
    def is_service(self) -> bool:
        """Tell whether the daemon of this run directory is a service: nobody else may start one there."""
        return self.run_dir.parent == SERVICES_DIR or os.path.exists(self.service_path)

    def address(self) -> Path:
        """Return the socket at which these directories' daemon is found now and after any restart.

        That is the vault's: launchers of one user share a vault even where their run directories differ, and the
        vault is still there when a run directory went with the login that made it. Except where another daemon, with
        a vault of its own, serves the run directory, or is to.
        """
        if self.is_service or server_pid(self.socket_path) not in (None, server_pid(self.vault_socket_path)):
            return self.socket_path
        return self.vault_socket_path


def find_settings(environ: Mapping[str, str], *, run_dir: Path | None = None, shm_dir: Path | None = None) -> Settings:
    """Return the directories of arguments, else `environ`, else the defaults (docs/internals/protocol.md, Environment).

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
        shm_dir=(shm_dir or own_directory(uid)).absolute(),
    )


def server_pid(socket_path: Path) -> int | None:
    """Return the pid of the process that accepts connections at `socket_path`, None when none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        # Another user's may have a full backlog on purpose.
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(socket_path))
        except OSError:
            return None
        return wire.peer(probe)[0]


def _default_run_dir(environ: Mapping[str, str], uid: int) -> Path:
    # A service that is being restarted has not gone: the slots of its jobs are with it.
    run_dir = SERVICES_DIR / _user_name(uid)
    service = Settings(run_dir=run_dir, shm_dir=run_dir)
    if os.path.exists(service.service_path) or server_pid(service.socket_path) is not None:
        return run_dir
    runtime_dir = environ.get("XDG_RUNTIME_DIR")
    if runtime_dir is not None and not _is_of_another_user(runtime_dir, uid):
        return Path(runtime_dir) / "resilient-run"
    return Path(f"/tmp/resilient-run-{uid}")


def _is_of_another_user(directory: str, uid: int) -> bool:
    """Tell whether somebody else, who could put what they like in the place of what we make there, has `directory`.

    `su` and `sudo -E` leave the variable as it was.
    """
    try:
        return os.stat(directory).st_uid not in {0, uid}
    except OSError:
        return False


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        # A container may have users without names.
        return str(uid)
