"""The fingerprint of a run: by what its launchers see that they start the same script."""

import hashlib
import hmac
import os
import pwd
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.run import run_script_path

from resilient_run.ckpt.format.version import FORMATS
from resilient_run.daemon.base.fields import printable
from resilient_run.daemon.run.records import Fingerprint
from resilient_run.daemon.trust.secret import derive

_NAME_BYTES = 255


def fingerprint(
    entrypoint: Callable[..., Any] | str | None, arguments: Sequence[Any], run_key: str | None = None
) -> Fingerprint:
    """Return what identifies a run whose workers are `entrypoint` with `arguments`, as torch's worker spec has them.

    Of what may hold a secret there is only a hash; without the run key, if there is one, nobody can try words with it.
    """
    name, content, rest = _script(entrypoint, list(arguments))
    return Fingerprint(
        user=_user(),
        script=printable(name, _NAME_BYTES),
        content=content,
        arguments=_hashed("\0".join(map(_text, rest)), run_key),
        torch=str(torch.__version__),
        formats=", ".join(f"{name} {version}" for name, version in FORMATS.items()),
    )


def _script(entrypoint: Callable[..., Any] | str | None, arguments: list[Any]) -> tuple[str, str, list[Any]]:
    """Return the name of what runs, the hash of its content, "" where it has none, and its arguments."""
    if entrypoint is run_script_path and arguments:
        path = str(arguments[0])
        return os.path.basename(path), _content(path), arguments[1:]
    if isinstance(entrypoint, str):
        # As torch starts a script, or a module, unless it is told --no-python.
        match [entrypoint in (sys.executable, os.environ.get("PYTHON_EXEC")), *arguments]:
            case [True, "-u", "-m", module, *rest]:
                return f"-m {module}", "", rest
            case [True, "-u", script, *rest]:
                return os.path.basename(script), _content(script), rest
        # A program that is looked up in PATH is the system's, and may be another build on another host.
        content = _content(entrypoint) if os.sep in entrypoint else ""
        return os.path.basename(entrypoint), content, arguments
    kind: Any = entrypoint if hasattr(entrypoint, "__qualname__") else type(entrypoint)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}", "", arguments


def _content(path: str) -> str:
    """Return the SHA-256 of a regular file, "" for anything else; who starts it says what is wrong with it."""
    try:
        if not Path(path).is_file():
            return ""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def _text(value: Any) -> str:
    """Return what an argument says on every host alike: of an object that is no plain value only its class."""
    if value is None or isinstance(value, str | int | float | bytes | os.PathLike):
        return str(value) if isinstance(value, str | os.PathLike) else repr(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_text(key)}:{_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _hashed(text: str, run_key: str | None) -> str:
    key = b"" if run_key is None else derive(run_key, "hash of the arguments", size_bytes=32)
    return hmac.digest(key, text.encode(errors="surrogatepass"), "sha256").hex()


def _user() -> str:
    """Return the user's name: a number need not mean the same user on another host."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
