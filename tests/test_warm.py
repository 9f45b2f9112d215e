"""A warm worker is a cold one in all but the time: same program, same environment, same end."""

import ast
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import venv
import zipfile
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import stop, wait_until
from launchers import run_python
from tiers import nightly_but

from resilient_run.launcher.workers import warm, zygote
from resilient_run.launcher.workers.handler import warm_workers
from resilient_run.launcher.workers.warm import WarmProcess, WorkerStarter

pytestmark = pytest.mark.jobs

NAMES_TORCH = warm._names_torch
WORKER_ENV = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
COMMAND = (sys.executable, "-u", "script.py", "positional", "--rr-off", "--flag=é")

IDENTITY = """
    import gc, json, locale, os, random, resource, signal, sys, threading, warnings
    import multiprocessing, multiprocessing.process

    main = sys.modules["__main__"]
    before_torch = sorted(globals())
    import torch, torch.distributed

    def stream(file):
        raw = getattr(file.buffer, "raw", file.buffer)
        return [file.name, file.mode, file.encoding, file.errors, file.line_buffering, file.write_through,
                file.seekable(), file.isatty(), file.fileno(), file.closed, type(file.buffer).__name__,
                raw.name, raw.mode, raw.closefd]

    def depth(n=0):
        try:
            return depth(n + 1)
        except RecursionError:
            return n

    def signals(get):
        return {s.name: str(get(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)}

    line = os.environ.pop("RESILIENT_LINE", "").split(":")  # what `loop` uses
    facts = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "cmdline": open("/proc/self/cmdline").read(),
        "path": sys.path, "flags": str(sys.flags), "options": [sys.warnoptions, sys._xoptions],
        "globals": before_torch, "order": list(globals())[:9], "file": __file__, "spec": str(__spec__),
        "loader": [type(__loader__).__name__, __loader__.name, __loader__.path],
        "builtins": repr(__builtins__), "package": __package__, "cached": globals().get("__cached__"),
        "main": main.__dict__ is globals(),
        "frames": str(sys._getframe().f_back), "depth": depth(),
        "environ": dict(os.environ), "cwd": os.getcwd(), "original_dir": multiprocessing.process.ORIGINAL_DIR,
        "umask": os.umask(0), "parent": os.getppid() == int(os.environ["RESILIENT_TEST_LAUNCHER"]),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "descriptors": [fd for fd in sorted(os.listdir("/proc/self/fd"))
                        if os.path.exists(f"/proc/self/fd/{fd}") and fd != line[0]],
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
        "original_streams": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__],
        "signals": signals(signal.getsignal), "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1), "locale": locale.setlocale(locale.LC_ALL),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "threads": [thread.name for thread in threading.enumerate()],
        "main_thread": threading.main_thread().native_id == threading.get_native_id(),
        "process": [multiprocessing.current_process().name, len(multiprocessing.current_process().authkey)],
        "site": ["sitecustomize" in sys.modules, "usercustomize" in sys.modules],
        "ours": sorted(m for m in sys.modules if m.startswith("resilient_run.launcher")),
        "warnings": [str(f) for f in warnings.filters], "meta_path": [str(f) for f in sys.meta_path],
        "importers": sorted(p for p in sys.path_importer_cache if "zygote" in p),
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.randn(3).dtype is torch.float32],
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")],
        "scheduling": [sorted(os.sched_getaffinity(0)), os.nice(0)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace() is None, sys.getrecursionlimit()],
        "exec": [sys.executable, sys.prefix, sys.base_prefix],
    }
    for key, value in facts.items():
        print(key, json.dumps(value))
"""

