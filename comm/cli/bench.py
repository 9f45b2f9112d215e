"""`resilient-comm bench`: how long each scheme takes, here, for gradients of given sizes and densities."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import click

from ..errors import CommError
from ..schemes import SCHEMES
from .share import Share

_TIMEOUT = timedelta(seconds=300)
_WARM_UP = 4  # memory is allocated, and Zen plans after three
_Rows = list[dict[str, Any]]
_Measured = Callable[[Any], _Rows]
"""What a rank does with its transport."""
_SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}


def _elements(text: str) -> int:
    """Return the elements of a gradient: 1000000 or 1M."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    try:
        size = round(float(text if factor == 1 else text[:-1]) * factor)
    except ValueError:
        size = 0
    if not 0 < size < 2**31:
        raise click.BadParameter(f"{text!r} is not a number of elements below 2^31, as 1000000 or 1M")
    return size


@click.command()
@click.option("--scheme", "schemes", type=click.Choice([*SCHEMES]), multiple=True, help="Repeat it; all if not given.")
@click.option(
    "--size",
    "sizes",
    type=_elements,
    metavar="ELEMENTS",
    multiple=True,
    default=("1M",),
    show_default=True,
    help="Elements.",
)
@click.option(
    "--density",
    "densities",
    type=Share(),
    multiple=True,
    default=(0.01,),
    show_default=True,
    help="Share of the elements that are not zero, or that a scheme selects.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    multiple=True,
    default=(4,),
    show_default=True,
    help="Ranks over loopback; inside torchrun, its ranks are used.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=3, show_default=True, help="Those that are measured; four go before."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    schemes: tuple[str, ...],
    sizes: tuple[int, ...],
    densities: tuple[float, ...],
    workers: tuple[int, ...],
    steps: int,
    as_json: bool,
) -> None:
    """Time schemes on made-up gradients: whole steps, their bytes and rounds.

    Ranks are threads that talk over loopback with Gloo, or those of a job (`torchrun … --no-python resilient-comm
    bench`), with NCCL on GPUs.

    All times are of the slowest rank.
    """
    cases = [(size, density) for size in sizes for density in densities]
    measured = partial(_measured, names=schemes or tuple(SCHEMES), cases=cases, steps=steps)
    try:
        if "RANK" in os.environ:
            rows = _in_job(measured)
        else:
            rows = [row for count in workers for row in _on_loopback(count, measured)]
        if not rows:
            return
    except CommError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps({"measured": rows}) if as_json else _text(rows))


def _on_loopback(count: int, measured: _Measured) -> _Rows:
    from torch._C._distributed_c10d import HashStore
    from torch.distributed import ProcessGroupGloo

    from ..net.transport import Transport

    store = HashStore()

    def rank(number: int) -> _Rows:
        group: Any = ProcessGroupGloo(store, number, count, _TIMEOUT)
        return measured(Transport.over(group))

    with ThreadPoolExecutor(count) as pool:
        return next(iter(pool.map(rank, range(count))))


def _in_job(measured: _Measured) -> _Rows:
    """Return what was measured on rank 0, nothing on the others."""
    import torch.distributed as dist

    from ..net.transport import Transport
    from .job import joined_job

    with joined_job(_TIMEOUT) as device:
        group = dist.group.WORLD
        assert group is not None
        rows = measured(Transport.over(group, device))
        return rows if dist.get_rank() == 0 else []


def _measured(transport: Any, *, names: Sequence[str], cases: Sequence[tuple[int, float]], steps: int) -> _Rows:
    from ..measure.timing import example_gradient, inputs_for, measure, scheme_at

    rows = []
    for numel, density in cases:
        gradients = [example_gradient(numel, transport.rank, step).to(transport.device) for step in range(steps)]
        all_steps = [gradients[step % steps] for step in range(_WARM_UP + steps)]
        for name in names:
            scheme = scheme_at(name, transport, density)
            inputs = inputs_for(scheme, all_steps, density)
            found = measure(scheme, transport, inputs, warm_up=_WARM_UP)
            rows.append(
                {
                    "workers": transport.size,
                    "numel": numel,
                    "density": density,
                    "scheme": name,
                    "step_s": median(found.step_s),
                    "received_bytes": found.received_bytes,
                    "header_bytes": found.header_bytes,
                    "rounds": found.rounds,
                }
            )
    return rows


def _text(rows: _Rows) -> str:
    width = max(len(row["scheme"]) for row in rows)
    lines = []
    for case in dict.fromkeys((row["workers"], row["numel"], row["density"]) for row in rows):
        here = [row for row in rows if (row["workers"], row["numel"], row["density"]) == case]
        lines += ["", f"{case[0]} workers, {case[1]} elements, density {case[2]:g}"]
        lines.append(f"{'scheme':<{width}}  {'step ms':>9}  {'received MB':>11}  {'rounds':>6}")
        for row in sorted(here, key=lambda row: row["step_s"]):
            lines.append(
                f"{row['scheme']:<{width}}  {row['step_s'] * 1e3:>9.2f}  {row['received_bytes'] / 1e6:>11.3f}  "
                f"{row['rounds']:>6}"
            )
    return "\n".join(lines[1:])
