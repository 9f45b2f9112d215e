"""Launchers and programs for tests, forked from an interpreter that has torch imported (see `prepared.py`).

All but their creation, and that of the zygote of a launcher, is what ``python -P`` does, in a fifth of the CPU time.
The test's process is the parent of a launcher or a program, and a launcher that of its zygote, as ever.
"""

import atexit
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import prepared
from torch.distributed import TCPStore

from resilient_run.launcher.workers import warm
from resilient_run.launcher.workers.prctl import adopting_orphans

_RUN = str(Path(__file__).with_name("run.py"))
_LAUNCHER = "resilient-run"
_PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
_READ_AT_IMPORT = re.compile(r"(PYTHON|LD_|MALLOC|OMP|KMP|MKL|NUMBA|TORCH(?!_NCCL|ELASTIC)|GRPC|LANG|LC_).*")


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
    if _Parent.of_this_process().fits(env) and prepared.knows(prefix):
        return _Forked([*prefix, _LAUNCHER, *arguments], env=env, **_PIPES)
    return execute_launcher(arguments, env, prefix)


def start_python(arguments: Sequence[str], env: Mapping[str, str], **options: Any) -> "subprocess.Popen[Any]":
    """Return a running ``python -P``.

    Args:
        arguments: A script, ``-c`` and code, or ``-m`` and a module; and what follows.
        env: Its environment.
        options: Of `subprocess.Popen`: its streams and what they carry.
    """
    if _Parent.of_this_process().fits(env):
        return _Forked([sys.executable, *arguments], env=env, **options)
    return subprocess.Popen([sys.executable, "-P", *arguments], env=env, **options)


def run_python(
    arguments: Sequence[str], env: Mapping[str, str], *, timeout_s: float = 240.0
) -> "subprocess.CompletedProcess[str]":
    """Return what a `start_python` came to; one that is late is killed."""
    with start_python(arguments, env, **_PIPES) as process:
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


class _Forked(subprocess.Popen[Any]):
    """`Popen` of a fork: it differs from any other in nothing but its creation."""

    def _execute_child(self, *given: Any) -> None:
        args, env, pipes = given[0], given[6], given[10:16]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        descriptors = [own if piped == -1 else piped for own, piped in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _Parent.of_this_process().fork(args, env, descriptors)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Parent:
    """The interpreter that launchers are forked from, as its user sees it."""

    _made: "_Parent | None" = None

    @classmethod
    def of_this_process(cls) -> "_Parent":
        if cls._made is None:
            cls._made = cls()
            atexit.register(cls._made.close)
        return cls._made

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._env = dict(os.environ, OMP_NUM_THREADS="1")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryDirectory() as hook_dir, theirs:
            Path(hook_dir, "sitecustomize.py").symlink_to(prepared.__file__)
            path = os.pathsep.join([hook_dir, *filter(None, [self._env.get("PYTHONPATH")])])
            hooked = {**self._env, "PYTHONPATH": path, prepared.CONTROL_FD: str(theirs.fileno())}
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
        launches = command[0] != sys.executable
        prefix = list(command[: command.index(_LAUNCHER)]) if launches else []
        command = command[len(prefix) :]
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
