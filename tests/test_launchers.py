"""What tests start is forked, in a process that has used torch's compiler, too; daemons have no torch."""

import ctypes
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from launchers import run_python, start_ctl, start_daemon, start_python

IS_FORKED = "import os; print(open('/proc/self/cmdline').read().endswith('tests/run.py\\0'), 'DEMO' in os.environ)"


def test_programs_are_forked_unless_something_read_at_import_differs() -> None:
    env = {**os.environ, "DEMO": "1"}
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


def adopts_orphans() -> bool:
    """Tell whether this process is the new parent of descendants that lose theirs (PR_GET_CHILD_SUBREAPER)."""
    value = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(value), 0, 0, 0) == 0
    return bool(value.value)


def test_what_is_forked_by_several_threads_is_this_process_s_child() -> None:
    """Though programs with torch and those without are forked from different processes."""

    both = threading.Barrier(2)

    def parent(start: Any, arguments: list[str]) -> int:
        both.wait()
        with start(arguments, os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            found = psutil.Process(process.pid).ppid()
            process.communicate(b"\n")
        return found

    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            started = [pool.submit(parent, start_python, ["-c", "input()"]), pool.submit(parent, start_ctl, ["--help"])]
            assert {each.result() for each in started} == {os.getpid()}
            assert not adopts_orphans()
