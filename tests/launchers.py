"""Launchers, daemons and programs for tests, forked from an interpreter with their imports (see `prepared.py`).

All but their creation, and that of a launcher's zygote and daemon, is what ``python -P`` does, in a fifth of the CPU
time. The test's process is the parent of what it starts, and a launcher that of its zygote and its daemon, as ever.
"""

import atexit
import inspect
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import prepared
from torch.distributed import TCPStore

from resilient_run.launcher import daemon_link
from resilient_run.launcher.workers import warm, zygote
from resilient_run.launcher.workers.prctl import adopting_orphans

if TYPE_CHECKING:  # also for programs that do not have benchmarks/ on their path
    from netlab import NetLab

_RUN = str(Path(__file__).with_name("run.py"))
_LAUNCHER = "resilient-run"
_DAEMON = "resilient_run.daemon"
_CTL = "from resilient_run.daemon.ctl.cli import resilientctl; resilientctl(prog_name='resilientctl')"
_NO_TORCH = ("resilient_run.daemon.cli", "resilient_run.daemon.ctl.cli")
_OURS = tuple(f"resilient_run.{name}" for name in ("ckpt.checkpointer", "comm.hook", "launcher.cli", "daemon.cli"))
_TORCH = (*zygote._AT_ONCE, *zygote._LATER, *_OURS)
"""What is imported beforehand."""
_PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
# TORCHINDUCTOR_CACHE_DIR is read when torch compiles, and set by torch itself in a process that imports its compiler.
_NO_SUCH_TORCH = "_NCCL|ELASTIC|INDUCTOR_CACHE_DIR"
_READ_AT_IMPORT = re.compile(rf"(PYTHON|LD_|MALLOC|OMP|KMP|MKL|NUMBA|TORCH(?!{_NO_SUCH_TORCH})|GRPC|LANG|LC_).*")


def execute_launcher(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = ()
) -> "subprocess.Popen[Any]":
    """Return a running `resilient-run`, started as by a user, with pipes of text for its output.

    Args:
        arguments: Its own.
        env: Its environment.
        prefix: What stands before its command.
    """
    command = [*prefix, sys.executable, "-P", "-m", "resilient_run", *arguments]
    return subprocess.Popen(command, env=env, **_PIPES)


def start_launcher(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = ()
) -> "subprocess.Popen[Any]":
    """Return what `execute_launcher` does, forked if it can be."""
    if _Parent.of(_TORCH).fits(env) and prepared.knows(prefix):
        return _Forked([*prefix, _LAUNCHER, *arguments], env=env, **_PIPES)
    return execute_launcher(arguments, env, prefix)


