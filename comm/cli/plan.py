"""`resilient-comm plan`: what to do with the gradients of a model on a cluster."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from ..cupcake.cupcake import PLANNERS
from ..errors import FileError
from ..espresso.espresso import ESPRESSO_PLANNERS, espresso_plan
from ..espresso.fused import alone_or_dense, fused_plan
from ..espresso.fusion_cluster import cluster_plan
from ..plan.cluster import read_cluster
from ..plan.constraints import CONSTRAINTS, allowed
from ..plan.fields import LARGEST, is_text, read_object
from ..plan.model import Model, Tensor, fused, neighbours, read_model
from ..plan.plan import Plan

_FUSED = "espresso-fused"
_WITH_BUCKETS = {"espresso": alone_or_dense, _FUSED: fused_plan}
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option(
    "--planner",
    type=click.Choice([*PLANNERS, *ESPRESSO_PLANNERS, _FUSED]),
    default="cupcake",
    show_default=True,
    help="The planner; those named espresso choose a path of the tree for each tensor.",
)
@click.option("--model", "model_path", type=_FILE, required=True, help="JSON file with the gradients of the model.")
@click.option("--system", "system_path", type=_FILE, required=True, help="JSON file with the costs of the cluster.")
@click.option(
    "--flops-per-s",
    type=float,
    help="The model file has operations (bwd_flop) in place of backward_s: how many the device does in a second.",
)
@click.option("--compressor", help="The compressor that the costs are for; the plan file keeps its name.")
@click.option(
    "--constraint",
    "constraints",
    type=click.Choice(list(CONSTRAINTS)),
    multiple=True,
    help="Only paths of the tree that meet this (espresso planners); may be given several times.",
)
@click.option("--out", type=_FILE, help="Write the plan file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the same as in the plan file.")
def plan(
    planner: str,
    model_path: Path,
    system_path: Path,
    flops_per_s: float | None,
    compressor: str | None,
    constraints: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Plan how the gradients of a model are fused, compressed and communicated, and predict an iteration.

    Times in the answer are in seconds. When compression does not pay the plan says so: compress is false.
    """
    if compressor is not None and not is_text(compressor):
        raise click.BadParameter("write its name, as the plan file is to have it", param_hint="--compressor")
    try:
        model = read_model(model_path, flops_per_s=flops_per_s)
        groups = neighbours(model)
        found = _plan(fused(model, groups), system_path, planner, compressor, constraints)
        if len(groups) < len(model.tensors):
            found = _apart(found, model, groups, read_object(system_path).number("forward_s", "seconds"))
        times_s = {found.planner: found.iteration_s, **found.baselines_s}
        if too_long := [name for name, time_s in times_s.items() if not time_s <= LARGEST]:
            raise FileError(
                f"{system_path}: an iteration of {times_s[too_long[0]]:.3g} s ({too_long[0]}): "
                f"write costs in seconds and bytes"
            )
    except (FileError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    try:
        if out is not None:
            found.write(out)
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}: name a file that can be written") from error
    click.echo(json.dumps(found.document()) if as_json else _text(found))


def _apart(found: Plan, model: Model, together: Sequence[Sequence[Tensor]], forward_s: float) -> Plan:
    """Return the plan for all tensors of a model that was planned for groups of neighbours."""
    names = {group[0].name: tuple(tensor.name for tensor in group) for group in together}
    return replace(
        found,
        groups=tuple(
            replace(group, tensors=tuple(name for first in group.tensors for name in names[first]))
            for group in found.groups
        ),
        # Others may fuse otherwise.
        bound_s=min(found.bound_s, forward_s + model.backward_s),
        reason=f"{len(model.tensors)} tensors were taken as {len(together)}; {found.reason}",
    )


def _plan(model: Model, system_path: Path, planner: str, compressor: str | None, constraints: tuple[str, ...]) -> Plan:
    cluster = read_cluster(system_path, compressor)
    if planner in (*ESPRESSO_PLANNERS, _FUSED):
        if planner in _WITH_BUCKETS:
            return _WITH_BUCKETS[planner](model, cluster, options=allowed(constraints))
        return espresso_plan(model, cluster, planner=planner, options=allowed(constraints))
    if constraints:
        raise ValueError(f"--constraint is for the espresso planners: leave it out, or choose another than {planner}")
    return cluster_plan(model, cluster, planner=planner)


def _text(found: Plan) -> str:
    times_s = {found.planner: found.iteration_s, **found.baselines_s, "bound": found.bound_s}
    width = max(map(len, times_s))
    # Rounded up: what is printed is proven.
    within = f"within {math.ceil(found.gap * 1e4) / 100:g} % of the optimum"
    lines = [f"{found.model}: {found.reason}", f"planned in {found.planning_s * 1e3:.1f} ms; {within}", ""]
    lines.append(f"{'strategy':<{width}}  {'iteration ms':>12}  {'to this plan':>12}")
    for name, time_s in sorted(times_s.items(), key=lambda pair: pair[1]):
        relation = f"{time_s / found.iteration_s - 1:+.1%}" if found.iteration_s else "-"
        lines.append(f"{name:<{width}}  {time_s * 1e3:>12.3f}  {relation:>12}")
    lines += ["", f"{'group':>5}  {'tensors':>7}  {'option':<10}  first … last"]
    for number, group in enumerate(found.groups):
        names = group.tensors[0] if len(group.tensors) == 1 else f"{group.tensors[0]} … {group.tensors[-1]}"
        lines.append(f"{number:>5}  {len(group.tensors):>7}  {group.option:<10}  {names}")
    return "\n".join(lines)
