"""Between daemons: who is let in, what a fetch accepts, hostile bytes on both sockets, restarts of etcd."""

import asyncio
import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import wait_until
from etcd_process import EtcdProcess, ask
from hosts import PAYLOAD_BYTES, TOPOLOGY, Client, Hosts, payload, publish, restored_bytes, wait_for_watermark
from peer_talk import dial, hello, identity_of, listening, peer_address, some_identity, was_closed
from proxy import Proxy

from resilient_run.ckpt.errors import CheckpointError, SlotError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.slot import CHUNK_BYTES, Slot, plan_layout
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig
from resilient_run.daemon.peers.download import RANGE_BYTES
from resilient_run.daemon.peers.fetch import Peer, PeerError
from resilient_run.daemon.peers.holders import Holders
from resilient_run.daemon.run.keys import HOSTS, LEADER
from resilient_run.daemon.trust.secure import SecureSocket

pytestmark = pytest.mark.jobs


def connect(family: int, address: Any, first: bytes = b"") -> socket.socket:
    sock = socket.socket(family)
    sock.settimeout(30)
    sock.connect(address)
    sock.sendall(first)
    return sock


def have(rank: int = 0, generation: int = 1, step: int = 1) -> dict[str, Any]:
    return {"id": 7, "op": "have", "rank": rank, "generation": generation, "step": step}


def test_peer_that_knows_the_secret_is_served(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    path = trainer.capture(1)
    wait_for_watermark([trainer], (1, 1))
    with dial(peer_address(hosts, "a"), identity_of(hosts), have()) as sock:
        answer = wire.recv_message(sock)
        assert answer is not None
        size = answer["used_bytes"]
        assert answer == {"id": 7, "ok": True, "used_bytes": size, "payload_offset": Slot.open(path).payload_offset}
        sock.sendall(wire.encode({**have(), "op": "get", "offset": size - 5, "size": 5}))
        assert wire.recv_message(sock) == {"id": 7, "ok": True, "size": 5}
        assert sock.recv(5) == payload(hosts.run_id, 0, (1, 1))[-5:]
        sock.sendall(wire.encode(have(step=2)))
        refused = wire.recv_message(sock)
        assert refused is not None
        assert (refused["ok"], refused["error"]) == (False, "SlotError")


def test_idle_connections_are_asked_whether_their_hosts_still_live(hosts: Hosts) -> None:
    """A host that loses its power sends no farewell: an hour of lost hosts left 50 descriptors behind."""
    hosts.run("a")
    with dial(peer_address(hosts, "a"), identity_of(hosts), have()) as sock:
        assert wire.recv_message(sock) is not None
        port = sock.getsockname()[1]

        def timer() -> str:
            lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            (theirs,) = (line for line in lines if int(line[2].partition(":")[2], 16) == port)
            return theirs[5].partition(":")[0]

        wait_until(lambda: timer() == "02", timeout_s=30, what="the timer of keepalive (proc(5), tcp)")


@pytest.mark.parametrize(
    "request_",
    [
        {**have(), "op": "get", "offset": 0, "size": RANGE_BYTES + 1},
        {**have(), "op": "get", "offset": 1 << 40, "size": 1},
        {**have(), "op": "get", "offset": -1, "size": 1},
        {**have(), "op": "get", "offset": 0},
        {**have(), "op": "put"},
        {**have(), "rank": True},
        {
            "op": "offer",
            "rank": 0,
            "generation": 1,
            "step": 5,
            "used_bytes": 1 << 60,
            "payload_offset": 8192,
            "patience_s": 0,
        },
        {
            "op": "offer",
            "rank": 0,
            "generation": 1,
            "step": 5,
            "used_bytes": 1 << 20,
            "payload_offset": 8191,
            "patience_s": 0,
        },
    ],
)
def test_peer_that_asks_for_nonsense_is_disconnected(hosts: Hosts, request_: dict[str, Any]) -> None:
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    with dial(peer_address(hosts, "a"), identity_of(hosts), request_) as sock:
        assert was_closed(sock)
    hosts.commit([trainer], [2])


def test_offers_by_others_than_the_owner_are_ignored(hosts: Hosts) -> None:
    """Only the host that runs a rank may have its replica overwritten."""
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1])
    offer = {
        "op": "offer",
        "rank": 1,
        "generation": 1,
        "step": 9,
        "used_bytes": 1 << 20,
        "payload_offset": 8192,
        "patience_s": 0,
        "watermark": {"generation": 1, "step": 1},
        "next": {"generation": 1, "step": 2},
    }
    with dial(peer_address(hosts, "a"), identity_of(hosts, "c"), offer, have()) as sock:
        assert wire.recv_message(sock) is not None
    hosts.commit(trainers, [2])
    assert hosts["a"].held()[1] == {(1, 1), (1, 2)}


