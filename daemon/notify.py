"""What the daemon tells systemd, if that started it: ready, alive, stopping (sd_notify(3), sd_watchdog_enabled(3))."""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class ServiceManager:
    """The service manager that started this process; every call does nothing when none did.

    Args:
        environ: Usually `os.environ`, with `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` as systemd sets them.

    Attributes:
        watchdog_s: Seconds without a sign of life after which the manager restarts us, None when it does not watch.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        # Open for good: where no file can be opened the manager shall not take the daemon for dead.
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        self._notifier = socket.socket(socket.AF_UNIX, kind) if self._address else None
        microseconds = environ.get("WATCHDOG_USEC", "")
        for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) and for_us else None

    @property
    def is_there(self) -> bool:
        """Tell whether a service manager started this process."""
        return bool(self._address)

    def ready(self) -> None:
        """Notify systemd that the daemon serves."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Notify systemd that the daemon ends on purpose."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Send nothing from now on."""
        if self._notifier is not None:
            self._notifier.close()
            self._notifier = None

    async def watch(self) -> None:
        """Send a sign of life twice in every watchdog interval, from the event loop: a stuck loop sends none."""
        while self._notifier is not None and self.watchdog_s is not None:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, state: str) -> None:
        if self._notifier is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            self._notifier.sendto(state.encode(), address)
        except OSError as error:
            # A service manager that does not listen must not bring down the daemon.
            log.warning("cannot send %s to the service manager at %s: %s", state, self._address, error)
