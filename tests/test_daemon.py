"""A job on real daemons, one per loopback host: commit, repair, restore, refusals, and the ends of jobs."""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cleaner import needs_cleaner, remove_all_old
from cluster import wait_until
from etcd_process import EtcdProcess
from hosts import PAYLOAD_BYTES, TOPOLOGY, Hosts, corrupt, payload, restored_bytes, wait_for_watermark

from resilient_run import __version__
from resilient_run.ckpt.errors import DaemonError, MemoryBudgetError, RestoreError, TopologyError
from resilient_run.ckpt.format.slot import Slot
from resilient_run.daemon.base.fields import Fields
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.settings import Settings
from resilient_run.daemon.base.spec import JobSpec
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.trainers.sessions import Sessions
from resilient_run.launcher.daemon_link import DaemonLink

pytestmark = pytest.mark.jobs


def test_slot_of_a_size_that_none_can_have_is_refused_by_name() -> None:
    asked = Fields({"capacity_bytes": 4096, "payload_offset": 8192}, "allocate")
    nobody: Any = None  # it is refused before anybody is asked
    with pytest.raises(DaemonError, match="allocate: field 'capacity_bytes' must be an integer from 8192 to"):
        asyncio.run(Sessions.handle(nobody, nobody, "allocate", asked))


def test_single_host_commits_its_own_captures(hosts: Hosts) -> None:
    """Two replicas are wanted, one host is there: one replica is all."""
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], range(1, 5))
    assert hosts.watermark() == (1, 4)


def test_nothing_is_committed_without_every_rank(hosts: Hosts) -> None:
    trainers = hosts.run("abc")
    hosts.commit(trainers, [1])
    for trainer in trainers[:2]:
        trainer.capture(2)
    hosts.wait_for_replicas("abc", (1, 2), 4)
    assert hosts.watermark() == (1, 1)
    trainers[2].capture(2)
    wait_for_watermark(trainers, (1, 2))


def test_lost_host_s_replicas_are_fetched_by_its_replacement(hosts: Hosts) -> None:
    trainers = hosts.run("abc")
    hosts.commit(trainers, [1, 2, 3])
    hosts["b"].close()
    trainers = hosts.run("adc", generation=2)
    for rank, trainer in enumerate(trainers):
        answer = trainer.request("restore")
        assert answer["source"] == ("peer" if rank == 1 else "local")
        assert restored_bytes(answer["path"]) == payload(hosts.run_id, rank, (1, 3))
    hosts.wait_for_replicas("adc", (1, 3), 6)
    hosts.commit(trainers, [4])


def test_host_that_lost_its_memory_gets_it_back(hosts: Hosts) -> None:
    hosts.commit(hosts.run("abc"), [1, 2])
    hosts["a"].close()
    hosts["a"].start()
    trainers = hosts.run("abc", generation=2)
    answer = trainers[0].request("restore")
    assert answer["source"] == "peer"
    assert restored_bytes(answer["path"]) == payload(hosts.run_id, 0, (1, 2))
    hosts.wait_for_replicas("abc", (1, 2), 6)


def test_slots_of_a_dead_timeline_are_cleared(hosts: Hosts) -> None:
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1, 2])
    trainers[0].capture(3)
    hosts.wait_for_replicas("ab", (1, 3), 2)
    hosts.run("ab", generation=2)
    assert [hosts[name].held() for name in "ab"] == [{0: {(1, 2)}, 1: {(1, 2)}}] * 2
    assert not [path for name in "ab" for path in hosts[name].slot_paths(0, (1, 3))]


