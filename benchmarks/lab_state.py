"""What a laboratory network remembers of itself, and the commands that it gives the kernel."""

import fcntl
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

LABS = Path("/run/resilient-netlab")
"""One directory for each lab: its state file, and below it one directory for each host."""

_NAME = re.compile(r"[a-z][a-z0-9]{0,19}")
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
QUEUE_S = 0.02
"""As of a switch."""

_RATE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class NetLabError(Exception):
    """The lab cannot be built or changed; the message says why and what to do."""


def unavailable() -> str | None:
    """Return why this process cannot build a lab, None if it can."""
    if os.geteuid() != 0:
        return f"netlab makes network namespaces and must run as root, not as uid {os.geteuid()}"
    missing = [name for name in ("ip", "tc", "mount") if shutil.which(name) is None]
    if missing:
        return f"netlab needs {' and '.join(missing)}: install iproute2 and util-linux"
    effective = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    lacking = [name for name, bit in _CAPABILITIES.items() if effective and not int(effective[1], 16) >> bit & 1]
    return f"netlab needs {' and '.join(lacking)}, which root lacks in this container" if lacking else None


def parse_rate(text: str) -> int:
    """Return the bits per second that `text` such as "200mbit" means.

    Raises:
        NetLabError: It means no rate.
    """
    match = _RATE.fullmatch(text.strip().lower())
    rate_bit_s = round(float(match[1]) * _RATE_UNITS[match[2]]) if match else 0
    if rate_bit_s < 1000:
        raise NetLabError(f"{text!r} is not a rate of at least 1kbit; write for example 200mbit")
    return rate_bit_s


def check_name(name: str) -> str:
    """Return `name` if a lab or a host may have it.

    Raises:
        NetLabError: It may not.
    """
    if _NAME.fullmatch(name) is None:
        raise NetLabError(f"{name!r} is not a name for a lab or host: use up to 20 of a-z and 0-9, a letter first")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class LabState:
    """What is remembered of a lab, written before anything of it is made.

    Attributes:
        name: The lab.
        hosts: Their names, in the order of their addresses.
        rate_bit_s: Rate of every link in either direction, unless it was slowed.
        queue_s: How long what a link lets pass later may wait for that.
        shm_bytes: Size of each host's tmpfs.
        owner: (pid, `started_ticks`) of the process that the lab ends with, None when it is to stay.
    """

    name: str
    hosts: tuple[str, ...]
    rate_bit_s: int
    queue_s: float = QUEUE_S
    shm_bytes: int
    owner: tuple[int, int] | None

    @property
    def directory(self) -> Path:
        """Directory of the state file and of the hosts' directories."""
        return LABS / self.name

    @property
    def switch(self) -> str:
        """Namespace of the bridge."""
        return f"netlab-{self.name}"

    def namespace(self, host: str) -> str:
        """Return the namespace of a host; names hold no dash, so no two are equal."""
        return f"{self.switch}-{host}"

    def save(self) -> None:
        """Write the state file, whole or not at all."""
        self.directory.mkdir(mode=0o755, exist_ok=True)
        written = self.directory / "state.new"
        written.write_text(json.dumps(asdict(self)))
        written.rename(self.directory / "state.json")

    @classmethod
    def load(cls, name: str) -> Self:
        """Read the state file of a lab.

        Raises:
            NetLabError: There is no such lab.
        """
        try:
            fields = json.loads((LABS / check_name(name) / "state.json").read_text())
        except FileNotFoundError:
            known = ", ".join(lab_names()) or "none"
            raise NetLabError(f"there is no lab {name!r} (labs: {known}); `netlab up N` makes one") from None
        fields["hosts"], fields["owner"] = tuple(fields["hosts"]), fields["owner"] and tuple(fields["owner"])
        return cls(**fields)


def lab_names() -> list[str]:
    """Return the names of the labs that exist on this machine, whole or in part."""
    return sorted(path.parent.name for path in LABS.glob("*/state.json"))


@contextmanager
def changing_labs() -> Iterator[None]:
    """Let one process at a time build or remove labs.

    Raises:
        NetLabError: This process may not.
    """
    if (reason := unavailable()) is not None:
        raise NetLabError(reason)
    LABS.mkdir(mode=0o755, exist_ok=True)
    with (LABS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str) -> str:
    """Run a command and return what it printed.

    Raises:
        NetLabError: It failed.
    """
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetLabError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def namespace_exists(namespace: str) -> bool:
    """Tell whether a network namespace of this name exists."""
    return Path("/run/netns", namespace).exists()
