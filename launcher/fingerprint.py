"""The fingerprint of a run: by what its launchers see that they start the same script."""

import hashlib
import os
import pwd
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.run import run_script_path

from resilient_run.ckpt.format.version import FORMATS
from resilient_run.daemon.base.fields import printable
from resilient_run.daemon.run.records import Fingerprint

_NAME_BYTES = 255
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def fingerprint(entrypoint: Callable[..., Any] | str | None, arguments: Sequence[Any]) -> Fingerprint:
    """Return what identifies a run whose workers are `entrypoint` with `arguments`, as torch's worker spec has them.

    Of what may hold a secret there are only hashes.
    """
    name, content, rest = _script(entrypoint, list(arguments))
    return Fingerprint(
        user=_user(),
        script=printable(name, _NAME_BYTES),
        content=content,
        arguments=_sha256("\0".join(map(_text, rest))),
        torch=str(torch.__version__),
        formats=", ".join(f"{name} {version}" for name, version in FORMATS.items()),
    )


def _script(entrypoint: Callable[..., Any] | str | None, arguments: list[Any]) -> tuple[str, str, list[Any]]:
    """Return the name of what runs, the hash of its content, "" where it has none, and its arguments."""
    if entrypoint is run_script_path and arguments:
        path = str(arguments[0])
        return os.path.basename(path), _content(path), arguments[1:]
    if isinstance(entrypoint, str):
        if _is_python(entrypoint):
            return _python_script(entrypoint, arguments)
        # A program that is looked up in PATH is the system's, and may be another build on another host.
        content = _content(entrypoint) if os.sep in entrypoint else ""
        return os.path.basename(entrypoint), content, arguments
    kind: Any = entrypoint if hasattr(entrypoint, "__qualname__") else type(entrypoint)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}", "", arguments


def _python_script(python: str, arguments: list[str]) -> tuple[str, str, list[str]]:
    """Return what `_script` does for a command line of Python: its script, `-m` module, or `-c` program."""
    place = 0
    while place < len(arguments):
        word, rest = arguments[place], arguments[:place] + arguments[place + 1 :]
        if word in ("-m", "-c") and place + 1 < len(arguments):
            named, rest = arguments[place + 1], arguments[:place] + arguments[place + 2 :]
            return (f"-m {named}", "", rest) if word == "-m" else ("-c", _sha256(named), rest)
        if not word.startswith("-"):
            return os.path.basename(word), _content(word), rest
        place += 2 if word in _PYTHON_OPTIONS_WITH_VALUE else 1
    return os.path.basename(python), "", arguments


def _is_python(program: str) -> bool:
    ours = {sys.executable, os.environ.get("PYTHON_EXEC")}
    return program in ours or _PYTHON.fullmatch(os.path.basename(program)) is not None


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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _user() -> str:
    """Return the user's name: a number need not mean the same user on another host."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