PROGRAMS = {
    "identity": IDENTITY,
    "empty": "",
    "traceback": """
        def fail(depth):
            if depth == 0:
                raise ValueError("é")
            fail(depth - 1)
        try:
            fail(3)
        except ValueError as error:
            raise RuntimeError("outer") from error
    """,
    "stack": """
        import traceback, warnings
        traceback.print_stack()
        warnings.warn("from the script")
        warnings.warn("from its caller", stacklevel=2)
    """,
    "syntax error": "def broken(:",
    "exit 0": "import sys; print('x'); sys.exit()",
    "exit 3": "raise SystemExit(3)",
    "exit with a message": "raise SystemExit('the message')",
    "exit with a big code": "raise SystemExit(259)",
    "_exit": "import os; print('kept'); os._exit(7)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "aborted": "import os; os.abort()",
    "hung up": "import os, signal; os.kill(os.getpid(), signal.SIGHUP)",
    "broken pipe": """
        import os
        reader, writer = os.pipe()
        os.close(reader)
        os.write(writer, b"x")
    """,
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not reached')",
    "interrupt raised": "raise KeyboardInterrupt",
    "faulthandler": """
        import ctypes, faulthandler
        faulthandler.enable()
        ctypes.string_at(0)
    """,
    "end": """
        import atexit, sys, threading, time
        released = threading.Event()
        class Late:
            def __del__(self):
                print("deleted")
        late = Late()
        def work():
            released.wait()
            print("thread", threading.current_thread().name)
        @atexit.register
        def bye():
            print("atexit", "__file__" in sys.modules["__main__"].__dict__, threading.active_count())
        threading.Thread(target=work).start()
        sys.stdout.write("main is done, ")
        released.set()
    """,
    "exception in a thread": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0, name="divider")
        thread.start()
        thread.join()
    """,
    "exception while exiting": """
        import atexit
        atexit.register(lambda: 1 / 0)
        raise SystemExit(4)
    """,
    "unraisable": """
        class Bad:
            def __del__(self):
                raise ValueError("in del")
        Bad()
    """,
    "pickle": """
        import pickle
        class Point:
            x = 3
        point = pickle.loads(pickle.dumps(Point()))
        print(Point.__module__, type(point) is Point, pickle.dumps(Point)[:40])
    """,
    "spawned processes": """
        import multiprocessing
        def square(n):
            return n * n, __name__, multiprocessing.current_process().name
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [3]))
    """,
    "forked processes": """
        import multiprocessing, os
        def child(queue):
            queue.put(os.getppid())
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get() == os.getpid(), process.join(), process.exitcode)
    """,
    "data loader": """
        import torch
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return torch.tensor(float(index))
        torch.manual_seed(3)
        print([batch.tolist() for batch in DataLoader(Numbers(), batch_size=2, num_workers=1, shuffle=True)])
    """,
    "arithmetic": """
        import torch
        torch.manual_seed(1)
        model = torch.nn.Linear(64, 64)
        model(torch.randn(32, 64)).square().mean().backward()
        print(model.weight.grad.double().sum().item().hex(), torch.randn(3).tolist())
    """,
    "subprocess": """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "import sys; print(sys.path[1:], sys.flags)"], capture_output=True))
    """,
    "environment": """
        import os, subprocess
        os.environ["ADDED"] = "1"
        names = ("ADDED", "RANK", "PYTHONPATH", "RESILIENT_ZYGOTE_FD")
        print(subprocess.run(["/usr/bin/env"], capture_output=True, text=True).stdout.count("ZYGOTE"))
        print([os.getenv(name) for name in names])
    """,
    "standard input": "import sys; print(sys.stdin.read(), sys.stdin.fileno())",
    "streams": """
        import os, sys
        print("é", end="")
        sys.stderr.write("to stderr")
        os.write(1, b" raw ")
        print(sys.stdout.tell(), file=sys.stderr)
    """,
    "logging": """
        import logging, sys, torch
        print(logging.root.handlers, logging.getLogger("torch").handlers, logging.root.level)
        logging.warning("last resort")
        print([handler.stream is sys.stderr for handler in logging.getLogger("torch").handlers])
    """,
    "late module": """
        import pathlib, importlib
        pathlib.Path("late_module.py").write_text("value = 1")
        import late_module
        print(late_module.value, late_module.__file__)
    """,
    "doctest of main": '''
        """Docs of the script."""
        from __future__ import annotations
        import __main__
        x: int = 1
        print(__main__.__doc__, __annotations__)
    ''',
}

WATCHED = (
    "identity",
    "empty",
    "traceback",
    "stack",
    "syntax error",
    "exit 3",
    "_exit",
    "exception while exiting",
    "pickle",
    "spawned processes",
    "forked processes",
    "data loader",
    "arithmetic",
    "subprocess",
    "environment",
)
"""Programs that see what `--rr-auto` might change."""
LOOK = {"RESILIENT_AUTO_WORKER": "begin"}


class Bench:
    """One directory, one command line, one zygote; the script changes from run to run."""

    def __init__(self, directory: Path, command: tuple[str, ...] = COMMAND) -> None:
        self.directory = directory
        self.command = command
        self.starter = WorkerStarter(warm=True)
        self.env = {**os.environ, **WORKER_ENV, "RESILIENT_TEST_LAUNCHER": str(os.getpid())}

    def run(self, *, warm: bool, cold: WorkerStarter | None = None, **env: str) -> tuple[str, str, int]:
        """Return stdout, stderr and exit code of one run of the command, cold by `cold` if that is given."""
        out_path, err_path = self.directory / "stdout", self.directory / "stderr"
        with out_path.open("w") as out, err_path.open("w") as err:
            if warm:
                process = self.starter.start(self.command, {**self.env, **env}, out, err)
                assert isinstance(process, WarmProcess)
            elif cold is not None:
                process = cold.start(self.command, {**self.env, **env}, out, err)
            else:
                process = subprocess.Popen(
                    self.command, env={**self.env, **env}, stdout=out, stderr=err, start_new_session=True
                )
            code = process.wait(60)
        return out_path.read_text(), err_path.read_text(), code

    def write(self, source: str) -> None:
        """Make `source` the script."""
        (self.directory / "script.py").write_text(textwrap.dedent(source))


@pytest.fixture(scope="module", autouse=True)
def any_program_waits() -> Iterator[None]:
    """Let programs start warm that do not name torch, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_names_torch", lambda args: True)
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory = tmp_path_factory.mktemp("bench")
    before = os.getcwd()
    os.chdir(directory)
    bench = Bench(directory)
    yield bench
    bench.starter.close()
    os.chdir(before)


