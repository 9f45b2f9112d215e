"""What `resilientctl drain` refuses before it interrupts anything; tests/test_elastic.py drains real runs."""

import time
from typing import Any

import pytest
from click.testing import CliRunner
from hosts import Hosts

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.etcd.client import Etcd, EtcdConfig


@pytest.mark.parametrize(
    ("host", "nnodes", "job", "waiting", "message"),
    [
        (
            "c",
            (1, 3),
            {"elastic_s": 1.0},
            "",
            "host 'c' does not train in generation 1, which runs on a, b; check HOST",
        ),
        ("b", (2, 3), {"elastic_s": 1.0}, "", "the run needs 2 hosts (--nnodes), and 1 would remain: start a standby"),
        (
            "b",
            (1, 3),
            {},
            "",
            "the other hosts cannot make 2 ranks, which without --rr-elastic the run keeps: start a standby",
        ),
        ("b", (1, 3), {}, "c2", "the other hosts cannot make 2 ranks, which without --rr-elastic the run keeps"),
        (
            "b",
            (1, 3),
            {"elastic_s": 1.0, "sizes": [2, 4]},
            "",
            "the other hosts cannot make 2, 4 ranks, which --rr-sizes allows",
        ),
        ("b", (1, 3), {}, "c1", None),
        ("b", (1, 3), {"elastic_s": 1.0, "sizes": [2, 4]}, "c1", None),
        ("b", (1, 3), {"elastic_s": 1.0}, "", None),
    ],
)
def test_a_host_that_the_run_needs_is_not_drained(
    tmp_path: Any,
    etcd_config: EtcdConfig,
    host: str,
    nnodes: tuple[int, int],
    job: dict[str, Any],
    waiting: str,
    message: str | None,
) -> None:
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=etcd_config)
    options = ["--run-id", hosts.run_id, "--etcd-endpoint", etcd_config.endpoints[0], "--timeout", "1"]

    def drain(name: str) -> str:
        done = CliRunner().invoke(resilientctl, ["drain", name, *options])
        assert done.exit_code == 1
        return done.output

    async def write(etcd: Etcd) -> None:
        agreed = {"incarnation": "i", "min_nodes": nnodes[0], "max_nodes": nnodes[1], "token": "t", **job}
        await etcd.put(f"{hosts.prefix}rdzv/job", agreed)
        seats = [{"host": name, "session": "s", "nproc": 1} for name in "ab"]
        await etcd.put(f"{hosts.prefix}rdzv/round", {"generation": 1, "members": seats, "restore": None})
        for name in ("a1", "b1", *waiting.split()):
            ready = 2 if name == waiting else 0
            member = {"session": "s", "nproc": int(name[1]), "addr": "127.0.0.1", "pid": 1, "ready": ready}
            await etcd.put(f"{hosts.prefix}rdzv/members/{name[0]}", member)

    try:
        assert "etcd has no run" in drain(host)
        hosts.etcd(write)
        if message is not None:
            assert message in drain(host)
        else:
            # Nobody is there to form another round.
            assert "has committed nothing without host b within 1 s: keep the host" in drain(host)
        broken = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}rdzv/failure/1"))
        assert (broken is None) == (message is not None)
        avoided = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}rdzv/quarantine/{host}"))
        assert (avoided is None) == (message is not None)
    finally:
        hosts.close()


@pytest.mark.parametrize("left_s", [60.0, -1.0])
def test_a_host_that_is_drained_may_be_drained_again(tmp_path: Any, etcd_config: EtcdConfig, left_s: float) -> None:
    """Two commands at once, or one that is repeated after it was cut off, say the same of the host."""
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=etcd_config)
    options = ["--run-id", hosts.run_id, "--etcd-endpoint", etcd_config.endpoints[0], "--timeout", "20"]

    async def write(etcd: Etcd) -> None:
        since_unix_s = time.time() - 100.0
        avoided = {"since_unix_s": since_unix_s, "until_unix_s": time.time() + left_s, "reason": "host b is drained"}
        await etcd.put(f"{hosts.prefix}rdzv/quarantine/b", avoided)
        await etcd.put(f"{hosts.prefix}state/watermark", {"generation": 2, "step": 7})
        seats = [{"host": "a", "session": "s", "nproc": 1}]
        await etcd.put(f"{hosts.prefix}rdzv/round", {"generation": 2, "members": seats, "restore": None})

    try:
        hosts.etcd(write)
        done = CliRunner().invoke(resilientctl, ["drain", "b", *options])
        if left_s > 0:
            assert (done.exit_code, done.output) == (
                0,
                "host b is drained: generation 2 runs on a and has committed step 7\n",
            )
        else:
            assert done.exit_code == 1
            assert "host 'b' does not train in generation 2, which runs on a; check HOST" in done.output
        assert hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}rdzv/failure/2")) is None
    finally:
        hosts.close()
