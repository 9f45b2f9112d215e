"""A host that `resilientctl doctor` looks at, and what it says."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from launchers import run_ctl


class SomeHost(Protocol):
    """Where a daemon of a test is."""

    run_dir: Path
    shm_dir: Path


class Report:
    """What one call of the doctor has said."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        self.code = done.returncode
        answer = json.loads(done.stdout)
        self.findings: list[dict[str, Any]] = answer["findings"]
        assert all(bool(found["remedy"]) == (found["level"] != "ok") for found in self.findings), self.findings
        assert (answer["failed"] > 0) == (self.code == 1)

    def of(self, check: str) -> list[dict[str, Any]]:
        return [found for found in self.findings if found["check"] == check]

    def says(self, check: str, level: str, *, found: str, remedy: str = "") -> None:
        """Assert that one finding of the check has this level and these words in it."""
        fitting = [
            each
            for each in self.of(check)
            if each["level"] == level and found in each["found"] and remedy in each["remedy"]
        ]
        assert fitting, self.of(check) or self.findings


class Patient:
    """A host: its directories, and the doctor that looks at it."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "run"
        self.shm_dir = Path("/dev/shm") / f"rr-test-{os.getpid()}-{root.name}"

    def doctor(self, *arguments: str, prefix: Sequence[str] = (), **env: str) -> Report:
        command = ["--run-dir", str(self.run_dir), "--shm-dir", str(self.shm_dir), "doctor", "--json", *arguments]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RESILIENT_")}
        return Report(run_ctl(command, {**inherited, **env}, prefix))


def patient_of(host: SomeHost, root: Path) -> Patient:
    made = Patient(root)
    made.run_dir, made.shm_dir = host.run_dir, host.shm_dir
    return made