@pytest.fixture(scope="module")
def watching() -> Iterator[WorkerStarter]:
    """Starts workers cold."""
    starter = WorkerStarter(warm=False)
    yield starter
    starter.close()


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerStarter]:
    monkeypatch.chdir(tmp_path)
    starter = WorkerStarter(warm=True)
    yield starter
    starter.close()


def _normal(text: str) -> str:
    """Return `text` without addresses and faulthandler's list of what happens to be imported."""
    return re.sub(r"\n\nExtension modules: .*", "", re.sub(r"0x[0-9a-f]+", "0x…", text))


@pytest.mark.parametrize("name", PROGRAMS)
def test_warm_equals_cold(bench: Bench, name: str) -> None:
    bench.write(PROGRAMS[name])
    cold = bench.run(warm=False)
    (bench.directory / "late_module.py").unlink(missing_ok=True)
    warm = bench.run(warm=True)
    assert warm[2] == cold[2]
    assert _normal(warm[0]).splitlines() == _normal(cold[0]).splitlines()
    assert _normal(warm[1]).splitlines() == _normal(cold[1]).splitlines()


@pytest.mark.parametrize("name", nightly_but(["data loader", "forked processes", "identity", "traceback"], WATCHED))
def test_worker_that_is_looked_into_equals_one_that_is_not(bench: Bench, watching: WorkerStarter, name: str) -> None:
    bench.write(PROGRAMS[name])
    plain = bench.run(warm=False)
    assert _unhooked(bench.run(warm=False, cold=watching, **LOOK)) == _unhooked(plain)
    if name != "identity":  # the zygote of this bench has imported more by now
        assert _unhooked(bench.run(warm=True, **LOOK)) == _unhooked(plain)


