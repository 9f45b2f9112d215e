"""The options of `resilientctl` commands that ask etcd about a run."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..base.settings import Settings
from ..etcd.client import EtcdConfig
from ..etcd.config import ACCESS
from .ask import ask

_Command = TypeVar("_Command", bound=Callable[..., Any])


def etcd_options(*, of_run: bool) -> Callable[[_Command], _Command]:
    """Return the decorator that adds `etcd_endpoint` and `etcd_conf` to a command.

    Args:
        of_run: Whether the command needs etcd, and asks `etcd_of` where it is.
    """

    def add(command: _Command) -> _Command:
        conf = click.option(
            "--etcd-conf",
            default="",
            metavar="NAME=VALUE,…",
            help="As --rdzv-conf: user, passwordfile, cacert, cert, key. Or RESILIENT_ETCD_USER and "
            "RESILIENT_ETCD_PASSWORD.",
        )
        endpoint = click.option(
            "--etcd-endpoint",
            metavar="HOST[:PORT],…",
            help=f"The run's --rdzv-endpoint. Default: {'what its daemon here uses' if of_run else 'none'}.",
        )
        return endpoint(conf(command))

    return add


def etcd_of(settings: Settings, run_id: str, endpoint: str | None, conf: str) -> EtcdConfig:
    """Return where the etcd of a run is, which the daemon of this host may know.

    Raises:
        click.ClickException: It does not, and the options do not say it.
    """
    if endpoint is None:
        try:
            jobs = ask(settings, "status")["jobs"]
        except click.ClickException as error:
            raise click.UsageError(f"{error.message}; or give --etcd-endpoint (the run's --rdzv-endpoint)") from error
        known = sorted({job["etcd"] for job in jobs if job["run_id"] == run_id and "etcd" in job})
        if len(known) > 1:
            raise click.UsageError(
                f"the daemon of this host knows runs {run_id!r} of several etcds: give --etcd-endpoint, one of "
                f"{', '.join(known)}"
            )
        endpoint = next(iter(known), None)
    if endpoint is None:
        raise click.UsageError(
            f"the daemon of this host does not know run {run_id!r}: give --etcd-endpoint (the run's --rdzv-endpoint)"
        )
    return parse_etcd(endpoint, conf)


def parse_etcd(endpoint: str, conf: str) -> EtcdConfig:
    """Return where the two options say that etcd is.

    Raises:
        click.UsageError: They do not say it.
    """
    try:
        items = [item for item in conf.split(",") if item.strip()]
        if any("=" not in item for item in items):
            raise ValueError("--etcd-conf takes NAME=VALUE, separated by commas")
        options = {name.strip(): value.strip() for name, value in (item.split("=", 1) for item in items)}
        if unknown := sorted(options.keys() - {*ACCESS, "password"}):
            raise ValueError(f"--etcd-conf has no {', '.join(unknown)}, only {', '.join(ACCESS)}")
        return EtcdConfig.parse(endpoint, options)
    except ValueError as error:
        raise click.UsageError(f"--etcd-endpoint or --etcd-conf: {error}") from error


def check_run_id(run_id: str, name: str) -> None:
    """Check that a run may have this id.

    Raises:
        click.UsageError: It may not.
    """
    if not run_id.isprintable() or not run_id or "/" in run_id:
        raise click.UsageError(
            f"{name} is {run_id!r}; it is part of etcd keys, so it must be printable, not empty, and without '/'"
        )
