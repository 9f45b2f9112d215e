"""Checks of etcd: who answers there, how fast, in which version, and who is let in; and what time it is there."""

import asyncio
import ctypes
import http.client
import re
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from ..etcd.address import is_local
from ..etcd.client import Etcd, EtcdAuthError, EtcdError, EtcdUnavailable, Status
from ..etcd.config import RUNS, EtcdConfig, is_unix
from ..etcd.stranger import is_open
from .examine import Check, Finding, examine, fail, ok, warn
from .plan import RunPlan

_CONNECT_S = 1.5
_ANSWER_S = 2.0
_QUESTIONS = 10
_SLOW_S, _TOO_SLOW_S = 0.025, 0.5
_LONG = 1_000_000
_TIME_ERROR = 5
_SKEW_S, _WRONG_S = 2.0, 60.0
_TIMES = (9, 10)  # of OpenSSL: the certificate is not valid yet, and no longer
_TIMEX_BYTES = 512
_FORGET = "start etcd with --auto-compaction-retention=5m"
_MAKE_SPACE = f"make space (etcdctl compact, defrag, alarm disarm), and {_FORGET}"
_GIVE = "--rdzv-endpoint (here --etcd-endpoint)"


def etcd_checks(plan: RunPlan) -> list[Check]:
    """Return the checks of the etcd of the run `plan`, and of the clock."""
    checks = [Check(name="clock", look=lambda: _clock(plan.etcd), when_late="etcd does not say what time it is")]
    if (config := plan.etcd) is not None:
        late = f"etcd at {config.where}: is it overloaded, or the name service slow?"
        checks.insert(0, Check(name="etcd-reachable", look=lambda: _look(plan, config), within_s=6.0, when_late=late))
    return checks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What one endpoint has said."""

    endpoint: str
    error: EtcdError | None = None
    status: Status | None = None
    remembers_long: bool = False
    seconds: float = 0.0

    @property
    def version(self) -> str:
        return "" if self.status is None else self.status.version


def _look(plan: RunPlan, config: EtcdConfig) -> Iterator[Finding]:
    answers = asyncio.run(_ask_all(config))
    refused = [answer.error for answer in answers if isinstance(answer.error, EtcdAuthError)]
    silent = [answer for answer in answers if answer.error is not None and answer.error not in refused]
    heard = [answer for answer in answers if answer.error is None]
    if not heard and not refused:
        yield from examine([_silent(answer, config) for answer in silent])
        return
    tls = "with TLS" if config.tls else "without TLS"
    if silent:
        found, remedy = _why_silent(silent[0], config)
        yield warn("etcd-reachable", f"{len(silent)} of {len(answers)} members are away: {found}", remedy)
    else:
        yield ok("etcd-reachable", f"{config.where} {tls}")
    if refused:
        found, _, remedy = str(refused[0]).rpartition(": ")
        yield fail("etcd-access", found, remedy)
        return
    yield _access(plan, config)
    yield _latency(max(heard, key=lambda answer: answer.seconds))
    yield _version(min(heard, key=lambda answer: _numbers(answer.version)))
    yield _space(heard)


async def _ask_all(config: EtcdConfig) -> list[_Answer]:
    return await asyncio.gather(*(_ask(replace(config, endpoints=(endpoint,))) for endpoint in config.endpoints))


async def _ask(config: EtcdConfig) -> _Answer:
    (endpoint,) = config.endpoints
    clock = asyncio.get_running_loop().time
    try:
        etcd = await Etcd.connect(config, _ANSWER_S)
        try:
            status, began_s = await etcd.status(), clock()
            remembers_long = status.revision > _LONG and await etcd.remembers(status.revision - _LONG)
            times: list[float] = []
            while len(times) < _QUESTIONS and clock() - began_s < _ANSWER_S:
                asked_s = clock()
                await etcd.revision(RUNS)
                times.append(clock() - asked_s)
        finally:
            await etcd.close()
    except EtcdError as error:
        return _Answer(endpoint=endpoint, error=error)
    seconds = statistics.median(times)
    return _Answer(endpoint=endpoint, status=status, remembers_long=remembers_long, seconds=seconds)


def _silent(answer: _Answer, config: EtcdConfig) -> Check:
    late = f"{answer.endpoint}: the name service, or the host, does not answer: correct {_GIVE}"
    look = lambda: [fail("etcd-reachable", *_why_silent(answer, config))]  # noqa: E731
    return Check(name="etcd-reachable", look=look, within_s=_ANSWER_S + _CONNECT_S, when_late=late)


def _why_silent(answer: _Answer, config: EtcdConfig) -> tuple[str, str]:
    """Return what is seen of an endpoint that does not answer as etcd does, and what to do about it."""
    endpoint = answer.endpoint
    if not isinstance(answer.error, EtcdUnavailable):
        found, _, remedy = str(answer.error).partition("; ")
        return found, remedy or f"something else listens there: correct the port in {_GIVE}"
    try:
        with _connect(endpoint) as sock:
            if config.tls:
                _context(config).wrap_socket(sock, server_hostname=endpoint.rpartition(":")[0].strip("[]")).close()
            elif _speaks_tls(sock):
                return f"{endpoint} speaks TLS", "--rdzv-conf (here --etcd-conf) cacert=…, and cert=…,key=… if it asks"
    except (socket.gaierror, UnicodeError) as error:
        return f"{endpoint} does not resolve: {getattr(error, 'strerror', error)}", f"correct the host in {_GIVE}"
    except ConnectionRefusedError:
        return f"nothing listens at {endpoint}", f"start etcd there, or correct host and port in {_GIVE}"
    except ssl.SSLCertVerificationError as error:
        expired = "renew the certificate of this etcd, or correct this host's clock"
        other = "the cacert= of this etcd, and the name that is in its certificate"
        return f"{endpoint}: {error.verify_message}", expired if error.verify_code in _TIMES else other
    except (ssl.SSLError, ConnectionError) as error:
        why = str(getattr(error, "reason", None) or error)
        if why == "KEY_VALUES_MISMATCH":
            return f"key={config.key} does not belong to cert={config.cert}", "give the two files of one certificate"
        if "CERTIFICATE" in why:
            given = f"cert={config.cert}" if config.cert else "a host without cert= and key="
            return (
                f"{endpoint} refuses {given} ({why})",
                "a cert= and key= of a CA that it trusts, which has not expired",
            )
        found = f"{endpoint} refuses TLS ({why})"
        return (
            found,
            "leave out cacert=, cert= and key= where etcd has no TLS; else give a cert= and key= that it accepts",
        )
    except TimeoutError:
        return f"{endpoint} does not answer", f"is the host up, and its firewall open? else correct {_GIVE}"
    except OSError as error:
        return f"{endpoint}: {error.strerror or error}", f"correct {_GIVE}, see `ip route`"
    return (
        f"{endpoint} accepts connections, but does not answer as etcd does",
        "if it is etcd, it has no leader: start the other members (`etcdctl endpoint status --cluster`); else "
        f"something else listens there: correct the port in {_GIVE}",
    )


def _connect(endpoint: str) -> socket.socket:
    if is_unix(endpoint):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(endpoint.removeprefix("unix:"))
        except FileNotFoundError as error:
            sock.close()
            raise ConnectionRefusedError(*error.args) from error
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S)


def _speaks_tls(sock: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(sock).close()
    except (ssl.SSLError, OSError):
        return False
    return True


def _context(config: EtcdConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.cacert)
    if config.cert is not None:
        context.load_cert_chain(config.cert, config.key)
    return context


def _access(plan: RunPlan, config: EtcdConfig) -> Finding:
    if all(map(is_local, config.endpoints)):
        return ok("etcd-access", "only this host reaches it")
    if not is_open(config, _CONNECT_S):
        return ok("etcd-access", "it requires credentials and accepts these")
    if plan.has_key:
        return ok("etcd-access", "anyone who reaches it can connect; the run key protects the run's state")
    return fail(
        "etcd-access",
        "anyone who reaches it can read and forge the state of the run",
        "give all hosts one run key: `resilientctl keygen run.key`, then --rr-key-file run.key (here --key-file)",
    )


def _latency(slowest: _Answer) -> Finding:
    found = f"{1e3 * slowest.seconds:.1f} ms for a read at {slowest.endpoint}, the median of {_QUESTIONS}"
    remedy = "every commit takes several of these: give etcd a fast disk, idle CPUs, and a place near the hosts"
    if slowest.seconds >= _TOO_SLOW_S:
        return fail("etcd-latency", found, remedy)
    if slowest.seconds >= _SLOW_S:
        return warn("etcd-latency", found, remedy)
    return ok("etcd-latency", found)


def _version(oldest: _Answer) -> Finding:
    numbers, found = _numbers(oldest.version), f"etcd {oldest.version} at {oldest.endpoint}"
    if numbers < (3, 4):
        return fail("etcd-version", found, "upgrade it to 3.4.x, or to 3.5.3 or later")
    if (3, 5) <= numbers < (3, 5, 3):
        if is_unix(oldest.endpoint):
            return ok("etcd-version", f"{found} (before 3.5.3 only good for runs on this host)")
        return fail(
            "etcd-version",
            f"{found}: before 3.5.3 a member that crashes may come back with other data than the rest",
            "upgrade it to 3.5.3 or later",
        )
    return ok("etcd-version", found)


def _space(heard: list[_Answer]) -> Finding:
    full = [answer.endpoint for answer in heard if answer.status is not None and answer.status.is_full]
    if full:
        return fail("etcd-space", f"{', '.join(full)} has no space left, so nothing is committed", _MAKE_SPACE)
    used_bytes = max(answer.status.used_bytes for answer in heard if answer.status is not None)
    found = f"{used_bytes / 2**20:.0f} MiB"
    if any(answer.remembers_long for answer in heard):
        return warn(
            "etcd-space",
            f"{found}, with more than {_LONG:,} changes: without compaction, its commits fill it",
            _FORGET,
        )
    return ok("etcd-space", found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _clock(config: EtcdConfig | None) -> Iterator[Finding]:
    remedy = "run chrony, ntpd or systemd-timesyncd on every host (`timedatectl set-ntp true`)"
    skews_s = (_skew_s(endpoint, config) for endpoint in config.endpoints) if config is not None else iter(())
    skew_s = next((skew for skew in skews_s if skew is not None), None)
    if skew_s is not None and abs(skew_s) > _SKEW_S:
        found = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} etcd's"
        if abs(skew_s) > _WRONG_S:
            yield fail("clock", f"{found}: quarantines and certificates begin and end at wrong times", remedy)
        else:
            yield warn("clock", f"{found}: the times in events and logs of the hosts do not fit together", remedy)
    elif (state := _clock_state()) == _TIME_ERROR:
        yield warn("clock", "the kernel reports that it is not synchronized", remedy)
    else:
        kept = "kept right" if state >= 0 else "the kernel does not say whether it is synchronized"
        yield ok("clock", kept if skew_s is None else f"{kept}; within {_SKEW_S:g} s of etcd's")


def _clock_state() -> int:
    """Return what the kernel says of its clock, -1 where it may not be asked."""
    return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))


def _skew_s(endpoint: str, config: EtcdConfig) -> float | None:
    """Return by how many seconds our clock is ahead of that of an endpoint, None when that does not tell the time."""
    if is_unix(endpoint):
        return None
    host, _, port = endpoint.rpartition(":")
    place = host.strip("[]"), int(port)
    try:
        connection = (
            http.client.HTTPSConnection(*place, timeout=_CONNECT_S, context=_context(config))
            if config.tls
            else http.client.HTTPConnection(*place, timeout=_CONNECT_S)
        )
        began_s = time.time()
        try:
            connection.request("GET", "/version")
            date = connection.getresponse().getheader("Date")
        finally:
            connection.close()
        # It leaves out what is less than a second.
        return None if date is None else (began_s + time.time()) / 2 - parsedate_to_datetime(date).timestamp() - 0.5
    except (OSError, http.client.HTTPException, ValueError):
        return None
