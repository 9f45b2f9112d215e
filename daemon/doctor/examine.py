"""Checks that look at one thing each, beside each other, and none of which is waited for longer than it may take."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check says of one thing.

    Attributes:
        check: Name of what was looked at.
        level: `OK`, `WARN` (a run works, and less well) or `FAIL` (it does not work, or protects nothing).
        found: What there is, with its values.
        remedy: What to do about it, "" where nothing is wrong.
    """

    check: str
    level: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One look at the host.

    Attributes:
        name: What it looks at; findings of parts of that have names of their own.
        look: Returns what it finds. It may block, and is left alone then.
        within_s: How long it may take.
        when_late: What to do about the one thing that keeps it waiting.
    """

    name: str
    look: Callable[[], Iterable[Finding]]
    within_s: float = 4.0
    when_late: str


def ok(check: str, found: str) -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding(check=check, level=OK, found=found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Return the finding that a run works less well than it could."""
    return Finding(check=check, level=WARN, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Return the finding that a run does not work, or protects nothing."""
    return Finding(check=check, level=FAIL, found=found, remedy=remedy)


def examine(checks: Sequence[Check]) -> list[Finding]:
    """Return what the checks find, in their order, not later than the most patient of them allows."""
    looks = [_Look(check) for check in checks]
    began_s = time.monotonic()
    return [finding for look in looks for finding in look.findings(began_s)]


class _Look:
    """A check that is under way in a thread; nobody waits for the thread at the end of the process."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, name=check.name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._found = [fail(check.name, f"not checked: {error}", "raise the limit of processes (ulimit -u)")]

    def findings(self, began_s: float) -> list[Finding]:
        if self._found is None:
            self._thread.join(max(0.0, began_s + self._check.within_s - time.monotonic()))
        if self._found is None:
            return [fail(self._check.name, f"no answer within {self._check.within_s:g} s", self._check.when_late)]
        return self._found

    def _run(self) -> None:
        try:
            self._found = list(self._check.look())
        except Exception as error:  # noqa: BLE001 - the boundary between checks
            found = f"could not be looked at: {type(error).__name__}: {error}"
            self._found = [fail(self._check.name, found, "this is a bug of the doctor: please report it")]