def test_a_capture_that_one_rank_has_missed_gives_way_to_a_later_one(hosts: Hosts) -> None:
    """Also at the peers, in the slots of what was never committed; and every trainer hears which one comes next."""
    trainers = hosts.run("abc")
    hosts.commit(trainers, [1])
    for trainer in trainers[:2]:
        trainer.capture(2, slot=0)
    hosts.wait_for_replicas("abc", (1, 2), 4)
    trainers[2].notify("missed", next=1, step=1, late=True)
    trainers[2].notify("missed", next=2, step=5, late=True)
    for trainer in trainers:
        wait_until(lambda trainer=trainer: trainer.next() == (1, 7), timeout_s=30, what="news of the next capture")
    for trainer in trainers:
        trainer.capture(7, slot=0)
    wait_for_watermark(trainers, (1, 7))
    hosts.wait_for_replicas("abc", (1, 1), 6)


def test_only_what_was_captured_as_agreed_is_committed(hosts: Hosts) -> None:
    """A rank reports late what the others need not keep any more."""
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1])
    trainers[0].capture(2, slot=0)
    hosts.wait_for_replicas("ab", (1, 2), 2)
    trainers[1].notify("missed", next=2, step=2, late=False)
    for trainer in trainers:
        wait_until(lambda trainer=trainer: trainer.next() == (1, 3), timeout_s=30, what="news of the next capture")
    trainers[1].capture(2, slot=0)
    for trainer in trainers:
        trainer.capture(3, slot=0)
    wait_for_watermark(trainers, (1, 3))
    assert all(trainer.watermarks() == [(1, 1), (1, 3)] for trainer in trainers)


def test_corrupt_local_slot_is_replaced_from_a_peer(hosts: Hosts) -> None:
    hosts.commit(hosts.run("ab"), [1, 2])
    (path,) = hosts["a"].slot_paths(0, (1, 2))
    corrupt(path)
    trainers = hosts.run("ab", generation=2)
    answer = trainers[0].request("restore")
    assert answer["source"] == "peer"
    assert restored_bytes(answer["path"]) == payload(hosts.run_id, 0, (1, 2))
    assert "is corrupt and was cleared" in hosts["a"].log


def test_restore_names_everything_that_was_tried(hosts: Hosts) -> None:
    hosts.commit(hosts.run("ab"), [1, 2])
    for name in "ab":
        (path,) = hosts[name].slot_paths(0, (1, 2))
        corrupt(path)
    trainers = hosts.run("ab", generation=2)
    with pytest.raises(
        RestoreError, match=r"rank 0 at step 2 .*no local slot .*chunk 3 .*; host b: .*rank 0 step 2: chunk 3"
    ):
        trainers[0].request("restore")
    assert trainers[1].request("restore")["source"] == "local"


def test_another_topology_is_refused(hosts: Hosts) -> None:
    hosts.commit(hosts.run("a"), [1])
    (trainer,) = hosts.run("a", generation=2)
    trainer.close()
    other = hosts["a"].trainer(0, world_size=1, generation=2)
    other.attach(topology=TOPOLOGY - 1)
    with pytest.raises(TopologyError, match=r"world size 1 .* or with a new run id"):
        other.request("restore")


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"rank": 1}, "does not fit generation 1"),
    ({"local_rank": 1}, "does not fit generation 1"),
    ({"world_size": 2}, "does not fit generation 1"),
    ({"run_id": "other"}, "field 'run_id' names no job"),
    ({"rank": "0"}, "field 'rank' must be an integer"),
    ({"generation": 0}, "field 'generation' must be an integer of at least 1"),
    ({"estimate_bytes": -1}, "field 'estimate_bytes'"),
    ({"topology": 2**64}, "field 'topology'"),
]


def test_attachments_that_do_not_fit_are_refused(hosts: Hosts) -> None:
    """All are tried at once, because the daemon waits a while for a launcher that opens the job of another name."""
    hosts.run("a")
    trainers = [hosts["a"].trainer(0, world_size=1, generation=1) for _ in REFUSED]
    with ThreadPoolExecutor(len(REFUSED)) as pool:
        answers = [
            pool.submit(trainer.attach, **changes) for trainer, (changes, _) in zip(trainers, REFUSED, strict=True)
        ]
    for answer, (_, message) in zip(answers, REFUSED, strict=True):
        with pytest.raises(DaemonError, match=message):
            answer.result()


