"""What every benchmark shares: medians with spread, a table on stdout and the same numbers as JSON."""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

from catalogue import digests_of_script, latest, name_of

NO_CONSTANTS: Final[Mapping[str, "Constant"]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Median and spread (10th to 90th percentile) of repeated measurements."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the summary of at least one value."""
        ordered = sorted(values)
        if len(ordered) == 1:
            return cls(median=ordered[0], p10=ordered[0], p90=ordered[0], count=1)
        deciles = statistics.quantiles(ordered, n=10, method="inclusive")
        return cls(median=statistics.median(ordered), p10=deciles[0], p90=deciles[-1], count=len(ordered))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.p10:{spec}}..{self.p90:{spec}})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A figure that was taken from another result, for a computation or a model.

    Attributes:
        value: What it was.
        result: The file that it is from, without folders.
        at: The keys below `results` there.
    """

    value: float
    result: str
    at: tuple[str, ...]

    def now(self, folder: Path) -> "Constant | None":
        """Return the same figure of the newest result of that name in a folder; None if there is none.

        Raises:
            KeyError: The newest result has no such figure.
        """
        path = latest(name_of(self.result), folder)
        return None if path is None else constant(path, *self.at)


def constant(path: Path, *at: str) -> Constant:
    """Read a figure of a result, by the keys below its `results`.

    Raises:
        KeyError: It has no such figure.
    """
    value = json.loads(path.read_text())["results"]
    for key in at:
        value = value[key]
    return Constant(value=value, result=path.name, at=at)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows `--json FILE`, for a script that is being run.

    When it is told to end, it unwinds as at Ctrl-C: what it started would stay behind otherwise.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
            signal.signal(number, _unwind)
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results here as well")
    return made


def _unwind(number: int, _: object) -> None:
    # Once: what is cleaned up now shall not be cut short by a second signal.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column flush left, the others flush right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    print(f"\n{title}")
    for row in (header, ["-" * width for width in widths], *rows):
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]))


def write_json(
    path: Path | None,
    *,
    question: str,
    parameters: dict[str, Any],
    results: dict[str, Any],
    constants: Mapping[str, Constant] = NO_CONSTANTS,
) -> None:
    """Write the results with the circumstances they were measured in; nothing when `path` is None.

    Args:
        path: The file.
        question: What was measured.
        parameters: Of the measurement.
        results: What it found.
        constants: What `results` depend on from other results. `reproduce.py --check` finds those that have changed.
    """
    if path is None:
        return
    script = getattr(sys.modules["__main__"], "__file__", None)
    document = {
        "question": question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "resilient_run": version("resilient-run"),
        "code": script and digests_of_script(Path(script)),
        "constants": dict(constants),
        "parameters": parameters,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
