"""The zygote: a worker's interpreter that stops inside ``import site``, imports torch there, and forks the workers.

It is started with the command line and the environment of a worker, except that a directory in front of PYTHONPATH
offers this file as module ``sitecustomize``. The interpreter imports that module at the end of its start-up, just
before it runs the script. `hold` does not return in the zygote; in each fork it returns, and the interpreter goes on to
run the command as if it had just been started: no frame, no ``__main__`` and no exit code of ours is involved.

The zygote says once, over a socket of sequenced packets, ``{"ready": true}`` or ``{"refused": reason}``. A request is
``{"set": {name: value}, "unset": [name]}``, the difference of the worker's environment to the zygote's, with four
descriptors: the worker's stdin, stdout and stderr, and a socket of its own. On that socket ``{"pid", "preloaded",
"notes"}`` or ``{"refused"}`` comes back, and the worker waits for a packet, its leave to run; it ends when the
launcher, having given up, has closed its end. The socket stays open in it as its line (see `line.py`).

What the script imports besides torch is imported beforehand by zygotes of single ranks (see `nursery.py`), which this
one forks and hands requests on to.

A worker is forked twice, so that it is an orphan that the launcher (see `prctl.adopting_orphans`) adopts: the launcher
is then the parent of a warm worker as of a cold one, gets its exit status from the kernel, and the zygote may die.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

CONTROL_FD = "RESILIENT_ZYGOTE_FD"
"""Environment variable with the number of the zygote's end of the socket pair."""

PRELOAD = "RESILIENT_ZYGOTE_PRELOAD"
"""Environment variable with the modules to import beforehand, "none", or nothing to learn them."""

_MAX_PACKET_BYTES = 1 << 16

_AT_ONCE = ("torch.distributed",)
_LATER = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
"""What training scripts import besides; any optimizer needs the first. It is imported before the first workers if the
program names an optimizer, and else when nobody waits."""

_OWN = (
    "resilient_run.ckpt.checkpointer",
    "resilient_run.ckpt.state.loading",
    "resilient_run.ckpt.convert.import_loader",
    "resilient_run.ckpt.convert.captures",
    "resilient_run.ckpt.convert.reshape",
)
"""What a `Checkpointer` imports, at once or only when it restores: another version may be installed by then."""

_LATER_S = 1.0


def _beside(name: str) -> ModuleType:
    """Return the module of a file beside this one, by its path: the package may not be found yet."""
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_import_hook = _beside("import_hook")
_line = _beside("line")


def hold() -> None:
    """Serve the launcher until it hangs up; return only in a forked worker.

    Raises:
        ModuleNotFoundError: In a worker, when the user has no ``sitecustomize``: what its import would have raised.
    """
    if _import_hook.PROBE in os.environ:
        os._exit(_import_hook.PROBE_EXIT_CODE)
    try:
        has_sitecustomize = _serve(socket.socket(fileno=int(os.environ.pop(CONTROL_FD))))
    except BaseException:  # noqa: BLE001
        # A zygote that went on would run the training script itself.
        traceback.print_exc()
        os._exit(1)
    if not has_sitecustomize:
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")


def _serve(control: socket.socket) -> bool:
    """Return in a worker, whether the user has a ``sitecustomize``."""
    control.set_inheritable(False)
    has_sitecustomize: bool = _import_hook.import_hidden_sitecustomize(os.path.dirname(__file__))
    sys.meta_path.append(_unfound)
    changed = _changed_variable()
    bind = _ours("prctl").death_with_parent(os.getppid())
    nursery = _ours("nursery").Nursery.from_variable(os.environ.pop(PRELOAD, None))
    _preload(_AT_ONCE)
    if _names_optimizer():
        _preload(_LATER)
    _answer(control, bind, changed, nursery)
    return has_sitecustomize


def _answer(control: socket.socket, bind: Callable[[], None], changed: str | None, nursery: Any) -> None:
    """Fork a worker for each request, unless something speaks against it, as `changed` does; return in a worker."""
    refusal = changed or _refusal()
    # Modules known by name are for the first worker too, whose request comes as soon as this is ready.
    if refusal is None and (rank := nursery.due()) is not None and _fork_rank_zygote(nursery, rank, bind, control):
        return
    _tell(control, {"refused": refusal} if refusal else {"ready": True})
    has_forked = False
    while True:
        is_later = has_forked and _LATER[0] not in sys.modules
        pause_s = _LATER_S if is_later else None if refusal else nursery.pause_s()
        readable = select.select([control, *nursery.controls()], [], [], pause_s)[0]
        nursery.listen(readable)
        if control in readable:
            packet, descriptors, _, _ = socket.recv_fds(control, _MAX_PACKET_BYTES, 4)
            if not packet:
                os._exit(0)
            if _fork_worker(json.loads(packet), descriptors, bind, refusal, nursery, control):
                return
            has_forked = True
        elif is_later and not readable:
            _preload(_LATER)
            refusal = changed or _refusal()
        elif (
            refusal is None and (rank := nursery.due()) is not None and _fork_rank_zygote(nursery, rank, bind, control)
        ):
            return


