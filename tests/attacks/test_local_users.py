"""Another user of the host, who gets nothing out of a daemon and nothing done by it, and hostile files in a vault.

Each attack says what it gets: nothing. What the daemon does for its own user goes on.
"""

import json
import os
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import wait_until
from hosts import Host, Hosts
from launchers import run_ctl, run_daemon, run_launcher
from second_user import MALLORY, as_mallory

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format import wire
from resilient_run.daemon.base.policy import Policy
from resilient_run.daemon.base.settings import Settings, find_settings
from resilient_run.daemon.base.spec import JobSpec
from resilient_run.daemon.etcd.client import EtcdConfig
from resilient_run.daemon.trust.private import open_directory
from resilient_run.launcher import daemon_link
from resilient_run.launcher.rendezvous import claim

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users"),
]

SECRET = "what only its owner may read"


def ask(path: Path, op: str = "status") -> None:
    """Ask the daemon at `path` something; raises when it does not answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(path))
        sock.sendall(wire.encode({"id": 1, "op": op}))
        if not sock.recv(1):
            raise ConnectionResetError("no answer")


def resilientctl(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RESILIENT_RUN_DIR": str(host.run_dir), "RESILIENT_SHM_DIR": str(host.shm_dir)}
    return run_ctl(arguments, env)


def launch(host: Host, script: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["--standalone", "--nproc-per-node", "1", "--rr-run-dir", str(host.run_dir)]
    return run_launcher([*arguments, "--rr-shm-dir", str(host.shm_dir), str(script)], os.environ)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that every user can reach."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    return tmp_path


@pytest.fixture
def host(place: Path) -> Iterator[Host]:
    made = Host("a", place, run_id="unused", config=EtcdConfig(endpoints=("127.0.0.1:1",)))
    yield made
    made.close()


def serves(host: Host) -> bool:
    return host.status()["jobs"] == []


# Who gets in.


@pytest.mark.parametrize("where", ["run_dir", "shm_dir"])
def test_no_other_user_reaches_the_socket(host: Host, where: str) -> None:
    host.start()
    path: Path = getattr(host, where) / "resilientd.sock"
    assert as_mallory(lambda: ask(path)) != 0
    assert as_mallory(lambda: os.listdir(path.parent)) != 0
    assert serves(host)


@pytest.mark.parametrize("op", ["status", "gc", "open_job", "attach"])
def test_no_other_user_is_served_at_a_socket_that_stands_open(host: Host, op: str) -> None:
    """The owner opened directory and socket for all: the daemon asks the kernel who is there."""
    host.start()
    host.run_dir.chmod(0o755)
    host.socket_path.chmod(0o666)
    assert as_mallory(lambda: socket.socket(socket.AF_UNIX).connect(str(host.socket_path))) == 0
    assert as_mallory(lambda: ask(host.socket_path, op)) != 0
    wait_until(lambda: f"is of uid {MALLORY}" in host.log, timeout_s=30, what="the refusal")
    assert serves(host)


def test_not_even_root_is_served_by_the_daemon_of_a_user(host: Host) -> None:
    """Nor does root's launcher trust that daemon: root has one of its own."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    host.run_dir.mkdir()
    os.chown(host.run_dir, MALLORY, MALLORY)
    ids = (f"--reuid={MALLORY}", f"--regid={MALLORY}", "--clear-groups")
    host.prefix = ("setpriv", *ids, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    host.start()
    with pytest.raises(ConnectionError):
        ask(host.socket_path)
    done = resilientctl(host, "status")
    assert done.returncode == 1
    assert "is not a socket in a directory that only uid 0 can write to" in done.stderr


# What another user put in place beforehand.


@pytest.mark.parametrize("option", ["run_dir", "shm_dir"])
@pytest.mark.parametrize("link", [False, True], ids=["directory", "link"])
def test_a_daemon_starts_in_no_directory_of_another_user(host: Host, place: Path, option: str, link: bool) -> None:
    planted: Path = getattr(host, option)
    target = place / "target" if link else planted
    target.mkdir()
    os.chown(target, MALLORY, MALLORY)
    if link:
        planted.symlink_to(target)
        os.chown(planted, MALLORY, MALLORY, follow_symlinks=False)
    done = run_daemon(["--run-dir", str(host.run_dir), "--shm-dir", str(host.shm_dir)], os.environ)
    if link:
        planted.unlink()
    assert done.returncode == 1
    assert "remove it, or choose another directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("option", ["run_dir", "shm_dir"])
def test_a_launcher_writes_nothing_in_a_directory_of_another_user(host: Host, place: Path, option: str) -> None:
    """The log of the daemon would have gone through a link to wherever its user may write."""
    planted: Path = getattr(host, option)
    planted.mkdir()
    victim, script = place / "profile", place / "script.py"
    victim.write_text(SECRET)
    script.write_text("print('ran')\n")
    (planted / "resilientd.log").symlink_to(victim)
    (planted / "resilientd.lock").symlink_to(victim)
    (planted / "vault.lock").symlink_to(victim)
    os.chown(planted, MALLORY, MALLORY)
    done = launch(host, script)
    assert done.returncode != 0
    assert f"{planted} must belong to uid 0, it belongs to uid {MALLORY}" in done.stderr
    assert "ran" not in done.stdout
    assert victim.read_text() == SECRET


def test_a_socket_that_another_user_serves_hears_nothing(host: Host) -> None:
    """Whoever made the directory first would have been told the run's secrets, and where its state goes."""
    host.run_dir.mkdir()
    os.chown(host.run_dir, MALLORY, MALLORY)
    heard: list[bytes] = []
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(MALLORY, MALLORY, MALLORY)
            os.setresuid(MALLORY, MALLORY, MALLORY)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(host.socket_path))
            listener.listen()
            os.write(ready[1], b"1")
            while True:
                sock, _ = listener.accept()
                os.write(done[1], sock.recv(4096) or b"-")
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    reader = threading.Thread(target=lambda: heard.append(os.read(done[0], 4096)))
    reader.start()
    answer = resilientctl(host, "status")
    reader.join(30)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert answer.returncode == 1
    assert "is not a socket in a directory that only uid 0 can write to" in answer.stderr
    assert [chunk.strip(b"-") for chunk in heard] == [b""]


