"""`resilient-comm advise`: whether another sum of gradients pays in a user's own job, how much, and what to write."""

import json
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch.distributed as dist

from ..errors import CommError
from ..trial.advice import Turns, advice, recommended
from ..trial.trial import Trial
from .job import from_environment


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="How long to measure, about."
)
@click.option(
    "--ranks-per-host", type=click.IntRange(1), help="Consecutive ranks of a host; as `register` finds it if not given."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def advise(
    module: bool, seconds: float, ranks_per_host: int | None, as_json: bool, script: str, args: tuple[str, ...]
) -> None:
    """Report whether another sum of gradients pays in a training job, how much, and what to write for it.

    Run it as the job is run: `resilient-run … --no-python resilient-comm advise train.py --its-own args`. The script
    runs on every rank as it is, but the gradients of its DistributedDataParallel are summed in one way after the
    other, and it is ended after about a minute. The model that it trains in that time is useless, so do not let
    it overwrite checkpoints; a Checkpointer of resilient-run makes none.
    """
    if "RANK" not in os.environ:
        raise click.UsageError("advise runs on the ranks of a job: resilient-run … --no-python resilient-comm advise …")
    if not module and not Path(script).is_file():
        raise click.BadParameter(f"{script}: there is no such file; name the training script", param_hint="SCRIPT")
    first = from_environment("RANK") == 0
    os.environ.pop("RESILIENT_SOCKET", None)
    # It would say that the job was not started by resilient-run, and how to do that.
    warnings.filterwarnings("ignore", message="no checkpoints are kept", category=RuntimeWarning)
    trial = Trial(seconds=seconds, ranks_per_host=ranks_per_host)
    try:
        with trial.watching():
            _run(script, args, module=module)
    except SystemExit as ended:
        if ended.code:
            raise
    except CommError as error:
        raise click.ClickException(str(error)) from error
    if first:
        _report(trial, as_json=as_json)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not trial.finished:
        sys.exit(1)


def _run(script: str, args: Sequence[str], *, module: bool) -> None:
    """Run the script as `python` would."""
    sys.argv = [script, *args]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


def _report(trial: Trial, *, as_json: bool) -> None:
    if not trial.finished:
        why = "few steps were trained" if trial.taken else "no or few steps with DistributedDataParallel were trained"
        click.echo(f"Error: {why}, and the script ended; let it train longer, or lower --seconds", err=True)
        return
    known = {name: trial.method(name) for name in trial.taken}
    chosen = recommended(trial.taken, trial.exact)
    text = advice(trial.taken, known)
    if as_json:
        found: dict[str, Any] = {
            "step_s": trial.taken,
            "left_out": trial.left_out,
            "recommended": chosen,
            "write": known[chosen].write if chosen is not None else None,
            "advice": text,
        }
        click.echo(json.dumps(found))
        return
    width = max(map(len, trial.taken))
    for name, each in sorted(trial.taken.items(), key=lambda item: median(item[1])):
        click.echo(f"{name:<{width}}  {Turns.of(each)}")
    for name, why in trial.left_out.items():
        click.echo(f"{name:<{width}}  left out: {why}")
    click.echo(f"\n{text}")
