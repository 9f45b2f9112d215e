"""A zygote that is begun together with the launcher, so that both import torch at the same time.

The command line is only guessed at here, because torch's parser comes with torch. The guess costs nothing but time if
it is wrong: `WorkerStarter.expect` compares it with what the agent will start.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from .warm import WorkerStarter

_NO_GUESS = frozenset(
    {"-h", "--help", "-m", "--module", "--no-python", "--rr-off", "--rr-no-warm-workers", "--rr-version"}
)
_NO_GUESS_VARIABLES = frozenset({"PYTHON_EXEC", "RESILIENT_OFF", "RESILIENT_WARM_WORKERS"})
_SECRETS = frozenset({"RESILIENT_KEY", "RESILIENT_ETCD_PASSWORD"})

_begun: WorkerStarter | None = None


@contextmanager
def begun(arguments: Sequence[str]) -> Iterator[None]:
    """Begin the zygote of a launcher with these arguments, if they can be guessed at; end it if nobody takes it."""
    global _begun
    guess = guessed(arguments, os.environ)
    if guess is not None:
        command, env, preload = guess
        _begun = WorkerStarter(warm=True, preload=preload)
        _begun.expect(command, env, is_guess=True)
    try:
        yield
    finally:
        take(enabled=False, preload=None)


def take(*, enabled: bool, preload: Sequence[str] | None) -> WorkerStarter | None:
    """Return, once, the starter whose zygote was begun if it is what is asked for now, and else end it."""
    global _begun
    starter, _begun = _begun, None
    if starter is None:
        return None
    if enabled and starter.preload == preload:
        return starter
    starter.close()
    return None


def guessed(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str], tuple[str, ...] | None] | None:
    """Return the workers' command, environment and modules to import beforehand, None where a guess may be wrong."""
    script = next(
        (index for index, text in enumerate(arguments) if text.endswith(".py") and os.path.isfile(text)), None
    )
    if script is None or "${local_rank}" in " ".join(arguments):
        return None
    options = [text.replace("_", "-") for text in arguments[:script]]
    if not _NO_GUESS.isdisjoint(options) or not _NO_GUESS_VARIABLES.isdisjoint(environ):
        return None
    env = {name: value for name, value in environ.items() if name not in _SECRETS}
    # What torch's launcher and agent add.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if _value(options, "--nproc-per-node", environ.get("PET_NPROC_PER_NODE", "1")) != "1":
        env.setdefault("OMP_NUM_THREADS", "1")
    modules = _value(arguments[:script], "--rr-preload", environ.get("RESILIENT_PRELOAD", ""))
    named = () if modules in ("", "none") else tuple(name.strip() for name in modules.split(","))
    preload = None if modules == "learn" else named
    return (sys.executable, "-u", *arguments[script:]), env, preload


def _value(options: Sequence[str], name: str, default: str) -> str:
    value = default
    for index, text in enumerate(options):
        if text == name and index + 1 < len(options):
            value = options[index + 1]
        elif text.startswith(f"{name}="):
            value = text.partition("=")[2]
    return value
