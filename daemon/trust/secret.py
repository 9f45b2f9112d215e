"""The run key, a secret that every host of a run is given and neither etcd nor the network sees."""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from resilient_run.ckpt.errors import DaemonError

from .private import open_directory, own_directory, read_secret

VARIABLE: Final = "RESILIENT_KEY"
PASSWORD_VARIABLE: Final = "RESILIENT_ETCD_PASSWORD"
MAX_KEY_BYTES: Final = 4096
_MIN_LETTERS: Final = 32
_SALT: Final = b"resilient-run"
_KEYGEN: Final = "make one with `resilientctl keygen PATH`"
_withheld: dict[str, str] = {}


@contextmanager
def withheld() -> Iterator[None]:
    """Take the secrets out of the environment for the block: what is started in it does not need them."""
    taken = {name: os.environ.pop(name) for name in (VARIABLE, PASSWORD_VARIABLE) if name in os.environ}
    _withheld.update(taken)
    try:
        yield
    finally:
        for name in taken:
            del _withheld[name]
        os.environ.update(taken)


def secret_variable(name: str) -> str | None:
    """Return the secret that this process was given in an environment variable, also while it is `withheld`."""
    return _withheld.get(name, os.environ.get(name))


def check_url(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the value of an option that is a URL or a path, as click wants it from a callback.

    Raises:
        click.BadParameter: A password stands in it, as in ``ftp://user:password@host``, on the command line.
    """
    told = value is not None and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
    if told and re.search(r"://[^/]*:[^/]*@", value or ""):
        raise click.BadParameter(
            "the password in the URL can be read in the process list by everyone on this host; set RESILIENT_PERSIST",
            ctx,
            param,
        )
    return value


def make_key(path: Path) -> None:
    """Write a new run key to `path`, for its owner only.

    Raises:
        OSError: There is such a file, or it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError:
        path.unlink()
        raise


def find_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """Return the run key in the file `path`, else in RESILIENT_KEY, None when neither is given.

    Raises:
        DaemonError: It is no key, others can read or replace the file, or both are given.
    """
    text = environ.get(VARIABLE)
    if path is None:
        return None if text is None else checked_key(text.strip(), VARIABLE)
    if text is not None:
        raise DaemonError(f"a run key is given twice, in {path} and in {VARIABLE}: leave one of them out")
    try:
        return checked_key(read_secret(path).strip(), str(path))
    except ValueError as error:
        raise DaemonError(f"the run key: {error}; {_KEYGEN}") from error


def host_key() -> str:
    """Return the key of this user on this machine, made by whoever is first: for runs that no other host takes part in.

    Raises:
        DaemonError: There is no place for it that is this user's alone.
    """
    directory = own_directory(os.geteuid())
    try:
        open_directory(directory)
        path, fresh = directory / "host.key", directory / f"host.key.{os.getpid()}.{secrets.token_hex(4)}"
        if not path.exists():
            make_key(fresh)
            try:
                # Whole at once, and never in the place of one that others have read already.
                with suppress(FileExistsError):
                    os.link(fresh, path)
            finally:
                fresh.unlink()
        return checked_key(read_secret(path), str(path))
    except (OSError, ValueError, DaemonError) as error:
        raise DaemonError(f"no key for the runs of this host: {error}; or give one with --rr-key-file") from error


def checked_key(text: str, where: str) -> str:
    """Return the run key `text` if it is one; its text is in no message.

    Raises:
        DaemonError: Whoever tries keys would find it, or it is no printable text.
    """
    if len(text) < _MIN_LETTERS:
        raise DaemonError(f"the run key in {where} has {len(text)} characters, fewer than {_MIN_LETTERS}: {_KEYGEN}")
    if not text.isprintable() or len(text.encode()) > MAX_KEY_BYTES:
        raise DaemonError(f"the run key in {where} is not one line of at most {MAX_KEY_BYTES} bytes: {_KEYGEN}")
    return text


def key_proof(key: str, run_id: str) -> str:
    """Return what shows to whoever has it, too, that a launcher has `key`; it may be published.

    Nobody gets from it to the key but by trying keys, and that is hopeless only because `checked_key` wants long ones.
    """
    return derive(key, "proof of the run key", run_id, size_bytes=32).hex()


def derive(secret: str, purpose: str, *of: str, size_bytes: int) -> bytes:
    """Return bytes that follow from a secret, for one purpose and one thing; nothing else follows from them."""
    info = json.dumps([purpose, *of]).encode()
    return HKDF(algorithm=SHA256(), length=size_bytes, salt=_SALT, info=info).derive(secret.encode())
