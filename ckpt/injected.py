"""Faults that the daemon orders for this rank on purpose (`resilient-inject`); they strike in `Checkpointer.step()`."""

import threading
from typing import Any

from .errors import InjectedFault
from .wire import Message


class Injected:
    """The fault that waits for the next step, if any."""

    def __init__(self) -> None:
        """Begin with none."""
        self._order: Message | None = None

    def order(self, message: Message) -> None:
        """Let the next `strike` carry out the daemon's notification `message`."""
        self._order = message

    def strike(self) -> None:
        """Carry out what is ordered, once.

        Raises:
            InjectedFault: That is what is ordered.
        """
        order, self._order = self._order, None
        if order is None:
            return
        if order.get("kind") == "raise":
            raise InjectedFault("resilient-inject ordered this step to fail")
        duration: Any = order.get("duration_s")
        threading.Event().wait(duration or None)