def run_launcher(arguments: Sequence[str], env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Return what a `start_launcher` came to; one that is late is killed."""
    return _ended(start_launcher(arguments, env), 240.0)


def start_daemon(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """Return a running `resilientd`.

    Args:
        arguments: Its own.
        env: Its environment.
        prefix: What stands before its command.
        options: Of `subprocess.Popen`: its streams and what they carry.
    """
    return _start_without_torch(["-m", _DAEMON, *arguments], env, prefix, **options)


def run_daemon(arguments: Sequence[str], env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Return what a `start_daemon` came to; one that is late is killed."""
    return _ended(start_daemon(arguments, env, **_PIPES), 60.0)


def start_ctl(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """Return a running `resilientctl`; see `start_daemon`."""
    return _start_without_torch(["-c", _CTL, *arguments], env, prefix, **options)


def _start_without_torch(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str], **options: Any
) -> "subprocess.Popen[Any]":
    env = {**env, "OMP_NUM_THREADS": "1"}
    if _Parent.of(_NO_TORCH).fits(env) and prepared.knows(prefix):
        return _ForkedWithoutTorch([*prefix, sys.executable, *arguments], env=env, **options)
    return subprocess.Popen([*prefix, sys.executable, "-P", *arguments], env=env, **options)


def run_ctl(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    """Return what a `start_ctl` came to; one that is late is killed."""
    return _ended(start_ctl(arguments, env, prefix, **_PIPES), 120.0)


def start_python(
    arguments: Sequence[str], env: Mapping[str, str], prefix: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """Return a running ``python -P``.

    Args:
        arguments: A script, ``-c`` and code, or ``-m`` and a module; and what follows.
        env: Its environment.
        prefix: What stands before its command.
        options: Of `subprocess.Popen`: its streams and what they carry.
    """
    if _Parent.of(_TORCH).fits(env) and prepared.knows(prefix):
        return _Forked([*prefix, sys.executable, *arguments], env=env, **options)
    return subprocess.Popen([*prefix, sys.executable, "-P", *arguments], env=env, **options)


def run_python(
    arguments: Sequence[str], env: Mapping[str, str], *, timeout_s: float = 240.0
) -> "subprocess.CompletedProcess[str]":
    """Return what a `start_python` came to; one that is late is killed."""
    return _ended(start_python(arguments, env, **_PIPES), timeout_s)


def run_apart(check: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a test module, which has to call it by name as a script, where no threads of other tests are.

    A worker of a `DataLoader` that is forked beside them may crash.
    """
    file = Path(inspect.getfile(check))
    arguments_json = json.dumps(arguments)
    ended = run_python([str(file), check.__name__, arguments_json], os.environ)
    assert ended.returncode == 0, ended.stderr


def _ended(started: "subprocess.Popen[str]", timeout_s: float) -> "subprocess.CompletedProcess[str]":
    with started as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_trainers(arguments: Sequence[str], size: int, *, timeout_s: float = 240.0) -> str:
    """Return what all ranks of a `start_python` printed, whose environments are those that torchrun gives on one host.

    All must succeed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": store.port, "OMP_NUM_THREADS": 1}
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        processes = []
        for rank in range(size):
            differing = {name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": rank, **shared}.items()}
            process = stack.enter_context(start_python(arguments, {**environ, **differing}, **_PIPES))
            stack.callback(process.kill)
            processes.append(process)
        ended = list(pool.map(lambda process: process.communicate(timeout=timeout_s), processes))
    assert [process.returncode for process in processes] == [0] * size, "".join(err for _, err in ended)
    return "".join(out for out, _ in ended)


def run_on_hosts(lab: "NetLab", arguments: Sequence[str], *, timeout_s: float = 240.0) -> list[tuple[str, str]]:
    """Return what each rank of a `start_python` printed to stdout and stderr, one on each host of a lab.

    All must succeed.
    """
    shared = {"WORLD_SIZE": str(len(lab.hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29500"}
    workers = [
        start_python(arguments, {**os.environ, **host.env, **shared, "RANK": str(rank)}, host.prefix, **_PIPES)
        for rank, host in enumerate(lab.hosts)
    ]
    ended = [worker.communicate(timeout=timeout_s) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), "".join(err for _, err in ended)
    return ended


class _Forked(subprocess.Popen[Any]):
    """`Popen` of a fork: it differs from any other in nothing but its creation."""

    modules = _TORCH

    def _execute_child(self, *given: Any) -> None:
        args, env, pipes = given[0], given[6], given[10:16]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        descriptors = [own if piped == -1 else piped for own, piped in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _Parent.of(self.modules).fork(args, env, descriptors)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _ForkedWithoutTorch(_Forked):
    modules = _NO_TORCH


class _Parent:
    """An interpreter that others are forked from, as its user sees it."""

    _made: ClassVar[dict[tuple[str, ...], "_Parent"]] = {}
    _lock: ClassVar = threading.Lock()
    """Of all: whether this process adopts orphans is a state that they share."""

    @classmethod
    def of(cls, modules: tuple[str, ...]) -> "_Parent":
        """Return the one of this process that has imported `modules`."""
        if modules not in cls._made:
            cls._made[modules] = cls(modules)
            atexit.register(cls._made[modules].close)
        return cls._made[modules]

    def __init__(self, modules: Sequence[str]) -> None:
        self._env = dict(os.environ, OMP_NUM_THREADS="1")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryDirectory() as hook_dir, theirs:
            Path(hook_dir, "sitecustomize.py").symlink_to(prepared.__file__)
            path = os.pathsep.join([hook_dir, *filter(None, [self._env.get("PYTHONPATH")])])
            hooked = {**self._env, "PYTHONPATH": path, prepared.CONTROL_FD: str(theirs.fileno())}
            hooked[prepared.MODULES] = ",".join(modules)
            # Pipes, as the launchers get: a stream remembers whether it can seek.
            self._process = subprocess.Popen(
                [sys.executable, "-u", _RUN],
                env=hooked,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._answer()

    def fits(self, env: Mapping[str, str]) -> bool:
        """Tell whether what is imported already has read nothing that is different in `env`."""
        return _at_import(env) == _at_import(self._env)

    def fork(self, command: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Return the pid of a new child of this process with these standard streams: a program, or a launcher."""
        begin = next(place for place, word in enumerate(command) if word in (_LAUNCHER, sys.executable))
        prefix, command = list(command[:begin]), command[begin:]
        launches = command[0] == _LAUNCHER
        argv = command if launches else [_RUN, *command[1:]]
        request = {"argv": argv, "command": command, "env": dict(env), "cwd": os.getcwd()}
        request |= {"launches": launches, "prefix": prefix}
        with self._lock, adopting_orphans():
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            return self._answer()

    def _answer(self) -> int:
        """Return the pid that comes back: its own when it is prepared, then that of each fork."""
        answer = self._control.recv(prepared.MAX_PACKET_BYTES)
        if not answer:
            raise AssertionError(f"nothing can be forked: {self._process.communicate()[0]!r}")
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.communicate()


def _at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _READ_AT_IMPORT.fullmatch(name)}


def offer_zygote(pid: int, descriptor: int) -> None:
    """Let this launcher's first zygote be process `pid`, which waits at socket `descriptor`, if it is as asked for."""
    offered, at_import = [(pid, socket.socket(fileno=descriptor))], _at_import(os.environ)

    class Prepared(warm.Zygote):
        def __init__(
            self, args: Sequence[str], env: Mapping[str, str], bind: Any, preload: Sequence[str] | None = ()
        ) -> None:
            runs_script = list(args[:2]) == [sys.executable, "-u"] and not args[2].startswith("-")
            if not offered or not runs_script or _at_import(env) != at_import or preload != ():
                super().__init__(args, env, bind, preload)
                return
            pid, call = offered.pop()
            self._args, self._env, self._cwd = tuple(args), dict(env), os.getcwd()
            self._note_level = logging.INFO
            self._site_hook = warm.SiteHook(prepared.__file__)
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            request = {"argv": [_RUN, *args[2:]], "command": args, "env": self._env, "cwd": self._cwd}
            with theirs, call:
                socket.send_fds(call, [json.dumps(request).encode()], [theirs.fileno()])
            self._process = warm.WarmProcess(args, pid)

    warm.Zygote = Prepared  # type: ignore[misc]


def offer_daemon(pid: int, descriptor: int) -> None:
    """Let this launcher's first daemon be process `pid`, which waits at socket `descriptor`, if it is as asked for."""
    offered, at_import = [(pid, socket.socket(fileno=descriptor))], _at_import(os.environ)

    class Prepared(subprocess.Popen[Any]):
        def _execute_child(self, *given: Any) -> None:
            args, env, pipes = given[0], given[6], given[10:16]
            if not offered or args[1:4] != ["-P", "-m", _DAEMON] or _at_import(env) != at_import:
                super()._execute_child(*given)  # type: ignore[misc]
                return
            self.pid, call = offered.pop()
            self._child_created = True
            p2cread, _, _, c2pwrite, _, errwrite = pipes
            request = {"argv": [_RUN, *args[2:]], "command": args, "env": env, "cwd": os.getcwd()}
            with call:
                socket.send_fds(call, [json.dumps(request).encode()], [p2cread, c2pwrite, errwrite])
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    daemon_link.subprocess.Popen = Prepared  # type: ignore[misc]