def _unhooked(run: tuple[str, str, int]) -> list[Any]:
    """Return what a run came to but for the one thing that differs in a worker that is looked into."""
    out, err, code = run
    lines = [line for line in _normal(out).splitlines() if not line.startswith("meta_path")]
    return [lines, _normal(err).splitlines(), code]


def test_missing_script_equals_cold(bench: Bench) -> None:
    (bench.directory / "script.py").unlink(missing_ok=True)
    cold = bench.run(warm=False)
    assert bench.run(warm=True) == cold
    assert cold[2] == 2


def test_environment_of_each_worker_is_its_own(bench: Bench) -> None:
    bench.write("import os; print(os.environ.get('RANK'), os.environ.get('TORCHELASTIC_RUN_ID'))")
    assert bench.run(warm=True, RANK="5", TORCHELASTIC_RUN_ID="x")[0] == "5 x\n"
    assert bench.run(warm=True)[0] == "1 None\n"


def test_error_file_of_record(bench: Bench, tmp_path: Path) -> None:
    bench.write("""
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        main()
    """)
    messages = []
    for is_warm in (False, True):
        path = tmp_path / f"{is_warm}.json"
        bench.run(warm=is_warm, TORCHELASTIC_ERROR_FILE=str(path))
        message = json.loads(path.read_text())["message"]
        messages.append((message["message"], message["extraInfo"]["py_callstack"]))
    assert messages[0] == messages[1]
    assert "recorded" in messages[0][0]


def test_random_numbers_differ_between_workers(bench: Bench) -> None:
    bench.write("""
        import multiprocessing, random, torch
        import numpy
        print(random.random(), numpy.random.random(), torch.rand(1).item(), multiprocessing.current_process().authkey)
    """)
    first, second = (bench.run(warm=True)[0] for _ in range(2))
    assert not set(first.split(maxsplit=3)) & set(second.split(maxsplit=3))


def test_zygote_imports_more_once_the_first_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    others = set(psutil.Process().children())
    bench = Bench(tmp_path)
    bench.write("import sys; print('torch._dynamo' in sys.modules)")
    try:
        assert bench.run(warm=True)[0] == "False\n"
        (zygote,) = set(psutil.Process().children()) - others
        before_s = zygote.cpu_times().user
        wait_until(lambda: zygote.cpu_times().user > before_s + 0.2, timeout_s=60, what="more imports")
        assert bench.run(warm=True)[0] == "True\n"
        bench.write(
            "import torch._dynamo, torch.distributed.tensor, torch.distributed.fsdp\n" + textwrap.dedent(IDENTITY)
        )
        cold, warm = bench.run(warm=False), bench.run(warm=True)
        assert _normal(warm[0]).splitlines() == _normal(cold[0]).splitlines()
        assert warm[1:] == cold[1:]
    finally:
        bench.starter.close()


def test_what_modules_of_ours_import_later_is_imported_beforehand_if_that_is_cheap(bench: Bench) -> None:
    """By then another version may be installed."""
    bench.write("""
        import json, sys
        print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
    """)
    loaded = json.loads(bench.run(warm=True)[0])
    later = set()
    for name, file in loaded.items():
        if name.startswith("resilient_run"):
            package = name if Path(file).name == "__init__.py" else name.rpartition(".")[0]
            later.update(_imported_by_functions(Path(file), package))
    assert "resilient_run.ckpt.state.loading" in later
    assert later - loaded.keys() == {"resilient_run.ckpt.capture.fingerprint"}, "it needs numba"
    assert not {"numba", "torch.distributed.checkpoint", "accelerate", "lightning", "transformers"} & loaded.keys()


def _imported_by_functions(file: Path, package: str) -> Iterator[str]:
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    name = resolve_name("." * node.level + (node.module or ""), package)
                    if name.startswith("resilient_run"):
                        yield name


