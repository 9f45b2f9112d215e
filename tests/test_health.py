"""Host health: thresholds without flapping, real measures of this machine, and a tmpfs that runs full."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster import wait_until
from hosts import Hosts

from resilient_run.daemon.base.policy import DetectPolicy
from resilient_run.daemon.health.health import local_directory, measure_host
from resilient_run.daemon.health.threshold import Judge, Measure
from resilient_run.daemon.run.observation import parse_observations

pytestmark = pytest.mark.jobs


def free(value: float) -> Measure:
    return Measure(name="x", kind="disk", value=value, warn=10.0, fail=5.0, low_is_bad=True, message=f"{value} is free")


def load(value: float) -> Measure:
    return Measure(name="x", kind="load", value=value, warn=4.0, fail=8.0, message=f"{value} wait")


@pytest.mark.parametrize(
    ("measure", "values", "severities"),
    [
        (free, [12, 10, 9.9, 10.9, 11, 4.9, 5.4, 5.5, 12], ["", "", "warn", "warn", "", "fail", "fail", "warn", ""]),
        (load, [3.9, 4, 3.7, 3.6, 3.5, 9, 7.3, 7.1, 3], ["", "warn", "warn", "warn", "", "fail", "fail", "warn", ""]),
    ],
)
def test_values_near_a_threshold_do_not_flap(measure: type, values: list[float], severities: list[str]) -> None:
    judge = Judge()
    found = [judge.judge([measure(value)]) for value in values]
    assert [seen["x"].severity if seen else "" for seen in found] == severities


def test_observation_says_since_when_and_names_its_threshold() -> None:
    now = iter([100.0, 200.0, 300.0]).__next__
    judge = Judge(wall=now)
    assert judge.judge([free(9)])["x"].unix_s == 100.0
    again = judge.judge([free(8)])["x"]
    assert (again.unix_s, again.value, again.limit) == (100.0, 8, 10.0)
    assert again.message == "8 is free (the limit is 10)"
    assert judge.judge([free(1)])["x"].unix_s == 200.0
    assert judge.judge([]) == {}


def test_threshold_of_zero_is_off() -> None:
    never = Measure(name="x", kind="load", value=0.0, message="idle")
    assert Judge().judge([never]) == {}


def test_this_machine_is_measured(tmp_path: Path) -> None:
    """Thresholds that every real machine violates find everything; the defaults fail nothing."""
    harsh = DetectPolicy(
        memory_warn_percent=100.0,
        disk_fail_percent=100.0,
        tmpfs_warn_percent=100.0,
        load_warn=1e-9,
        swap_warn_percent=0,
    )
    missing = tmp_path / "not" / "there" / "yet"
    found = Judge().judge(measure_host(harsh, tmpfs=tmp_path, disks=[tmp_path, missing]))
    wanted = {"memory", f"tmpfs {tmp_path}", f"disk {tmp_path}", f"disk {missing}"}
    assert wanted <= found.keys() <= wanted | {"load"}
    assert {name: seen.severity for name, seen in found.items() if seen.kind == "disk"} == {
        f"disk {tmp_path}": "fail",
        f"disk {missing}": "fail",
    }
    usage = psutil.disk_usage(str(tmp_path))
    assert found[f"disk {missing}"].value == pytest.approx(100 * usage.free / (usage.used + usage.free), abs=1.0)
    assert 0 < found["memory"].value < 100
    gentle = Judge().judge(measure_host(DetectPolicy(), tmpfs=tmp_path, disks=[tmp_path]))
    assert not [seen for seen in gentle.values() if seen.severity == "fail"]


def test_directory_that_cannot_be_reached_is_wrong(tmp_path: Path) -> None:
    """A name that is too long stands for a file system that answers with an error."""
    found = Judge().judge(measure_host(DetectPolicy(), tmpfs=tmp_path, disks=[tmp_path / ("x" * 300)]))
    (seen,) = [seen for seen in found.values() if "cannot be reached: File name too long" in seen.message]
    assert (seen.kind, seen.severity, seen.value) == ("disk", "warn", 0.0)


@pytest.mark.parametrize(
    ("target", "directories"),
    [
        (None, []),
        ("/mnt/tier", [Path("/mnt/tier")]),
        ("file:///mnt/tier", [Path("/mnt/tier")]),
        ("s3://bucket/tier", []),
        ("simplecache::gs://bucket", []),
    ],
)
def test_local_persistent_tier_needs_room_too(target: str | None, directories: list[Path]) -> None:
    assert local_directory(target) == directories


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def seen(hosts: Hosts, name: str) -> dict[str, str]:
    """Return kind → severity of what a host has in etcd."""
    entry = hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}state/observations/{name}"))
    return {} if entry is None else {item.kind: item.severity for item in parse_observations(entry.value)}


QUIET = {
    "memory_warn_percent": 0.0,
    "swap_warn_percent": 0.0,
    "disk_warn_percent": 0.0,
    "tmpfs_warn_percent": 0.0,
    "load_warn": 0.0,
}


def test_full_tmpfs_is_seen_and_its_end_too(hosts: Hosts, small_tmpfs: Path) -> None:
    host = hosts["a"]
    host.shm_dir = small_tmpfs / "slots"
    hosts.create_job()
    host.start()
    settings = {**QUIET, "sample_s": 0.1, "tmpfs_warn_percent": 50.0, "tmpfs_fail_percent": 10.0}
    host.open(policy={"detect": settings})
    wait_until(lambda: hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}ckpt/hosts/a")), timeout_s=30, what="the job")
    assert seen(hosts, "a") == {}, "something is written though nothing is wrong"
    filler = small_tmpfs / "filler"
    filler.write_bytes(bytes(3 << 20))
    wait_until(lambda: seen(hosts, "a") == {"tmpfs": "warn"}, timeout_s=30, what="a warning")
    filler.write_bytes(bytes((4 << 20) - (64 << 10)))
    wait_until(lambda: seen(hosts, "a") == {"tmpfs": "fail"}, timeout_s=30, what="a failure")
    (shown,) = host.status()["jobs"][0]["observations"]
    assert "% (0.00 of 0.00 GiB) of the file system" in shown["message"]
    filler.unlink()
    wait_until(lambda: seen(hosts, "a") == {}, timeout_s=30, what="the end")
    assert host.log.count("tmpfs (fail): ") == 1
    assert "tmpfs is over" in host.log


def test_silent_peer_is_reported_while_it_is_registered(hosts: Hosts) -> None:
    hosts.create_job()
    for name in "ab":
        hosts[name].start()
        hosts[name].open(policy={"detect": {**QUIET, "peer_unreachable_s": 1.0}})
    hosts.form_round(1, "ab")
    wait_until(lambda: hosts["a"].status()["jobs"][0]["generation"] == 1, timeout_s=30, what="the round")
    wait_until(lambda: hosts.etcd(lambda etcd: etcd.get(f"{hosts.prefix}ckpt/hosts/b")), timeout_s=30, what="host b")
    process = hosts["b"].process
    assert process is not None
    psutil.Process(process.pid).suspend()
    try:
        wait_until(lambda: seen(hosts, "a") == {"peer_unreachable": "warn"}, timeout_s=30, what="the observation")
        (shown,) = hosts["a"].status()["jobs"][0]["observations"]
        assert shown["message"].startswith("the daemon of host b at 127.0.0.1:")
        wait_until(lambda: seen(hosts, "a") == {}, timeout_s=30, what="its end, because the lease of b expires")
    finally:
        psutil.Process(process.pid).resume()


def test_commits_that_stay_behind_are_reported(hosts: Hosts) -> None:
    hosts.create_job()
    hosts["a"].start()
    hosts["a"].open(policy={"detect": {**QUIET, "replication_lag_steps": 5}})
    hosts.form_round(1, "a")
    trainer = hosts["a"].trainer(0, world_size=1, generation=1)
    trainer.attach()
    for step in range(1001, 1006):
        trainer.notify("progress", step=step)
    trainer.notify("progress", step=1005)
    wait_until(lambda: seen(hosts, "a") == {"replication_slow": "warn"}, timeout_s=30, what="the observation")
    trainer.capture(1005)
    wait_until(lambda: seen(hosts, "a") == {}, timeout_s=30, what="its end")
    assert "step 1005 is done, but the newest committed one is 5 steps older" in hosts["a"].log
