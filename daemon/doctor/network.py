"""Checks of what other hosts reach of this one, and this one of them."""

import errno
import socket
from collections.abc import Iterator, Mapping

import psutil

from ..base.settings import server_pid
from ..etcd.address import is_loopback, own_address
from .examine import Check, Finding, fail, ok, warn
from .plan import RunPlan

_CONNECT_S = 3.0
_PROBED_PORT = 29600
_NAMES_ARE_SLOW = "the name service does not answer: see /etc/resolv.conf, or name hosts in /etc/hosts"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def network_checks(plan: RunPlan) -> list[Check]:
    """Return the checks of the network for the run `plan`."""
    checks = [
        Check(name="host-name", look=lambda: _host_name(plan), when_late=_NAMES_ARE_SLOW),
        Check(name="interface", look=lambda: _interfaces(plan), when_late="see `ip link`"),
    ]
    if plan.etcd is not None:
        checks.append(Check(name="address", look=lambda: _address(plan), when_late=_NAMES_ARE_SLOW))
    if plan.ports is not None:
        checks.append(Check(name="port", look=lambda: _ports(plan, plan.ports or range(0)), when_late="see `ss -ltn`"))
    for peer in plan.peers:
        look = lambda peer=peer: _peer(plan, peer)  # noqa: E731
        checks.append(Check(name="peer", look=look, when_late=f"{peer}: {_NAMES_ARE_SLOW}"))
    return checks


def _host_name(plan: RunPlan) -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        yield warn(
            "host-name",
            f"{name} does not resolve on this host ({error}): Gloo cannot find an interface by it",
            f"add '{_shown_address(plan)} {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
        return
    addresses = sorted({str(info[4][0]) for info in infos})
    found = f"{name} is {', '.join(addresses)}"
    if plan.several_hosts and all(map(is_loopback, addresses)) and not plan.environ.get("GLOO_SOCKET_IFNAME"):
        yield warn(
            "host-name",
            f"{found} on this host, where others do not reach Gloo",
            f"put '{_shown_address(plan)} {name}' instead of that line in /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    else:
        yield ok("host-name", found)


def _address(plan: RunPlan) -> Iterator[Finding]:
    address = _own_address(plan)
    if plan.several_hosts and is_loopback(address):
        yield fail(
            "address",
            f"the launcher would tell the others {address}, because etcd at {plan.etcd and plan.etcd.where} is here",
            "--local-addr ADDRESS, which the others reach (`ip -brief address`), or name etcd's host by that",
        )
    elif address == socket.gethostname():
        yield fail(
            "address",
            f"no route to etcd at {plan.etcd and plan.etcd.where}, or no such name: it shows the launcher its address",
            "correct the endpoint, see `ip route`, or --local-addr ADDRESS",
        )
    else:
        who = "the others" if plan.several_hosts else "this host"
        yield ok("address", f"{who} would reach launcher and daemon at {address}")


def _ports(plan: RunPlan, ports: range) -> Iterator[Finding]:
    address = _own_address(plan) if plan.etcd is not None else ""
    pid = server_pid(plan.settings.address())
    taken = []
    for port in ports:
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address, port))
        except OSError as error:
            if error.errno == errno.EACCES:
                yield fail("port", f"{port} is for root only", "--rr-port with ports from 1024 on")
                return
            if error.errno == errno.EADDRINUSE and not (pid is not None and port in _ports_of(pid)):
                taken.append(port)
    shown = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    if len(taken) == len(ports):
        remedy = f"`ss -ltnp` shows them; give others with --rr-port (as {ports[-1] + 1}-{ports[-1] + 10})"
        yield fail("port", f"other processes use {'port' if len(ports) == 1 else 'all ports of'} {shown}", remedy)
    else:
        yield ok("port", f"{len(ports) - len(taken)} of {shown} free for the daemon")


def _peer(plan: RunPlan, peer: str) -> Iterator[Finding]:
    host, colon, text = peer.rpartition(":")
    named = bool(colon) and text.isdecimal() and (":" not in host or host.endswith("]"))
    host, port = (host, int(text)) if named else (peer, plan.ports[0] if plan.ports is not None else _PROBED_PORT)
    if not host or not 0 < port < 1 << 16:
        yield fail("peer", f"{peer!r} is not HOST[:PORT] with a port from 1 to 65535", "correct --peer")
        return
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_S) as sock:
            address = sock.getpeername()[0]
        yield ok("peer", f"{host} answers at {address}, port {port}")
    except (socket.gaierror, UnicodeError) as error:
        yield fail(
            "peer",
            f"{host} does not resolve: {getattr(error, 'strerror', error)}",
            "correct the name, or add it to /etc/hosts",
        )
    except ConnectionRefusedError:
        # Whoever refuses is there, and no firewall in between.
        if named:
            yield fail("peer", f"{host} refuses port {port}", "start what listens there, or correct the port")
        else:
            yield ok("peer", f"{host} is reached (nothing listens at port {port} yet)")
    except OSError as error:
        reason = f"no answer within {_CONNECT_S:g} s" if isinstance(error, TimeoutError) else error.strerror
        yield fail(
            "peer",
            f"{host}, port {port}: {reason}",
            "is the host up? open its firewall for TCP from here: all ports, or those of --rr-port beside torch's",
        )


def _interfaces(plan: RunPlan) -> Iterator[Finding]:
    stats = psutil.net_if_stats()
    wanted = {name: plan.environ[name] for name in _INTERFACES if plan.environ.get(name)}
    for variable, text in wanted.items():
        problems = _troubles(variable, text, {name: each.isup for name, each in stats.items()})
        if problems:
            there = ", ".join(sorted(name for name, each in stats.items() if each.isup)) or "none"
            yield fail("interface", f"{variable}={text}: {'; '.join(problems)}", f"set it to one that is up: {there}")
        else:
            yield ok("interface", f"{variable}={text}")
    if not wanted:
        address = _own_address(plan) if plan.etcd is not None else None
        names = [
            name
            for name, entries in psutil.net_if_addrs().items()
            if address in {entry.address.partition("%")[0] for entry in entries}
        ]
        chosen = f", etcd is reached by {names[0]}" if names else ""
        yield ok("interface", f"Gloo and NCCL choose by themselves{chosen}")


def _troubles(variable: str, text: str, is_up: Mapping[str, bool]) -> list[str]:
    """Return what is wrong with the interfaces that a variable names.

    NCCL takes beginnings of names, after "=" whole ones, and after "^" those that it is to leave alone.
    """
    whole = not variable.startswith("NCCL") or text.startswith("=")
    if not whole and text.startswith("^"):
        return []
    troubles = []
    for item in text.removeprefix("=").split(","):
        names = [name for name in is_up if (name == item if whole else name.startswith(item))]
        if not names:
            troubles.append(f"there is no {item}")
        elif not any(is_up[name] for name in names):
            troubles.append(f"{item} is down")
    return troubles


def _own_address(plan: RunPlan) -> str:
    assert plan.etcd is not None
    return own_address(plan.etcd.endpoints[0])


def _shown_address(plan: RunPlan) -> str:
    address = "" if plan.etcd is None else _own_address(plan)
    return "ADDRESS" if address in ("", socket.gethostname()) or is_loopback(address) else address


def _ports_of(pid: int) -> set[int]:
    try:
        return {found.laddr.port for found in psutil.net_connections("tcp") if found.pid == pid and found.laddr}
    except psutil.Error:
        return set()
