"""Where etcd is and how to get in: read from the command line, carried to the daemon as JSON."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ..trust.private import read_secret
from ..trust.secret import PASSWORD_VARIABLE, secret_variable

DEFAULT_PORT = 2379
ACCESS = ("user", "passwordfile", "cacert", "cert", "key")
"""The options of access."""
_MOST_SOCKET_BYTES = 107
RUNS = "/resilient-run/"
"""Below it are the keys of all runs, and nothing else of ours: the user must be allowed to read and write there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdConfig:
    """Endpoints ("host:port" or "unix:/path"), credentials and absolute paths of PEM files.

    TLS is used when any of these files is given.
    """

    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("no etcd endpoint given; use --rdzv-endpoint=host[:port][,host[:port]...]")
        for endpoint in self.endpoints:
            _endpoint(endpoint)
        if (self.user is None) != (self.password is None):
            raise ValueError(
                "etcd needs both a user and a password; set RESILIENT_ETCD_USER and RESILIENT_ETCD_PASSWORD"
            )
        if (self.cert is None) != (self.key is None):
            raise ValueError("etcd needs both cert= and key=, or neither; see --rdzv-conf")
        for path in (self.cacert, self.cert, self.key):
            if path is not None and not os.path.isabs(path):
                raise ValueError(f"the TLS file {path!r} must be given by an absolute path")
        if self.tls and any(is_unix(endpoint) for endpoint in self.endpoints):
            raise ValueError(f"etcd at {self.where}: a unix socket takes no TLS; omit cacert=, cert= and key=")

    @classmethod
    def parse(cls, endpoint: str, options: Mapping[str, str]) -> Self:
        """Return the configuration of torch's `--rdzv-endpoint` and `--rdzv-conf`.

        Args:
            endpoint: `host[:port][,host[:port]...]`, port 2379 by default, IPv6 addresses in brackets; or `unix:/path`.
            options: May hold `user`, `passwordfile`, `cacert`, `cert` and `key`; user and password fall back to
                RESILIENT_ETCD_USER and RESILIENT_ETCD_PASSWORD. Other options are left alone.

        Raises:
            ValueError: An endpoint has another form, an option lacks its counterpart, a password is among the options,
                or its file cannot be read or is not the user's alone.
        """
        if "password" in options:
            raise ValueError(
                "password= can be read in the process list by everyone on this host; set RESILIENT_ETCD_PASSWORD, or "
                "name a file that only you can read by passwordfile="
            )
        file = options.get("passwordfile")
        password = read_secret(file) if file else secret_variable(PASSWORD_VARIABLE)
        paths = {name: options.get(name) for name in ("cacert", "cert", "key")}
        return cls(
            endpoints=tuple(_endpoint(part.strip()) for part in endpoint.split(",") if part.strip()),
            user=options.get("user") or os.environ.get("RESILIENT_ETCD_USER") or None,
            password=password or None,
            **{name: path and os.path.abspath(path) for name, path in paths.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration, with its password, as a JSON object."""
        return {**asdict(self), "endpoints": list(self.endpoints)}

    @property
    def tls(self) -> bool:
        """Tell whether connections are encrypted."""
        return self.cacert is not None or self.cert is not None

    @property
    def where(self) -> str:
        """The endpoints for a message."""
        return ",".join(self.endpoints)


def is_unix(endpoint: str) -> bool:
    """Tell whether the endpoint is a unix socket, which only this host can reach."""
    return re.match("unix:/[^/]", endpoint) is not None


def _endpoint(text: str) -> str:
    """Return "host:port" with the default port filled in, or "unix:/path"."""
    text = re.sub("^unix:///", "unix:/", text)
    if is_unix(text):
        if len(os.fsencode(text.removeprefix("unix:"))) > _MOST_SOCKET_BYTES:
            raise ValueError(f"etcd endpoint {text!r}: a socket's path has at most {_MOST_SOCKET_BYTES} bytes")
        return text
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or "/" in host or (":" in host and not bracketed) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"etcd endpoint {text!r} is neither host[:port] nor unix:/path (an IPv6 address goes in brackets, TLS is "
            "chosen by cacert=)"
        )
    return f"{host}:{port}"
