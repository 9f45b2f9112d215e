"""Requests to an etcd cluster over gRPC: TLS, credentials, time limits, several endpoints, errors with a remedy."""

import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from .config import RUNS, EtcdConfig, is_unix


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep gRPC, which reads these variables when it is imported, from lines of its own. Children do not inherit them.

    They would come at every fork of the process, though no child of ours uses a channel of its parent, and at every
    attempt of a TLS handshake, around the one error that we show.
    """
    quiet = {"GRPC_ENABLE_FORK_SUPPORT": "false", "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "ERROR")}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


with _quietly():
    import grpc  # type: ignore[import-untyped, unused-ignore]
    from aetcd import rpc

T = TypeVar("T")
_UNAVAILABLE = {rpc.StatusCode.UNAVAILABLE, rpc.StatusCode.DEADLINE_EXCEEDED, rpc.StatusCode.INTERNAL}
# etcd has no code of its own for these: a lease that nobody leads to be asked about, more requests than it can take.
_UNAVAILABLE_DETAILS = ("context deadline exceeded", "too many requests")
# What befell a request that etcd would take at another moment, as "raft proposal dropped" while its leader changes.
_BEFELL = {rpc.StatusCode.UNKNOWN, rpc.StatusCode.ABORTED, rpc.StatusCode.RESOURCE_EXHAUSTED}
_FULL_DETAILS = ("database space exceeded",)
_REFUSED = {rpc.StatusCode.UNAUTHENTICATED, rpc.StatusCode.PERMISSION_DENIED}
_REFUSED_DETAILS = ("authentication", "permission denied", "user name is empty", "auth store is old")
_STALE_TOKEN = ("invalid auth token", "auth store is old")
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A mirror is loaded in one answer, which is longer than gRPC's own limit of 4 MiB where there are many hosts.
    ("grpc.max_receive_message_length", -1),
    # gRPC's own defaults wait up to two minutes before they look at a restarted server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A watch has no deadline: only pings tell that the other end of a silent connection is gone. etcd's own default
    # refuses a client that pings more often than every 5 s.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class EtcdError(Exception):
    """etcd refused or could not carry out a request."""


class EtcdUnavailable(EtcdError):
    """etcd cannot carry out a request now; trying again is right. Whether a write was applied is unknown."""


class EtcdAuthError(EtcdError):
    """etcd wants other credentials, or these may not touch the key."""


class EtcdLeaseLost(EtcdError):
    """The lease expired or was revoked; ask for a new one."""


class Endpoint:
    """One endpoint: its channel and stubs."""

    def __init__(self, endpoint: str, credentials: Any) -> None:
        options = list(_CHANNEL_OPTIONS)
        if is_unix(endpoint):
            endpoint = quote(endpoint, safe=":/")  # gRPC takes it for a URI
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(endpoint, options=options)
        else:
            self.channel = grpc.aio.secure_channel(endpoint, credentials, options=options)
        self.auth = rpc.AuthStub(self.channel)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)


class EtcdConnection:
    """Channels to every endpoint of one cluster; the first is in use until it fails, then the next."""

    def __init__(self, config: EtcdConfig, timeout_s: float) -> None:
        self.config = config
        self.timeout_s = timeout_s
        self._files = _tls_files(config)
        self._members = self._channels()
        self._retired: list[Endpoint] = []
        self._token: str | None = None

    @property
    def member(self) -> Endpoint:
        """The endpoint in use."""
        return self._members[0]

    @property
    def is_met(self) -> bool:
        """Tell whether an endpoint speaks gRPC with us now; one that is asleep or without a leader may do so, too."""
        return any(each.channel.get_state() is grpc.ChannelConnectivity.READY for each in self._members)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a request must carry to be let in."""
        return () if self._token is None else (("token", self._token),)

    def meet(self) -> None:
        """Begin to connect to every endpoint, so that the first ones do not keep the later ones waiting."""
        for member in self._members:
            member.channel.get_state(try_to_connect=True)

    async def call(self, send: Callable[[Endpoint, dict[str, Any]], Awaitable[T]], *, resend: bool = True) -> T:
        """Return what `send(member, options)` returns; where sending twice does no harm, try every endpoint once.

        A token that etcd no longer knows is renewed, and the request, which was not carried out, is sent again.
        """
        attempts = len(self._members) if resend else 1
        renewed = False
        while True:
            member = self.member
            try:
                return await send(member, {"timeout": self.timeout_s, "metadata": self.metadata})
            except rpc.AioRpcError as error:
                if _mentions(error, _STALE_TOKEN) and self.config.user is not None and not renewed:
                    renewed = True
                    await self.login()
                    continue
                failure = self.failed(member, error)
                attempts -= 1
                if attempts == 0 or not isinstance(failure, EtcdUnavailable):
                    raise failure from error
            except grpc.aio.UsageError as error:
                raise EtcdUnavailable(f"the connection to etcd at {self.config.where} was closed") from error

    async def login(self) -> None:
        """Exchange user and password, if there are any, for a token.

        Raises:
            EtcdAuthError: etcd refuses them, or asks nobody, so that they do not guard what the caller believes.
            EtcdUnavailable: It does not answer.
        """
        if self.config.user is None:
            return
        member = self.member
        request = rpc.AuthenticateRequest(name=self.config.user, password=self.config.password)
        try:
            self._token = (await member.auth.Authenticate(request, timeout=self.timeout_s)).token
        except rpc.AioRpcError as error:
            if not _mentions(error, ("authentication is not enabled",)):
                raise self.failed(member, error) from error
            if not all(map(is_unix, self.config.endpoints)):
                raise EtcdAuthError(
                    f"etcd at {self.config.where} requires no password: enable its authentication "
                    f"(etcdctl auth enable), or leave out RESILIENT_ETCD_USER and user="
                ) from error
            self._token = None

    async def close(self) -> None:
        """Close every channel."""
        for member in (*self._members, *self._retired):
            await member.channel.close()

    def failed(self, member: Endpoint, error: rpc.AioRpcError) -> EtcdError:
        """Return our error for gRPC's; when `member` is out of reach, use the next endpoint from now on."""
        details = error.details() or error.code().name
        where = self.config.where
        if error.code() in _UNAVAILABLE or _mentions(error, _UNAVAILABLE_DETAILS):
            return self.unavailable(member, details)
        if _mentions(error, _FULL_DETAILS):
            return EtcdUnavailable(
                f"etcd at {where} has no space left ({details}): make space (etcdctl compact, defrag, alarm "
                "disarm), and start it with --auto-compaction-retention=5m"
            )
        if error.code() in _REFUSED or _mentions(error, _REFUSED_DETAILS):
            user = "without a user" if self.config.user is None else f"as user {self.config.user!r}"
            return EtcdAuthError(
                f"etcd refused access at {where} {user} ({details}): check RESILIENT_ETCD_USER and "
                f"RESILIENT_ETCD_PASSWORD, and that the user may read and write keys below {RUNS}"
            )
        if error.code() is rpc.StatusCode.UNIMPLEMENTED:
            return EtcdError(
                f"what answers at {where} is not etcd 3 ({details}): check the endpoint and port given to "
                "--rdzv-endpoint"
            )
        if error.code() == rpc.StatusCode.NOT_FOUND and "lease" in details:
            return EtcdLeaseLost(f"etcd at {where} no longer has the lease ({details}): ask for a new one")
        # Of its codes, gRPC gives one to answers that are too large as well: they always will be.
        failed = EtcdUnavailable if error.code() in _BEFELL and "larger than max" not in details else EtcdError
        return failed(f"etcd at {where} could not carry out a request: {details}")

    def unavailable(self, member: Endpoint, details: str) -> EtcdUnavailable:
        """Turn away from `member`, unless another request already did, and return the error that says so."""
        if self.member is member:
            self._members.rotate(-1)
            self._renew()
        tls = "with TLS" if self.config.tls else "without TLS"
        return EtcdUnavailable(
            f"cannot reach etcd at {self.config.where} {tls} ({details}): check that it runs, and the endpoint, "
            "port and TLS files given to --rdzv-endpoint and --rdzv-conf (resilientctl: --etcd-endpoint, --etcd-conf)"
        )

    def _channels(self) -> deque[Endpoint]:
        # One channel per endpoint, so that TLS checks each certificate against the name of its own endpoint.
        credentials = grpc.ssl_channel_credentials(*self._files) if self.config.tls else None
        return deque(Endpoint(endpoint, credentials) for endpoint in self.config.endpoints)

    def _renew(self) -> None:
        """Connect with the files of TLS as they are now: a channel keeps those that it began with."""
        try:
            files = _tls_files(self.config)
        except EtcdError:
            return  # they are being renewed
        if files != self._files:
            self._files = files
            self._retired += self._members
            self._members = self._channels()


def _tls_files(config: EtcdConfig) -> tuple[bytes | None, bytes | None, bytes | None]:
    return _read(config.cacert), _read(config.key), _read(config.cert)


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise EtcdError(f"cannot read the TLS file {path}: {error.strerror}; see --rdzv-conf") from error


def _mentions(error: rpc.AioRpcError, phrases: Iterable[str]) -> bool:
    details = error.details() or ""
    return any(phrase in details for phrase in phrases)


__all__ = [
    "Endpoint",
    "EtcdAuthError",
    "EtcdConnection",
    "EtcdError",
    "EtcdLeaseLost",
    "EtcdUnavailable",
    "grpc",
    "rpc",
]