def test_zygote_imports_what_is_beside_it_once() -> None:
    """It forks zygotes of ranks later, when another version may be installed."""
    ended = run_python(
        ["-c", f"from {zygote.__name__} import _ours; assert _ours('prctl') is _ours('prctl')"], os.environ
    )
    assert ended.returncode == 0, ended.stderr


def test_one_zygote_serves_all_starts(bench: Bench) -> None:
    bench.write("import os; print(os.getpid())")
    bench.run(warm=True)
    children = {child.pid for child in psutil.Process().children()}
    pids = {bench.run(warm=True)[0] for _ in range(2)}
    assert len(pids) == 2
    assert {child.pid for child in psutil.Process().children()} == children


def _make_module(directory: Path, source: str) -> tuple[str, ...]:
    package = directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "program.py").write_text(source)
    return "-m", "package.program"


def _make_package(directory: Path, source: str) -> tuple[str, ...]:
    (directory / "package").mkdir()
    (directory / "package" / "__init__.py").write_text("print('package')")
    (directory / "package" / "__main__.py").write_text(source)
    return "-m", "package"


def _make_directory(directory: Path, source: str) -> tuple[str, ...]:
    (directory / "program").mkdir()
    (directory / "program" / "__main__.py").write_text(source)
    return (str(directory / "program"),)


