"""Names that a writer of etcd, or a host of the run, makes up: none steers a terminal or forges a line of a log."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_identity import identity, meet

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig, EtcdError
from resilient_run.launcher.rendezvous.claim import machine_name

STEERS = "\x1b]0;title\x07\x1b[2J"
FORGES = "h\nresilient-run: all is well"
MEMBER = {"session": "s", "nproc": 1, "role": "", "addr": "192.0.2.1", "pid": 1, "ready": 0, "label": ""}


@pytest.mark.parametrize("name", [STEERS, FORGES])
def test_a_key_that_no_host_has_counts_as_nothing(
    name: str, etcd_config: EtcdConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is there at first or comes later."""
    prefix = f"/resilient-run/{tmp_path.name}/"
    key = f"{prefix}rdzv/members/{name}"

    async def attack() -> None:
        etcd = await Etcd.connect(etcd_config)
        try:
            await etcd.put(f"{prefix}rdzv/members/a", MEMBER)
            async with aclosing(etcd.follow(prefix)) as states:
                assert list(await anext(states)) == [f"{prefix}rdzv/members/a"]
                await etcd.put(key, MEMBER)
                await etcd.put(f"{prefix}rdzv/members/b", MEMBER)
                async for entries in states:
                    assert key not in entries
                    if f"{prefix}rdzv/members/b" in entries:
                        break
            assert list(await etcd.list(prefix)) == [f"{prefix}rdzv/members/{host}" for host in "ab"]
            with pytest.raises(EtcdError) as refused:
                await etcd.get(key)
            assert str(refused.value) == f"etcd key {key!r} is not printable; delete it"
        finally:
            await etcd.close()

    asyncio.run(attack())
    said = [record.getMessage() for record in caplog.records if "is not printable" in record.getMessage()]
    assert said
    assert all(message.isprintable() for message in said)


@pytest.mark.parametrize("name", [STEERS, FORGES])
def test_nor_may_a_run_or_a_host_have_such_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_HOST_ID", "a")
    assert machine_name("run") == "a"
    with pytest.raises(ValueError, match=r"--rdzv-id is .*must be printable"):
        machine_name(name)
    monkeypatch.setenv("RESILIENT_HOST_ID", name)
    with pytest.raises(ValueError, match=r"RESILIENT_HOST_ID is .*must be printable"):
        machine_name("run")
    forgotten = CliRunner().invoke(resilientctl, ["forget", name])
    assert forgotten.exit_code == 2
    assert "must be printable" in forgotten.output


@pytest.mark.parametrize("name", [STEERS, FORGES])
def test_a_certificate_with_such_a_name_proves_nothing(name: str) -> None:
    """Whoever has the secret of a run can make any."""
    for client, server in ((identity(name), identity("a")), (identity("a"), identity(name))):
        with pytest.raises(DaemonError, match="the peer's certificate names no host"):
            meet(client.client, server.server)
