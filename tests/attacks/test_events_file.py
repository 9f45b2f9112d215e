"""What another user has put where `--rr-events` is to write gets nothing, and holds nobody up."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click import BadParameter
from second_user import MALLORY, as_mallory, open_way

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.trust.private import open_to_append
from resilient_run.launcher.config import RunConfig
from resilient_run.launcher.timeline import RecoveryTimeline

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
OWN = "what only its owner may change\n"


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A directory as /tmp, though one in which the kernel protects nobody from links: it is not sticky."""
    made = tmp_path / "public"
    open_way(made)
    made.mkdir()
    made.chmod(0o777)
    return made


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "profile"
    path.write_text(OWN)
    return path


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("new"))


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def own_file(path: Path, _: Path) -> None:
    path.touch()
    path.chmod(0o666)


def write_event(path: Path) -> None:
    """Have a recovery told as a launcher does."""
    timeline = RecoveryTimeline(run_id="run", host="a", events_path=path, publish=[].append, missed_after_s=6.0)
    timeline.begin(kind="worker_exit", cause="rank 1 exited", detect_s=0.0, last_step=8)
    timeline.close()


@needs_root
@pytest.mark.parametrize("plant", [link, dangling, pipe, own_file])
@pytest.mark.parametrize("early", [True, False])
def test_what_another_user_plants_is_not_written_to(
    public: Path,
    victim: Path,
    plant: Callable[[Path, Path], None],
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the launcher starts it is refused; later it costs the event."""
    path = public / "events.jsonl"
    monkeypatch.setenv("RESILIENT_EVENTS", str(path))
    if not early:
        assert RunConfig.from_environ().events_path == path
    assert as_mallory(lambda: plant(path, victim)) == 0
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if plant is pipe else None
    if early:
        with pytest.raises(BadParameter, match=rf"{path} .*uid {MALLORY}.*: remove it, or choose another file"):
            RunConfig.from_environ()
    else:
        with caplog.at_level(logging.INFO):
            write_event(path)
        assert f"cannot write an event to {path}" in caplog.text
        assert "not recovered" in caplog.text, "training and its log go on"
    if reader is not None:
        assert os.read(reader, 100) == b""
        os.close(reader)
    assert victim.read_text() == OWN
    assert not victim.with_name("new").exists()
    assert plant is not own_file or path.read_text() == ""


@needs_root
def test_a_second_name_of_a_file_is_not_written_to(public: Path, victim: Path) -> None:
    """The kernel lets others make one where it does not protect hard links."""
    os.link(victim, public / "events.jsonl")
    with pytest.raises(DaemonError, match="has several hard links"):
        open_to_append(public / "events.jsonl")
    assert victim.read_text() == OWN


@needs_root
def test_a_link_that_takes_the_place_of_ones_own_is_not_followed(
    public: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory of a group its members may rename links at any moment, as after the look at who has made one."""
    public.chmod(0o770)
    os.chown(public, -1, MALLORY)
    own, path = victim.with_name("events.jsonl"), public / "events.jsonl"
    path.symlink_to(own)

    def swap() -> None:
        path.unlink()
        path.symlink_to(victim)

    def raced(file: Path | str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_APPEND and not flags & os.O_NOFOLLOW:
            assert as_mallory(swap) == 0
        return opened(file, flags, mode)

    opened = os.open
    monkeypatch.setattr(os, "open", raced)
    descriptor = open_to_append(path)
    os.write(descriptor, b"event")
    os.close(descriptor)
    assert path.readlink() == victim, "the attack was carried out"
    assert (own.read_text(), victim.read_text()) == ("event", OWN)
    with pytest.raises(DaemonError, match=f"{path} is a link that uid {MALLORY} has made"):
        open_to_append(path)


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events"
    os.mkfifo(path)
    write_event(path)
    assert os.strerror(errno.ENXIO) in caplog.text
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    assert os.write(writer, bytes(1 << 20)) < 1 << 20, "it is full now"
    write_event(path)
    assert os.strerror(errno.EAGAIN) in caplog.text
    os.close(reader)
    os.close(writer)


WRITE = "import sys; from pathlib import Path; from test_events_file import write_event; write_event(Path(sys.argv[1]))"


def written(path: str, *, stdout: int = subprocess.PIPE) -> str:
    """Return what a process whose standard output is a pipe has written there by the name `path`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    command = [sys.executable, "-c", WRITE, path]
    return subprocess.run(command, env=env, stdout=stdout, text=True, check=True).stdout


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_users_pass_works(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert '"event": "recovery"' in written(path)
    log = tmp_path / "log"
    with log.open("w") as file:
        written(path, stdout=file.fileno())
    assert '"event": "recovery"' in log.read_text()


def test_files_links_and_pipes_of_ones_own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "events")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.chdir(tmp_path)
    for name in ("file", "link", "pipe", "/dev/null"):
        monkeypatch.setenv("RESILIENT_EVENTS", name)
        for _ in range(2):
            path = RunConfig.from_environ().events_path
            assert path == tmp_path / name
            write_event(path)
    for text in ((tmp_path / "file").read_text(), (tmp_path / "elsewhere" / "events").read_text()):
        assert text.count('"event": "recovery"') == 2
    assert os.read(reader, 1 << 16).count(b'"event": "recovery"') == 2
    os.close(reader)


@needs_root
def test_root_may_append_to_a_users_file_in_that_users_directory(tmp_path: Path) -> None:
    (tmp_path / "events").touch()
    for path in (tmp_path, tmp_path / "events"):
        os.chown(path, MALLORY, MALLORY)
    write_event(tmp_path / "events")
    assert '"event": "recovery"' in (tmp_path / "events").read_text()
