"""Places that are this process's user's alone: directories that nobody else may enter, files that nobody else made."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from resilient_run.ckpt.errors import DaemonError

_SECRET_BYTES = 4096
_REMEDY = "remove it, or choose another directory (RESILIENT_RUN_DIR, RESILIENT_SHM_DIR)"


def own_directory(uid: int) -> Path:
    """Return the tmpfs directory of a user that all processes of that user on this machine find."""
    return Path(f"/dev/shm/resilient-run-{uid}")


def open_directory(path: Path) -> None:
    """Make sure that `path` is a directory of our user, and that nobody else may enter it.

    Raises:
        DaemonError: It is something else, or somebody else's.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise DaemonError(f"{path} cannot be used: {error.strerror}; {_REMEDY}") from error
    # What is checked is what is changed, whatever takes its name meanwhile.
    with _own(path) as descriptor:
        os.fchmod(descriptor, 0o700)


def hold_directory(path: Path) -> int:
    """Return a descriptor of the directory `path`: while it is open, systemd-tmpfiles removes nothing below `path`.

    Raises:
        DaemonError: It is something else, or somebody else's.
    """
    with _own(path) as descriptor:
        held = os.dup(descriptor)
    # Some file systems have no locks for directories, and this one only keeps a cleaner off (tmpfiles.d(5)).
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_SH)
    return held


def directory_mode(path: Path) -> int:
    """Return the permissions of the directory `path` of our user, and change nothing.

    Raises:
        DaemonError: It is something else, or somebody else's.
    """
    with _own(path) as descriptor:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)


@contextlib.contextmanager
def _own(path: Path) -> Iterator[int]:
    """Open the directory `path`, which has to be our user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DaemonError(f"{path} cannot be used: {error.strerror}; {_REMEDY}") from error
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise DaemonError(f"{path} must belong to uid {os.geteuid()}, it belongs to uid {owner}; {_REMEDY}")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open the file `path` of our user for reading.

    Raises:
        DaemonError: It is something else: a link, a pipe, a directory, a file of another user.
        OSError: It cannot be opened.
    """
    try:
        # A pipe would be waited for without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DaemonError(f"{path} is not a file of uid {os.geteuid()}") from error
        raise
    with open(descriptor, "rb", buffering=0) as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise DaemonError(f"{path} is not a file of uid {os.geteuid()}")
        yield file


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """Return what is in the file `path` of our user.

    Raises:
        DaemonError: It is something else (see `opened`), or longer than `max_bytes`.
        OSError: It cannot be read.
    """
    with opened(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DaemonError(f"{path} is longer than {max_bytes} bytes")
    return content


def open_log(path: Path) -> int:
    """Return a descriptor that appends to the file `path`, made if there is none, in a directory of our user.

    Raises:
        DaemonError: The directory is something else, or somebody else's by now.
        OSError: The file cannot be opened, or is a link.
    """
    with _own(path.parent) as directory:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path.name, flags, 0o600, dir_fd=directory)


def open_new(path: Path | str, mode: int) -> int:
    """Return a descriptor that writes to a new file, in the place of whatever file, link or pipe has the name `path`.

    So nothing is written to that another user may have put there, wherever it leads.

    Args:
        path: The file.
        mode: Its permissions, of which the umask takes some.

    Raises:
        OSError: It cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def open_to_append(path: Path) -> int:
    """Return a descriptor that appends to `path`, and never waits: a file, made if there is none, a pipe or a terminal.

    What another user may have put there is not written to: links, pipes, files that are theirs in a directory that is
    not, and files with more than one name. A link of this user's or root's, as /dev/stdout, leads where they want it.

    Raises:
        DaemonError: It is such a thing, or nothing that could be appended to.
        OSError: It cannot be opened.
    """
    trusted, place = {0, os.geteuid()}, path.parent.stat()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    linked = False
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        linked, (owner, leads_to) = True, _link(path)
        # Where others may change names, it may be another link by now.
        if not {owner, place.st_uid} <= trusted or place.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise DaemonError(f"{path} is a link that uid {owner} has made, or others may change") from error
        # Only where nobody else changes names may it be opened by its own: in /proc there are links to what has none.
        descriptor = os.open(leads_to if place.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else path, flags, 0o644)
    about = os.fstat(descriptor)
    is_file, trouble = stat.S_ISREG(about.st_mode), ""
    if not (is_file or stat.S_ISFIFO(about.st_mode) or stat.S_ISCHR(about.st_mode)):
        trouble = "is not a file, pipe or terminal"
    elif is_file and about.st_nlink > 1 and not linked:
        trouble = "has several hard links"
    elif not (
        linked or stat.S_ISCHR(about.st_mode) or about.st_uid in trusted | ({place.st_uid} if is_file else set())
    ):
        trouble = f"belongs to uid {about.st_uid}"
    if trouble:
        os.close(descriptor)
        raise DaemonError(f"{path} {trouble}")
    return descriptor


def _link(path: Path) -> tuple[int, Path]:
    """Return who has made the link `path`, and where that link leads, whatever takes its name meanwhile."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_uid, path.parent / os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)


def read_secret(path: Path | str) -> str:
    """Return the text of a file that only its user, and root, can read, without the newline at its end.

    A link is followed, as orchestrators mount secrets: what it leads to is checked.

    Raises:
        ValueError: It is missing, empty or too long, no regular file, or other users may own, read or write it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            # The group is how a user comes to read a file of root's.
            others = 0o077 if found.st_uid == os.geteuid() else 0o027
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in {0, os.geteuid()} or found.st_mode & others:
                raise ValueError(
                    f"{path} is not private (uid {found.st_uid}, mode {stat.filemode(found.st_mode)}): "
                    f"it must be a regular file of yours; chmod 600 {path}"
                )
            content = file.read(_SECRET_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > _SECRET_BYTES:
        raise ValueError(f"{path} is longer than {_SECRET_BYTES} bytes; it must contain a secret")
    try:
        secret = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8; it must contain a secret") from None
    if not secret:
        raise ValueError(f"{path} is empty; it must contain a secret")
    return secret
