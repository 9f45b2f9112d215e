"""The dialling side between daemons: offer a capture to a peer, and fetch one from it straight into a mapped slot."""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from resilient_run.ckpt.errors import CheckpointError, DaemonError, SlotError, WireError
from resilient_run.ckpt.format import wire
from resilient_run.ckpt.format.pair import Pair, pair_value
from resilient_run.ckpt.format.version import FORMATS

from ..base.fields import Fields
from ..slots.slots import Geometry
from ..trust.identity import Identity
from ..trust.secure import SecureSocket
from .download import Part, PartQueue

_IN_FLIGHT = 2
_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 30.0


class PeerError(CheckpointError):
    """A peer's daemon cannot be reached, or the connection broke; it may be back later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferPace:
    """How an offered capture is sent.

    Attributes:
        in_flight: Ranges that are asked for ahead, the sub-buffers p.
        patience_s: How much longer than usual a range may take, because its sender waits for idle spans.
    """

    in_flight: int
    patience_s: float


class Peer:
    """The daemon of one peer host, over a connection each for offers, urgent fetches, paced ones and questions.

    Every call raises `PeerError` when the peer cannot be reached or does not keep to the protocol.

    Args:
        host: Name of the peer.
        address: Where its daemon listens.
        identity: Who we are.
    """

    def __init__(self, *, host: str, address: tuple[str, int], identity: Identity) -> None:
        self.host = host
        self.address = address
        self.identity = identity
        self._offers = _Channel(host, address, identity)
        self._fetches = _Channel(host, address, identity)
        self._questions = _Channel(host, address, identity)
        self._paced = _Channel(host, address, identity)

    async def offer(self, offer: wire.Message) -> None:
        """Announce to the peer what it may fetch; there is no answer."""
        async with self._offers.use() as sock:
            await _send(sock, {"op": "offer", **offer})

    async def ask(self) -> None:
        """Return once the peer has answered something, however busy the other connections are."""
        async with self._questions.use() as sock:
            await _send(sock, _request("have", 0, Pair(1, 0)))
            await _receive_answer(sock)

    async def have(self, rank: int, pair: Pair) -> Geometry | None:
        """Return the geometry of the peer's replica of `rank` at `pair`, None when it has none."""
        async with self._fetches.use() as sock:
            await _send(sock, _request("have", rank, pair))
            answer = await _receive_answer(sock)
            if not answer["ok"]:
                return None
            return Geometry.parse(answer, "answer to have")

    async def fetch(self, rank: int, pair: Pair, download: PartQueue, pace: OfferPace | None = None) -> None:
        """Fetch parts of `download` until it is complete, whoever delivers the last one.

        Args:
            rank: Whose replica.
            pair: Which capture.
            download: What hands the parts out, and verifies them.
            pace: How an offered capture is sent, None for one that is sent as fast as can be.

        Raises:
            SlotError: The peer does not have the replica any more, or what it sent is corrupt.
        """
        channel, in_flight, timeout_s = self._fetches, _IN_FLIGHT, _ANSWER_TIMEOUT_S
        if pace is not None:
            channel, in_flight, timeout_s = self._paced, pace.in_flight, _ANSWER_TIMEOUT_S + pace.patience_s
        asked: deque[Part] = deque()
        async with channel.use() as sock:
            while not download.is_complete:
                # The next range is asked for before this one has arrived, so that the wire is never idle.
                while len(asked) < in_flight and (part := download.take(self.host)) is not None:
                    message = {**_request("get", rank, pair), "offset": part.offset, "size": len(part.target)}
                    await _send(sock, message)
                    asked.append(part)
                if not asked:
                    await download.changed()
                    continue
                part = asked.popleft()
                answer = await _receive_answer(sock, timeout_s)
                if not answer["ok"]:
                    raise SlotError(f"host {self.host} gave up rank {rank} {pair}: {answer.get('message')}")
                if answer.get("size") != len(part.target):
                    raise WireError(f"announced {answer.get('size')} bytes for a range of {len(part.target)}")
                if await sock.receive_into(part.target, timeout_s) < len(part.target):
                    raise WireError("connection closed before the end of an answer")
                try:
                    download.landed(self.host, part)
                except SlotError as error:
                    raise SlotError(f"host {self.host} sent something else than rank {rank} {pair}: {error}") from error

    async def digests(self, rank: int, pair: Pair, structure: str, leaves: Sequence[int]) -> wire.Message | None:
        """Return the peer's digests of a structure at `pair` of its own `rank` and the names of some, None if gone."""
        async with self._questions.use() as sock:
            await _send(sock, {**_request("digests", rank, pair), "structure": structure, "leaves": list(leaves)})
            answer = await _receive_answer(sock)
        return answer if answer["ok"] else None

    async def close(self) -> None:
        """Close the connections once nobody uses them any more."""
        await self._offers.close()
        await self._fetches.close()
        await self._questions.close()
        await self._paced.close()


