"""The names by which others find this daemon, which a cleaner, a logout or a user may take away while it runs."""

from pathlib import Path


class Names:
    """Files that this daemon has made and keeps open, so that no other file gets their inodes meanwhile.

    Args:
        paths: Where they are now.
    """

    def __init__(self, *paths: Path) -> None:
        self._files = {path: _file_at(path) for path in paths}

    def lost(self) -> Path | None:
        """Return the first path that leads to that file no more, None while all do."""
        return next((path for path in self._files if not self.is_ours(path)), None)

    def is_ours(self, path: Path) -> bool:
        """Tell whether `path` still leads to the file that was there; also if nobody can tell."""
        try:
            return _file_at(path) == self._files[path]
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True


def _file_at(path: Path) -> tuple[int, int]:
    about = path.lstat()
    return about.st_dev, about.st_ino
