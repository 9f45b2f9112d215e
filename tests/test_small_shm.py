"""A container's 64 MiB of /dev/shm, mounted for real: the batches of data loaders need them, so slots are elsewhere."""

import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from solo_daemon import SoloDaemon

from resilient_run import Checkpointer

SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "-")
FEW_LOCKED = ("setpriv", "--bounding-set=-ipc_lock", "prlimit", f"--memlock={1 << 20}:{2 << 20}")

TRAIN = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from resilient_run import Checkpointer

class Batches(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        return torch.ones(10 << 18)

def first(name):
    mark = Path(sys.argv[1], name)
    found = mark.exists()
    mark.touch()
    return not found

def daemon():
    return int(Path(os.environ["RESILIENT_SHM_DIR"], "vault.lock").read_text())

model = torch.nn.Linear(1 << 20, 1, bias=False)
optimizer = torch.optim.Adam(model.parameters())
checkpointer = Checkpointer(model=model, optimizer=optimizer)
n, old = checkpointer.restore(), daemon()
begun = n
print(f'{{"started_at": {n}, "rank": 0, "pid": {os.getpid()}}}', flush=True)
for batch in DataLoader(Batches(), num_workers=2):
    (model.weight.sum() * batch.mean()).backward()
    optimizer.step()
    n += 1
    checkpointer.step(n)
    if not begun:
        while checkpointer.watermark is None and n >= 4:
            time.sleep(0.05)
        if n >= 4 and first("worker"):
            os.kill(os.getpid(), signal.SIGKILL)
    elif n == begun + 4 and first("daemon"):
        os.kill(old, signal.SIGKILL)
    elif n > begun + 4:
        # Without a daemon nothing is captured; the next one lends new slots.
        time.sleep(0.05)
        if daemon() != old and checkpointer.wait(1) and first("again"):
            os.kill(os.getpid(), signal.SIGKILL)
        if Path(sys.argv[1], "again").exists():
            break
print("END", flush=True)
checkpointer.close()
os._exit(0)
"""


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_slots_leave_a_small_shm_to_the_data_loader(cluster: Cluster, tmp_path: Path) -> None:
    """Killed workers have their steps back; the daemon's end costs what it held, and the run says so beforehand."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    host = cluster.host("a")
    host.prefix = [*SMALL, *FEW_LOCKED]
    host.launch(["--standalone"], [str(script), str(tmp_path)])
    assert host.wait() == 0, host.output
    assert "END" in host.output
    assert "No space left" not in host.output
    begun = [line["started_at"] for line in host.lines if "started_at" in line]
    first, second, third = begun
    assert 0 == first < second <= 4
    assert third > second + 4
    assert {*host.recoveries()[0]["sources"], *host.recoveries()[1]["sources"]} == {"local"}
    line = next(line for line in host.output.splitlines() if "protected: every step, 1 replica" in line)
    assert "slots are lost when the daemon ends, because the 64.00 MiB at" in line
    assert "slots are not locked in memory, and may be swapped out" in line
    assert "the daemon may lock 2.00 MiB" in line


def test_an_error_of_a_full_shm_says_how_much_slots_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as vault:
        directory = Path(vault, "job")
        directory.mkdir()
        daemon = SoloDaemon(directory)
        daemon.start()
        daemon.enter(monkeypatch)
        with Checkpointer(x=torch.ones(1 << 20)) as ckpt:
            ckpt.restore()
            ckpt.step()
            assert ckpt.wait()
            sys.excepthook(RuntimeError, RuntimeError("out of range"), None)
            assert not caplog.messages
        with caplog.at_level(logging.ERROR):
            sys.excepthook(RuntimeError, RuntimeError("DataLoader worker is killed by signal: Bus error."), None)
        daemon.stop()
    assert any("checkpoints take 8 of the " in message for message in caplog.messages), caplog.messages
