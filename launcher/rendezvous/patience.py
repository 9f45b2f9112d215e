"""How long a launcher waits: the options in `--rdzv-conf`, and deadlines made from them."""

import logging
import time
from dataclasses import dataclass
from typing import Self

from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilient_run.daemon.etcd.config import ACCESS

log = logging.getLogger(__name__)

_LONG_S = 3.0
_EXPIRY_S = 1.0
"""etcd counts whole seconds, and looks for expired leases twice in each."""
_TIMES = ("join_timeout", "last_call_timeout", "lease_ttl", "timeout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """The options in `--rdzv-conf` that say how long to wait, seconds."""

    join_timeout_s: float
    last_call_s: float
    lease_ttl_s: float

    @property
    def missed_after_s(self) -> float:
        """For how long after its last sign of life a launcher still seems to be there, at most."""
        return self.lease_ttl_s + _EXPIRY_S

    @classmethod
    def from_params(cls, params: RendezvousParameters) -> Self:
        """Return the options; torch's own `timeout` stands in for `join_timeout`.

        Raises:
            ValueError: An option is not a positive number.
        """
        if unknown := sorted(params.config.keys() - {*_TIMES, *ACCESS}):
            ours = ", ".join((*_TIMES[:3], *ACCESS))
            log.warning("--rdzv-conf: etcd-v3 ignores %s; it knows %s", ", ".join(unknown), ours)
        return cls(
            join_timeout_s=_seconds(params, "join_timeout", _seconds(params, "timeout", 900.0)),
            last_call_s=_seconds(params, "last_call_timeout", 30.0),
            lease_ttl_s=_seconds(params, "lease_ttl", 5.0),
        )


class Impatience:
    """Warns once when a wait has become long; an outage that soon passes needs no word."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._told = False

    def tell(self, message: str, *args: object) -> None:
        """Log the warning if the first call was a while ago."""
        now_s = time.monotonic()
        self._began_s = now_s if self._began_s is None else self._began_s
        if now_s - self._began_s >= _LONG_S and not self._told:
            self._told = True
            log.warning(message, *args)


class Deadline:
    """When patience of `patience_s` seconds ends, on the monotonic clock."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.restart()

    def restart(self) -> None:
        """Begin to wait anew."""
        self.at_s = time.monotonic() + self.patience_s

    @property
    def left_s(self) -> float:
        """Seconds left, less than 0 after the end."""
        return self.at_s - time.monotonic()


def _seconds(params: RendezvousParameters, name: str, default: float) -> float:
    text = params.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{name}={text} in --rdzv-conf is not a positive number of seconds")
    return seconds
