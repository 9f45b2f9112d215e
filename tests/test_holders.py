"""A replica fetched from several holders: shared out, and none the worse for one that lies, refuses or falls silent."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, payload, publish, restored_bytes
from peer_talk import listening, some_identity

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot, plan_layout
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.peers.download import RANGE_BYTES
from resilient_run.daemon.peers.fetch import Peer, PeerError
from resilient_run.daemon.peers.holders import Holders, too_late
from resilient_run.daemon.slots.slots import Geometry
from resilient_run.daemon.trust.secure import SecureSocket

pytestmark = pytest.mark.jobs

SIZE_BYTES = 8 * RANGE_BYTES + 5
PAIR = (1, 1)


class Holder:
    """Serves one slot file as a peer's daemon does, and may misbehave from its `since`-th answer to a `get` on."""

    def __init__(self, slot: Slot, misdeed: str = "", *, since: int = 0) -> None:
        self._slot, self._misdeed, self._since = slot, misdeed, since
        self.served = 0

    async def serve(self, sock: SecureSocket) -> None:
        while (message := await sock.receive_message(4096)) is not None:
            await self._answer(message, sock)

    async def _answer(self, message: dict[str, Any], sock: SecureSocket) -> None:
        answer = {"id": message["id"], "ok": True}
        header = self._slot.header()
        if message["op"] == "have":
            if self._misdeed == "deaf":
                await asyncio.Event().wait()
            if self._misdeed == "empty":
                answer = {"id": message["id"], "ok": False, "error": "SlotError", "message": "not here"}
            sizes = {"used_bytes": header.used_bytes, "payload_offset": header.payload_offset}
            await sock.send_message({**answer, **sizes})
            return
        data = bytearray(self._slot.buffer[message["offset"] :][: message["size"]])
        misdeed = self._misdeed if self.served >= self._since else ""
        if misdeed == "silence":
            await asyncio.Event().wait()
        if misdeed == "hang up":
            raise ConnectionError
        if misdeed == "lie":
            data[-1] ^= 1
        self.served += 1
        await sock.send_all(wire.encode({**answer, "size": len(data)}) + data)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    """A complete slot."""
    payload_offset, capacity_bytes = plan_layout(100, SIZE_BYTES)
    path = tmp_path_factory.mktemp("holders") / "source"
    slot = Slot.create(path, capacity_bytes=capacity_bytes, payload_offset=payload_offset)
    publish(slot, run_id="run", rank=0, world_size=1, pair=PAIR, size_bytes=SIZE_BYTES)
    yield slot
    slot.close()


@pytest.fixture
def target(source: Slot, tmp_path: Path) -> Iterator[Slot]:
    """A slot to fetch it into."""
    sizes = {"capacity_bytes": source.capacity_bytes, "payload_offset": source.payload_offset}
    slot = Slot.create(tmp_path / "target", **sizes)
    slot.begin()
    yield slot
    slot.close()


def with_peers(holders: Sequence[Holder], work: Callable[[Holders], Awaitable[Any]]) -> Any:
    """Return what `work` does with the holders, hosts a, b, … on real sockets."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            peers = []
            for name, holder in zip("abc", holders, strict=False):
                address = await stack.enter_async_context(listening(some_identity(name), holder.serve))
                peers.append(Peer(host=name, address=address, identity=some_identity("z")))
                stack.push_async_callback(peers[-1].close)
            # Less than the time limit of a single answer: a silent holder is left out before that.
            async with asyncio.timeout(20):
                return await work(Holders(peers))

    return asyncio.run(run())


def fetch(holders: Sequence[Holder], source: Slot, target: Slot) -> bytes:
    """Ask and fetch as a restore does."""

    async def work(found: Holders) -> bytes:
        header = source.header()
        geometry = await found.have(0, PAIR)
        assert geometry == Geometry(capacity_bytes=header.used_bytes, payload_offset=header.payload_offset)
        return await found.fetch(0, PAIR, target, header.used_bytes)

    page: bytes = with_peers(holders, work)
    return page


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("misdeed", "since"),
    [("", 0), ("deaf", 0), ("empty", 0), *((how, n) for how in ("lie", "hang up", "silence") for n in (0, 3))],
)
def test_one_holder_of_three_cannot_spoil_it(
    source: Slot, target: Slot, misdeed: str, culprit: int, since: int
) -> None:
    """The culprit may be the one that delivers the head, and may begin before or after it did so."""
    holders = [Holder(source, misdeed if index == culprit else "", since=since) for index in range(3)]
    page = fetch(holders, source, target)
    assert target.state() == "WRITING"
    assert target.adopt(page) == source.header()
    assert target.verify() == source.verify()
    if not misdeed:
        assert all(holder.served for holder in holders), "somebody had nothing to do"


def test_all_holders_lie(source: Slot, target: Slot) -> None:
    with pytest.raises(SlotError, match="host b sent something else than rank 0"):
        fetch([Holder(source, "lie", since=3), Holder(source, "lie")], source, target)
    assert target.state() == "WRITING"


def test_holders_that_leave_are_a_reason_to_try_again(source: Slot, target: Slot) -> None:
    with pytest.raises(PeerError, match="host b"):
        fetch([Holder(source, "hang up", since=3), Holder(source, "hang up")], source, target)


def test_nobody_has_it(source: Slot) -> None:
    assert with_peers([Holder(source, "empty")] * 2, lambda holders: holders.have(0, PAIR)) is None


def test_announced_size_must_be_the_header_s(source: Slot, target: Slot) -> None:
    with pytest.raises(SlotError, match="was announced with"):
        with_peers([Holder(source)], lambda holders: holders.fetch(0, PAIR, target, source.header().used_bytes - 1))


@pytest.mark.parametrize(
    ("waited_s", "outstanding", "part_s", "late"),
    [(0.5, 2, 0.0, False), (1.1, 2, 0.0, True), (1.1, 2, 0.1, False), (1.5, 2, 0.1, True), (60.0, 2, 20.0, False)],
)
def test_patience_goes_by_what_the_others_would_need(
    waited_s: float, outstanding: int, part_s: float, late: bool
) -> None:
    assert too_late(waited_s=waited_s, outstanding=outstanding, part_s=part_s)[0] is late


def test_new_host_restores_from_two_holders(tmp_path: Path, etcd_config: EtcdConfig) -> None:
    """Three replicas, one lost: real daemons deliver the state together, also when one copy is corrupt."""
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=etcd_config)
    try:
        trainers = hosts.run("abc", replicas=3)
        for trainer in trainers:
            trainer.allocate(payload_bytes=3 * CHUNK_BYTES + 77)
        hosts.commit(trainers, [1])
        hosts["b"].close()
        hosts["d"].start()
        hosts["d"].open(replicas=3)
        hosts.form_round(2, "adc")
        trainer = hosts["d"].trainer(1, world_size=3, generation=2)
        trainer.attach()
        answer = trainer.request("restore")
        assert answer["source"] == "peer"
        assert restored_bytes(answer["path"]) == payload(hosts.run_id, 1, (1, 1))
        hosts.wait_for_replicas("adc", (1, 1), 9)
    finally:
        hosts.close()
