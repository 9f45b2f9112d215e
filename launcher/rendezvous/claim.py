"""Which host of its run a launcher is: the first on a machine has the machine's name, further ones `<machine>#1`, …."""

import errno
import hashlib
import logging
import os
import socket

from torch.distributed.elastic.rendezvous import RendezvousStateError

from resilient_run.daemon.run.rounds import Round

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
        for self.host in sorted(names, key=lambda name: name not in seats):
            # An abstract address needs no file, and the kernel frees it however the process ends.
            self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._lock.bind(_address(run_id, self.host))
            except OSError as error:
                self._lock.close()
                if error.errno != errno.EADDRINUSE:
                    # A sandbox without such addresses: etcd still refuses a second launcher of the machine's name.
                    log.warning("cannot tell launchers of this machine apart: %s", error)
                    self.host = machine
                    return
            else:
                if self.host != machine:
                    log.warning("run %r has another launcher on %s; this one is host %s", run_id, machine, self.host)
                return
        raise RendezvousStateError(f"run {run_id!r} has {_MOST} launchers on {machine} already")

    def release(self) -> None:
        """Let another launcher have the name."""
        self._lock.close()


def machine_name(run_id: str) -> str:
    """Return the name of this machine.

    Raises:
        ValueError: It, or `run_id`, cannot be in an etcd key.
    """
    machine = os.environ.get("RESILIENT_HOST_ID") or socket.gethostname()
    for name, value, wrong in (("--rdzv-id", run_id, "/"), ("RESILIENT_HOST_ID", machine, "/#")):
        if not value or any(character in value for character in wrong):
            told = " or ".join(map(repr, wrong))
            raise ValueError(f"{name} is {value!r}; it names a key in etcd: it must not be empty or contain {told}")
    return machine


def _address(run_id: str, host: str) -> str:
    digest = hashlib.blake2b(f"{run_id}\0{host}".encode(), digest_size=16).hexdigest()
    return f"\0resilient-run/{os.getuid()}/{digest}"
