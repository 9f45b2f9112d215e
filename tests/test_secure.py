"""TLS over asyncio's sockets: bytes arrive where they should, in any pieces, and nothing that breaks goes unseen."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from peer_talk import some_identity

from resilient_run.ckpt.errors import WireError
from resilient_run.ckpt.format import wire
from resilient_run.daemon.trust.secure import TURN_BYTES, SecureSocket

_OVERHEAD_BYTES = 5 + 1 + 16
"""Of a record: header, type of content, and tag."""

SIZES = [0, 1, 100, 16 << 10, (16 << 10) + 1, TURN_BYTES - 1, TURN_BYTES, TURN_BYTES + 1, 5 * TURN_BYTES + 3]


@asynccontextmanager
async def plain_pair(buffer_bytes: int | None = None) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.socket()
        if buffer_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.connect(server.getsockname())
        accepted, _ = server.accept()
    if buffer_bytes is not None:
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    with client, accepted:
        for sock in (client, accepted):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client, accepted


@asynccontextmanager
async def pair(buffer_bytes: int | None = None) -> AsyncIterator[tuple[SecureSocket, SecureSocket]]:
    """Yield a client, host a, and a server, host b, that have met."""
    async with plain_pair(buffer_bytes) as (left, right):
        client = SecureSocket(left, some_identity("a"), server_side=False)
        server = SecureSocket(right, some_identity("b"), server_side=True)
        try:
            assert await asyncio.gather(client.handshake(), server.handshake()) == ["b", "a"]
            yield client, server
        finally:
            client.close()
            server.close()


def run(work: Callable[[SecureSocket, SecureSocket], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), pair(**options) as ends:
            await work(*ends)

    asyncio.run(main())


@pytest.mark.parametrize("buffer_bytes", [None, 4096])
def test_bytes_arrive_in_both_directions(buffer_bytes: int | None) -> None:
    """Whatever the sizes are of what is sent and of what is asked for, also through a keyhole."""
    dice = random.Random(7)

    async def work(client: SecureSocket, server: SecureSocket) -> None:
        for source, sink in ((client, server), (server, client)):
            for size in SIZES:
                data, target = dice.randbytes(size), bytearray(size)

                async def send(source: SecureSocket = source, data: bytes = data) -> None:
                    at = 0
                    while at < len(data):
                        count = dice.randint(1, len(data))
                        await source.send_all(data[at : at + count])
                        at += count

                async def receive(sink: SecureSocket = sink, target: bytearray = target) -> None:
                    at = 0
                    while at < len(target):
                        count = dice.randint(1, len(target) - at)
                        assert await sink.receive_into(memoryview(target)[at : at + count], 30) == count
                        at += count

                await asyncio.gather(send(), receive())
                assert bytes(target) == data

    run(work, buffer_bytes=buffer_bytes)


@pytest.mark.parametrize("late_bytes", [1, 30, 16_000, 16_500, 17_000, 40_000])
def test_a_rest_that_comes_late_is_not_waited_for_in_vain(late_bytes: int) -> None:
    """Whatever part of the last records of a range TLS has taken in already, what is left of them wakes it up."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60), plain_pair() as (left, relay_in), plain_pair() as (relay_out, right):
            client = SecureSocket(left, some_identity("a"), server_side=False)
            server = SecureSocket(right, some_identity("b"), server_side=True)

            async def back() -> None:
                while data := await loop.sock_recv(relay_out, 1 << 16):
                    await loop.sock_sendall(relay_in, data)

            async def forth(size_bytes: int) -> None:
                while size_bytes:
                    data = await loop.sock_recv(relay_in, min(size_bytes, 1 << 16))
                    await loop.sock_sendall(relay_out, data)
                    size_bytes -= len(data)

            answers, there = asyncio.create_task(back()), asyncio.create_task(forth(1 << 30))
            await asyncio.gather(client.handshake(), server.handshake())
            there.cancel()
            await asyncio.gather(there, return_exceptions=True)
            size_bytes = 2 * TURN_BYTES
            target = bytearray(size_bytes)
            sending = asyncio.create_task(client.send_all(b"x" * size_bytes))
            receiving = asyncio.create_task(server.receive_into(memoryview(target), 30))
            records = -(-size_bytes // (16 << 10))
            await forth(size_bytes + records * _OVERHEAD_BYTES - late_bytes)
            await asyncio.sleep(0.05)  # the receiver takes in what there is
            await asyncio.gather(forth(late_bytes), sending)
            assert await receiving == size_bytes
            assert target == b"x" * size_bytes
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)
            client.close()
            server.close()

    asyncio.run(main())