def _fork_worker(
    request: dict[str, Any],
    descriptors: list[int],
    bind: Callable[[], None],
    refusal: str | None,
    nursery: Any,
    control: socket.socket,
) -> bool:
    """Fork the worker that is asked for, here or in its rank's zygote; return True in it, and False here."""
    *streams, own = descriptors
    with socket.socket(fileno=own) as worker:
        if refusal:
            _tell(worker, {"refused": refusal})
        else:
            zygote = nursery.zygote_for(request, streams)
            request["notes"] = nursery.take_notes()
            if zygote is None or not zygote.fork(request, descriptors):
                journal = nursery.begins(request)
                if _is_orphan():
                    control.close()
                    nursery.forget()
                    _go_on(worker, request, streams, bind, journal, [])
                    return True
    for descriptor in streams:
        os.close(descriptor)
    return False


def _fork_rank_zygote(nursery: Any, rank: str, bind: Callable[[], None], control: socket.socket) -> bool:
    """Fork the zygote of `rank`; return True in its workers, and False here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bind_to_this = _ours("prctl").death_with_parent(os.getpid())
    request, journal = nursery.request(rank), nursery.journal(rank)
    importer = nursery.importer(rank, _refusal)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return False
    if pid:
        theirs.close()
        nursery.add(rank, pid, ours)
        return False
    try:
        control.close()
        ours.close()
        nursery.forget()
        bind_to_this()
        _serve_rank(theirs, bind, request, journal, importer)
    except BaseException:  # noqa: BLE001
        # It would run the training script.
        traceback.print_exc()
        os._exit(1)
    return True


def _serve_rank(
    control: socket.socket, bind: Callable[[], None], first: dict[str, Any], journal: Any, importer: Any
) -> None:
    """Import and fork as the zygote says; return in a worker."""
    environ = dict(os.environ)
    _apply(first)
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, _MAX_PACKET_BYTES, 4)
        if not packet:
            os._exit(0)
        message = json.loads(packet)
        if "preload" in message:
            refused = importer.follow(message["preload"])
            _tell(control, {"refused": refused, "reads": importer.reads})
            continue
        *streams, own = descriptors
        with socket.socket(fileno=own) as worker:
            if _is_orphan():
                control.close()
                for name in (*first["set"], *first["unset"]):
                    os.environ.pop(name, None)
                    if name in environ:
                        os.environ[name] = environ[name]
                _go_on(worker, message, streams, bind, journal, importer.imported)
                return
        for descriptor in streams:
            os.close(descriptor)


def _go_on(
    launcher: socket.socket,
    request: dict[str, Any],
    streams: list[int],
    bind: Callable[[], None],
    journal: Any,
    preloaded: Sequence[str],
) -> None:
    """Make this fork the worker that `request` asks for, and wait for the launcher's leave to run."""
    bind()
    _become_worker(request, streams)
    os.environ[_line.LINE] = _line.name(launcher)
    if journal is not None:
        journal.keep()
    _tell(launcher, {"pid": os.getpid(), "preloaded": list(preloaded), "notes": request["notes"]})
    if not launcher.recv(1):
        os._exit(1)
    launcher.detach()


def _tell(launcher: socket.socket, message: dict[str, Any]) -> None:
    launcher.send(json.dumps(message).encode())


def _changed_variable() -> str | None:
    """Return which variable the start of the interpreter has changed: it may depend on what differs by worker."""
    with open("/proc/self/environ", "rb") as file:
        before = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0") if entry)
    now = dict(os.environb)
    for name in sorted((before.keys() | now.keys()) - {CONTROL_FD.encode(), PRELOAD.encode(), b"PYTHONPATH"}):
        if before.get(name) != now.get(name):
            return f"sitecustomize, or a .pth file, changed environment variable {os.fsdecode(name)}"
    return None


