"""A laboratory network on one machine: hosts as Linux network namespaces around a bridge, with shaped links.

As a library `NetLab` serves tests and benchmarks; `python benchmarks/netlab.py` is the same by hand.
"""

import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import click
from lab_host import BRIDGE, NETWORK, HostStatus, LabHost
from lab_state import (
    QUEUE_S,
    LabState,
    NetLabError,
    changing_labs,
    check_name,
    lab_names,
    namespace_exists,
    parse_rate,
    run,
    unavailable,
)

from resilient_run.daemon.base.process import started_ticks


class NetLab:
    """A lab; as a context manager it is built on entry and removed on exit.

    The bridge is in a namespace of its own, so the machine's own network is never touched. A lab whose process was
    killed is removed when the next one is built.

    Args:
        hosts: How many (named h0, h1, …), or their names.
        rate: Of every host's link, in both directions.
        queue_s: A link drops what would have to wait longer than about that.
        name: Of the lab; one of this name that exists is removed first. By default a name that is not taken.
        shm_bytes: Size of each host's tmpfs.
        stays: The lab outlives this process.

    Raises:
        NetLabError: A name or the rate is none.
    """

    def __init__(
        self,
        hosts: int | Sequence[str],
        *,
        rate: str = "200mbit",
        queue_s: float = QUEUE_S,
        name: str | None = None,
        shm_bytes: int = 1 << 30,
        stays: bool = False,
    ) -> None:
        names = tuple(f"h{index}" for index in range(hosts)) if isinstance(hosts, int) else tuple(hosts)
        if not 0 < len(set(map(check_name, names))) == len(names) < NETWORK.num_addresses - 2:
            raise NetLabError(f"a lab needs at least one host, and each a name of its own, got {hosts!r}")
        ticks = started_ticks(os.getpid())
        self._state = LabState(
            name=check_name(name or f"p{os.getpid()}t{time.monotonic_ns() % 10**9}"),
            hosts=names,
            rate_bit_s=parse_rate(rate),
            queue_s=queue_s,
            shm_bytes=shm_bytes,
            owner=None if stays or ticks is None else (os.getpid(), ticks),
        )
        self.hosts = _hosts(self._state)

    @classmethod
    def attach(cls, name: str) -> Self:
        """Return the lab of that name, which someone else has built.

        Raises:
            NetLabError: There is none.
        """
        lab = cls.__new__(cls)
        lab._state = LabState.load(name)
        lab.hosts = _hosts(lab._state)
        return lab

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def name(self) -> str:
        """The lab's name, part of the name of everything that it makes."""
        return self._state.name

    @property
    def rate_bit_s(self) -> int:
        """Rate of every link that was not slowed, in each direction."""
        return self._state.rate_bit_s

    def host(self, name: str) -> LabHost:
        """Return the host of that name.

        Raises:
            NetLabError: There is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise NetLabError(f"lab {self.name!r} has no host {name!r}; it has {', '.join(self._state.hosts)}")

    def up(self) -> None:
        """Build the lab, after removing what labs of this name or of dead processes left.

        Raises:
            NetLabError: This process is not root, or the kernel refuses.
        """
        with changing_labs():
            for left in map(NetLab.attach, lab_names()):
                if left.name == self.name or not left.has_owner():
                    left._remove()
            try:
                self._state.save()
                run("ip", "netns", "add", self._state.switch)
                run("ip", "-n", self._state.switch, "link", "add", BRIDGE, "type", "bridge")
                run("ip", "-n", self._state.switch, "link", "set", BRIDGE, "up")
                for host in self.hosts:
                    host.build()
            except BaseException:
                self._remove()
                raise

    def down(self) -> None:
        """Kill every process in the lab and remove all of it; what is gone already is no error.

        Raises:
            NetLabError: This process is not root, or a process does not end.
        """
        with changing_labs():
            self._remove()

    def has_owner(self) -> bool:
        """Tell whether the process that the lab ends with still runs; true for a lab that is to stay."""
        owner = self._state.owner
        return owner is None or started_ticks(owner[0]) == owner[1]

    def _remove(self) -> None:
        for host in self.hosts:
            host.remove()
        if namespace_exists(self._state.switch):
            run("ip", "netns", "delete", self._state.switch)
        shutil.rmtree(self._state.directory, ignore_errors=True)


def _hosts(state: LabState) -> tuple[LabHost, ...]:
    return tuple(LabHost(state, index) for index in range(len(state.hosts)))


def _reported(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a lab's errors into one line on stderr and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        if (reason := unavailable()) is not None:
            raise click.ClickException(reason)
        try:
            return command(*args, **options)
        except NetLabError as error:
            raise click.ClickException(str(error)) from error

    return wrapped


_named = click.option("--name", default="lab", show_default=True, help="Name of the lab.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def netlab() -> None:
    """Hosts as network namespaces on this machine, joined by a bridge over shaped links. Needs root."""


@netlab.command()
@click.argument("hosts", type=click.IntRange(min=1))
@click.option("--rate", default="200mbit", show_default=True, help="Of every link, in both directions.")
@click.option("--shm-mb", type=click.IntRange(min=1), default=1024, show_default=True, help="Each host's tmpfs, MiB.")
@_named
@_reported
def up(hosts: int, rate: str, shm_mb: int, name: str) -> None:
    """Build a lab of HOSTS hosts: h0, h1, …; one of the same name is removed first."""
    lab = NetLab(hosts, rate=rate, name=name, shm_bytes=shm_mb << 20, stays=True)
    lab.up()
    click.echo(_table([host.status() for host in lab.hosts]))


@netlab.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_named
@click.argument("host")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_reported
def execute(host: str, command: tuple[str, ...], name: str) -> None:
    """Run COMMAND on HOST, with that host's directories in the environment: exec h0 -- resilientd."""
    lab_host = NetLab.attach(name).host(host)
    words = (*lab_host.prefix, *(command[1:] if command[0] == "--" else command))
    os.execvpe(words[0], words, {**os.environ, **lab_host.env})


