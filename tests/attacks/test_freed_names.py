"""A name that was cleaned away under a run (a logout empties /dev/shm, a cleaner /tmp) is free for another user."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from second_user import as_mallory, make_public

from resilient_run.ckpt.errors import SlotError
from resilient_run.ckpt.format.slot import HEADER_BYTES, Slot
from resilient_run.daemon.base.record import JobRecord
from resilient_run.daemon.slots.memory import MemoryBudget
from resilient_run.daemon.slots.slots import JobSlots
from resilient_run.daemon.slots.vault import Vault
from resilient_run.launcher.workers import import_hook
from resilient_run.launcher.workers.warm import SiteHook

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A directory as /dev/shm or /tmp."""
    return make_public(tmp_path / "shm")


@pytest.fixture
def job(public: Path) -> JobSlots:
    """A job that goes on, whose vault was removed."""
    vault = public / "vault"
    vault.mkdir(mode=0o700)
    record = JobRecord(run_id="run", host="a", incarnation=None, replicas=2, attached=False, launcher_pid=os.getpid())
    slots = Vault(vault, MemoryBudget(vault, None)).open(record)
    shutil.rmtree(vault)
    return slots


def test_a_record_is_written_to_nothing_that_was_planted(job: JobSlots, tmp_path: Path) -> None:
    victim = tmp_path / "profile"
    victim.write_text("what only its owner may change\n")

    def plant() -> None:
        os.umask(0)
        job.directory.mkdir(parents=True)
        (job.directory / "job.json.new").symlink_to(victim)

    assert as_mallory(plant) == 0
    job.update_record(generation=3)
    assert victim.read_text() == "what only its owner may change\n"
    assert JobRecord.load(job.directory).generation == 3


def test_no_state_goes_into_a_slot_of_another_user(job: JobSlots) -> None:
    """A trainer maps the file that its daemon has named, whoever has put another one there meanwhile."""
    path = job.directory / "rank0.0.slot"

    def plant() -> None:
        os.umask(0)
        job.directory.mkdir(parents=True)
        Slot.create(path, capacity_bytes=4 * HEADER_BYTES, payload_offset=2 * HEADER_BYTES)
        path.chmod(0o666)

    assert as_mallory(plant) == 0
    for writable in (True, False):
        with pytest.raises(SlotError, match=r"belongs to uid \d+, not to uid 0"):
            Slot.open(path, writable=writable)


@pytest.mark.parametrize("free", [True, False])
def test_workers_run_nothing_from_where_the_import_hook_was(
    free: bool, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold workers of `--rr-auto` find it by PYTHONPATH, weeks later, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(public))
    hook = SiteHook(import_hook.__file__)
    (directory,) = public.iterdir()
    shutil.rmtree(directory)

    def plant() -> None:
        directory.mkdir()
        (directory / "sitecustomize.py").write_text("import os; print('as uid', os.getuid())")

    if not free:
        assert as_mallory(plant) == 0
    env = hook.environ({**os.environ, import_hook.AUTO: "begin", "RANK": "1"})
    worker = [sys.executable, "-c", "import os; print('worker', os.environ.get('RESILIENT_AUTO_WORKER'))"]
    assert subprocess.run(worker, env=env, capture_output=True, text=True, check=True).stdout == "worker None\n"
    hook.close()
    assert list(public.rglob("*.py")) == ([] if free else [directory / "sitecustomize.py"])
