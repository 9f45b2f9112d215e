"""Workers start warm: forked from a `zygote` that has torch imported, when that equals a cold start in all but time.

A command or an environment that a fork could not imitate exactly starts cold, and the log says why. Warm or cold, a
worker is a child of the launcher and is killed with it. Nothing here imports torch: a zygote is begun before that.
"""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from . import import_hook, line, zygote
from .prctl import adopting_orphans, death_with_parent
from .preload import PER_WORKER

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_FORK_TIMEOUT_S = 20.0
_MAX_PACKET_BYTES = 1 << 16

_LOAD_TIME = re.compile(
    rb"""["'](?:LD|MALLOC|G?OMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|PYTORCH|TORCH(?!ELASTIC|_NCCL)[A-Z]*)_[A-Z_]+["']"""
    rb"""|\b(?:LD|MALLOC|G?OMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR)_[A-Z_]+(?=\s{0,20}=(?!=))|\bload_dotenv\b"""
)
"""In a script: names, quoted or as keywords, of variables that only take effect when set before torch is imported, and
what sets any of them from a file."""

_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]{0,200}(?:from[ \t]{1,20}(\.{0,20})([\w.]{0,200})[ \t]{1,20})?"
    rb"import\b[ \t]{0,20}(\([^)]*\)|(?:[^#;\n\\]|\\\n)*)",
    re.M,
)
_MAX_SOURCES = 200
_MAX_CANDIDATES = 20_000
_UNHURRIED_S = 1.0


class ColdStart(Exception):
    """This worker cannot be forked from a zygote; the message says why."""