def test_replicas_reach_a_host_whose_next_launcher_opens_its_job_anew(hosts: Hosts) -> None:
    """Its daemon and the other hosts' connections to it go on."""
    hosts.commit(hosts.run("ab"), [1])
    launcher = hosts["a"].launcher
    assert launcher is not None
    launcher.request("close_job", run_id=hosts.run_id, discard=False)
    launcher.close()
    hosts["a"].clients.remove(launcher)
    hosts["a"].launcher = None
    trainers = hosts.run("ab", generation=2)
    for trainer in trainers:
        trainer.request("restore")
    hosts.commit(trainers, [2, 3])
    hosts.wait_for_replicas("ab", (2, 3), 4)


class LyingPeer:
    """Serves one slot file as a peer's daemon does, after `change` has had its way with each answer and its bytes."""

    def __init__(self, slot: Slot, change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> None:
        self._slot, self._change = slot, change

    async def serve(self, sock: SecureSocket) -> None:
        while (message := await sock.receive_message(4096)) is not None:
            data = bytes(self._slot.buffer[message["offset"] :][: message["size"]])
            answer, data = self._change({"id": message["id"], "ok": True, "size": len(data)}, data)
            await sock.send_all(wire.encode(answer) + data)

    async def fetch(self, target: Slot) -> bytes:
        async with listening(some_identity("b"), self.serve) as address:
            peer = Peer(host="b", address=address, identity=some_identity("a"))
            try:
                return await Holders([peer]).fetch(0, (1, 1), target, self._slot.header().used_bytes)
            finally:
                await peer.close()


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[tuple[Slot, Slot]]:
    payload_offset, capacity_bytes = plan_layout(100, 9 * CHUNK_BYTES + 5)
    made = [Slot.create(tmp_path / n, capacity_bytes=capacity_bytes, payload_offset=payload_offset) for n in "st"]
    publish(made[0], run_id="run", rank=0, world_size=1, pair=(1, 1), size_bytes=9 * CHUNK_BYTES + 5)
    made[1].begin()
    yield made[0], made[1]
    for slot in made:
        slot.close()


def test_fetched_slot_is_bit_identical(slots: tuple[Slot, Slot]) -> None:
    source, target = slots
    page = asyncio.run(LyingPeer(source, lambda answer, data: (answer, data)).fetch(target))
    assert target.state() == "WRITING"
    assert target.adopt(page) == source.verify()
    used_bytes = source.header().used_bytes
    assert bytes(target.buffer[:used_bytes]) == bytes(source.buffer[:used_bytes])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda answer, data: (answer, data[:-1] + bytes([data[-1] ^ 1])), SlotError),
        (lambda answer, data: ({**answer, "size": answer["size"] - 1}, data), PeerError),
        (lambda answer, data: ({**answer, "ok": "yes"}, data), PeerError),
        (lambda answer, data: ({"id": 0, "ok": False, "message": "gone"}, b""), SlotError),
        (lambda answer, data: ([], data), PeerError),
    ],
    ids=["flipped bits", "short", "wrong type", "refused", "no object"],
)
def test_fetch_of_something_else_is_refused(
    slots: tuple[Slot, Slot], change: Callable[..., Any], error: type[CheckpointError]
) -> None:
    source, target = slots
    liar = LyingPeer(source, change)
    with pytest.raises(error, match="host b"):
        asyncio.run(liar.fetch(target))
    assert target.state() == "WRITING"


