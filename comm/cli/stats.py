"""`resilient-comm stats`: how sparse gradients are, and what each scheme would make of them."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from torch import Tensor

from ..errors import CommError, FileError
from ..measure.gradient_stats import GradientStats, gradient_stats
from ..recorder import read_gradients

_NAME: Final = re.compile(r"rank(\d+)-step(\d+)\.pt")
_COLUMNS: Final = (
    "gradient",
    "elements",
    "density",
    "of rows",
    "overlap",
    "densification",
    "skew",
    "push",
    "pull",
    "Zen chooses",
    "of dense",
)


@click.command()
@click.argument("paths", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--servers", type=click.IntRange(2), help="Parts for skew and imbalance; default: as many as ranks.")
@click.option(
    "--least-elements", type=click.IntRange(1), default=1 << 14, show_default=True, help="Leave smaller gradients out."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: gradient, step, all metrics.")
def stats(paths: tuple[Path, ...], servers: int | None, least_elements: int, as_json: bool) -> None:
    """Show the sparsity of gradients, and which way Zen would sum them.

    PATHS: the directory that a GradientRecorder has written in a training job; or files of torch.save, one for each
    rank, all of the same step. Numbers are means over the steps. "push" and "pull" are the imbalance of Zen; that of
    plain parameter servers is the skew.
    """
    try:
        steps = _steps(paths)
        found = {
            name: {step: gradient_stats(gradients, servers=servers) for step, gradients in by_step.items()}
            for name, by_step in _by_name(steps).items()
            if next(iter(by_step.values()))[0].numel() >= least_elements
        }
    except CommError as error:
        raise click.UsageError(str(error)) from error
    if not found:
        raise click.UsageError(f"no gradient has {least_elements} elements; lower --least-elements")
    if as_json:
        document = {name: {step: asdict(each) for step, each in by_step.items()} for name, by_step in found.items()}
        click.echo(json.dumps(document))
        return
    rows = [_COLUMNS, *(_row(name, list(by_step.values())) for name, by_step in found.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        first, *others = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join([first, *others]))


def _steps(paths: Sequence[Path]) -> dict[int, list[dict[str, Tensor]]]:
    """Return step → gradients of each rank."""
    files = [path for path in paths if path.is_file()]
    found: dict[int, dict[int, dict[str, Tensor]]] = defaultdict(dict)
    for rank, path in enumerate(files):
        found[0][rank] = read_gradients(path)
    for directory in (path for path in paths if path.is_dir()):
        for path in sorted(directory.iterdir()):
            if (match := _NAME.fullmatch(path.name)) is not None:
                found[int(match[2])][int(match[1])] = read_gradients(path)
    if not found:
        raise FileError(
            f"no gradients in {', '.join(map(str, paths))}; name directories with rank<r>-step<n>.pt, or files"
        )
    counts = {step: sorted(ranks) for step, ranks in found.items()}
    if len({tuple(ranks) for ranks in counts.values()}) > 1:
        raise FileError(f"not every step has the same ranks: {counts}; name the directories of all hosts")
    return {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in sorted(found.items())}


def _by_name(steps: dict[int, list[dict[str, Tensor]]]) -> dict[str, dict[int, list[Tensor]]]:
    """Return name → step → the gradient of each rank."""
    names = next(iter(steps.values()))[0]
    found: dict[str, dict[int, list[Tensor]]] = {}
    for name, first in names.items():
        found[name] = {}
        for step, ranks in steps.items():
            if any(name not in rank or rank[name].shape != first.shape for rank in ranks):
                raise FileError(f"{name} is not in all files of step {step} with shape {list(first.shape)}")
            found[name][step] = [rank[name] for rank in ranks]
    return found


def _row(name: str, found: Sequence[GradientStats]) -> tuple[str, ...]:
    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    plan = found[-1].plan
    dense_bytes = found[-1].dense_bytes
    return (
        name,
        f"{found[0].elements:,}",
        f"{100 * mean(each.density for each in found):.2f} %",
        f"{100 * mean(each.row_density for each in found):.2f} %",
        f"{mean(each.overlap for each in found):.2f}",
        f"{mean(each.densification for each in found):.2f}",
        f"{mean(each.skewness for each in found):.2f}",
        f"{mean(each.push_imbalance for each in found):.3f}",
        f"{mean(each.pull_imbalance for each in found):.3f}",
        plan.route + (f", rows of {plan.width}" if plan.width > 1 else ""),
        f"{100 * plan.received_bytes / dense_bytes:.1f} %" if dense_bytes else "-",
    )
