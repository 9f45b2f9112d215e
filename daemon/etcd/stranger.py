"""Whether an etcd that gets a certificate from us asks for one at all."""

import contextlib
import socket
import ssl

from .config import EtcdConfig

_STRANGER_S = 5.0
_REFUSALS = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_BAD_CERTIFICATE", "ALERT_HANDSHAKE_FAILURE")


def is_open(config: EtcdConfig, within_s: float | None = None) -> bool:
    """Tell whether whoever reaches an etcd that lets us in with `config` can read there; asks it only where it must.

    Args:
        config: Where it is, and how we get in.
        within_s: How long one endpoint may take to answer, None for 5 s.
    """
    if config.user is not None:
        return False  # An etcd that does not ask for it was refused.
    return config.cert is None or lets_strangers_in(config, within_s)


def lets_strangers_in(config: EtcdConfig, within_s: float | None = None) -> bool:
    """Tell whether an endpoint answers who shows no certificate; so it counts, too, when none is seen to refuse that.

    An endpoint from which nothing is heard may be down: the others say what etcd asks for.
    """
    found = [_answers(endpoint, config.cacert, within_s) for endpoint in config.endpoints]
    return True in found or False not in found


def _answers(endpoint: str, cacert: str | None, within_s: float | None) -> bool | None:
    """Tell whether `endpoint` answers without a certificate of ours, None when it says neither yes nor no."""
    # Who else answers in the place of this etcd says nothing about it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        if cacert is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cacert)
        plain = socket.create_connection((host, int(port)), timeout=within_s or _STRANGER_S)
        with plain, context.wrap_socket(plain, server_hostname=host) as sock:
            # In TLS 1.3 the alert comes now, and the server may have gone after it.
            with contextlib.suppress(OSError):
                sock.sendall(b"GET /version HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n")
            return True if sock.recv(1) else None
    except ssl.SSLError as error:
        return False if (error.reason or "").endswith(_REFUSALS) else None
    except OSError:
        return None