class WarmProcess(subprocess.Popen[bytes]):
    """`Popen` of a child that a zygote made: it differs from any other in nothing but its creation."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self._warm_pid = pid
        super().__init__(args)

    def _execute_child(self, *_: object) -> None:
        self.pid = self._warm_pid
        self._child_created = True


class WorkerStarter:
    """Decides between warm and cold for each worker of a run, and owns the run's zygote.

    Args:
        warm: False starts every worker cold.
        preload: Modules that the zygote imports besides torch; None learns them from the first workers.

    Attributes:
        keeps_lines: Whether there is somebody who listens to the workers' lines, and may keep them (see `line.py`).
        lines: Those of the workers that run, by pid.
        ready: Those of the workers that are kept for the next start, by local rank.
    """

    def __init__(self, *, warm: bool, preload: Sequence[str] | None = ()) -> None:
        self.preload = preload
        self.keeps_lines = False
        self.lines: dict[int, line.Line] = {}
        self.ready: dict[int, line.Line] = {}
        self._refusal = None if warm else "warm start is switched off"
        self._preparing: list[threading.Thread] = []
        self._wanted: tuple[Sequence[str], Mapping[str, str]] | None = None
        self._guess: tuple[Sequence[str], Mapping[str, str]] | None = None
        self._prepared = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._has_forked = False
        self._site_hook: SiteHook | None = None
        self._waits = True
        self._bind = death_with_parent(os.getpid())

    def start(
        self,
        args: Sequence[str],
        env: dict[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        local_rank: int | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Return the running worker, leader of its own session; one that is ready for `local_rank` goes on."""
        streams = [0, stdout.fileno() if stdout else 1, stderr.fileno() if stderr else 2]
        kept = None if local_rank is None else self.ready.pop(local_rank, None)
        if kept is not None and kept.go_on(env, streams):
            return kept.process
        process: subprocess.Popen[bytes]
        try:
            pid, end = self._zygote_for(args, env).fork(env, streams)
            self._has_forked = True
            process = WarmProcess(args, pid)
        except ColdStart as reason:
            log.info("cold start of %s: %s", args[0], reason)
            hooked = self._with_import_hook(args[0], env)
            end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    args,
                    env={**hooked, line.LINE: line.name(theirs)},
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                    preexec_fn=self._bind,
                    pass_fds=[theirs.fileno()],
                )
        if self.keeps_lines and import_hook.AUTO not in env:
            self.lines[process.pid] = line.Line(end, process, env, streams)
        else:
            end.close()  # What --rr-auto has in a worker knows of one generation.
        return process

    def expect(self, args: Sequence[str], env: Mapping[str, str], *, is_guess: bool = False) -> None:
        """Prepare for workers that will be started with `args` and, but for what differs by worker, `env`.

        What was prepared for a guess goes on if it was right, and is replaced otherwise.
        """
        if self._guess is not None:
            guess, self._guess = self._guess, None
            if (difference := _difference(*guess, args, env)) is None:
                return
            log.info("the zygote was made for other workers (%s); starting another", difference)
            if (zygote := self._zygote) is not None:
                zygote.kill()
            with self._lock:
                self._wanted = None
                self._prepared.clear()
                self._refusal = None
                self._discard()
        elif self._preparing:
            return
        if self._refusal is None:
            self._guess = (args, env) if is_guess else None
            self._waits = _names_torch(args)
            self._wanted = (args, env)
            thread = threading.Thread(target=self._prepare, args=(self._wanted,), name="zygote", daemon=True)
            self._preparing.append(thread)
            thread.start()

    def close(self) -> None:
        """End the zygote; its workers go on."""
        for each in self.lines.values():
            each.end.close()
        self._closing.set()
        if (zygote := self._zygote) is not None:
            zygote.kill()
        for thread in self._preparing:
            thread.join()
        self._discard()
        if self._site_hook is not None:
            self._site_hook.close()

    def _with_import_hook(self, program: str, env: dict[str, str]) -> dict[str, str]:
        """Return the environment of a cold worker: one that `import_hook` looks into if ``--rr-auto`` asks for that."""
        if import_hook.AUTO not in env:
            return env
        if self._site_hook is None:
            self._site_hook = SiteHook(import_hook.__file__)
        hooked = self._site_hook.environ(env)
        if self._site_hook.is_reached(program, hooked):
            return hooked
        log.warning("--rr-auto protects nothing here: another sitecustomize comes before its own")
        return {name: value for name, value in env.items() if name != import_hook.AUTO}

    def _discard(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _zygote_for(self, args: Sequence[str], env: Mapping[str, str]) -> "Zygote":
        self.expect(args, env)
        if self._refusal is not None:
            raise ColdStart(self._refusal)
        if not self._waits and not self._prepared.is_set():
            raise ColdStart("the zygote is not prepared yet, and the program does not name torch")
        self._prepared.wait()
        with self._lock:
            return self._checked(args, env)

    def _checked(self, args: Sequence[str], env: Mapping[str, str]) -> "Zygote":
        if self._refusal is not None:
            raise ColdStart(self._refusal)
        if self._zygote is not None and not self._zygote.alive():
            log.warning("the zygote (pid %d) died; starting another", self._zygote.pid)
            self._discard()
        if self._zygote is None:
            self._make_zygote(args, env)
        assert self._zygote is not None
        try:
            self._zygote.check(args, env)
        except ColdStart as difference:
            if self._has_forked:
                raise
            log.info("the zygote was made for other workers (%s); starting another", difference)
            self._discard()
            self._make_zygote(args, env)
        return self._zygote

    def _prepare(self, wanted: tuple[Sequence[str], Mapping[str, str]]) -> None:
        if not self._waits and self._closing.wait(_UNHURRIED_S):
            return
        try:
            with self._lock:
                # A guess may have turned out wrong by now.
                if self._wanted is wanted:
                    self._make_zygote(*wanted)
        except ColdStart as reason:
            log.info("workers will start cold: %s", reason)
        finally:
            if self._wanted is wanted:
                self._prepared.set()
        # The kernel would kill the zygote with the thread that started it.
        self._closing.wait()

    def _make_zygote(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        try:
            _check_command(args)
            self._zygote = Zygote(args, env, self._bind, self.preload)
            if self._closing.is_set():
                self._zygote.kill()
            self._zygote.wait_ready()
            log.info("the zygote is ready (pid %d)", self._zygote.pid)
        except Exception as error:
            # What this run's command is refused for once, it would be refused for at every start.
            self._refusal = str(error) if isinstance(error, ColdStart) else f"the zygote cannot be made: {error!r}"
            self._discard()
            raise ColdStart(self._refusal) from error


class SiteHook:
    """A directory in front of PYTHONPATH that offers a file of ours as module ``sitecustomize``.

    Args:
        file: It undoes this, and imports the ``sitecustomize`` that it hides.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._link = self._make()
        self._reached: dict[str, bool] = {}

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which an interpreter reaches the file."""
        if not self._is_there():
            self._link = self._make()
        path = [str(self._link.parent), *filter(None, [env.get("PYTHONPATH")])]
        return {**env, "PYTHONPATH": os.pathsep.join(path)}

    def is_reached(self, program: str, hooked: Mapping[str, str]) -> bool:
        """Return whether `program` is an interpreter that reaches it, found by one harmless start."""
        if program not in self._reached:
            probe = [program, "-u", "-c", ""]
            code = subprocess.run(probe, env={**hooked, import_hook.PROBE: "1"}, check=False).returncode
            self._reached[program] = code == import_hook.PROBE_EXIT_CODE
        return self._reached[program]

    def close(self) -> None:
        """Remove it: interpreters that have started go on."""
        if self._is_there():
            shutil.rmtree(self._link.parent, ignore_errors=True)

    def _make(self) -> Path:
        """Return the file's new name, in a directory of its own."""
        link = Path(tempfile.mkdtemp(prefix="resilient-run-zygote-"), "sitecustomize.py")
        link.symlink_to(self._file)
        return link

    def _is_there(self) -> bool:
        """Tell whether the directory is still the one that was made.

        Long runs outlive what cleans /tmp. Then its name is free, and workers would run what another user puts there.
        """
        try:
            return self._link.parent.lstat().st_uid == os.geteuid() and self._link.is_symlink()
        except OSError:
            return False


class Zygote:
    """The launcher's side of one zygote process (see `zygote.py`).

    Args:
        args: Command line of a worker; the zygote can start workers with exactly this one.
        env: Environment of a worker; the others may differ in what torch's agent sets for each worker.
        bind: Called in the new process, to bind it to this one's life.
        preload: See `WorkerStarter`.

    Raises:
        ColdStart: An interpreter started with `env` would not reach the zygote's code.
    """

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], bind: Any, preload: Sequence[str] | None = ()
    ) -> None:
        self._args = tuple(args)
        self._env = dict(env)
        self._cwd = os.getcwd()
        # What was asked for by name is missed.
        self._note_level = logging.INFO if preload is None else logging.WARNING
        self._site_hook = SiteHook(zygote.__file__)
        hooked = self._site_hook.environ(env)
        # Were the hook not reached, the zygote would run the training script.
        if not self._site_hook.is_reached(sys.executable, hooked):
            self._site_hook.close()
            raise ColdStart("another sitecustomize comes before the zygote's")
        modules = {} if preload is None else {zygote.PRELOAD: ",".join(preload) or "none"}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self._args,
                env={**hooked, zygote.CONTROL_FD: str(theirs.fileno()), **modules},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=bind,
            )

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    def alive(self) -> bool:
        """Tell whether the zygote process runs."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Block until torch is imported.

        Raises:
            ColdStart: The zygote refuses this command, failed, or took longer than 60 s.
        """
        try:
            _receive(self._control, _START_TIMEOUT_S)
        except OSError as error:
            raise ColdStart(f"torch is not imported after {_START_TIMEOUT_S:.0f} s: {error}") from error
        self._site_hook.close()

    def check(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        """Raise `ColdStart` when a fork would not be what `args` in `env` starts here and now."""
        if os.getcwd() != self._cwd:
            raise ColdStart(f"the working directory was {self._cwd} when the zygote was started")
        if (difference := _difference(self._args, self._env, args, env)) is not None:
            raise ColdStart(difference)

    def fork(self, env: Mapping[str, str], streams: Sequence[int]) -> tuple[int, socket.socket]:
        """Return the pid of a new child of this process that runs the command, with `streams` as descriptors 0 to 2.

        With it comes our end of the line to it.

        Raises:
            ColdStart: The zygote died, or could not fork.
        """
        request = {
            "set": {name: value for name, value in env.items() if self._env.get(name) != value},
            "unset": sorted(self._env.keys() - env.keys()),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as stack:
            stack.callback(ours.close)
            stack.enter_context(theirs)
            try:
                with adopting_orphans():
                    socket.send_fds(self._control, [json.dumps(request).encode()], [*streams, theirs.fileno()])
                    theirs.close()
                    answer = _receive(ours, _FORK_TIMEOUT_S)
                ours.send(b"!")
            except OSError as error:
                self._process.kill()
                raise ColdStart(f"cannot reach the zygote, or adopt its fork: {error}") from error
            stack.pop_all()
        for note in answer["notes"]:
            log.log(self._note_level, "%s", note)
        if answer["preloaded"]:
            log.info("a worker starts with %s imported", ", ".join(answer["preloaded"]))
        return int(answer["pid"]), ours

    def kill(self) -> None:
        """Kill the zygote, which also ends a wait for it."""
        self._process.kill()

    def close(self) -> None:
        """Kill the zygote and forget it."""
        self.kill()
        self._process.wait()
        self._control.close()
        self._site_hook.close()


def _receive(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Return what a zygote, or its fork, says next; raise `ColdStart` when that is no, `OSError` when it is late."""
    sock.settimeout(timeout_s)
    packet = sock.recv(_MAX_PACKET_BYTES)
    if not packet:
        raise ColdStart("the zygote, or its fork, failed")
    answer: dict[str, Any] = json.loads(packet)
    if "refused" in answer:
        raise ColdStart(answer["refused"])
    return answer


def _difference(
    args: Sequence[str], env: Mapping[str, str], other_args: Sequence[str], other_env: Mapping[str, str]
) -> str | None:
    """Return why a zygote made for `args` in `env` cannot fork the other workers, None when it can."""
    if tuple(args) != tuple(other_args):
        return "the command line differs from the one that the zygote was started with"
    for name in sorted(env.keys() | other_env.keys()):
        if env.get(name) != other_env.get(name) and not PER_WORKER.fullmatch(name):
            return f"environment variable {name} has changed since the zygote was started"
    return None


def _check_command(args: Sequence[str]) -> None:
    """Raise `ColdStart` unless `args` is ``python -u [-m] program …`` whose program may find torch imported already."""
    if args[0] != sys.executable:
        raise ColdStart(f"the workers' program is not {sys.executable}")
    if len(args) > 2 and os.path.exists(args[2]) and not (os.path.isfile(args[2]) or os.path.isdir(args[2])):
        raise ColdStart(f"{args[2]} is not a regular file")
    for source, text in _sources(args):
        if name := _LOAD_TIME.search(text):
            raise ColdStart(f"{source} names {name[0].decode()}, which takes effect before torch is imported")
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as error:
            raise ColdStart(f"standard stream {descriptor} is closed") from error


def _names_torch(args: Sequence[str]) -> bool:
    """Tell whether `args`, their program, or a module in its directory that it imports has the word in it."""
    try:
        return any("torch" in argument for argument in args) or any(b"torch" in text for _, text in _sources(args))
    except ColdStart:
        return True  # It is refused at once.


def _sources(args: Sequence[str]) -> Iterator[tuple[Path, bytes]]:
    """Yield the program of `args` and the modules in its directory that it imports, each with its text.

    Raises:
        ColdStart: The interpreter of `args` is not to run a program, or not as a worker does.
    """
    match args[1:4]:
        case ["-u", "-m", module, *_]:
            path, root = Path(*module.split(".")), Path()
            packages = [parent / "__init__.py" for parent in path.parents if parent.name]
            programs = [path.with_suffix(".py"), path / "__main__.py", path / "__init__.py", *packages]
        case ["-u", script, *_] if not script.startswith("-"):
            root = Path(script).resolve() if Path(script).is_dir() else Path(script).resolve().parent
            programs = [Path(script), Path(script, "__main__.py")]
        case _:
            raise ColdStart("the interpreter has options other than -u and -m")
    seen = set(programs)
    remaining, count = deque(programs), 0
    while remaining:
        path = remaining.popleft()
        try:
            if not path.is_file():
                continue
            text = path.read_bytes()
        except OSError:
            continue
        count += 1
        yield path, text
        for candidate in _imported(path, text, root):
            if candidate not in seen:
                seen.add(candidate)
                remaining.append(candidate)
        if count > _MAX_SOURCES or len(seen) > _MAX_CANDIDATES:
            raise ColdStart(f"the program has more than {_MAX_SOURCES} modules of its own, too many to inspect")


def _imported(path: Path, text: bytes, root: Path) -> Iterator[Path]:
    """Yield the files that the imports of a module may read; those that are not relative to it are below `root`."""
    above = path.resolve().parents
    for dots, module, names in _IMPORT.findall(text):
        base = above[min(len(dots), len(above)) - 1] if dots else root
        for name in (b"", *re.findall(rb"[\w.]+", names)):
            place = base
            for part in filter(None, [*module.split(b"."), *name.split(b".")]):
                place /= part.decode()
                yield place.parent / f"{place.name}.py"
                yield place / "__init__.py"
