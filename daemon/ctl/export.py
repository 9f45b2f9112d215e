"""`resilientctl export`: a step that memory or the persistent tier holds, as a checkpoint that plain PyTorch loads."""

from pathlib import Path
from typing import Any, Final, Literal

import click

from resilient_run.ckpt.convert.captures import Captures, of_slots
from resilient_run.ckpt.errors import CheckpointError, SlotError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.ckpt.format.slot import Slot

from ..base.settings import Settings
from ..tier.slots import published_slots
from ..tier.tier import Tier
from ..trust.secret import check_url
from .ask import ask

_REMEDY: Final = (
    "run this on a host that holds all ranks, its own and replicas (`resilientctl status` lists them), or export from "
    "the persistent tier (--from persist), which has every rank of what it published"
)

target_option = click.option(
    "--target",
    metavar="URL",
    envvar="RESILIENT_PERSIST",
    show_envvar=True,
    callback=check_url,
    help="The persistent tier. Default: what the run's daemon here uses.",
)


@click.command()
@click.option("--run-id", required=True, help="The run (--rdzv-id).")
@click.option("--step", type=click.IntRange(min=0), help="Default: the newest step that all ranks have.")
@click.option(
    "--from",
    "source",
    type=click.Choice(["memory", "persist"]),
    default="memory",
    show_default=True,
    help="The slots of this host, or the persistent tier.",
)
@target_option
@click.option("--to", type=click.Path(path_type=Path), required=True, help="Directory (dcp) or file (torch) to write.")
@click.option(
    "--format", "format_", type=click.Choice(["dcp", "torch"]), default="dcp", show_default=True, help="What to write."
)
@click.pass_obj
def export(
    settings: Settings,
    run_id: str,
    step: int | None,
    source: str,
    target: str | None,
    to: Path,
    format_: Literal["dcp", "torch"],
) -> None:
    """Write a held step as a DCP checkpoint or one torch.save file."""
    # Only this command needs torch.
    from resilient_run.ckpt.convert.export import export as write
    from resilient_run.ckpt.convert.export import is_free

    try:
        if not is_free(to):
            raise click.ClickException(
                f"{to} exists already, and is not an empty directory of yours; choose another --to"
            )
        if source == "memory":
            captures = _from_memory(job_of(settings, run_id), step)
        else:
            url = target or (job_of(settings, run_id).get("persist") or {}).get("target")
            if url is None:
                raise click.ClickException(f"run {run_id!r} has no persistent tier here; give --target")
            captures = published_slots(Tier(url, run_id, of_others=target is not None), step)
        write(captures, to, format_)
    except (CheckpointError, OSError) as error:
        raise click.ClickException(str(error)) from error
    generation, found = captures.pair
    click.echo(f"wrote step {found} (generation {generation}) of {len(captures.ranks)} ranks to {to}")


def job_of(settings: Settings, run_id: str) -> dict[str, Any]:
    """Return what the daemon of this host says of a run; it is a click error if there is none."""
    for job in ask(settings, "status")["jobs"]:
        if job["run_id"] == run_id:
            return dict(job)
    raise click.ClickException(f"the daemon of this host knows no run {run_id!r}; see `resilientctl status`")


def _from_memory(job: dict[str, Any], step: int | None) -> Captures:
    """Return what is in the slots of all ranks, which this host must hold; training may overwrite it at any moment."""
    held: dict[Pair, dict[int, Path]] = {}
    for slot in job["slots"]:
        if slot["step"] is not None:
            pair = Pair(slot["generation"], slot["step"])
            held.setdefault(pair, {})[slot["rank"]] = Path(job["directory"]) / slot["file"]
    fitting = sorted((pair for pair in held if step is None or pair[1] == step), reverse=True)
    if not fitting:
        wanted = "any step" if step is None else f"step {step}"
        others = f", but of steps {sorted({pair[1] for pair in held})}" if held else ""
        raise click.ClickException(f"this host has nothing of {wanted} of run {job['run_id']!r}{others}; {_REMEDY}")
    lacking = []
    for pair in fitting:
        slots = [Slot.open(path) for _, path in sorted(held[pair].items())]
        world_size = slots[0].header().world_size
        missing = sorted(set(range(world_size)) - held[pair].keys())
        if not missing:
            captures = of_slots(slots)
            if captures.pair != pair:
                raise SlotError(f"training has overwritten step {pair[1]}; try again")
            return captures
        lacking.append(f"rank(s) {missing} of {world_size} at step {pair[1]}")
    raise click.ClickException(f"this host does not hold {', nor '.join(lacking)}; {_REMEDY}")
