"""The address at which other hosts reach this one."""

import ipaddress
import socket

from .config import is_unix


def own_address(endpoint: str) -> str:
    """Return this host's address on the route to an endpoint of etcd, its name when there is no route."""
    if is_unix(endpoint):
        return "127.0.0.1"  # Nobody comes from elsewhere.
    host, _, port = endpoint.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except OSError:
        return socket.gethostname()
    for family, kind, protocol, _, target in infos:
        with socket.socket(family, kind, protocol) as sock:
            try:
                # Connecting a datagram socket sends nothing; it makes the kernel choose a source address.
                sock.connect(target)
            except OSError:
                continue
            return str(sock.getsockname()[0])
    return socket.gethostname()


def is_local(endpoint: str) -> bool:
    """Tell whether only this host itself can reach `endpoint`: "host:port" or "unix:path"."""
    return is_unix(endpoint) or is_loopback(endpoint.rpartition(":")[0].strip("[]"))


def is_loopback(address: str) -> bool:
    """Tell whether only this host itself can reach `address`; a name other than "localhost" counts as reachable."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
