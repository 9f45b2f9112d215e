"""The job of torchrun that a command runs in as a rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
import torch
import torch.distributed as dist


def from_environment(name: str, *, minimum: int = 0, default: int | None = None) -> int:
    """Return an integer that torchrun sets in the environment.

    Raises:
        click.UsageError: It is not there and has no default, or is no such integer.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) < minimum:
        found = "is not set" if text is None else f"is {text!r}"
        raise click.UsageError(
            f"{name} {found} in the environment, not an integer of at least {minimum}; start the command with torchrun"
        )
    return int(text)


@contextmanager
def joined_job() -> Iterator[torch.device]:
    """Be one of the job's ranks in torch's default process group: NCCL and a GPU each, or Gloo where there is none.

    Raises:
        click.UsageError: The environment is not that of a rank.
        click.ClickException: The ranks do not come together.
    """
    rank, ranks = from_environment("RANK"), from_environment("WORLD_SIZE", minimum=1)
    if rank >= ranks:
        raise click.UsageError(
            f"RANK is {rank} and WORLD_SIZE {ranks}: ranks are below it; start each rank with torchrun"
        )
    port = from_environment("MASTER_PORT", minimum=1)
    if not (address := os.environ.get("MASTER_ADDR")):
        raise click.UsageError("MASTER_ADDR is not set in the environment; start the command with torchrun")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", from_environment("LOCAL_RANK", default=0))
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except dist.DistError as error:
        raise click.ClickException(f"rank {rank} finds no others at {address}:{port}: {error}") from error
    try:
        yield device
    finally:
        dist.destroy_process_group()