def test_the_word_that_a_directory_is_a_services_does_not_count_there(host: Host, place: Path) -> None:
    """With it a launcher went to the socket, a link to one of its own user's, and told that its secrets."""
    heard: list[bytes] = []
    unrelated = place / "unrelated.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(unrelated))
    listener.listen()

    def listen() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            heard.append(sock.recv(4096))

    thread = threading.Thread(target=listen)
    thread.start()
    host.run_dir.mkdir()
    host.socket_path.symlink_to(unrelated)
    (host.run_dir / "service").touch()
    for path in (host.run_dir, host.socket_path):
        os.chown(path, MALLORY, MALLORY, follow_symlinks=False)
    script = place / "script.py"
    script.write_text("print('ran')\n")
    done = launch(host, script)
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    listener.close()
    assert done.returncode != 0
    assert f"{host.run_dir} must belong to uid 0" in done.stderr
    assert not b"".join(heard)


def test_a_link_is_no_socket(host: Host, place: Path) -> None:
    host.start()
    other = place / "other"
    other.mkdir(mode=0o700)
    (other / "resilientd.sock").symlink_to(host.socket_path)
    env = {**os.environ, "RESILIENT_RUN_DIR": str(other), "RESILIENT_SHM_DIR": str(place / "none")}
    done = run_ctl(["status"], env)
    assert done.returncode == 1
    assert "is not a socket in a directory that only uid 0 can write to" in done.stderr


