"""`resilient-comm profile`: what compression and communication cost on a job's own ranks, as a cluster file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from ..compress.compressor import Compressor
from ..compress.compressors import NAMES, named
from ..errors import CommError, FileError
from ..measure.probe import PROBED, PROBED_COMPRESSED, CoderPoints, probe_coder, probe_link
from ..net.fabric import Fabric, make_fabric
from ..net.transport import Transport
from ..plan.cluster import cluster_of
from ..plan.fields import FileFields
from ..plan.model import read_model
from ..plan.tree import Routine
from .job import from_environment, joined_job

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--compressor", type=click.Choice(NAMES), default="topk", show_default=True, help="Which one.")
@click.option(
    "--density",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.01,
    show_default=True,
    help="Share of the elements that topk, dgc and randomk send.",
)
@click.option("--model", "model_path", type=_FILE, help="Model file of BackwardProfiler: takes forward_s from it.")
@click.option(
    "--ranks-per-host", type=click.IntRange(1), help="Consecutive ranks of a host; LOCAL_WORLD_SIZE if not given."
)
@click.option(
    "--largest-mib",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Sizes go from 16 KiB to this, times 4.",
)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Samples of each time.")
@click.option("--out", type=_FILE, required=True, help="Rank 0 writes the cluster file here.")
def profile(
    compressor: str,
    density: float,
    model_path: Path | None,
    ranks_per_host: int | None,
    largest_mib: int,
    repeats: int,
    out: Path,
) -> None:
    """Measure compression and collectives on the ranks of a job, and write the cluster file for `plan`.

    Run it as the job is run: `resilient-run … --no-python resilient-comm profile --out cluster.json`. When gradients
    become ready is measured in the training script, by `resilient_run.comm.profiler.BackwardProfiler`.
    """
    if "RANK" not in os.environ:
        raise click.UsageError("profile runs on the ranks of a job: torchrun … --no-python resilient-comm profile …")
    per_host = ranks_per_host or from_environment("LOCAL_WORLD_SIZE", minimum=1, default=1)
    if writes := from_environment("RANK") == 0:
        _check_writable(out)
    try:
        forward_s = 0.0 if model_path is None else _forward_s(model_path)
        document = _measure(compressor, density, forward_s, per_host, largest_mib << 20, repeats)
    except FileError as error:
        raise click.UsageError(str(error)) from error
    except CommError as error:
        raise click.ClickException(str(error)) from error
    if writes:
        _write(document, out)


def _check_writable(out: Path) -> None:
    """Refuse a file that cannot be written while nothing has been measured for it."""
    if not (os.access(out, os.W_OK) if os.path.exists(out) else out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise click.BadParameter(f"{out}: name a file that can be written, in a folder that exists", param_hint="--out")


def _write(document: dict[str, Any], out: Path) -> None:
    """Write what planners can read; print it where that fails, because measuring took all ranks' time."""
    text = json.dumps(document, indent=1)
    try:
        cluster_of(FileFields(json.loads(text), source=str(out)))
        out.write_text(f"{text}\n", encoding="utf-8")
    except (FileError, OSError) as error:
        click.echo(text)
        raise click.ClickException(f"{out} is not written; what was measured stands above: {error}") from error
    click.echo(f"wrote {out}")


def _forward_s(path: Path) -> float:
    model = read_model(path)
    if model.forward_s is None:
        raise FileError(f"{path}: forward_s is missing: take a file that BackwardProfiler wrote, or leave out --model")
    return model.forward_s


def _measure(
    name: str, density: float, forward_s: float, ranks_per_host: int, largest_bytes: int, repeats: int
) -> dict[str, Any]:
    """Return the cluster file's document; all ranks measure together."""
    with joined_job() as device:
        fabric = make_fabric(range(dist.get_world_size()), ranks_per_host=ranks_per_host, device=device)
        sizes = [16 << 10]
        while sizes[-1] < largest_bytes:
            sizes.append(min(4 * sizes[-1], largest_bytes))
        compressor = named(name, density=density)
        coders = {"gpu": probe_coder(compressor, sizes, device=device, repeats=repeats, transport=fabric.flat)}
        if device.type == "cuda":
            coders["cpu"] = probe_coder(
                compressor, sizes, device="cpu", gradients_on=device, repeats=repeats, transport=fabric.flat
            )
        costs = _costs(fabric, coders, compressor, sizes, repeats)
        return {"version": 1, "forward_s": forward_s, "bytes_per_element": 4, **costs}


def _costs(
    fabric: Fabric, coders: Mapping[str, CoderPoints], compressor: Compressor, sizes: Sequence[int], repeats: int
) -> dict[str, Any]:
    ratio = coders["gpu"].ratio

    def link(transport: Transport, *, sharing: int = 1) -> dict[str, Any]:
        """Measure a link whose adapters `sharing` ranks use at the same time."""
        if transport.size == 1:
            return {"alpha_s": 0.0, "beta_s_per_byte": 0.0}
        dense = {}
        for routine in PROBED:
            # All ranks together hold as much after an all-gather as before another collective.
            each = transport.size if routine is Routine.ALL_GATHER else 1
            held = [size // each for size in sizes]
            seconds = probe_link(transport, routine, held, repeats=repeats, everyone=fabric.flat)
            dense[str(routine)] = _table([sharing * size for size in held], seconds)
        first = dense.pop(str(PROBED[0]))
        # They add up on their way, so messages become larger than one compression makes them.
        messages = sorted({max(4, round(ratio * size)) for size in (*sizes, 4 * sizes[-1], 16 * sizes[-1])})
        compressed = {}
        for routine in PROBED_COMPRESSED:
            seconds = probe_link(
                transport, routine, messages, repeats=repeats, compressor=compressor, everyone=fabric.flat
            )
            compressed[str(routine)] = _table([sharing * size for size in messages], seconds)
        return {**first, "routines": dense, "compressed": compressed}

    hosts, per_host = fabric.inter.size, fabric.intra.size
    return {
        **({"flat": link(fabric.flat)} if hosts > 1 and per_host > 1 else {}),
        "hosts": hosts,
        "gpus_per_host": per_host,
        "intra": link(fabric.intra),
        "inter": link(fabric.inter, sharing=per_host),
        "compressors": {
            compressor.name: {
                "ratio": ratio,
                **{
                    device: {
                        "compress": _table(sizes, coder.compress),
                        "decompress": _table(sizes, coder.decompress),
                        "accumulate": _table(sizes, coder.accumulate),
                    }
                    for device, coder in coders.items()
                },
            }
        },
    }


def _table(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    return {"sizes_bytes": list(sizes), "seconds": list(seconds)}
