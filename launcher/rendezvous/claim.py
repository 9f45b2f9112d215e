"""Which host of its run a launcher is: the first on a machine has the machine's name, further ones `<machine>#1`, …."""

import fcntl
import hashlib
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousStateError

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.run.rounds import Round
from resilient_run.daemon.trust.private import open_directory, own_directory

log = logging.getLogger(__name__)

_MOST = 256


class HostClaim:
    """A name in a run that no other launcher of this user on this machine has; free again when this process ends.

    Of the free names those come first that the current round has: so a launcher that is started again takes the place
    that the dead one left, and finds its slots.

    Args:
        run_id: The run.
        machine: Name of the machine.
        current: The run's round, None before the first.

    Raises:
        RendezvousStateError: All names are taken.

    Attributes:
        host: The name.
    """

    def __init__(self, run_id: str, machine: str, current: Round | None) -> None:
        seats = () if current is None else current.hosts
        names = [machine, *(f"{machine}#{number}" for number in range(1, _MOST))]
        self._lock: tuple[Path, int] | None = None
        for self.host in sorted(names, key=lambda name: name not in seats):
            try:
                self._lock = _locked(_path(run_id, self.host))
            except BlockingIOError:
                continue
            except (OSError, DaemonError) as error:
                # etcd still refuses a second launcher of the machine's name.
                log.warning("cannot tell launchers of this machine apart: %s", error)
                self.host = machine
                return
            if self.host != machine:
                log.warning("run %r has another launcher on %s; this one is host %s", run_id, machine, self.host)
            return
        raise RendezvousStateError(f"run {run_id!r} has {_MOST} launchers on {machine} already: end some")

    def release(self) -> None:
        """Let another launcher have the name."""
        if self._lock is not None:
            path, descriptor = self._lock
            self._lock = None
            # While it is still locked: whoever has opened it meanwhile sees that it is gone.
            path.unlink(missing_ok=True)
            os.close(descriptor)


def machine_name(run_id: str) -> str:
    """Return the name of this machine.

    Raises:
        ValueError: It, or `run_id`, cannot be in an etcd key.
    """
    machine = os.environ.get("RESILIENT_HOST_ID") or socket.gethostname()
    for name, value, wrong in (("--rdzv-id", run_id, "/"), ("RESILIENT_HOST_ID", machine, "/#")):
        if not value.isprintable() or not value or any(character in value for character in wrong):
            told = " or ".join(map(repr, wrong))
            raise ValueError(
                f"{name} is {value!r}; it is part of an etcd key, so it must be printable, not empty, and "
                f"without {told}"
            )
    return machine


def _path(run_id: str, host: str) -> Path:
    """Return the file that the launcher of `host` holds locked, where no other user can be in the way."""
    directory = own_directory(os.geteuid())
    open_directory(directory)
    digest = hashlib.blake2b("\0".join((run_id, host)).encode(), digest_size=16)
    return directory / f"{digest.hexdigest()}.claim"


def _locked(path: Path) -> tuple[Path, int]:
    """Return the file at `path`, made if there is none, and its descriptor, which holds the lock.

    Raises:
        BlockingIOError: Another launcher has it.
        OSError: It cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return path, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Who had it let go of it, and removed it, in between.
        os.close(descriptor)