class _Channel:
    """One connection with one user at a time; closed whenever an exchange on it does not end well."""

    def __init__(self, host: str, address: tuple[str, int], identity: Identity) -> None:
        self._host = host
        self._address = address
        self._identity = identity
        self._sock: SecureSocket | None = None
        self._in_use = asyncio.Lock()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[SecureSocket]:
        """Lend the connected socket.

        Raises:
            PeerError: No connection, or what the body met on it: a broken connection, silence, a malformed answer.
        """
        async with self._in_use:
            finished = False
            try:
                yield await self._connected()
                finished = True
            except (OSError, TimeoutError, WireError, DaemonError) as error:
                raise _peer_error(self._host, self._address, error) from error
            finally:
                if not finished:
                    # Also after a cancellation nobody knows which bytes would come next.
                    self._drop()

    async def close(self) -> None:
        """Close the connection when its present user is done."""
        async with self._in_use:
            self._drop()

    async def _connected(self) -> SecureSocket:
        # A peer closes idle connections, for example because its daemon was restarted.
        if self._sock is not None and not self._sock.is_idle():
            self._drop()
        if self._sock is None:
            self._sock = await connect(self._host, self._address, self._identity)
        return self._sock

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


async def connect(host: str, address: tuple[str, int], identity: Identity) -> SecureSocket:
    """Return a connection to the daemon of `host`, which has proven that it is that.

    Raises:
        PeerError: Nobody is there, or nobody who knows the secret of the run, or another host.
    """
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return await _connect(host, address, identity)
    except (OSError, TimeoutError, WireError, DaemonError) as error:
        raise _peer_error(host, address, error) from error


def _peer_error(host: str, address: tuple[str, int], error: Exception) -> PeerError:
    return PeerError(f"daemon of host {host} at {address[0]}:{address[1]}: {error or 'no answer'}")


async def _connect(host: str, address: tuple[str, int], identity: Identity) -> SecureSocket:
    # Said twice: in clear, for a daemon that serves several runs to know which one is meant, and then to who that is.
    hello = {"op": "hello", "wire": FORMATS["wire"], "run_id": identity.run_id, "to": host}
    plain = await _dial(*address)
    try:
        await asyncio.get_running_loop().sock_sendall(plain, wire.encode(hello))
    except BaseException:
        plain.close()
        raise
    sock = SecureSocket(plain, identity, server_side=False)
    try:
        try:
            found = await sock.handshake()
        except ssl.SSLCertVerificationError as error:
            raise DaemonError(f"what answers there belongs to another run, or has another run key: {error}") from error
        except (ssl.SSLError, ConnectionError) as error:
            raise DaemonError(f"it ended the handshake, and its log says why: {error}") from error
        if found != host:
            raise DaemonError(f"host {found} answers there")
        await sock.send_message({**hello, "host": identity.host})
    except BaseException:
        sock.close()
        raise
    return sock


async def _dial(addr: str, port: int) -> socket.socket:
    """Return a connected, non-blocking socket to the first address of `addr` that answers."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"no address for {addr}")
    for family, kind, protocol, _, address in await loop.getaddrinfo(addr, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure


def _request(op: str, rank: int, pair: Pair) -> wire.Message:
    return {"id": 0, "op": op, "rank": rank, **pair_value(pair)}


async def _send(sock: SecureSocket, message: wire.Message) -> None:
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        await sock.send_message(message)


async def _receive_answer(sock: SecureSocket, timeout_s: float = _ANSWER_TIMEOUT_S) -> wire.Message:
    answer = await sock.receive_message(wire.MAX_FRAME_BYTES, timeout_s)
    if answer is None:
        raise WireError("connection closed before an answer")
    Fields(answer, "answer").flag("ok")
    return answer
