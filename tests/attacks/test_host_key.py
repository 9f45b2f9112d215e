"""The key of a user on a machine, and names of launchers there: what others prepare gets nothing and is not used."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from second_user import MALLORY, as_mallory, make_public

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.trust import secret
from resilient_run.daemon.trust.secret import host_key, make_key
from resilient_run.launcher.rendezvous import claim
from resilient_run.launcher.rendezvous.claim import HostClaim

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
OURS = "k" * 64
REFUSED = "no key for the runs of this host: .*--rr-key-file"


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A directory as /dev/shm."""
    return make_public(tmp_path / "shm")


@pytest.fixture
def own(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (secret, claim):
        monkeypatch.setattr(module, "own_directory", lambda uid: public / "own")
    return public / "own"


def directory(path: Path) -> None:
    path.mkdir(mode=0o777)
    (path / "host.key").write_text(OURS)


def link(path: Path) -> None:
    path.symlink_to(path.parent)


def file(path: Path) -> None:
    path.write_text(OURS)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@needs_root
@pytest.mark.parametrize("plant", [directory, link, file, pipe])
def test_what_is_there_first_is_not_used(own: Path, plant: Callable[[Path], None]) -> None:
    assert as_mallory(lambda: plant(own)) == 0
    before = sorted(own.parent.rglob("*"))
    with pytest.raises(DaemonError, match=REFUSED) as refusal:
        host_key()
    assert str(own) in str(refusal.value)
    assert sorted(own.parent.rglob("*")) == before
    # Names of launchers go without, too.
    assert HostClaim("run", "machine", None).host == "machine"
    assert sorted(own.parent.rglob("*")) == before


def chosen(path: Path) -> None:
    path.write_text(OURS)
    path.chmod(0o600)
    os.chown(path, MALLORY, MALLORY)


def open_to_all(path: Path) -> None:
    path.write_text(OURS)
    path.chmod(0o644)


def known(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def stuck(path: Path) -> None:
    os.mkfifo(path, 0o600)


def folder(path: Path) -> None:
    path.mkdir(mode=0o700)


@needs_root
@pytest.mark.parametrize("plant", [chosen, open_to_all, known, dangling, stuck, folder])
def test_a_key_that_another_user_could_know_is_none(own: Path, plant: Callable[[Path], None]) -> None:
    """The directory stood open for a while."""
    own.mkdir(mode=0o700)
    plant(own / "host.key")
    with pytest.raises(DaemonError, match=REFUSED) as refusal:
        host_key()
    assert OURS not in str(refusal.value)
    assert [path.name for path in own.iterdir()] == ["host.key"]


@needs_root
def test_a_directory_that_stood_open_is_closed_before_a_key_is_made(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)
    host_key()
    assert as_mallory(lambda: os.listdir(own)) == errno.EACCES
    assert as_mallory(lambda: (own / "host.key").read_bytes()) == errno.EACCES
    assert as_mallory(lambda: (own / "x").touch()) == errno.EACCES


LAUNCH = """
import sys
from pathlib import Path
from resilient_run.daemon.trust import secret
secret.own_directory = lambda uid: Path(sys.argv[1])
print(secret.host_key())
"""


def test_launchers_that_start_at_once_have_one_key(own: Path) -> None:
    command = [sys.executable, "-P", "-c", LAUNCH, str(own)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    found = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    assert [path.name for path in own.iterdir()] == ["host.key"]


@needs_root
def test_users_have_keys_of_their_own(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "own_directory", lambda uid: public / str(uid))
    ours = host_key()
    assert as_mallory(host_key) == 0
    theirs = public / str(MALLORY) / "host.key"
    assert theirs.read_text().strip() != ours
    assert (theirs.stat().st_uid, theirs.stat().st_mode & 0o777) == (MALLORY, 0o600)
    assert as_mallory((public / "0" / "host.key").read_bytes) == errno.EACCES


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs in which not a byte is left."""
    mounted = tmp_path / "full"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8k,mode=1777", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    (mounted / "all").write_bytes(bytes(8192))
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


def test_a_full_machine_gets_no_key_and_keeps_no_litter(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a key would have stayed, empty, for every launcher that tried."""
    monkeypatch.setattr(secret, "own_directory", lambda uid: full / "own")
    for _ in range(2):
        with pytest.raises(DaemonError, match=r"No space left on device.*--rr-key-file"):
            host_key()
    with pytest.raises(OSError, match="No space left on device"):
        make_key(full / "run.key")
    assert sorted(path.name for path in full.rglob("*")) == ["all", "own"]
    (full / "all").unlink()
    make_key(full / "run.key")
    assert len(host_key()) == 64


@needs_root
def test_nobody_else_holds_the_name_of_a_launcher(own: Path) -> None:
    """He would have made every launcher of the machine another host, whose slots nobody finds."""
    first = HostClaim("run", "machine", None)
    (name,) = own.glob("*.claim")

    def hold() -> None:
        descriptor = os.open(name, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert as_mallory(hold) == errno.EACCES
    assert HostClaim("run", "machine", None).host == "machine#1"
    first.release()
    assert HostClaim("run", "machine", None).host == "machine"


@needs_root
@pytest.mark.parametrize("plant", [known, dangling, stuck, folder])
def test_a_thing_in_the_place_of_a_claim_is_left_alone(own: Path, plant: Callable[[Path], None]) -> None:
    own.mkdir(mode=0o700)
    path = claim._path("run", "machine")
    plant(path)
    passwd = Path("/etc/passwd").read_bytes()
    held = HostClaim("run", "machine", None)
    assert held.host == "machine"
    held.release()
    assert os.path.lexists(path) or plant is stuck
    assert Path("/etc/passwd").read_bytes() == passwd