def test_others_have_their_turns() -> None:
    """While much goes over a connection as fast as it can, the event loop serves others, too."""

    async def work(client: SecureSocket, server: SecureSocket) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        count = 64
        target = bytearray(count * TURN_BYTES)
        task = asyncio.create_task(other())
        await asyncio.gather(client.send_all(bytes(len(target))), server.receive_into(memoryview(target), 30))
        task.cancel()
        assert turns >= count

    run(work)


def test_the_end_between_messages_is_one_and_inside_is_an_error() -> None:
    async def ends(client: SecureSocket, server: SecureSocket) -> None:
        await client.send_message({"n": 1})
        client.close()
        assert await server.receive_message(100, 30) == {"n": 1}
        assert await server.receive_message(100, 30) is None

    async def breaks(client: SecureSocket, server: SecureSocket) -> None:
        await client.send_all(wire.encode({"n": 1})[:-1])
        client.close()
        with pytest.raises(WireError, match="inside a frame"):
            await server.receive_message(100, 30)

    async def falls_short(client: SecureSocket, server: SecureSocket) -> None:
        await client.send_all(b"123")
        client.close()
        assert await server.receive_into(memoryview(bytearray(4)), 30) == 3

    for work in (ends, breaks, falls_short):
        run(work)


def test_a_long_message_is_refused_before_it_is_read() -> None:
    async def work(client: SecureSocket, server: SecureSocket) -> None:
        await client.send_message({"text": "x" * 4096})
        with pytest.raises(WireError, match="more than the limit of 4096"):
            await server.receive_message(4096, 30)

    run(work)


def test_silence_has_a_limit() -> None:
    async def work(client: SecureSocket, server: SecureSocket) -> None:
        with pytest.raises(TimeoutError):
            await server.receive_message(100, 0.05)
        await client.send_message({"late": True})
        assert await server.receive_message(100, 30) == {"late": True}

    run(work)


def test_idle_is_neither_closed_nor_speaking() -> None:
    async def work(client: SecureSocket, server: SecureSocket) -> None:
        assert client.is_idle()
        assert server.is_idle()
        await client.send_all(b"unasked")
        await asyncio.sleep(0.01)
        assert not server.is_idle()
        server.close()
        await asyncio.sleep(0.01)
        assert not client.is_idle()

    run(work)


def test_what_is_given_up_leaves_nothing_behind_in_the_loop() -> None:
    async def work(client: SecureSocket, server: SecureSocket) -> None:
        receiving = asyncio.create_task(server.receive_message(100))
        sending = asyncio.create_task(client.send_all(bytes(64 << 20)))
        await asyncio.sleep(0.05)
        for task in (receiving, sending):
            task.cancel()
        await asyncio.gather(receiving, sending, return_exceptions=True)
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(server.raw)
        assert not loop.remove_writer(client.raw)

    run(work)


def test_a_handshake_with_somebody_who_speaks_no_tls_fails() -> None:
    async def main() -> None:
        async with plain_pair() as (left, right):
            server = SecureSocket(right, some_identity("b"), server_side=True)
            left.send(wire.encode({"op": "hello"}))
            with pytest.raises(OSError, match="SSL"):
                await server.handshake()
            server.close()

    asyncio.run(main())