@functools.cache
def _ours(name: str) -> ModuleType:
    """Return a module beside this one, forgotten by the interpreter: a worker has imported none of them.

    It is imported once, from what is installed when this process starts.
    """
    full = f"resilient_run.launcher.workers.{name}"
    module = importlib.import_module(full)
    for forgotten in list(sys.modules):
        if f"{forgotten}.".startswith("resilient_run.launcher."):
            del sys.modules[forgotten]
    vars(sys.modules["resilient_run"]).pop("launcher", None)
    return module


def _preload(modules: Sequence[str]) -> None:
    gc.disable()  # Nothing of what imports make is garbage.
    for name in (*modules, *_OWN):
        # What a worker cannot import must fail there, where the user sees it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()


class _Unfound:
    """The last finder: notes which modules nobody has, because a worker may have them beside its script.

    Attributes:
        names: Theirs.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing."""
        if path is None:
            self.names.add(name)


_unfound = _Unfound()


def _names_optimizer() -> bool:
    """Tell whether the program, if it is a file, has the word in it."""
    program = sys.orig_argv[2]
    if not os.path.isfile(program):
        return False
    with contextlib.suppress(OSError), open(program, "rb") as file:
        return b"optim" in file.read()
    return False


def _refusal(modules: Iterable[str] | None = None) -> str | None:
    """Return why this command must not run with `modules`, all by default, imported beforehand; None when it may."""
    if threading.active_count() > 1:
        return f"sitecustomize started a thread, which a fork would lose: {threading.enumerate()[-1].name}"
    if sys.modules["torch"].cuda.is_initialized():
        return "importing torch initialised CUDA, which a fork would not survive"
    if sys.orig_argv[2] == "-m":
        program, places = sys.orig_argv[3], [os.getcwd()]
        if program in sys.modules:
            return f"module {program} is itself imported beforehand"
    else:
        program = sys.orig_argv[2]
        places = [program, os.path.dirname(os.path.realpath(program))]
    return _hidden_module(places, [*(sys.modules if modules is None else modules), *sorted(_unfound.names)])


def _hidden_module(places: list[str], modules: Iterable[str]) -> str | None:
    """Return which of `modules` the worker would find in `places`, the head of its ``sys.path``, not where we did."""
    for name in modules:
        if name in _unfound.names and name not in sys.modules:
            if (beside := PathFinder.find_spec(name, places)) is not None:
                return f"{beside.origin or name} is found by the script alone: what is imported beforehand looks for it"
            continue
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        if "." in name or loaded is None or loaded.origin in {"built-in", "frozen"}:
            continue
        found = PathFinder.find_spec(name, places)
        if found is not None and found.loader is not None and found.origin != loaded.origin:
            return f"{found.origin} takes the place of module {name}, which is imported beforehand"
    return None


def _is_orphan() -> bool:
    """Fork a grandchild, in its own session; return True in it, once its parent is gone, and False in the zygote."""
    try:
        middle = os.fork()
    except OSError:
        return False  # The launcher sees the worker's socket close.
    if middle:
        os.waitpid(middle, 0)
        return False
    middle = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    os.setsid()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(middle)
        select.select([descriptor], [], [])
        os.close(descriptor)
    return True


def _become_worker(request: dict[str, Any], streams: list[int]) -> None:
    """Set up this fork of the zygote as if the launcher had started it directly."""
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_unfound)
    _take_place(request, streams)
    # Python reseeds `random` at a fork; the rest that must differ between processes is up to us.
    sys.modules["torch"].default_generator.seed()
    if "numpy.random.mtrand" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()
    _import_hook.install()


def _take_place(request: dict[str, Any], streams: list[int]) -> None:
    """Give this fork its environment, its standard streams, and a main thread with an id of its own."""
    _apply(request)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    _reopen(sys.__stdin__, 0, "<stdin>")
    _reopen(sys.__stdout__, 1, "<stdout>")
    _reopen(sys.__stderr__, 2, "<stderr>")
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def _apply(request: dict[str, Any]) -> None:
    for name in request["unset"]:
        del os.environ[name]
    os.environ.update(request["set"])


def _reopen(stream: Any, descriptor: int, name: str) -> None:
    """Make a standard stream look at its descriptor anew: whether it can seek is remembered from the zygote's start.

    In place, because modules that were imported beforehand may keep the stream.
    """
    binary = stream.buffer
    raw: Any = binary if isinstance(binary, io.FileIO) else binary.raw
    mode = stream.mode
    raw.__init__(descriptor, mode + "b", closefd=False)
    raw.name = name
    if binary is not raw:
        binary.__init__(raw)
    stream.__init__(
        binary,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    stream.mode = mode


if __name__ == "sitecustomize":
    hold()