def _make_archive(directory: Path, source: str) -> tuple[str, ...]:
    with zipfile.ZipFile(directory / "program.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    return ("program.zip",)


def _make_link(directory: Path, source: str) -> tuple[str, ...]:
    (directory / "real").mkdir()
    (directory / "real" / "program.py").write_text(source)
    (directory / "link.py").symlink_to("real/program.py")
    return ("link.py",)


@pytest.mark.parametrize("make", [_make_module, _make_package, _make_directory, _make_archive, _make_link])
def test_every_kind_of_program_equals_cold(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = make(
        tmp_path,
        "import sys, traceback\n"
        "print(sys.argv, sys.orig_argv, sys.path, __file__, __spec__, __package__, sorted(globals()))\n"
        "traceback.print_stack()\n"
        "1 / 0\n",
    )
    bench = Bench(tmp_path, (sys.executable, "-u", *program, "argument"))
    try:
        cold = bench.run(warm=False)
        assert [_normal(part) for part in bench.run(warm=True)[:2]] == [_normal(part) for part in cold[:2]]
        assert "ZeroDivisionError" in cold[1]
    finally:
        bench.starter.close()


def test_pythonpath_and_sitecustomize_equal_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watching: WorkerStarter
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = __file__")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'lib'}::")
    monkeypatch.setenv("PYTHONWARNINGS", "error::UserWarning")
    monkeypatch.setenv("LC_ALL", "C")
    bench, fresh = Bench(tmp_path), Bench(tmp_path)
    bench.write(IDENTITY + "    import sitecustomize\n    print(customized, sitecustomize)\n")
    try:
        cold = bench.run(warm=False)
        warm = bench.run(warm=True)
        assert _normal(warm[0]).splitlines() == _normal(cold[0]).splitlines()
        assert warm[1:] == cold[1:]
        assert f"{tmp_path}/lib/sitecustomize.py" in cold[0]
        assert _unhooked(bench.run(warm=False, cold=watching, **LOOK)) == _unhooked(cold)
        assert _unhooked(fresh.run(warm=True, **LOOK)) == _unhooked(cold)
    finally:
        fresh.starter.close()
        bench.starter.close()


def _start(starter: WorkerStarter, *command: str, **env: str) -> "subprocess.Popen[bytes]":
    with open(os.devnull, "w") as null:
        return starter.start((sys.executable, *command), {**os.environ, **WORKER_ENV, **env}, null, null)


def _script(source: str = "pass") -> str:
    Path("script.py").write_text(source)
    return "script.py"


def _change_directory(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    assert _start(starter, "-u", str(Path(_script()).absolute())).wait(60) == 0
    script = Path("script.py").absolute()
    os.chdir("/")
    return _start(starter, "-u", str(script))


def _change_environment(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    assert _start(starter, "-u", _script()).wait(60) == 0
    return _start(starter, "-u", "script.py", OMP_NUM_THREADS="7")


def _change_command(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    assert _start(starter, "-u", _script()).wait(60) == 0
    return _start(starter, "-u", "script.py", "--local-rank=1")


def _other_program(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    with open(os.devnull, "w") as null:
        return starter.start(("/bin/true",), dict(os.environ), null, null)


def _other_flags(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    return _start(starter, "-u", "-X", "dev", _script())


def _sets_threads(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    return _start(starter, "-u", _script("import os; os.environ['OMP_NUM_THREADS'] = '2'"))


def _sets_threads_by_keyword(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    return _start(starter, "-u", _script("import os; os.environ.update(OMP_NUM_THREADS='2')"))


def _reads_variables_from_a_file(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    return _start(starter, "-u", _script("if False:\n    from dotenv import load_dotenv\n    load_dotenv()"))


def _imports_what_sets_threads(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("package").mkdir()
    Path("package", "__init__.py").write_text("from . import (first,\n    second)\n")
    Path("package", "first.py").write_text("")
    Path("package", "second.py").write_text("from .. import outside\nfrom .third.deep import anything")
    Path("package", "third").mkdir()
    Path("package", "third", "deep.py").write_text("anything = 1\nimport os, settings as s; os.getcwd()")
    Path("settings.py").write_text("import package\nimport os\nos.environ['OMP_NUM_THREADS'] = '2'")
    Path("outside.py").write_text("")
    return _start(starter, "-u", _script("if False:\n    import package.third.deep"))


def _package_sets_threads(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("package", "inner").mkdir(parents=True)
    Path("package", "__init__.py").write_text("import os; import settings")
    Path("package", "inner", "train.py").write_text("")
    Path("settings.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'")
    return _start(starter, "-u", "-m", "package.inner.train")


def _has_many_modules(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    names = [f"module_{number}" for number in range(300)]
    for name in names:
        Path(f"{name}.py").write_text("")
    return _start(starter, "-u", _script(f"import {', '.join(names)}"))


def _is_a_pipe(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    os.mkfifo("pipe.py")
    written = threading.Thread(target=Path("pipe.py").write_text, args=("open('ran', 'w')",))
    written.start()
    process = _start(starter, "-u", "pipe.py")
    assert process.wait(60) == 0
    written.join()
    assert Path("ran").exists()
    return process


def _sitecustomize_goes_by_the_rank(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("sitecustomize.py").write_text("import os; os.environ['MY_GPU'] = os.environ.get('LOCAL_RANK', 'none')")
    return _start(starter, "-u", _script(), PYTHONPATH=os.getcwd())


def _temporary_folder_is_gone(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", f"{os.getcwd()}/nowhere")
        return _start(starter, "-u", _script("text = '''\nfrom ......... import x\n'''"))


def _hides_module(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("typing_extensions.py").write_text("")
    return _start(starter, "-u", _script())


def _has_what_torch_looks_for(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("opt_einsum.py").write_text("")
    return _start(starter, "-u", _script())


def _preloaded_module(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    return _start(starter, "-u", "-m", "torch.version")


def _starts_thread(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True, name='spy').start()"
    )
    return _start(starter, "-u", _script(), PYTHONPATH=os.getcwd())


def _broken_sitecustomize(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    Path("sitecustomize.py").write_text("import no_such_module")
    return _start(starter, "-u", _script(), PYTHONPATH=os.getcwd())


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (_change_directory, "working directory was"),
        (_change_environment, "environment variable OMP_NUM_THREADS has changed"),
        (_change_command, "command line differs"),
        (_other_program, "program is not"),
        (_other_flags, "options other than -u and -m"),
        (_sets_threads, "names 'OMP_NUM_THREADS'"),
        (_sets_threads_by_keyword, "names OMP_NUM_THREADS"),
        (_reads_variables_from_a_file, "names load_dotenv"),
        (_imports_what_sets_threads, "settings.py names 'OMP_NUM_THREADS'"),
        (_package_sets_threads, "settings.py names 'OMP_NUM_THREADS'"),
        (_has_many_modules, "more than 200 modules of its own"),
        (_is_a_pipe, "pipe.py is not a regular file"),
        (_sitecustomize_goes_by_the_rank, "changed environment variable MY_GPU"),
        (_temporary_folder_is_gone, "the zygote cannot be made: FileNotFoundError"),
        (_hides_module, "takes the place of module typing_extensions"),
        (_has_what_torch_looks_for, "opt_einsum.py is found by the script alone"),
        (_preloaded_module, "torch.version is itself imported"),
        (_starts_thread, "started a thread, which a fork would lose: spy"),
        (_broken_sitecustomize, "the zygote, or its fork, failed"),
    ],
)
def test_what_cannot_be_forked_starts_cold(
    starter: WorkerStarter, start: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "resilient_run.launcher.workers.warm"):
        process = start(starter)
    assert not isinstance(process, WarmProcess)
    assert process.wait(60) == 0
    assert reason in caplog.text


def test_what_is_expected_is_waited_for_and_what_comes_in_its_place_gets_a_zygote_of_its_own(
    starter: WorkerStarter, caplog: pytest.LogCaptureFixture
) -> None:
    args = (sys.executable, "-u", _script())
    with caplog.at_level(logging.INFO, "resilient_run.launcher.workers.warm"):
        starter.expect(args, {**os.environ, "OMP_NUM_THREADS": "3"})
        first = _start(starter, *args[1:])
        assert isinstance(first, WarmProcess)
        assert first.wait(60) == 0
        assert "made for other workers (environment variable OMP_NUM_THREADS has changed" in caplog.text
        assert isinstance(_restart(starter), WarmProcess)
    assert caplog.text.count("the zygote is ready") == 2


def test_what_does_not_name_torch_does_not_wait(
    starter: WorkerStarter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm, "_names_torch", NAMES_TORCH)
    Path("module.py").write_text("import torch")
    names = (
        ("-u", _script("import module")),
        ("-u", "-m", "torch.version"),
        ("-u", "x.py", "torch"),
        ("-X", "dev", "x.py"),
    )
    assert [NAMES_TORCH((sys.executable, *command)) for command in names] == [True] * 4
    with caplog.at_level(logging.INFO, "resilient_run.launcher.workers.warm"):
        first = _start(starter, "-u", _script("pass"))
        assert not isinstance(first, WarmProcess)
        assert "does not name torch" in caplog.text
        wait_until(lambda: "the zygote is ready" in caplog.text, timeout_s=60, what="a zygote")
        assert isinstance(_restart(starter), WarmProcess)
    assert first.wait(60) == 0


def test_closing_while_a_zygote_is_prepared_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children())
    starter = WorkerStarter(warm=True)
    starter.expect((sys.executable, "-u", _script()), dict(os.environ))
    starter.close()
    assert set(psutil.Process().children()) <= before


def test_hook_that_is_not_reached_never_runs_the_script(
    starter: WorkerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    first = tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text("")
    (site_packages / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(first)!r})\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    with caplog.at_level(logging.INFO, "resilient_run.launcher.workers.warm"):
        process = _start(starter, "-u", _script("open('runs', 'a').write('x')"))
    assert process.wait(60) == 0
    assert "another sitecustomize" in caplog.text
    assert Path("runs").read_text() == "x"


def test_switched_off(starter: WorkerStarter) -> None:
    process = _start(WorkerStarter(warm=False), "-u", _script())
    assert process.wait(60) == 0
    assert not isinstance(process, WarmProcess)


def test_popen_surface(starter: WorkerStarter) -> None:
    process = _start(starter, "-u", _script("import time; time.sleep(1000)"))
    assert isinstance(process, WarmProcess)
    assert process.poll() is None
    assert process.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    assert process.poll() == process.returncode == -signal.SIGTERM
    process.kill()  # of no effect on a process that was waited for


def test_workers_outlive_their_zygote_and_the_next_start_makes_another(starter: WorkerStarter) -> None:
    others = set(psutil.Process().children())
    process = _start(starter, "-u", _script("import time; time.sleep(1000)"))
    (zygote,) = (child for child in set(psutil.Process().children()) - others if child.pid != process.pid)
    zygote.kill()
    wait_until(lambda: zygote.status() == psutil.STATUS_ZOMBIE, timeout_s=30, what="end of the zygote")
    second = _start(starter, "-u", "script.py")
    assert isinstance(second, WarmProcess)
    assert process.poll() is second.poll() is None
    for worker in (process, second):
        worker.kill()
        assert worker.wait(60) == -signal.SIGKILL


def test_zygote_that_stops_answering_costs_a_cold_start(
    starter: WorkerStarter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = set(psutil.Process().children())
    assert _start(starter, "-u", _script()).wait(60) == 0
    monkeypatch.setattr("resilient_run.launcher.workers.warm._FORK_TIMEOUT_S", 0.1)
    (zygote,) = set(psutil.Process().children()) - others
    stop(zygote.pid)
    caplog.set_level(logging.INFO, "resilient_run.launcher.workers.warm")
    process = _start(starter, "-u", "script.py")
    assert process.wait(60) == 0
    assert not isinstance(process, WarmProcess)
    assert "cannot reach the zygote" in caplog.text
    caplog.clear()
    monkeypatch.setattr("resilient_run.launcher.workers.warm._FORK_TIMEOUT_S", 60.0)
    assert isinstance(_restart(starter), WarmProcess), caplog.text


def _restart(starter: WorkerStarter) -> "subprocess.Popen[bytes]":
    process = _start(starter, "-u", "script.py")
    assert process.wait(60) == 0
    return process


LAUNCHER = """
    import sys, time
    from torch.distributed.elastic.multiprocessing import api
    from resilient_run.launcher.workers.handler import warm_workers

    def start(rank):
        return api.get_subprocess_handler(
            entrypoint=sys.executable, args=("-u", "script.py"), env={"RANK": str(rank)},
            stdout=f"out{rank}", stderr="", local_rank_id=rank, numa_options=None,
        ).proc
    with warm_workers(enabled=True):
        warm = [start(0), start(1)]
        with open("pids", "w") as pids:
            print(*(process.pid for process in warm), file=pids)
        time.sleep(1000)
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_killed_launcher_leaves_no_process(tmp_path: Path, enabled: bool) -> None:
    (tmp_path / "script.py").write_text("import time; print('up'); time.sleep(1000)")
    source = textwrap.dedent(LAUNCHER).replace("enabled=True", f"enabled={enabled}")
    launcher = subprocess.Popen([sys.executable, "-P", "-c", source], cwd=tmp_path)
    try:
        outputs = [tmp_path / "out0", tmp_path / "out1"]
        wait_until(
            lambda: (
                all(path.exists() and path.read_text() == "up\n" for path in outputs) or launcher.poll() is not None
            ),
            timeout_s=60,
            what="two workers",
        )
        children = wait_until(
            lambda: (
                len(found := psutil.Process(launcher.pid).children(recursive=True)) == (3 if enabled else 2) and found
            ),
            timeout_s=60,
            what="two workers and, if enabled, the zygote",
        )
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(
        lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children),
        timeout_s=30,
        what=f"end of {children}",
    )


def test_handler_is_put_back() -> None:
    from torch.distributed.elastic.multiprocessing import api

    before = api.get_subprocess_handler
    with warm_workers():
        assert api.get_subprocess_handler is not before
        with warm_workers():
            assert api.get_subprocess_handler is not before
    assert api.get_subprocess_handler is before
