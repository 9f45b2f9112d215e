"""Whether an etcd that gets a certificate from us asks for one at all."""

import contextlib
import socket
import ssl

from .config import EtcdConfig

_STRANGER_S = 2.0


def lets_strangers_in(config: EtcdConfig) -> bool:
    """Tell whether an endpoint, with TLS, answers who shows no certificate; one that does not answer at all is passed.

    A server that wants a certificate ends the connection instead, in TLS 1.3 not before the first request.
    """
    return any(_answers(endpoint) for endpoint in config.endpoints)


def _answers(endpoint: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is told: who the server is does not matter here.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError):
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=_STRANGER_S)
        with plain, context.wrap_socket(plain) as sock:
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n")
            return sock.recv(1) != b""
    return False
