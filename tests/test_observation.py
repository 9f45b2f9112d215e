"""The observation stream: its words in etcd, what is logged and written when, and that it outlives leases."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.supervise import Supervisor
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig, EtcdUnavailable
from resilient_run.daemon.observer import Observer
from resilient_run.daemon.run.leased import LeasedKeys
from resilient_run.daemon.run.observation import (
    MAX_OBSERVATIONS,
    Observation,
    parse_observations,
    report_observations,
)
from resilient_run.daemon.run.view import JobView

SEEN = Observation(
    kind="disk", severity="warn", value=2.5, limit=5.0, message="2.5 % of /run is free", unix_s=1_700_000_000.5
)


def test_report_comes_back_the_worst_first() -> None:
    hang = replace(SEEN, kind="hang", severity="fail", rank=3, generation=2)
    report = report_observations([SEEN, hang])
    assert report is not None
    assert parse_observations(report) == (hang, SEEN)
    assert report_observations([]) is None
    many = report_observations([SEEN] * 2 * MAX_OBSERVATIONS)
    assert many is not None
    assert len(parse_observations(many)) == MAX_OBSERVATIONS


def test_message_that_names_a_strange_path_is_still_readable() -> None:
    strange = replace(SEEN, message="/a\nb\udcff\0" + "é" * 9000)
    report = report_observations([strange])
    assert report is not None
    (back,) = parse_observations(report)
    assert back.message == "/a?b??" + "é" * 994


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "weather"}, "field 'kind' must be one of hang"),
        ({"severity": "fatal"}, "field 'severity' must be one of info"),
        ({"rank": -1}, "field 'rank'"),
        ({"generation": "1"}, "field 'generation'"),
        ({"value": float("nan")}, "field 'value'"),
        ({"limit": None}, "field 'limit'"),
        ({"message": "line\nline"}, "field 'message'"),
        ({"message": "x" * 5000}, "field 'message'"),
        ({"unix_s": float("inf")}, "field 'unix_s'"),
    ],
)
def test_what_is_no_observation_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DaemonError, match=message):
        parse_observations({"observations": [{**SEEN.to_value(), **change}]})


@pytest.mark.parametrize(
    "value", [{}, {"observations": 3}, {"observations": [3]}, {"observations": [{}] * (MAX_OBSERVATIONS + 1)}]
)
def test_what_is_no_report_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(DaemonError):
        parse_observations(value)


class Keys(LeasedKeys):
    """Remembers what was set."""

    def __init__(self, view: JobView) -> None:
        super().__init__(view)
        self.values: list[Any] = []

    def set(self, name: str, value: Any) -> None:
        assert name == "state/observations/a"
        self.values.append(value)


def test_every_change_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    view = JobView(host="a", replicas=2)
    keys = Keys(view)

    async def nobody(host: str) -> None:
        raise AssertionError(host)

    observer = Observer(
        policy=Policy(),
        view=view,
        keys=keys,
        tmpfs=Path(),
        disks=(),
        ask_peer=nobody,
        work=dict,
        supervisor=Supervisor("a"),
    )
    worse = replace(SEEN, severity="fail")
    with caplog.at_level(logging.INFO):
        observer.update("health", {})
        observer.update("health", {"run": SEEN})
        observer.update("health", {"run": replace(SEEN, value=2.4)})
        observer.update("peers", {})
        assert observer.describe() == [replace(SEEN, value=2.4).to_value()]
        observer.update("health", {"run": worse})
        observer.update("health", {})
    assert keys.values == [{"observations": [SEEN.to_value()]}, {"observations": [worse.to_value()]}, None]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "INFO"]
    assert observer.describe() == []


def test_key_follows_the_daemon_s_lease(etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there while something is wrong, is written again with a new lease, and is gone with the last one."""

    async def until(etcd: Etcd, value: Any) -> None:
        async with asyncio.timeout(20):
            while (entry := await etcd.get("state/observations/a")) is None or entry.value != value:
                if value is None and entry is None:
                    return
                await asyncio.sleep(0.01)

    async def unanswered(self: Etcd, *given: Any, **named: Any) -> None:
        await commit(self, *given, **named)
        raise EtcdUnavailable("it stands still")

    commit = Etcd.commit

    async def scenario() -> None:
        etcd = await Etcd.connect(etcd_config, prefix="/leased-test/")
        view = JobView(host="a", replicas=2)
        keys = LeasedKeys(view)
        task = asyncio.create_task(keys.run(etcd))
        try:
            keys.set("state/observations/a", {"observations": [1]})
            await until(etcd, {"observations": [1]})
            keys.set("state/observations/a", {"observations": [2]})
            await until(etcd, {"observations": [2]})
            before = keys.lease
            assert before is not None
            await before.revoke()
            await until(etcd, {"observations": [2]})
            assert keys.lease is not before
            keys.set("state/observations/a", None)
            await until(etcd, None)
            with monkeypatch.context() as patch:
                patch.setattr(Etcd, "commit", unanswered)
                keys.set("state/observations/a", {"observations": [4]})
                await until(etcd, {"observations": [4]})
            keys.set("state/observations/a", None)
            await until(etcd, None)
            keys.set("state/observations/a", {"observations": [5]})
            await until(etcd, {"observations": [5]})
            assert keys.lease is not None
            task.cancel()
            await keys.lease.revoke()
            await until(etcd, None)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await etcd.close()

    asyncio.run(scenario())
