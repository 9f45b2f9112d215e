"""`resilientctl import`: a checkpoint of `torch.distributed.checkpoint` as what a run begins with."""

import asyncio
import json
from pathlib import Path

import click

from resilient_run.ckpt.errors import CheckpointError

from ..base.fields import Fields
from ..base.settings import Settings
from ..etcd.client import Etcd, EtcdConfig, EtcdError
from ..run import keys
from ..tier.imports import write_import
from ..tier.tier import Tier
from ..trust.secret import check_url
from .ask import ask
from .etcd import check_run_id, etcd_options, parse_etcd


@click.command("import")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--run-id", required=True, help="The run that will begin with it (--rdzv-id).")
@click.option(
    "--target",
    metavar="URL",
    required=True,
    envvar="RESILIENT_PERSIST",
    show_envvar=True,
    callback=check_url,
    help="The run's persistent tier (--rr-persist).",
)
@click.option("--step", type=click.IntRange(min=1), help="Completed steps. Default: what `export` wrote there.")
@click.option("--strict", is_flag=True, help="The run refuses it if something that it registers is missing.")
@etcd_options(of_run=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def import_(
    settings: Settings,
    directory: Path,
    run_id: str,
    target: str,
    step: int | None,
    strict: bool,
    etcd_endpoint: str | None,
    etcd_conf: str,
    as_json: bool,
) -> None:
    """Let the new run RUN-ID begin with the DCP checkpoint in DIRECTORY, in any world size.

    DIRECTORY holds pickles, which are loaded: import only what you trust. With --etcd-endpoint, a run that etcd knows
    is refused.
    """
    # Only this command and export need torch.
    from resilient_run.ckpt.convert.import_source import DcpSource

    check_run_id(run_id, "--run-id")
    try:
        _refuse_known(settings, run_id, None if etcd_endpoint is None else parse_etcd(etcd_endpoint, etcd_conf))
        tier = Tier(str(Path(target).absolute()) if "://" not in target and "::" not in target else target, run_id)
        tier.check()
        source = DcpSource(directory, strict=strict)
        found = source.step if step is None else step
        if not isinstance(found, int) or found < 1:
            raise click.UsageError(f"{directory} does not say which step it has: give --step")
        written = write_import(tier, run_id=run_id, step=found, manifest=source.manifest, payload=source.payload)
    except (CheckpointError, EtcdError, OSError) as error:
        raise click.ClickException(str(error)) from error
    size_bytes = written.ranks[0].stored_bytes
    if as_json:
        click.echo(json.dumps({"run_id": run_id, "step": found, "bytes": size_bytes, "left_out": source.left_out}))
        return
    for name, reason in source.left_out.items():
        click.echo(f"left out: {name}: {reason}", err=True)
    click.echo(f"run {run_id!r} will begin with step {found} in {tier.shown} ({size_bytes / (1 << 20):.1f} MiB)")


def _refuse_known(settings: Settings, run_id: str, etcd: EtcdConfig | None) -> None:
    """Refuse a run that the daemon of this host, if one answers, or etcd, if it is given, knows already."""
    jobs = []
    if settings.address().exists():
        try:
            jobs = ask(settings, "status")["jobs"]
        except click.ClickException:
            # A daemon that was killed leaves its socket.
            jobs = []
    known = [job for job in jobs if job["run_id"] == run_id and (job.get("launcher_pid") or job.get("watermark"))]
    step = (known[0].get("watermark") or {"step": 0})["step"] if known else None
    if step is None and etcd is not None:
        step = asyncio.run(_known(etcd, run_id))
    if step is not None:
        raise click.ClickException(
            f"run {run_id!r} has begun already and goes on from its own step {step}: choose another --run-id, or "
            "`resilientctl forget` it first"
        )


async def _known(config: EtcdConfig, run_id: str) -> int | None:
    """Return the committed step of a run that etcd knows, 0 when it has none, None for an unknown one."""
    etcd = await Etcd.connect(config, prefix=keys.prefix(run_id))
    try:
        found = await etcd.list()
    finally:
        await etcd.close()
    watermark = found.get(keys.WATERMARK)
    return None if not found else 0 if watermark is None else Fields(watermark.value, keys.WATERMARK).pair()[1]