def test_a_notification_that_cannot_be_obeyed_costs_its_connection_alone(hosts: Hosts) -> None:
    """What a request would have been answered with an error for is expected, whoever asks for no answer."""
    (trainer,) = hosts.run("a")
    trainer.notify("restore")
    assert trainer.is_closed()
    assert hosts["a"].status()["tasks"] == []
    assert "there is nothing to restore" in hosts["a"].log


def test_trainer_of_an_older_generation_is_refused(hosts: Hosts) -> None:
    (old,) = hosts.run("a")
    hosts.form_round(2, "a")
    assert old.is_closed()
    with pytest.raises(DaemonError, match="generation 1 is over, 2 has begun"):
        hosts["a"].trainer(0, world_size=1, generation=1).attach()


def test_job_that_does_not_fit_is_refused_before_training(hosts: Hosts) -> None:
    hosts["a"].start("--memory-limit", "64M")
    hosts["b"].start()
    for trainer in hosts.run("ab"):
        trainer.close()
    trainer = hosts["a"].trainer(0, world_size=2, generation=1)
    with pytest.raises(
        MemoryBudgetError, match=r"need 80.00 MiB \(2 slots \* 2 ranks .* limit is 64.00 MiB.*--rr-repl"
    ):
        trainer.attach(estimate_bytes=20 << 20)
    trainer.attach(estimate_bytes=10 << 20)
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        trainer.allocate(payload_bytes=33 << 20)


def test_job_s_own_memory_limit_counts(hosts: Hosts) -> None:
    hosts["a"].start()
    hosts["a"].open(memory_limit_bytes=PAYLOAD_BYTES)
    hosts.create_job()
    hosts.form_round(1, "a")
    with pytest.raises(MemoryBudgetError):
        hosts["a"].trainer(0, world_size=1, generation=1).attach()


def test_standby_without_room_stops_no_commits(hosts: Hosts) -> None:
    """They wait for its replica otherwise, and the launcher hears what protects the run each time that changes."""
    (trainer,) = hosts.run("a")
    hosts["b"].start()
    hosts["b"].open(memory_limit_bytes=1 << 20)
    member = {"session": "s", "nproc": 1, "role": "", "addr": "127.0.0.1", "pid": 1, "ready": 2, "label": ""}
    hosts.etcd(lambda etcd: etcd.put(f"{hosts.prefix}rdzv/members/b", member))
    wait_until(lambda: hosts["a"].status()["jobs"][0]["holders"] == ["a", "b"], timeout_s=30, what="the standby")
    hosts.commit([trainer], [1, 2])
    assert hosts["b"].held() == {}
    seen = hosts["b"].status()["jobs"][0]["observations"]
    # A machine that has much to do is seen, too.
    assert [each["rank"] for each in seen if each["kind"] != "load"] == [0], seen
    hosts["b"].drop_clients()
    hosts["b"].open()
    wait_until(lambda: hosts["b"].held() == {0: {(1, 2)}}, timeout_s=30, what="the replica")
    hosts.commit([trainer], [3])
    assert (1, 3) in hosts["b"].held()[0]
    launcher = hosts["a"].launcher
    assert launcher is not None
    told = [message["hosts"] for message in launcher.poll() if message.get("event") == "first_commit"]
    assert told == [["a"], ["a", "b"]]


