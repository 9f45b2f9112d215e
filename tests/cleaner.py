"""systemd's cleaner of old files, as it runs on most machines."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_cleaner = pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="needs systemd-tmpfiles")


def remove_all_old(directory: Path) -> None:
    """Let it clean `directory` as /tmp, with everything there old enough."""
    subprocess.run(["systemd-tmpfiles", "--clean", "-"], input=f"e {directory} - - - 0\n", text=True, check=True)
