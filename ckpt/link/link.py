"""The trainer's connection to the daemon of its host: its attachment, and who hears what the daemon says."""

import logging
import os
import time
from collections.abc import Callable
from typing import Final

from ..errors import CheckpointError, DaemonError, WireError
from ..format.version import FORMATS
from ..format.wire import Message
from .client import DaemonClient
from .env import TrainerEnv

CONNECT_S: Final = 600.0
"""How long the first connection may take; the launcher, which had one, knows that there is a daemon."""

_WARN_S: Final = 10.0
_LOOK_S: Final = 0.2
_log = logging.getLogger(__name__)


class Link(DaemonClient):
    """A `DaemonClient` that attaches one rank. After each attachment the trainer reports afresh."""

    def __init__(
        self,
        env: TrainerEnv,
        *,
        topology: int,
        estimate_bytes: int,
        on_attached: Callable[[Message], None],
        on_agreed: Callable[[Message], None],
        on_fault: Callable[[Message], None],
        on_other: Callable[[Message], None],
    ) -> None:
        """Prepare a link; `open` connects it.

        Args:
            env: Who attaches to which daemon.
            topology: Fingerprint that the attachment announces.
            estimate_bytes: Bytes of one capture that the attachment announces.
            on_attached: Called in the link's thread with the answer to each attachment.
            on_agreed: Called in the link's thread with what is agreed, in `watermark` and `next`, after the answer.
            on_fault: Called in the link's thread with each fault that is ordered for this rank.
            on_other: Called in the link's thread with any other notification.
        """
        self._env = env
        self._on_attached = on_attached
        self._on_agreed = on_agreed
        self._on_fault = on_fault
        self._on_other = on_other
        self._began_s = time.monotonic()
        self._trouble: Exception | None = None
        self._said: set[str] = set()
        attach = {
            "op": "attach",
            **FORMATS,
            "run_id": env.run_id,
            "host": env.host,
            "rank": env.rank,
            "local_rank": env.local_rank,
            "world_size": env.world_size,
            "generation": env.generation,
            "topology": topology,
            "pid": os.getpid(),
            "estimate_bytes": estimate_bytes,
        }
        super().__init__(
            env.socket,
            attach,
            on_welcome=self._attached,
            on_message=self._hear,
            on_trouble=self._note,
            name="resilient-link",
        )

    def open(self, timeout_s: float) -> Message:
        """Connect, attach, and return the answer to the attachment.

        Raises:
            OSError: There is no daemon at the socket, even after `CONNECT_S`.
            CheckpointError: The daemon refused, as the class that it named, or did not answer within `timeout_s`.
        """
        self._began_s = time.monotonic()
        self.start()
        try:
            while (left_s := timeout_s - (self.connected_s or 0.0)) > 0:
                try:
                    return self.wait_welcome(min(left_s, _LOOK_S))
                except TimeoutError:
                    late = self.connected_s is None and time.monotonic() > self._began_s + CONNECT_S
                    if late and self._trouble is not None:
                        raise self._trouble from None
            raise DaemonError(f"the daemon did not answer an attachment within {timeout_s} s: see its log")
        except (OSError, CheckpointError):
            self.close()
            raise

    def _attached(self, answer: Message) -> None:
        self._said.clear()
        self._on_attached(answer)

    def _hear(self, message: Message) -> None:
        match message["op"]:
            case "watermark":
                self._on_agreed(message)
            case "inject":
                self._on_fault(message)
            case _:
                self._on_other(message)

    def _note(self, trouble: Exception) -> None:
        """Log once, until the next attachment, that the daemon is not there, and once why it refuses."""
        self._trouble = trouble
        if not self.was_welcome:
            if time.monotonic() > self._began_s + _WARN_S:
                self._say("waits", "rank %d waits for the daemon at %s: %s", self._env.rank, self._env.socket, trouble)
        elif isinstance(trouble, (OSError, WireError)):
            self._say("broke", "the connection to the daemon broke (%s); training goes on", trouble)
        else:
            what = "the daemon refused to attach again: %s; training goes on, trying again"
            self._say(str(trouble), what, trouble)

    def _say(self, about: str, what: str, *arguments: object) -> None:
        if about not in self._said:
            self._said.add(about)
            _log.warning(what, *arguments)