def test_launcher_hears_what_happens_to_its_ranks(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    launcher = hosts["a"].launcher
    assert launcher is not None
    assert launcher.request("job_status", run_id=hosts.run_id)["attached"] is True
    trainer.notify("restored", step=0, seconds=0.25)
    trainer.notify("progress", step=1)
    trainer.notify("progress", step=2)
    wait_until(
        lambda: launcher.request("job_status", run_id=hosts.run_id)["last_steps"] == {"0": 2},
        timeout_s=30,
        what="last step",
    )
    events = [event for event in launcher.poll() if event["op"] == "event"]
    assert [event["event"] for event in events] == ["attached", "restored", "first_step"]
    assert {(event["rank"], event["generation"], event["run_id"]) for event in events} == {(0, 1, hosts.run_id)}
    assert events[1]["seconds"] == 0.25
    assert events[2]["step"] == 1
    trainer.notify("restored", step=1, seconds=0.25)
    wait_until(
        lambda: launcher.request("job_status", run_id=hosts.run_id)["last_steps"] == {"0": 1},
        timeout_s=30,
        what="the step from which a second failure counts",
    )
    assert all(0 < event["monotonic_s"] <= time.monotonic() for event in events)


def test_settle_waits_for_captures_also_for_one_that_nobody_announced(hosts: Hosts) -> None:
    trainers = hosts.run("ab")
    hosts.commit(trainers, [1])
    trainers[0].capture(2, announce=False)
    trainers[1].capture(2)
    launchers = [hosts[name].launcher for name in "ab"]
    assert launchers[0] is not None
    answer = launchers[0].request("settle", run_id=hosts.run_id, timeout_s=30)
    assert answer["watermark"] == {"generation": 1, "step": 2}
    trainers[0].capture(3)
    assert launchers[0].request("settle", run_id=hosts.run_id, timeout_s=0.05)["watermark"]["step"] == 2


def test_closed_job_leaves_nothing_behind(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    launcher = hosts["a"].launcher
    assert launcher is not None
    launcher.request("close_job", run_id=hosts.run_id, discard=True)
    assert list(hosts["a"].shm_dir.glob("*/")) == []
    held, address = (
        hosts.etcd(lambda etcd, key=key: etcd.get(f"{hosts.prefix}ckpt/{key}/a")) for key in ("held", "hosts")
    )
    assert (held, address) == (None, None)


def test_orphaned_slots_are_kept_for_a_relaunch_and_then_collected(hosts: Hosts) -> None:
    host = hosts["a"]
    # Long enough for a relaunch of a test that stands still for a while.
    host.start("--orphan-ttl", "5")
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    host.drop_clients()
    host.open()
    assert host.held() == {0: {(1, 1)}}
    host.drop_clients()
    wait_until(lambda: "no launcher came back" in host.log, timeout_s=30, what="collection of the orphan")
    assert not list(host.shm_dir.glob("*/"))


def test_second_live_launcher_of_a_run_is_refused(hosts: Hosts) -> None:
    hosts.run("a")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            hosts["a"].open()
        except DaemonError as error:
            status = 0 if f"already has a live launcher on host a: pid {os.getppid()}" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_daemon_has_so_many_jobs_at_most(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    host = hosts["a"]
    launcher = host.launcher
    for number in range(63):
        host.open(run_id=f"{hosts.run_id}-{number}")
    with pytest.raises(DaemonError, match=r"^this daemon has 64 runs open, and takes no more: end some"):
        host.open(run_id=f"{hosts.run_id}-63")
    host.launcher = launcher
    host.open()
    hosts.commit([trainer], [1, 2])


def test_another_process_that_attaches_as_a_rank_is_refused(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            hosts["a"].trainer(0, world_size=1, generation=1).attach()
        except DaemonError as error:
            refusal = rf"process {os.getppid()} is attached as rank 0, .*\(this one is {os.getpid()}\)"
            status = 0 if re.match(refusal, str(error)) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    hosts.commit([trainer], [1])
    hosts["a"].trainer(0, world_size=1, generation=1).attach()
    assert trainer.is_closed(), "it has connected anew"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_daemon_in_another_pid_namespace_takes_no_job(hosts: Hosts) -> None:
    """As in two containers of a pod: the launcher has no pid there, and every trainer that of a stranger."""
    hosts.create_job()
    hosts["a"].prefix = ("unshare", "--pid", "--fork", "--kill-child")
    hosts["a"].start()
    remedy = "or let their containers share processes (Kubernetes: shareProcessNamespace)"
    with pytest.raises(DaemonError, match=rf"pid {os.getpid()} is no process to it; .*{re.escape(remedy)}$"):
        hosts["a"].open()
    with pytest.raises(DaemonError, match=r"is in another pid namespace"):
        hosts["a"].trainer(0, world_size=1, generation=1).attach()
    assert hosts["a"].status()["jobs"] == [], "whoever only asks is answered"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_daemon_in_another_network_namespace_takes_no_job_of_an_etcd_that_it_may_not_reach(hosts: Hosts) -> None:
    """As where a container shares the directory of the slots: what the launcher reaches is another network."""
    hosts.create_job()
    hosts["a"].prefix = ("unshare", "--net")
    hosts["a"].start()
    job = JobSpec(
        run_id=hosts.run_id,
        host="a",
        replicas=1,
        nproc=1,
        etcd=replace(hosts.config, endpoints=("127.0.0.1:2379",)),
        addr="127.0.0.1",
        memory_limit_bytes=None,
        policy=Policy(),
        injection=False,
    )
    settings = Settings(run_dir=hosts["a"].run_dir, shm_dir=hosts["a"].shm_dir)
    link = DaemonLink(settings=settings, job=job, on_event=lambda _: None)
    link.start()
    try:
        with pytest.raises(DaemonError, match=r"another network namespace, where etcd at 127.0.0.1:2379 may be out of"):
            link.wait_open()
    finally:
        link.close(discard=False)
    etcd = {**hosts.config.to_dict(), "endpoints": ["unix:/nowhere/client"]}
    hosts["a"].open(network=os.stat("/proc/self/ns/net").st_ino, etcd=etcd)


def test_objects_that_change_behind_captures_are_known_to_whoever_attaches_later(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    trainer.notify("eager", name="model")
    for number in range(100):
        trainer.notify("eager", name=f"more{number}")
    hosts.commit([trainer], [1])
    eager = hosts["a"].trainer(0, world_size=1, generation=1).attach()["eager"]
    assert len(eager) == 64
    assert "model" in eager


def test_process_that_says_another_pid_is_refused(hosts: Hosts) -> None:
    """As where the daemon sees the host's processes and the launcher is in a container."""
    (trainer,) = hosts.run("a")
    with pytest.raises(DaemonError, match=rf"in another pid namespace: pid 1 is {os.getpid()} to it"):
        hosts["a"].trainer(0, world_size=1, generation=1).attach(pid=1)
    hosts.commit([trainer], [1])


@pytest.mark.parametrize(("version", "told"), [("9.1.0", "9.1.0"), (None, "an older version that does not tell")])
def test_setting_of_another_version_is_refused_with_both_versions_and_the_remedy(
    hosts: Hosts, version: str | None, told: str
) -> None:
    (trainer,) = hosts.run("a")
    request = {"host": "a", "replicas": 1, "nproc": 1, "etcd": hosts.config.to_dict(), "addr": "127.0.0.1"}
    request |= {"pid": os.getpid(), "memory_limit_bytes": None, "policy": {"root": {"of_tomorrow": 1}}}
    request |= {} if version is None else {"version": version}
    with pytest.raises(DaemonError) as refused:
        hosts["a"].client().request("open_job", run_id=f"{hosts.run_id}-newer", **request)
    for words in ("no setting 'of_tomorrow'", f"its resilient-run is {told}", f"was {__version__} when it started"):
        assert words in str(refused.value)
    assert "systemctl restart resilientd@USER" in str(refused.value)
    hosts.commit([trainer], [1])


@dataclass(frozen=True)
class PolicyOfTomorrow(Policy):
    def to_value(self) -> dict[str, Any]:
        return {**super().to_value(), "root": {"of_tomorrow": 1}}


def test_launcher_that_a_daemon_does_not_understand_tells_both_versions(hosts: Hosts) -> None:
    hosts.run("a")
    job = JobSpec(
        run_id=f"{hosts.run_id}-newer",
        host="a",
        replicas=1,
        nproc=1,
        etcd=hosts.config,
        addr="127.0.0.1",
        memory_limit_bytes=None,
        policy=PolicyOfTomorrow(),
        injection=False,
    )
    settings = Settings(run_dir=hosts["a"].run_dir, shm_dir=hosts["a"].shm_dir)
    link = DaemonLink(settings=settings, job=job, on_event=lambda _: None)
    link.start()
    try:
        both = rf"its resilient-run is {re.escape(__version__)}, this daemon's \(pid \d+\) was {re.escape(__version__)}"
        with pytest.raises(DaemonError, match=rf"no setting 'of_tomorrow'.* {both}"):
            link.wait_open()
    finally:
        link.close(discard=True)


def test_new_incarnation_of_a_run_id_starts_from_nothing(hosts: Hosts) -> None:
    hosts.commit(hosts.run("a"), [1, 2])
    hosts.etcd(lambda etcd: etcd.commit({}, {}, [hosts.prefix]))
    hosts.create_job("second")
    hosts.form_round(1, "a")
    wait_until(lambda: hosts["a"].held() == {}, timeout_s=30, what="removal of the first life's slots")
    assert hosts["a"].trainer(0, world_size=1, generation=1).attach()["restore"] is None


def test_job_with_a_broken_key_fails_alone(hosts: Hosts, tmp_path: Path) -> None:
    (trainer,) = hosts.run("a")
    broken = hosts["a"].client()
    request = {"host": "a", "replicas": 1, "nproc": 1, "etcd": hosts.config.to_dict(), "addr": "127.0.0.1"}
    request["pid"] = os.getpid()
    key = f"/resilient-run/{hosts.run_id}-broken/state/watermark"
    hosts.etcd(lambda etcd: etcd.put(key, {"generation": "one"}))
    # A daemon reads it when it opens the job; later only the root does.
    broken.request("open_job", run_id=f"{hosts.run_id}-broken", memory_limit_bytes=None, policy={}, **request)

    def failure() -> str:
        try:
            broken.request("job_status", run_id=f"{hosts.run_id}-broken")
        except DaemonError as error:
            return str(error)
        return ""

    message = wait_until(failure, timeout_s=30, what="failure of the broken job")
    assert "state/watermark: field 'generation' must be an integer" in message
    hosts.commit([trainer], [1, 2])


def test_capture_that_is_not_what_was_announced_is_not_held(hosts: Hosts) -> None:
    (trainer,) = hosts.run("a")
    path = trainer.capture(1, announce=False)
    trainer.notify("complete", path=str(path), generation=1, step=2)
    trainer.notify("complete", path="/etc/passwd", generation=1, step=1)
    slot = Slot.open(path)
    assert slot.header().step == 1
    slot.close()
    trainer.notify("complete", path=str(path), generation=1, step=1)
    wait_for_watermark([trainer], (1, 1))
    assert hosts["a"].log.count("is not held") == 2


def test_run_that_ends_while_etcd_refuses_its_credentials_ends(tmp_path: Path, etcd: EtcdProcess) -> None:
    """What a job would take back in etcd expires; others, and the daemon's own end, do not wait for it."""
    etcd.enable_auth("secret")
    config = EtcdConfig(endpoints=(etcd.endpoint,), user="trainer", password="secret")
    hosts = Hosts(tmp_path, run_id=tmp_path.name, config=config)
    try:
        host = hosts["a"]
        (trainer,) = hosts.run("a")
        hosts.commit([trainer], [1])
        etcd.ctl("user", "passwd", "trainer", "--interactive=false", user="root:top", stdin="other\n")
        assert host.launcher is not None
        host.launcher.request("close_job", run_id=hosts.run_id, discard=True)
        assert host.status()["jobs"] == []
        assert not list(host.shm_dir.glob("*/"))
        assert host.process is not None
        host.process.terminate()
        assert host.process.wait(30) == 0
    finally:
        hosts.close()


NAMES = ["vault.lock", "resilientd.sock", ""]


@pytest.mark.parametrize("name", NAMES, ids=["lock", "socket", "directory"])
@pytest.mark.parametrize("of", ["shm_dir", "run_dir"])
def test_daemon_that_nobody_finds_any_more_ends_and_the_next_one_is_found(hosts: Hosts, of: str, name: str) -> None:
    """A cleaner or a logout takes a name away under it; the launcher came through the run directory."""
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    host = hosts["a"]
    directory = host.shm_dir if of == "shm_dir" else host.run_dir
    path = directory / (name if of == "shm_dir" else name.replace("vault", "resilientd"))
    if path == directory:
        shutil.rmtree(path)
    else:
        path.unlink()
    assert host.process is not None
    assert host.process.wait(30) == 1
    assert host.log.count("was removed or replaced while this daemon") == 1
    assert trainer.is_closed()
    host.drop_clients()
    host.start()
    hosts.run("a", generation=2)
    survived = (of, name) != ("shm_dir", "")
    assert host.held() == ({0: {(1, 1)}} if survived else {})


def test_daemon_leaves_the_one_alone_that_has_taken_its_place(hosts: Hosts, tmp_path: Path) -> None:
    """The second one is there before the first has noticed that its vault is gone."""
    hosts.run("a")
    first, shm_dir = hosts["a"].process, hosts["a"].shm_dir
    assert first is not None
    first.send_signal(signal.SIGSTOP)
    shutil.rmtree(shm_dir)
    (tmp_path / "a" / "resilientd.lock").unlink()
    hosts["a"].drop_clients()
    hosts["a"].start()
    first.send_signal(signal.SIGCONT)
    assert first.wait(30) == 1
    hosts["a"].open()
    assert hosts["a"].process is not None
    assert hosts["a"].status()["pid"] == hosts["a"].process.pid
    assert (shm_dir / "resilientd.sock").is_socket()


def test_daemon_that_launchers_find_through_its_vault_needs_no_run_directory(hosts: Hosts) -> None:
    """It goes with the login that made it."""
    host = hosts["a"]
    host.start()
    host.socket_path = host.shm_dir / host.socket_path.name
    (trainer,) = hosts.run("a")
    shutil.rmtree(host.run_dir)
    hosts.commit([trainer], [1])
    assert host.process is not None
    with pytest.raises(subprocess.TimeoutExpired):
        host.process.wait(2)
    hosts.commit([trainer], [2])


def test_service_needs_its_run_directory(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher looks for it elsewhere, and its manager starts it again."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        host = hosts["a"]
        host.start()
        manager.settimeout(30)
        assert manager.recv(100) == b"READY=1"
        shutil.rmtree(host.run_dir)
        assert host.process is not None
        assert host.process.wait(30) == 1
    assert f"{host.run_dir / 'resilientd.lock'} was removed or replaced" in host.log


@needs_cleaner
def test_cleaner_of_old_files_spares_what_a_daemon_serves(hosts: Hosts, tmp_path: Path) -> None:
    host, parent = hosts["a"], tmp_path / "cleaned"
    host.run_dir, host.shm_dir = parent / "run", parent / "vault"
    host.socket_path = host.run_dir / host.socket_path.name
    (parent / "nobody's").mkdir(parents=True)
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1])
    served = {path for path in parent.rglob("*") if path.name != "nobody's"}
    remove_all_old(parent)
    assert set(parent.rglob("*")) == served
    hosts.commit([trainer], [2])
