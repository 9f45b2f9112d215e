"""Real jobs for benchmarks: each launcher as a process with directories of its own, and nothing left behind."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run")
RESILIENT_RUN = (sys.executable, "-P", "-m", "resilient_run")

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def host(name: str = "bench", *, prefix: str = "resilient-bench-") -> Iterator[dict[str, str]]:
    """Yield the environment of a host that has no daemon yet; end its daemon and remove its files afterwards."""
    # Not everybody who imports this module for its names has it: workers of peers' environments do not.
    from resilient_run.launcher.workers.prctl import adopting_orphans

    run_dir = Path(tempfile.mkdtemp(prefix=prefix))
    shm_dir = Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY))
    with adopting_orphans():
        try:
            yield {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RESILIENT_HOST_ID": name,
                "RESILIENT_RUN_DIR": str(run_dir),
                "RESILIENT_SHM_DIR": str(shm_dir),
                # Without it a restarted torchrun rank reads keys of its predecessor and most recoveries hang.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
        finally:
            _end_daemons(run_dir)
            shutil.rmtree(run_dir, ignore_errors=True)
            shutil.rmtree(shm_dir, ignore_errors=True)


def _end_daemons(run_dir: Path) -> None:
    """End the daemons of `run_dir` that launchers left to this process, also one too young to hold its lock."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if str(run_dir) in child.cmdline():
                child.terminate()
                child.wait(60)


@contextmanager
def job(command: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Yield a running launcher whose stdout is a pipe of lines and whose messages go to a file.

    Raises:
        RuntimeError: It failed; the message ends with what it wrote to stderr.
    """
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=messages, text=True)
        try:
            yield process
            if process.wait(600) != 0:
                messages.seek(0)
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{messages.read()[-4000:]}")
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