@netlab.command()
@click.argument("host")
@_named
@_reported
def cut(host: str, name: str) -> None:
    """Part HOST from the others without a sign."""
    NetLab.attach(name).host(host).cut()


@netlab.command()
@click.argument("host")
@_named
@_reported
def heal(host: str, name: str) -> None:
    """Undo `cut` and `slow`."""
    NetLab.attach(name).host(host).heal()


@netlab.command()
@click.argument("host")
@click.option("--rate", required=True, help="For example 10mbit; in both directions.")
@_named
@_reported
def slow(host: str, rate: str, name: str) -> None:
    """Give HOST's link another rate."""
    NetLab.attach(name).host(host).slow(rate)


@netlab.command()
@click.argument("host")
@_named
@_reported
def lose(host: str, name: str) -> None:
    """Let HOST die as in a power cut: cut, every process killed, its memory gone; `heal` reconnects it."""
    NetLab.attach(name).host(host).lose()


@netlab.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_named
@_reported
def status(name: str, as_json: bool) -> None:
    """Show the hosts: address, link, processes and shared memory."""
    lab = NetLab.attach(name)
    hosts = [host.status() for host in lab.hosts]
    if as_json:
        click.echo(json.dumps({"name": lab.name, "hosts": [asdict(host) for host in hosts]}))
    else:
        click.echo(_table(hosts))


@netlab.command()
@_named
@_reported
def down(name: str) -> None:
    """Kill every process in the lab and remove it; a lab that is not there is no error."""
    if name in lab_names():
        NetLab.attach(name).down()


def _table(hosts: Sequence[HostStatus]) -> str:
    lines = [f"{'host':<12}{'address':<16}{'link':<14}{'processes':<11}shared memory"]
    for host in hosts:
        link = f"{host.rate_bit_s / 1e6:g} Mbit/s" if host.attached else "cut"
        memory = f"{host.shm_used_bytes / (1 << 20):.1f} MiB"
        lines.append(f"{host.name:<12}{host.address:<16}{link:<14}{host.processes:<11}{memory}")
    return "\n".join(lines)


__all__ = ["LabHost", "NetLab", "NetLabError", "lab_names", "netlab", "unavailable"]


if __name__ == "__main__":
    netlab(prog_name="netlab")