def test_who_accepts_nobody_holds_nobody_up(host: Host) -> None:
    """Another user made the run directory first, and listens there with a backlog that is full."""
    host.run_dir.mkdir()
    listener, filling = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with listener, filling:
        listener.bind(str(host.socket_path))
        listener.listen(0)
        filling.connect(str(host.socket_path))
        host.socket_path.chmod(0o777)
        for path in (host.run_dir, host.socket_path):
            os.chown(path, MALLORY, MALLORY)
        done = resilientctl(host, "status")
    assert done.returncode == 1
    assert "no daemon answers" in done.stderr


def test_a_directory_that_is_replaced_while_it_is_dialled_leads_nowhere_else(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was checked, and is a link to another service of the same user when the connection is made."""
    checked, elsewhere = place / "checked", place / "elsewhere"
    for directory in (checked, elsewhere):
        directory.mkdir(mode=0o700)
    make = socket.socket

    def make_late(*arguments: int) -> socket.socket:
        checked.rename(place / "moved")
        checked.symlink_to(elsewhere)
        return make(*arguments)

    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as other:
        for listener, directory in ((ours, checked), (other, elsewhere)):
            listener.bind(str(directory / "resilientd.sock"))
            listener.listen()
            listener.setblocking(False)
        monkeypatch.setattr(socket, "socket", make_late)
        with wire.dial(checked / "resilientd.sock", 5) as sock:
            monkeypatch.undo()
            sock.sendall(b"secret")
        with pytest.raises(BlockingIOError):
            other.accept()
        with ours.accept()[0] as heard:
            assert heard.recv(10) == b"secret"


def test_the_runtime_directory_of_another_user_is_not_used(place: Path) -> None:
    """`su` leaves the variable, and its owner could exchange what root makes in that directory."""
    for name, owner in (("theirs", MALLORY), ("ours", os.getuid())):
        (place / name).mkdir(mode=0o700)
        os.chown(place / name, owner, owner)
    assert find_settings({"XDG_RUNTIME_DIR": str(place / "theirs")}) == find_settings({})
    assert find_settings({"XDG_RUNTIME_DIR": str(place / "ours")}).run_dir == place / "ours" / "resilient-run"


def test_no_log_is_written_in_a_directory_that_took_the_checked_ones_place(
    host: Host, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, victim = place / "theirs", place / "profile"
    theirs.mkdir()
    (theirs / "resilientd.log").symlink_to(victim)
    for path in (theirs, theirs / "resilientd.log"):
        os.chown(path, MALLORY, MALLORY, follow_symlinks=False)

    def check_and_lose(path: Path) -> None:
        open_directory(path)
        path.rename(place / "lost")
        theirs.rename(path)

    monkeypatch.setattr(daemon_link, "open_directory", check_and_lose)
    request = JobSpec(
        run_id="run",
        host="a",
        replicas=2,
        nproc=1,
        etcd=EtcdConfig(endpoints=("127.0.0.1:2379",)),
        addr="127.0.0.1",
        memory_limit_bytes=None,
        policy=Policy(),
        injection=False,
    )
    settings = Settings(run_dir=host.run_dir, shm_dir=host.shm_dir)
    with pytest.raises(DaemonError, match=f"must belong to uid 0, it belongs to uid {MALLORY}"):
        daemon_link.DaemonLink(settings=settings, job=request, on_event=[].append)._spawn().kill()
    assert not victim.exists()


def test_whose_names_are_taken_has_names_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user made the directory first in which launchers of one machine are told apart."""
    own = place / "own"
    own.mkdir()
    os.chown(own, MALLORY, MALLORY)
    monkeypatch.setattr(claim, "own_directory", lambda uid: own)
    assert claim.HostClaim("run", "machine", None).host == "machine"
    assert "cannot tell launchers of this machine apart" in caplog.text
    assert list(own.iterdir()) == []


def test_garbage_is_collected_in_no_directory_of_another_user(host: Host, place: Path) -> None:
    """`resilientctl gc` works without a daemon; as root it would have removed, and written, by another user's links."""
    victim = place / "victim"
    victim.mkdir()
    (victim / "kept").write_text(SECRET)
    host.shm_dir.mkdir()
    (host.shm_dir / ("0" * 32)).symlink_to(victim)
    (host.shm_dir / "vault.lock").symlink_to(victim / "kept")
    os.chown(host.shm_dir, MALLORY, MALLORY)
    done = resilientctl(host, "gc")
    assert done.returncode == 1
    assert f"belongs to uid {MALLORY}" in done.stderr
    assert (victim / "kept").read_text() == SECRET


# Hostile files in the vault cost the job that they are in, and nothing else.


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def link(path: Path, secret: Path) -> None:
    path.symlink_to(secret)


def dangling(path: Path, secret: Path) -> None:
    path.symlink_to(secret.parent / "nothing")


def directory(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def enormous(path: Path, _: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def deep(path: Path, _: Path) -> None:
    path.write_text("[" * 50_000)


def alien(path: Path, secret: Path) -> None:
    shutil.copy(secret, path)
    os.chown(path, MALLORY, MALLORY)


def bare(path: Path, _: Path) -> None:
    path.write_bytes(b"\0\xff\0")


def left_by(hosts: Hosts) -> tuple[Host, Path]:
    """Return a host whose daemon has ended, and the directory in which it left two committed steps of a job."""
    (trainer,) = hosts.run("a")
    hosts.commit([trainer], [1, 2])
    host = hosts["a"]
    host.drop_clients()
    wait_until(lambda: not host.status()["jobs"][0]["launcher_pid"], timeout_s=30, what="the launcher's end")
    host.kill()
    (left,) = (path for path in host.shm_dir.iterdir() if path.is_dir())
    return host, left


@pytest.mark.parametrize("plant", [fifo, link, dangling, directory, enormous, deep, alien, bare])
def test_a_hostile_record_costs_its_job_alone(
    hosts: Hosts, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    host, left = left_by(hosts)
    secret = tmp_path / "secret"
    record = json.loads((left / "job.json").read_text())
    secret.write_text(json.dumps({**record, "run_id": SECRET}))
    other = host.shm_dir / ("0" * 32)
    other.mkdir(mode=0o700)
    (other / "rank0.0.slot").write_bytes(b"RRSLOT\x00\x01")
    plant(other / "job.json", secret)
    host.start("--orphan-ttl", "0.1")
    wait_until(lambda: "is left alone" in host.log, timeout_s=30, what=lambda: host.log)
    wait_until(lambda: not left.exists(), timeout_s=60, what=lambda: f"the orphan's end:\n{host.log}")
    assert SECRET not in host.log + json.dumps(host.status())
    assert other.exists()
    assert host.stop() == 0


@pytest.mark.parametrize("plant", [fifo, link, dangling, directory, enormous, alien])
def test_a_hostile_slot_costs_itself_alone(hosts: Hosts, tmp_path: Path, plant: Callable[[Path, Path], None]) -> None:
    """It is removed; the other slots of the job are adopted, and housekeeping goes on."""
    host, left = left_by(hosts)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    plant(left / "rank7.0.slot", secret)
    host.start("--orphan-ttl", "3600")
    wait_until(lambda: "adopted run" in host.log, timeout_s=60, what=lambda: host.log)
    assert host.held() == {0: {(1, 1), (1, 2)}}
    assert not os.path.lexists(left / "rank7.0.slot")
    assert secret.read_text() == SECRET
    assert host.client().request("gc")["removed"] == [hosts.run_id]
    assert host.stop() == 0


def test_a_link_in_the_place_of_a_job_is_not_followed(hosts: Hosts) -> None:
    host, left = left_by(hosts)
    elsewhere = left.with_name("elsewhere")
    left.rename(elsewhere)
    left.symlink_to(elsewhere)
    host.start("--orphan-ttl", "0.1")
    wait_until(lambda: "serves" in host.log, timeout_s=30, what=lambda: host.log)
    assert serves(host)
    assert len(list(elsewhere.glob("*.slot"))) == 2
