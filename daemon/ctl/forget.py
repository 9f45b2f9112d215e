"""`resilientctl forget`: delete what etcd still has of a run that failed."""

import asyncio
import json

import click

from ..base.settings import Settings
from ..etcd.client import Etcd, EtcdConfig, EtcdError
from ..run import keys
from .etcd import check_run_id, etcd_of, etcd_options


class _StillRuns(Exception):
    """Its live members are the argument."""


@click.command()
@click.argument("run_id")
@etcd_options(of_run=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def forget(settings: Settings, run_id: str, etcd_endpoint: str | None, etcd_conf: str, as_json: bool) -> None:
    """Delete what etcd still has of the failed run RUN_ID, so that it cannot be continued and the id is free.

    Refuses while a launcher of the run is alive. Slots in memory stay until daemons collect them (`resilientctl gc`).
    """
    check_run_id(run_id, "RUN_ID")
    config = etcd_of(settings, run_id, etcd_endpoint, etcd_conf)
    try:
        deleted = asyncio.run(_forget(config, run_id))
    except _StillRuns as error:
        raise click.ClickException(
            f"run {run_id!r} still has live launchers on {error}: end them first (a killed one counts as live until "
            "its lease expires, after some seconds)"
        ) from error
    except EtcdError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"run_id": run_id, "deleted": deleted}))
    else:
        click.echo(f"{deleted} key(s) of run {run_id!r} deleted" if deleted else f"etcd has nothing of run {run_id!r}")


async def _forget(config: EtcdConfig, run_id: str) -> int:
    """Delete every key of the run that does not vanish by itself, and return how many there were.

    Raises:
        _StillRuns: It has live members.
        EtcdError: etcd cannot be reached or refuses.
    """
    etcd = await Etcd.connect(config, prefix=keys.prefix(run_id))
    members = keys.MEMBERS()
    try:
        found = [key for key in await etcd.list() if key.startswith(keys.lasting())]
        # Whoever joins in between makes the transaction fail.
        if found and not await etcd.commit({members: 0}, {}, deletes=keys.lasting()):
            live = await etcd.list(members)
            raise _StillRuns(", ".join(sorted(key.removeprefix(members) for key in live)) or "a host that just left")
        return len(found)
    finally:
        await etcd.close()
