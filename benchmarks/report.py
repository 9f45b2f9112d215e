"""What every benchmark shares: medians with spread, a table on stdout and the same numbers as JSON."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self


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


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows `--json FILE`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results here as well")
    return made


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


def write_json(path: Path | None, *, question: str, parameters: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the results with the circumstances they were measured in; nothing when `path` is None."""
    if path is None:
        return
    document = {
        "question": question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "resilient_run": version("resilient-run"),
        "parameters": parameters,
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=asdict) + "\n")
