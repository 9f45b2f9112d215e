"""What tests start is forked, in a process that has used torch's compiler, too; daemons have no torch."""

import os
import subprocess
from pathlib import Path

from launchers import run_python, start_daemon

IS_FORKED = "import os; print(open('/proc/self/cmdline').read().endswith('tests/run.py\\0'), 'DEMO' in os.environ)"


def test_programs_are_forked_unless_something_read_at_import_differs() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DEMO": "1"}
    by_compiler = {"TORCHINDUCTOR_CACHE_DIR": "/nowhere"}
    for changes, forked in (({}, True), (by_compiler, True), ({"OMP_NUM_THREADS": "2"}, False)):
        done = run_python(["-c", IS_FORKED], {**env, **changes})
        assert (done.returncode, done.stdout) == (0, f"{forked} True\n"), done.stderr


def test_a_daemon_has_no_torch(tmp_path: Path) -> None:
    directories = ["--run-dir", str(tmp_path / "run"), "--shm-dir", str(tmp_path / "shm")]
    with start_daemon(directories, os.environ, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stderr is not None
            assert "serves" in daemon.stderr.readline()
            with open(f"/proc/{daemon.pid}/cmdline") as command, open(f"/proc/{daemon.pid}/maps") as maps:
                assert "tests/run.py" in command.read()
                assert "libtorch" not in maps.read()
        finally:
            daemon.terminate()
        assert daemon.wait(60) == 0
