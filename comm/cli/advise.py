"""`resilient-comm advise`: whether another sum of gradients pays in a user's own job, how much, and what to write."""

import json
import os
import runpy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import click
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import CommError
from ..hook import make_tried
from ..runtime.gradient_hook import synchronize
from ..trial.advice import NOTHING, OWN, Method, Turns, advice, methods
from ..trial.trial import Trial
from ..trial.tried import TriedHook
from .job import from_environment


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option("--seconds", type=click.IntRange(1), default=60, show_default=True, help="How long to measure, about.")
@click.option(
    "--ranks-per-host", type=click.IntRange(1), help="Consecutive ranks of a host; as `register` finds it if not given."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def advise(
    module: bool, seconds: int, ranks_per_host: int | None, as_json: bool, script: str, args: tuple[str, ...]
) -> None:
    """Report whether another sum of gradients pays in a training job, how much, and what to write for it.

    Run it as the job is run: `resilient-run … --no-python resilient-comm advise train.py --its-own args`. The script
    runs unchanged for about a minute, without checkpoints, while the gradients of its DistributedDataParallel are also
    summed in other ways.
    """
    if "RANK" not in os.environ:
        raise click.UsageError("advise runs on the ranks of a job: resilient-run … --no-python resilient-comm advise …")
    if not module and not Path(script).is_file():
        raise click.BadParameter(f"{script}: there is no such file; name the training script", param_hint="SCRIPT")
    first = from_environment("RANK") == 0
    os.environ.pop("RESILIENT_SOCKET", None)
    # It would say that the job was not started by resilient-run, and how to do that.
    warnings.filterwarnings("ignore", message="no checkpoints are kept", category=RuntimeWarning)
    tried = [Method(name=NOTHING, write="", exact=True), *methods(ranks_per_host)]
    trial = Trial(tried, seconds=seconds)
    try:
        with _watching(trial, tried, ranks_per_host):
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


class _Enough(BaseException):
    """Ends the script: all is measured. No `except Exception` of the script is to catch it."""


@contextmanager
def _watching(trial: Trial, tried: list[Method], ranks_per_host: int | None) -> Iterator[None]:
    """Try methods in every DDP module that is made in the block, which is left when all is measured.

    An end of the script by `os._exit` is one by `sys.exit` here: there is something to say after it.
    """
    construct, leave, pid = DistributedDataParallel.__init__, os._exit, os.getpid()
    hooks: list[TriedHook] = []

    def before_forward(*_: object) -> None:
        if torch.is_grad_enabled():
            hooks[0].advance(trial)
        if trial.is_over:
            raise _Enough

    def make(module: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(module, *args, **kwargs)
        made = make_tried(module, trial, tried, ranks_per_host=ranks_per_host, leads=not hooks)
        module.register_comm_hook(made, synchronize)
        hooks.append(made)

        def take_own(state: object, hook: Callable[..., Any]) -> None:
            made.own = partial(hook, state)
            trial.base = trial.method = OWN

        # torch refuses a second hook; the script's is one of the methods instead.
        module.register_comm_hook = take_own  # type: ignore[method-assign]
        if len(hooks) == 1:
            module.register_forward_pre_hook(before_forward)

    def end(status: int) -> NoReturn:
        if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
            leave(status)  # a process or thread of the script's
        raise SystemExit(status)

    DistributedDataParallel.__init__ = make  # type: ignore[method-assign, assignment]
    os._exit = end
    try:
        yield
    except _Enough:
        pass
    finally:
        DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]
        os._exit = leave
        for hook in hooks:
            hook.close()


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
    known, chosen = trial.known, trial.recommended
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
