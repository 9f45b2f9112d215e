"""How sparse are the gradients of a training job, and which way would Zen sum them?

In the job, on every rank, under DDP or not:

    recorder = GradientRecorder(model, "gradients")
    ...  # in each step, after backward:
    recorder.step()

Then, with the directories of all hosts:

    python benchmarks/gradient_stats.py gradients
"""

import json
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
import sparsity
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from resilient_run.comm.errors import CommError, FileError
from resilient_run.comm.zen.partition import Balanced
from resilient_run.comm.zen.plan import Rows, decide
from resilient_run.comm.zen.sparse import row_width

_NAME: Final = re.compile(r"rank(\d+)-step(\d+)\.pt")
_ROWS: Final = (16, 64, 256)
# Key of a mean → head of its column, and form.
_MEANS: Final = {
    "density": ("density", "{:.2%}"),
    "row_density": ("of rows", "{:.2%}"),
    "overlap": ("overlap", "{:.2f}"),
    "densification": ("densification", "{:.2f}"),
    "skewness": ("skew", "{:.2f}"),
    "push_imbalance": ("push", "{:.3f}"),
    "pull_imbalance": ("pull", "{:.3f}"),
}


_SPARSE_BELOW = 1 / 4


class GradientRecorder:
    """Writes `rank<r>-step<n>.pt` for the first steps: a dict of name → gradient, which `stats` reads.

    It hooks on the parameters, so under DDP it sees what this rank computed, not the average.

    Args:
        model: Bare, or in DistributedDataParallel.
        directory: Made if it is not there; one for all ranks, or one on each host.
        steps: How many to keep; after them it does nothing.
        rank: Part of the file names; by default the environment's RANK, or 0.
    """

    def __init__(self, model: nn.Module, directory: Path, *, steps: int = 3, rank: int | None = None) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._steps = steps
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._step = 0
        self._found: dict[str, Tensor] = {}
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._handles = [self._watch(name, parameter) for name, parameter in inner.named_parameters()]

    def step(self) -> None:
        """Record that a step is done: writes what its backward passes have left in the gradients."""
        if self._step == self._steps:
            return
        self._step += 1
        torch.save(self._found, self._directory / f"rank{self._rank}-step{self._step}.pt")
        self._found = {}
        if self._step == self._steps:
            for handle in self._handles:
                handle.remove()

    def _watch(self, name: str, parameter: Tensor) -> RemovableHandle:
        def keep(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            gradient = gradient.detach().cpu()
            if gradient.is_sparse:
                self._found[name] = gradient.coalesce().clone()
            elif gradient.dim() and sparsity.density(gradient) < _SPARSE_BELOW:
                self._found[name] = gradient.to_sparse(1)
            else:
                self._found[name] = gradient.clone()

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
        return handle


def read_gradients(path: Path) -> dict[str, Tensor]:
    """Return name → gradient of a file of `torch.save`: a dict of tensors, or one tensor, which is named "gradient".

    Raises:
        FileError: It is none, or holds something else.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise FileError(f"{path} cannot be read as tensors; save a dict of them with torch.save: {error}") from error
    gradients = {"gradient": found} if isinstance(found, Tensor) else found
    if not isinstance(gradients, dict) or not gradients:
        raise FileError(f"{path} holds a {type(found).__name__}; save a dict of tensors with torch.save")
    for name, gradient in gradients.items():
        if not isinstance(name, str) or not isinstance(gradient, Tensor) or not gradient.is_floating_point():
            raise FileError(f"{path}: {name!r} is not a gradient; save a dict of floating-point tensors")
    return gradients


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
        found = {
            name: {step: metrics(gradients, servers) for step, gradients in by_step.items()}
            for name, by_step in _by_name(_steps(paths)).items()
            if next(iter(by_step.values()))[0].numel() >= least_elements
        }
    except CommError as error:
        raise click.UsageError(str(error)) from error
    if not found:
        raise click.UsageError(f"no gradient has {least_elements} elements; lower --least-elements")
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = [("gradient", "elements", *(head for head, _ in _MEANS.values()), "Zen chooses", "of dense")]
    rows += [_row(name, list(by_step.values())) for name, by_step in found.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        click.echo("  ".join([first.ljust(widths[0]), *cells]))


def metrics(gradients: Sequence[Tensor], servers: int | None = None) -> dict[str, Any]:
    """Return the metrics of one step of a gradient, given for each rank, and what Zen would do.

    Shares and ratios are means over ranks, `overlap` over neighbouring ones, 1 for a single rank; `densification` is
    γⁿ, and `dense_bytes` what a rank receives in an all-reduce (fp32).

    Args:
        gradients: At least one, all of one shape.
        servers: Parts for skew and imbalance; by default as many as ranks, but at least 2.
    """
    ranks, first = len(gradients), gradients[0]
    parts, elements = max(2, ranks) if servers is None else servers, first.numel()
    index_sets = [sparsity.nonzero(gradient) for gradient in gradients]
    servers_of = Balanced(length=elements, servers=parts).spread.owners
    density = fmean(indices.numel() for indices in index_sets) / max(1, elements)
    per_row = elements // first.shape[0] if first.dim() > 1 and first.shape[0] else 1
    plan = decide(_profile(gradients), ranks=ranks, numel=elements, item_bytes=4)
    return {
        "elements": elements,
        "ranks": ranks,
        "servers": parts,
        "density": density,
        "row_density": fmean(sparsity.densities([gradient], per_row)[0] for gradient in gradients),
        "overlap": fmean([sparsity.overlap_ratio(*pair) for pair in pairwise(gradients)] or [1.0]),
        "densification": sparsity.densities(gradients)[-1] / density if density else 1.0,
        "skewness": fmean(sparsity.skewness(gradient, parts) for gradient in gradients),
        "push_imbalance": sparsity.push_imbalance(index_sets, parts, servers_of),
        "pull_imbalance": sparsity.pull_imbalance(index_sets, parts, servers_of),
        "dense_bytes": 2 * (ranks - 1) / ranks * 4.0 * elements,
        "plan": asdict(plan),
    }


def _profile(gradients: Sequence[Tensor]) -> list[Rows]:
    """Return what Zen would count; recursive doubling as the first ranks see it."""
    numel, rounds = gradients[0].numel(), len(gradients).bit_length() - 1
    found = []
    for width in sorted({1, *(row_width(gradients[0].shape, rows) for rows in _ROWS)}):
        length = numel // width
        counts = [round(share * length) for share in sparsity.densities(gradients, width)]
        own = max(sparsity.nonzero(gradient, width).numel() for gradient in gradients)
        sent = tuple(counts[(1 << index) - 1] for index in range(rounds))
        found.append(Rows(width=width, own=own, sent=sent, summed=counts[-1]))
    return found


def _steps(paths: Sequence[Path]) -> dict[int, list[dict[str, Tensor]]]:
    """Return step → gradients of each rank."""
    found: dict[int, dict[int, dict[str, Tensor]]] = defaultdict(dict)
    for rank, path in enumerate(path for path in paths if path.is_file()):
        found[0][rank] = read_gradients(path)
    for path in (path for folder in paths if folder.is_dir() for path in folder.iterdir()):
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
    found: dict[str, dict[int, list[Tensor]]] = defaultdict(dict)
    for name, first in next(iter(steps.values()))[0].items():
        for step, ranks in steps.items():
            if any(name not in rank or rank[name].shape != first.shape for rank in ranks):
                raise FileError(f"{name} is not in all files of step {step} with shape {list(first.shape)}")
            found[name][step] = [rank[name] for rank in ranks]
    return found


def _row(name: str, found: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    means = [form.format(fmean(each[key] for each in found)) for key, (_, form) in _MEANS.items()]
    plan, dense_bytes = found[-1]["plan"], found[-1]["dense_bytes"]
    way = plan["route"] + (f", rows of {plan['width']}" if plan["width"] > 1 else "")
    share = f"{plan['received_bytes'] / dense_bytes:.1%}" if dense_bytes else "-"
    return name, f"{found[0]['elements']:,}", *means, way, share


if __name__ == "__main__":
    stats()
