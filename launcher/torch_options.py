"""What torch's parser takes, and torch's launcher would end at with a traceback or wait for in vain."""

import argparse
import math
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from torch.distributed import run as torchrun
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

_STREAMS = "0 to 3, or RANK:0 to RANK:3 with commas between several"


def refuse_unusable(args: argparse.Namespace) -> None:
    """Refuse the values of torch's own options that its launcher cannot use.

    Raises:
        click.BadParameter: One of them; the message names the option, the value and what is allowed.
    """
    for option, usable, allowed in (
        ("--nnodes", _is_range_of_hosts, "a number of hosts, or MIN:MAX"),
        ("--nproc-per-node", _is_number_of_workers, "a number of workers, or auto, cpu or gpu where there are GPUs"),
        ("--rdzv-conf", _parse_rendezvous_config, "KEY=VALUE, with commas between several"),
        ("--max-restarts", lambda number: number >= 0, "0 or more"),
        ("--monitor-interval", lambda seconds: 0 < seconds < math.inf, "a number of seconds above 0"),
        ("--redirects", Std.from_str, _STREAMS),
        ("--tee", Std.from_str, _STREAMS),
        ("--local-ranks-filter", _are_ranks, "ranks of this host, with commas between several"),
        ("--event-log-handler", get_logging_handler, "console, dynamic_rendezvous or null"),
        ("--local-addr", _is_address, "a name or an address of this host"),
        ("--log-dir", partial(_is_for_logs, args.logs_specs), "a directory that you may write to"),
    ):
        _refuse(option, getattr(args, option.removeprefix("--").replace("-", "_")), usable, allowed)


def _refuse(option: str, value: Any, usable: Callable[[Any], object], allowed: str) -> None:
    """Refuse `value` where `usable` raises or returns False."""
    try:
        refused, why = value is not None and usable(value) is False, ""
    except OSError as error:
        refused, why = True, f": {error.strerror}"
    except (AssertionError, LookupError, RuntimeError, ValueError):
        refused, why = True, ""
    if refused:
        raise click.BadParameter(f"{value!r} must be {allowed}{why}", param_hint=option)


def _is_range_of_hosts(nnodes: str) -> bool:
    fewest, most = torchrun.parse_min_max_nnodes(nnodes)
    return bool(0 < fewest <= most)


def _are_ranks(ranks: str) -> object:
    # One that this host does not have shows nothing.
    return not ranks or list(map(int, ranks.split(",")))


def _is_address(address: str) -> object:
    return not address or socket.getaddrinfo(address, None)


def _is_for_logs(logs_specs: str | None, path: str) -> bool:
    """Tell whether logs can be written to `path`, which is made: "" is a temporary directory, /dev/null is none."""
    # A plugin alone knows what it takes for a directory.
    if logs_specs is not None or path in ("", os.devnull):
        return True
    os.makedirs(path, exist_ok=True)
    return os.access(path, os.W_OK | os.X_OK)


def _is_number_of_workers(nproc_per_node: str) -> bool:
    return int(torchrun.determine_local_world_size(nproc_per_node)) > 0