def test_hostile_bytes_close_only_their_connection(hosts: Hosts) -> None:
    """Random bytes, random JSON and mutated messages on both sockets; the daemon serves its job as before."""
    dice = random.Random(20)
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    address, unix_path = peer_address(hosts, "a"), str(hosts["a"].socket_path)
    identity = identity_of(hosts)
    good = [
        {**trainer.identity, "op": "attach", "id": 1, "estimate_bytes": 1},
        {"op": "allocate", "id": 2, "capacity_bytes": 1 << 20, "payload_offset": 1 << 16},
        {"op": "complete", "path": trainer.paths[0], "generation": 1, "step": 2},
        {"op": "settle", "id": 3, "run_id": hosts.run_id, "timeout_s": 0},
        {"op": "open_job", "id": 4, "pid": os.getpid(), "run_id": "x", "host": "a", "etcd": {}, "addr": "::"},
        {"op": "restored", "step": 1, "seconds": 1},
        {"op": "progress", "step": 1},
        {**have(), "op": "get", "offset": 0, "size": 10},
        {
            "op": "offer",
            "rank": 0,
            "generation": 1,
            "step": 2,
            "used_bytes": 1 << 20,
            "payload_offset": 1 << 16,
            "patience_s": 0,
        },
        have(),
    ]
    values: list[Any] = [None, -1, 2**70, 1.5, "", "\ud800", "x" * 5000, [], {}, True, [[[]]], {"id": "id"}]
    for turn in range(150):
        if turn % 3 == 0:
            frame = dice.randbytes(dice.randrange(1, 200))
        elif turn % 3 == 1:
            frame = struct.pack(">I", dice.choice([0, 1, 20, 1 << 21, 2**32 - 1])) + dice.randbytes(20)
        else:
            message = dict(dice.choice(good))
            for _ in range(dice.randrange(1, 3)):
                message[dice.choice(list(message))] = dice.choice(values)
            body = json.dumps(message).encode()
            frame = struct.pack(">I", len(body)) + body
        talks: list[Callable[[], socket.socket]] = [
            lambda: connect(socket.AF_UNIX, unix_path),
            lambda: connect(socket.AF_INET, address, wire.encode(hello(hosts.run_id, "a"))),
            lambda: dial(address, identity),
            lambda: connect(socket.AF_INET, address),
        ]
        for talk in talks[:-1] if dice.random() < 0.8 else talks:
            with talk() as sock:
                try:
                    sock.sendall(frame)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                except OSError:
                    pass
    client = Client(hosts["a"].socket_path)
    assert client.request("status")["jobs"][0]["failure"] is None
    client.close()
    (trainer,) = hosts.run("a", generation=2)
    assert trainer.request("restore")["source"] == "local"
    trainer.capture(2)
    wait_for_watermark([trainer], (2, 2))
    assert "Traceback" not in hosts["a"].log, hosts["a"].log


def test_training_goes_on_without_etcd_and_commits_when_it_is_back(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    etcd.start()
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=EtcdConfig(endpoints=(etcd.endpoint,)))
    try:
        trainers = hosts.run("ab")
        hosts.commit(trainers, [1])
        etcd.kill()
        for trainer in trainers:
            trainer.capture(2)
        hosts.wait_for_replicas("ab", (1, 2), 4)
        assert [trainer.watermark() for trainer in trainers] == [(1, 1)] * 2
        etcd.start()
        wait_for_watermark(trainers, (1, 2))
        hosts.commit(trainers, [3])
        etcd.kill()
        etcd.forget()
        etcd.start()
        # All keys are gone, as for a new cluster: what daemons own comes back by itself.
        wait_until(
            lambda: len(hosts.etcd(lambda etcd: etcd.list(hosts.prefix + HOSTS()))) == 2,
            timeout_s=60,
            what=lambda: f"addresses\n{hosts['a'].log}",
        )
        answer = trainers[0].request("allocate", capacity_bytes=1 << 23, payload_offset=8192)
        assert len(answer["paths"]) == 1, "what is committed is in a smaller one"
    finally:
        hosts.close()
        etcd.kill()


def test_a_host_without_etcd_commits_through_the_others(tmp_path: Path, etcd: EtcdProcess) -> None:
    """Its reports, and what is committed, go from daemon to daemon."""
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=EtcdConfig(endpoints=(etcd.endpoint,)))
    proxies = {name: Proxy(("127.0.0.1", 0), ("127.0.0.1", etcd.port)) for name in "ab"}
    try:
        for name, proxy in proxies.items():
            hosts[name].start()
            through = EtcdConfig(endpoints=(f"127.0.0.1:{proxy.port}",))
            hosts[name].open(etcd=through.to_dict())
        trainers = hosts.run("ab")
        hosts.commit(trainers, [1])
        root = hosts.etcd(lambda etcd: etcd.get(hosts.prefix + LEADER)).value["host"]
        proxies["b" if root == "a" else "a"].cut()
        hosts.commit(trainers, [2, 3])
    finally:
        hosts.close()
        for proxy in proxies.values():
            proxy.close()


