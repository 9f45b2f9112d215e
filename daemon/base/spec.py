"""What a launcher says about its job when it opens it, and how it reads sizes and ports from its command line."""

import math
import re
from dataclasses import dataclass
from typing import Any

import click

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.slot import MAX_RUN_ID_BYTES

from ..etcd.config import EtcdConfig
from ..trust.secret import checked_key
from .codec import Record, limited
from .fields import Fields
from .policy import Policy
from .record import JobKey

_UNIT_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


MAX_NPROC = 1 << 10
_MAX_REPLICAS = 64


def read_etcd(values: Fields, name: str) -> EtcdConfig:
    """Return where etcd is, as `EtcdConfig.to_dict` says it in the field `name`; DaemonError when it does not."""
    found = Fields(values.object(name), f"{values.what}, {name}")
    access = {each: found.secret(each) for each in ("user", "password", "cacert", "cert", "key")}
    try:
        return EtcdConfig(endpoints=tuple(found.texts("endpoints")), **access)
    except ValueError as error:
        raise DaemonError(f"{values.what}: field '{name}': {error}") from error


def _read_key(values: Fields, name: str) -> str | None:
    key = values.secret(name)
    return None if key is None else checked_key(key, values.what)


def _read_last_port(values: Fields, name: str) -> int:
    return values.integer(name, low=values.integer("first_port", low=1, high=65535), high=65535)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(Record):
    """What a launcher says about its job when it opens it; equal specs continue, a different one starts the job anew.

    Attributes:
        run_id: Name of the run in etcd.
        host: Name of this host in the run.
        replicas: Copies of each checkpoint, m.
        nproc: Ranks on this host.
        etcd: How to reach etcd.
        addr: Of this host, at which the daemon is to listen for peers.
        memory_limit_bytes: What the job's slots may take on this host, None for the daemon's limit.
        policy: The job's configuration.
        injection: Whether faults may be ordered here: this word of the launcher is the only one that counts.
        run_key: The secret of the run's hosts, None where the one in etcd has to do; it is written down nowhere.
        first_port: The first port at which the daemon may listen, None for any.
        last_port: The last one.
        address: Where peers reach this daemon, as it says itself.
    """

    run_id: str = limited(high=MAX_RUN_ID_BYTES)
    host: str
    replicas: int = limited(low=1, high=_MAX_REPLICAS)
    nproc: int = limited(low=1, high=MAX_NPROC)
    etcd: EtcdConfig = limited(repr=False, read=read_etcd, write=EtcdConfig.to_dict)
    addr: str = limited(compare=False)
    memory_limit_bytes: int | None = None
    policy: Policy
    injection: bool = False
    run_key: str | None = limited(None, repr=False, read=_read_key)
    first_port: int | None = limited(None, low=1, high=65535, compare=False)
    last_port: int | None = limited(None, read=_read_last_port, compare=False)
    address: tuple[str, int] = limited(("", 0), outside=True)

    @property
    def key(self) -> JobKey:
        """Which job this is."""
        return self.run_id, self.host

    @property
    def ports(self) -> range | None:
        """The ports at which the daemon may listen for peers, None for any."""
        return None if self.first_port is None else range(self.first_port, (self.last_port or self.first_port) + 1)


def parse_ports(context: click.Context, param: click.Parameter, text: str | None) -> range | None:
    """Return the ports that an option means, "29600" or "29600-29609", as click wants it from a callback.

    Raises:
        click.BadParameter: It means none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    ports = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise click.BadParameter(
            f"{text!r} is not a port or range of ports: write 29600 or 29600-29609", context, param
        )
    return ports


class Finite(click.FloatRange):
    """A number in a range. click lets nan through, and infinity where the range is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number.

        Raises:
            click.BadParameter: It is none, not finite, or out of the range.
        """
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def parse_size(context: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Return the bytes that an option means; K, KB and KiB are all 1024 bytes. A callback for click, too.

    Raises:
        click.BadParameter: It means none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size_bytes = int(float(match[1]) * _UNIT_BYTES[match[2].upper()]) if match else 0
    if size_bytes <= 0:
        raise click.BadParameter(
            f"{text!r} is not a size: write a positive number and K, M, G or T, as 8G or 512MiB", context, param
        )
    return size_bytes
