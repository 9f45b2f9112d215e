"""`resilientctl exporter`: metrics and a page of this host's runs, over HTTP."""

import contextlib
import ssl
import threading
from pathlib import Path
from typing import Final

import click

from ..base.ask import ask_daemon
from ..base.settings import Settings
from ..exporter.server import ExporterServer
from ..trust.private import read_secret

_ANSWER_S: Final = 5.0
_SHORTEST: Final = 16


def _address(context: click.Context, param: click.Parameter, value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not ADDRESS:PORT, with a port from 0 to 65535", context, param)
    return host.removeprefix("[").removesuffix("]"), int(port)


@click.command()
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    default="127.0.0.1:9477",
    show_default=True,
    callback=_address,
    help="Where to listen; port 0 takes a free one.",
)
@click.option(
    "--password-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Require this password, by basic authentication (any user name) or as a bearer token.",
)
@click.option("--open", "is_open", is_flag=True, help="Let anybody who reaches the address read it.")
@click.option("--certificate", type=click.Path(dir_okay=False), help="Serve HTTPS: PEM file with the chain.")
@click.option("--private-key", type=click.Path(dir_okay=False), help="Its key.")
@click.pass_obj
def exporter(
    settings: Settings,
    listen: tuple[str, int],
    password_file: Path | None,
    is_open: bool,
    certificate: str | None,
    private_key: str | None,
) -> None:
    """Serve what `status` shows: /metrics for Prometheus, /healthz, and a page for people at /.

    It asks the daemon of this host, which may come and go, for each answer and every 10 s.
    """
    if (password_file is None) is not is_open:
        raise click.UsageError(
            "choose one of --password-file FILE (`resilientctl keygen FILE` makes one) and --open. With --open, "
            "everybody who reaches the address, at least every user of this host, reads the names of runs and hosts, "
            "and why they failed"
        )
    if (certificate is None) is not (private_key is None):
        raise click.UsageError("give both --certificate and --private-key, or neither")
    password = None if password_file is None else _password(password_file)
    tls = None if certificate is None or private_key is None else _tls(certificate, private_key)
    try:
        server = ExporterServer(
            listen,
            lambda: ask_daemon(settings.address(), "status", within_s=_ANSWER_S),
            password=password,
            tls=tls,
        )
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {listen[0]}:{listen[1]}: {error}; choose another --listen"
        ) from error
    host, port = server.server_address[:2]
    shown = f"[{host!s}]" if ":" in str(host) else str(host)
    click.echo(f"listening on http{'s' if tls else ''}://{shown}:{port}")
    threading.Thread(target=server.watch, daemon=True).start()
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _password(path: Path) -> str:
    try:
        password = read_secret(path).strip()
    except ValueError as error:
        raise click.ClickException(f"the password: {error}") from error
    if len(password) < _SHORTEST or not password.isprintable():
        raise click.ClickException(
            f"the password in {path} must have {_SHORTEST} printable characters at least, in one line; "
            "make one with `resilientctl keygen PATH`"
        )
    return password


def _tls(certificate: str, private_key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key)
    except OSError as error:
        raise click.ClickException(f"cannot use certificate {certificate} with key {private_key}: {error}") from error
    return context
