"""What is read of a run's keys, also where a value is damaged, or reading it fails for a moment."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_run.ckpt.errors import WireError
from resilient_run.ckpt.format import wire
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.supervise import Supervisor
from resilient_run.daemon.coordination import Coordinator
from resilient_run.daemon.etcd.client import Entry, Etcd, EtcdConfig
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.leased import LeasedKeys
from resilient_run.daemon.run.mirror import Mirror, host_name
from resilient_run.daemon.run.view import JobView
from resilient_run.launcher.rendezvous.rounds import rendezvous_mirror

MEMBER = {"session": "s", "nproc": 1, "role": "", "addr": "x", "pid": 1, "ready": 2, "label": ""}
DEAD = {
    "root/leader": {"host": "b"},
    "ckpt/hosts/b": {"addr": "x", "port": 1, "every": 1},
    "rdzv/members/b": MEMBER,
}
"""Keys of a host that vanish together, with its lease."""


@pytest.mark.parametrize(
    "key",
    ["rdzv/members/", "rdzv/members/a/b", "rdzv/quarantine/a/b", "rdzv/done/3", "rdzv/done/3/a/b", "rdzv/done/03/a"],
)
def test_a_key_of_no_host_counts_as_nothing(key: str) -> None:
    value = {**MEMBER, "since_unix_s": 1.0, "until_unix_s": 2.0, "reason": "r"}
    mirror = Mirror().apply({key: Entry(value=value, revision=1)})
    assert list(mirror.ignored) == [key]
    assert not any(mirror.folders.values())
    assert mirror.apply({key: None}).ignored == {}


@pytest.mark.parametrize(("key", "field"), [("rdzv/failure/1", "message"), ("rdzv/recovered/1/a", "cause")])
def test_a_key_that_is_nested_as_deeply_as_can_be_read_counts_as_nothing(key: str, field: str) -> None:
    """Whoever says what is wrong with it has less of the stack left than whoever has read it."""

    def nested(depth: int) -> dict[str, Any] | None:
        value = f'"failed": true, "{field}": {"[" * depth}{"]" * depth}'
        try:
            return wire.decode(
                f'{{"run_id": "r", "host": "a", "kind": "k", "generation": 1, "unix_s": 1, {value}}}'.encode()
            )
        except WireError:
            return None

    value = next(found for depth in range(2000, 0, -1) if (found := nested(depth)) is not None)
    mirror = rendezvous_mirror().apply({key: Entry(value=value, revision=1)})
    assert list(mirror.ignored) == [key]


def test_a_cause_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    mirror, key = Mirror(), "rdzv/members/a"
    for revision in range(1, 4):
        mirror.apply({key: Entry(value={}, revision=revision)})
    assert len(caplog.messages) == 1
    mirror.apply({key: None}).apply({key: Entry(value={}, revision=5)})
    assert len(caplog.messages) == 2


def test_a_value_stays_when_its_parser_fails() -> None:
    fails = False

    def parse(_: str, entry: Entry) -> Any:
        if fails:
            raise MemoryError
        return entry.value["n"]

    mirror = Mirror(more_folders={keys.HOSTS: (host_name, parse)})
    mirror.apply({"ckpt/hosts/a": Entry(value={"n": 1}, revision=1)})
    fails = True
    with pytest.raises(MemoryError):
        mirror.apply({"ckpt/hosts/a": Entry(value={"n": 2}, revision=2)})
    assert mirror.folders[keys.HOSTS] == {"a": 1}


@pytest.mark.jobs
def test_what_vanished_while_its_reader_failed_is_gone(etcd_config: EtcdConfig) -> None:
    """A condition that somebody waits for fails in the moment in which a host's keys vanish."""

    async def nothing(_: Any) -> None: ...

    async def scenario() -> None:
        run_id, fails = "run-of-a-failing-reader", False
        view, supervisor = JobView(host="a", replicas=2), Supervisor("test")

        def condition() -> bool:
            nonlocal fails
            if fails:
                fails = False
                raise OSError(24, "Too many open files")
            return False

        unused: Any = SimpleNamespace()
        coordinator = Coordinator(
            run_id=run_id,
            policy=Policy(),
            digests=unused,
            observe=lambda found: None,
            leased=LeasedKeys(view),
            config=etcd_config,
            address=("x", 1),
            view=view,
            slots=unused,
            tree=unused,
            on_agreement=nothing,
            on_round=nothing,
            persister=None,
            supervisor=supervisor,
            companions={},
        )
        etcd = await Etcd.connect(etcd_config, prefix=keys.prefix(run_id))
        tasks = [
            asyncio.create_task(supervisor.keep("follow", partial(coordinator._follow, etcd))),
            asyncio.create_task(view.wait_for(condition)),
        ]
        try:
            async with asyncio.timeout(30):
                await etcd.commit({}, DEAD)
                await view.wait_for(lambda: bool(view.leader and view.addresses and view.arrivals))
                fails = True
                await etcd.commit({}, {}, deletes=DEAD)
                await view.wait_for(lambda: not (view.leader or view.addresses or view.arrivals))
                assert view.leader_revision == 0
                assert supervisor.describe()[0]["failures"] == 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await etcd.close()

    asyncio.run(scenario())
