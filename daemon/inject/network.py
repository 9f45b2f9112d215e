"""Faults of a network interface of this network namespace, made with `ip` and `tc`; CAP_NET_ADMIN is needed."""

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from ..base.codec import Record, limited
from ..base.process import has_capability

_CAP_NET_ADMIN = 12
_COMMAND_S = 10.0
_BURST_BYTES = 32 << 10
_LATENCY_MS = 400


@dataclass(kw_only=True, slots=True)
class CutInterface(Record):
    """The interface is down for a while; routes through it, which the kernel forgets meanwhile, are put back."""

    interface: str = limited(high=15)
    duration_s: float
    force: bool
    _routes: list[dict[str, Any]] = limited(factory=list, outside=True)

    def what(self) -> str:
        """Return what will happen.

        Raises:
            DaemonError: There is no such interface, or nobody forces us to take this one.
        """
        _check(self.interface, force=self.force)
        return f"interface {self.interface} down for {self.duration_s:g} s"

    def strike(self) -> None:
        """Take it down."""
        routes = json.loads(_run("ip", "-json", "route", "show", "dev", self.interface) or "[]")
        self._routes = [route for route in routes if "gateway" in route]
        _run("ip", "link", "set", self.interface, "down")

    def undo(self) -> None:
        """Take it up again."""
        _run("ip", "link", "set", self.interface, "up")
        for route in self._routes:
            _run("ip", "route", "replace", route["dst"], "via", route["gateway"], "dev", self.interface)


@dataclass(kw_only=True, slots=True)
class SlowInterface(Record):
    """What the interface sends is shaped to a rate for a while (token bucket)."""

    interface: str = limited(high=15)
    duration_s: float
    force: bool
    rate_mbit: float = limited(low=0.001)
    _before: dict[str, Any] | None = limited(None, outside=True)

    def what(self) -> str:
        """Return what will happen.

        Raises:
            DaemonError: There is no such interface, nobody forces us to take this one, or it is shaped otherwise.
        """
        _check(self.interface, force=self.force)
        self._before = _bucket(self.interface)
        return f"interface {self.interface} sends {self.rate_mbit:g} Mbit/s for {self.duration_s:g} s"

    def strike(self) -> None:
        """Slow it down."""
        rate = f"{round(self.rate_mbit * 1000)}kbit"
        limits = ("rate", rate, "burst", str(_BURST_BYTES), "latency", f"{_LATENCY_MS}ms")
        _run("tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", *limits)

    def undo(self) -> None:
        """Shape it as before."""
        if self._before is None:
            _run("tc", "qdisc", "del", "dev", self.interface, "root")
            return
        # `tc -json` prints bytes per second, bytes and microseconds.
        rate, burst, latency = (self._before[name] for name in ("rate", "burst", "lat"))
        limits = ("rate", f"{rate * 8}bit", "burst", str(burst), "latency", f"{latency}us")
        _run("tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", *limits)


def _check(interface: str, *, force: bool) -> None:
    """Make sure that a fault may strike the interface: by itself only a veth without the default route."""
    if not has_capability(os.getpid(), _CAP_NET_ADMIN):
        raise DaemonError(f"changing interface {interface} needs CAP_NET_ADMIN")
    found = json.loads(_run("ip", "-json", "-details", "link", "show", "dev", interface))
    kind = found[0].get("linkinfo", {}).get("info_kind", "none")
    routes = json.loads(_run("ip", "-json", "route", "show", "default", "dev", interface) or "[]")
    if force or (kind == "veth" and not routes):
        return
    reason = "has the default route" if routes else f"is of kind {kind!r}, not a veth of a laboratory"
    raise DaemonError(f"interface {interface} {reason}: give force=true to change it all the same")


def _bucket(interface: str) -> dict[str, Any] | None:
    """Return the options of the interface's own token bucket, None when it is not shaped.

    Raises:
        DaemonError: It is shaped in a way that we could not put back.
    """
    roots = [
        item for item in json.loads(_run("tc", "-json", "qdisc", "show", "dev", interface) or "[]") if item.get("root")
    ]
    if not roots or roots[0]["kind"] == "noqueue":
        return None
    if roots[0]["kind"] != "tbf":
        raise DaemonError(f"interface {interface} has the queue {roots[0]['kind']!r}; only tbf can be put back")
    options: dict[str, Any] = roots[0]["options"]
    return options


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DaemonError(f"{' '.join(command)}: {error}; iproute2 is needed") from error
    if done.returncode != 0:
        raise DaemonError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
