"""`resilientctl drain`: let a run go on without one of its hosts, which may be taken away then."""

import asyncio
import time
from contextlib import aclosing

import click

from resilient_run.ckpt.errors import DaemonError

from ..base.settings import Settings
from ..base.spec import Finite
from ..etcd.client import Etcd, EtcdConfig, EtcdError
from ..run import keys
from ..run.mirror import Mirror, pair_of_entry
from ..run.quarantine import Quarantine
from ..run.records import Agreement, Failure
from ..run.rounds import Round, allowed
from .etcd import check_run_id, etcd_of, etcd_options

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=Finite(min=1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until the run goes on.",
)


@click.command()
@click.argument("host")
@click.option("--run-id", required=True, help="The run (--rdzv-id).")
@click.option(
    "--for",
    "avoided_s",
    type=Finite(min=1),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the run does without the host, if it stays.",
)
@timeout_option
@etcd_options(of_run=True)
@click.pass_obj
def drain(
    settings: Settings,
    host: str,
    run_id: str,
    avoided_s: float,
    timeout_s: float,
    etcd_endpoint: str | None,
    etcd_conf: str,
) -> None:
    """Move the ranks of HOST to a standby, or let a run with --rr-elastic go on without them.

    The run is interrupted once, right after a commit. The command ends when the run has committed a step elsewhere:
    HOST then holds nothing that is needed, and its launcher may be ended.
    """
    check_run_id(run_id, "--run-id")
    config = etcd_of(settings, run_id, etcd_endpoint, etcd_conf)
    try:
        done = asyncio.run(_drain(config, run_id, host, avoided_s, timeout_s))
    except TimeoutError:
        raise click.ClickException(
            f"run {run_id!r} has committed nothing without host {host} within {timeout_s:g} s: keep the host, and see "
            "`resilientctl status` and the output of the launchers"
        ) from None
    except (EtcdError, DaemonError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(done)


async def _drain(config: EtcdConfig, run_id: str, host: str, avoided_s: float, timeout_s: float) -> str:
    """Take `host` out of its run, and return what to tell once something is committed without it.

    Raises:
        DaemonError: The host is not in the run, or the run cannot go on without it.
        TimeoutError: Nothing was committed without it in time.
        EtcdError: etcd cannot be reached or refuses.
    """
    etcd = await Etcd.connect(config, prefix=keys.prefix(run_id))
    mirror = Mirror({keys.WATERMARK: pair_of_entry})
    ordered = False
    try:
        async with asyncio.timeout(timeout_s), aclosing(etcd.changes()) as states:
            seen: object = None
            async for changes in states:
                mirror.apply(changes)
                round_: Round | None = mirror.get(keys.ROUND)
                watermark = mirror.get(keys.WATERMARK)
                if round_ is None:
                    raise DaemonError(f"etcd has no running run {run_id!r}; check --run-id")
                if host not in round_:
                    # Another command may have drained it, or this one before it was cut off.
                    if not ordered and not _is_avoided(mirror, host):
                        raise DaemonError(
                            f"host {host!r} does not train in generation {round_.generation}, which runs on "
                            f"{', '.join(round_.hosts)}; check HOST"
                        )
                    if watermark is not None and watermark[0] == round_.generation:
                        return (
                            f"host {host} is drained: generation {round_.generation} runs on "
                            f"{', '.join(round_.hosts)} and has committed step {watermark[1]}"
                        )
                elif not ordered:
                    _check_goes_on(mirror, round_, host)
                    # Right after a commit the fewest steps are lost.
                    if watermark in (None, round_.restore) or seen not in (None, watermark):
                        ordered = await _order(etcd, mirror, round_, host, avoided_s)
                    seen = watermark
    finally:
        await etcd.close()
    raise DaemonError("etcd ended the watch")


async def _order(etcd: Etcd, mirror: Mirror, round_: Round, host: str, avoided_s: float) -> bool:
    """Break the generation for everyone and let launchers avoid `host`, unless something has changed meanwhile."""
    now_unix_s, why = time.time(), f"host {host} is drained"
    quarantine = Quarantine(since_unix_s=now_unix_s, until_unix_s=now_unix_s + avoided_s, reason=why)
    failure = Failure(
        generation=round_.generation,
        host=host,
        kind="membership",
        began_step=round_.began_step,
        unix_s=now_unix_s,
        message=why,
    )
    broken, job = keys.FAILURES(round_.generation), mirror.revisions.get(keys.JOB, 0)
    return (
        await etcd.commit(
            {keys.ROUND: round_.revision, broken: 0, keys.JOB: job},
            {keys.QUARANTINES(host): quarantine.to_value(), broken: failure.to_value()},
        )
        > 0
    )


def _check_goes_on(mirror: Mirror, round_: Round, host: str) -> None:
    """Check that launchers can form a round without `host`.

    Raises:
        DaemonError: They cannot.
    """
    job: Agreement | None = mirror.get(keys.JOB)
    members = mirror.folders[keys.MEMBERS]
    usable = {name: member for name, member in members.items() if name != host and not _is_avoided(mirror, name)}
    if job is None:
        return
    if len(usable) < job.min_nodes:
        raise DaemonError(
            f"the run needs {job.min_nodes} hosts (--nnodes), and {len(usable)} would remain: start a standby"
        )
    sizes = (round_.world_size,) if job.elastic_s is None else job.sizes
    if len(allowed(sizes, round_.seats, usable, job.max_nodes)) < job.min_nodes:
        allows = "without --rr-elastic the run keeps" if job.elastic_s is None else "--rr-sizes allows"
        raise DaemonError(
            f"the other hosts cannot make {', '.join(map(str, sizes))} ranks, which {allows}: start a standby"
        )


def _is_avoided(mirror: Mirror, host: str) -> bool:
    quarantines = mirror.folders[keys.QUARANTINES]
    return host in quarantines and quarantines[host].left_s(time.time()) > 0
