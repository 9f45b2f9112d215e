"""Files in the persistent tier's storage: written aside and renamed on a file system, put whole on an object store."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Sequence
from typing import Any

from ..trust.private import open_new


class FileWriter:
    """Writes one new file, which has its name once `finish` has returned.

    Object stores show an object when it is complete. On a local (or mounted) file system the file is written under
    another name, flushed to the disk, and renamed. Nothing is written to what stands there under that name.

    Args:
        fs: An fsspec file system.
        path: The file; one of that name is replaced.
        part: What its other name has at the end.
    """

    def __init__(self, fs: Any, path: str, part: str) -> None:
        self._fs = fs
        self._path = path
        self._aside = f"{path}{part}" if is_local(fs) else path
        local = None if self._aside == path else open_new(self._aside, 0o666)
        self._file: Any = fs.open(path, "wb") if local is None else open(local, "wb")  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self._file.write(data)

    def finish(self) -> None:
        """Complete the file and give it its name."""
        if self._aside == self._path:
            self._file.close()
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self._path)

    def abandon(self) -> None:
        """Give up what was written so far."""
        with contextlib.suppress(OSError):
            # A full disk refuses what is still buffered, too.
            self._file.close()
        if is_there(self._fs, self._aside):
            self._fs.rm_file(self._aside)


def write_small(fs: Any, path: str, data: bytes, part: str) -> None:
    """Write a whole file so that nobody ever sees a part of it; on a file system it is durable then."""
    if not is_local(fs):
        fs.pipe_file(path, data)
        return
    writer = FileWriter(fs, path, part)
    try:
        writer.write(data)
        writer.finish()
    except OSError:
        writer.abandon()
        raise
    fsync_directory(os.path.dirname(path))


def is_local(fs: Any) -> bool:
    """Tell whether `fs` is a file system of this machine, where a rename replaces a file at once."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(fs, LocalFileSystem)


def is_there(fs: Any, path: str) -> bool:
    """Tell whether there is a file or directory; fsspec's `exists` takes every error for a no.

    Raises:
        Exception: Nobody knows.
    """
    fs.invalidate_cache()
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True


def names_in(fs: Any, directory: str) -> set[str]:
    """Return the names in a directory, none if it is not there.

    Raises:
        Exception: Nobody knows.
    """
    fs.invalidate_cache()
    try:
        if is_local(fs):
            # Some versions of fsspec look at each file, and one that vanishes meanwhile is as if all were gone.
            return set(os.listdir(directory))
        return {str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(directory, detail=False)}
    except FileNotFoundError:
        return set()


def fsync_directory(path: str) -> None:
    """Make the names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(target: str, names: Sequence[str]) -> None:
    """Make the directory `target`, and below it one of each of `names` in the other, for this user alone."""
    os.makedirs(target, exist_ok=True)
    for name in names:
        target = os.path.join(target, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(target, 0o700)


def planted_by(target: str, names: Sequence[str]) -> tuple[str, int] | None:
    """Return what another user has made among the directories `names`, one in the other below `target`, and who.

    Where everybody or a group may write, a stranger can make directories of a run before the run does, with links and
    pipes in the place of its files. What the owner of `target` has made is trusted as `target` is.

    Raises:
        OSError: They cannot be looked at.
    """
    place = target
    for name in names:
        path = os.path.join(place, name)
        try:
            above, found = os.stat(place), os.lstat(path)
        except FileNotFoundError:
            return None
        if above.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and found.st_uid not in {0, os.geteuid(), above.st_uid}:
            # Some servers of files know each user, or root, by another name.
            with tempfile.TemporaryFile(dir=place) as file:
                ours = os.fstat(file.fileno()).st_uid
            if found.st_uid != ours:
                return path, found.st_uid
        place = path
    return None