@pytest.mark.parametrize(("lost", "further"), [(None, 0), (HOSTS("b"), 0), (HOSTS("b"), 100), (LEADER, 0)])
def test_commits_go_on_when_etcd_comes_back_without_the_last(tmp_path: Path, lost: str | None, further: int) -> None:
    """Without fsync a killed etcd loses what it answered last, but may know the lease that it was put with.

    Others may write so much before a host looks that nothing seems to be lost.
    """
    etcd = EtcdProcess(tmp_path / "etcd")
    etcd.start()
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=EtcdConfig(endpoints=(etcd.endpoint,)))
    data, before = (tmp_path / name / "data" for name in ("etcd", "before"))
    try:
        trainers = hosts.run("ab")
        hosts.commit(trainers, [1])
        etcd.end()
        shutil.copytree(data, before)
        etcd.start()
        if lost is not None:
            delete(before.parent, hosts.prefix + lost, further)
        hosts.commit(trainers, [2, 3, 4])
        etcd.kill()
        for trainer in trainers:
            trainer.capture(5)
        hosts.wait_for_replicas("ab", (1, 5), 4)
        etcd.forget()
        before.rename(data)
        etcd.start()
        wait_for_watermark(trainers, (1, 5))
        wait_until(
            lambda: hosts.etcd(lambda etcd: etcd.get(hosts.prefix + HOSTS("b"))),
            timeout_s=60,
            what=lambda: f"host b\n{hosts['b'].log}",
        )
        hosts.commit(trainers, [6])
    finally:
        hosts.close()
        etcd.kill()


def delete(directory: Path, key: str, further: int) -> None:
    """Delete a key of what an etcd has written down, and write others, which nobody sees meanwhile."""

    async def deleted(client: Etcd) -> None:
        assert await client.get(key), key
        await client.delete(key)
        for number in range(further):
            await client.put("/other", {"n": number})

    etcd = EtcdProcess(directory)
    etcd.start()
    try:
        ask(etcd.endpoint, deleted, timeout_s=30)
        etcd.end()
    finally:
        etcd.kill()


def test_bytes_restored_from_a_peer_are_the_captured_ones(hosts: Hosts) -> None:
    """Several ranks a host, and slots that change their size between generations."""
    hosts.create_job()
    for name in "ab":
        hosts[name].start()
        hosts[name].open(nproc=2)
    hosts.form_round(1, "ab", nproc=2)
    trainers = [
        hosts["ab"[rank // 2]].trainer(rank, local_rank=rank % 2, world_size=4, generation=1) for rank in range(4)
    ]
    for trainer in trainers:
        trainer.attach()
        trainer.allocate(payload_bytes=5 * CHUNK_BYTES)
    hosts.commit(trainers, [1, 2])
    hosts["a"].close()
    hosts["c"].start()
    hosts["c"].open(nproc=2)
    hosts.form_round(2, "cb", nproc=2)
    for rank in range(4):
        trainer = hosts["cb"[rank // 2]].trainer(rank, local_rank=rank % 2, world_size=4, generation=2)
        trainer.attach(topology=TOPOLOGY)
        answer = trainer.request("restore")
        assert answer["source"] == ("peer" if rank < 2 else "local")
        assert restored_bytes(answer["path"]) == payload(hosts.run_id, rank, (1, 2))
        trainers[rank] = trainer
    for slot, step in enumerate((3, 4)):
        for trainer in trainers:
            trainer.allocate(payload_bytes=6 * CHUNK_BYTES)
            assert len(trainer.paths) == slot + 1
            trainer.capture(step, slot=slot)
        wait_for_watermark(trainers, (2, step))


def test_a_replica_without_room_gives_way_to_a_later_capture(hosts: Hosts) -> None:
    """Each host has room for its own larger capture, but not for the other's beside it: all waited for ever."""
    slot_bytes, larger = sum(plan_layout(1, PAYLOAD_BYTES)), 4 * PAYLOAD_BYTES
    trainers = hosts.run("ab", memory_limit_bytes=8 * slot_bytes)
    hosts.commit(trainers, [1])
    for trainer in trainers:
        trainer.allocate(payload_bytes=larger)
    for trainer in trainers:
        slot = Slot.open(trainer.paths[0], writable=True)
        publish(slot, run_id=hosts.run_id, rank=trainer.rank, world_size=2, pair=(1, 2), size_bytes=larger)
        slot.close()
        trainer.notify("complete", path=trainer.paths[0], generation=1, step=2)
    for trainer in trainers:
        wait_until(
            lambda trainer=trainer: (trainer.next() or (1, 0)) > (1, 2), timeout_s=30, what=lambda: hosts["b"].log
        )
    for trainer in trainers:
        trainer.capture(5, slot=0)
    wait_for_watermark(trainers, (1, 5))
