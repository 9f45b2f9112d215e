"""The names by which others find this daemon, which a cleaner, a logout or a user may take away while it runs."""

import os
from pathlib import Path


class Names:
    """Files of one directory that this daemon has open, so that no other file gets their inodes meanwhile.

    Args:
        directory: A descriptor of it.
        files: Path → what its file is that this daemon has open.
    """

    def __init__(self, directory: int, files: dict[Path, os.stat_result]) -> None:
        self._directory = directory
        self._files = files

    def add(self, path: Path) -> None:
        """Count the file that is at `path` now, which this daemon has just made, as one of them."""
        self._files[path] = path.lstat()

    def lost(self) -> Path | None:
        """Return the first path that now leads elsewhere, None while none does."""
        return next((path for path in self._files if not self.is_ours(path)), None)

    def is_ours(self, path: Path) -> bool:
        """Tell whether `path` still leads to the file that was there; also if nobody can tell."""
        try:
            # Below a directory of another user we may see nothing.
            return os.path.samestat(path.parent.stat(), os.fstat(self._directory)) and os.path.samestat(
                path.lstat(), self._files[path]
            )
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
