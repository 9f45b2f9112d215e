"""The zygote: a worker's interpreter that stops inside ``import site``, imports torch there, and forks the workers.

It is started with the command line and the environment of a worker, except that a directory in front of PYTHONPATH
offers this file as module ``sitecustomize``. The interpreter imports that module at the end of its start-up, just
before it runs the script. `hold` does not return in the zygote; in each fork it returns, and the interpreter goes on to
run the command as if it had just been started: no frame, no ``__main__`` and no exit code of ours is involved.

The zygote says once, over a socket of sequenced packets, ``{"ready": true}`` or ``{"refused": reason}``. A request is
``{"set": {name: value}, "unset": [name]}``, the difference of the worker's environment to the zygote's, with four
descriptors: the worker's stdin, stdout and stderr, and a socket of its own. On that socket ``{"pid"}`` or
``{"refused"}`` comes back, and the worker waits for a packet, its leave to run; it ends when the launcher, having given
up, has closed its end.

A worker is forked twice, so that it is an orphan that the launcher (see `prctl.adopting_orphans`) adopts: the launcher
is then the parent of a warm worker as of a cold one, gets its exit status from the kernel, and the zygote may die.
"""

import contextlib
import importlib
import io
import json
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import Any

CONTROL_FD = "RESILIENT_ZYGOTE_FD"
"""Environment variable with the number of the zygote's end of the socket pair."""

PROBE = "RESILIENT_ZYGOTE_PROBE"
PROBE_EXIT_CODE = 86
"""How an interpreter leaves that was only asked whether this hook is reached."""

_MAX_PACKET_BYTES = 1 << 16

_AT_ONCE = ("torch.distributed",)
_LATER = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")
"""What training scripts import besides; any optimizer needs the first. It is imported before the first workers if the
program names an optimizer, and else when nobody waits."""

_LATER_S = 1.0


def hold() -> None:
    """Serve the launcher until it hangs up; return only in a forked worker.

    Raises:
        ModuleNotFoundError: In a worker, when the user has no ``sitecustomize``: what its import would have raised.
    """
    if PROBE in os.environ:
        os._exit(PROBE_EXIT_CODE)
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
    has_sitecustomize = _import_hidden_sitecustomize()
    changed = _changed_variable()
    bind = _binding_to_launcher()
    _preload(_AT_ONCE)
    if _names_optimizer():
        _preload(_LATER)
    refusal = changed or _refusal()
    _tell(control, {"refused": refusal} if refusal else {"ready": True})
    pause_s: float | None = None
    while True:
        if pause_s is not None and not select.select([control], [], [], pause_s)[0]:
            _preload(_LATER)
            refusal = changed or _refusal()
        packet, descriptors, _, _ = socket.recv_fds(control, _MAX_PACKET_BYTES, 4)
        if not packet:
            os._exit(0)
        *streams, own = descriptors
        with socket.socket(fileno=own) as worker:
            if refusal:
                _tell(worker, {"refused": refusal})
            elif _is_orphan():
                control.close()
                bind()
                _become_worker(json.loads(packet), streams)
                _tell(worker, {"pid": os.getpid()})
                if not worker.recv(1):
                    os._exit(1)
                return has_sitecustomize
        for descriptor in streams:
            os.close(descriptor)
        pause_s = _LATER_S if _LATER[0] not in sys.modules else None


def _tell(launcher: socket.socket, message: dict[str, Any]) -> None:
    launcher.send(json.dumps(message).encode())


def _import_hidden_sitecustomize() -> bool:
    """Undo what made the interpreter find this module, then import the one that it hides; tell whether there is one."""
    hook_dir = os.path.dirname(__file__)
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(hook_dir).removeprefix(os.pathsep)
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]
    sys.path.remove(hook_dir)
    sys.path_importer_cache.pop(hook_dir, None)
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        return False
    return True


def _changed_variable() -> str | None:
    """Say which variable the start of the interpreter has changed: it may have gone by what differs by worker."""
    with open("/proc/self/environ", "rb") as file:
        before = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0") if entry)
    now = dict(os.environb)
    for name in sorted((before.keys() | now.keys()) - {CONTROL_FD.encode(), b"PYTHONPATH"}):
        if before.get(name) != now.get(name):
            return f"sitecustomize, or a .pth file, changed environment variable {os.fsdecode(name)}"
    return None


def _binding_to_launcher() -> Callable[[], None]:
    """Return the function that ends a worker with the launcher, and forget the modules that it comes from."""
    from resilient_run.launcher.workers.prctl import death_with_parent

    for name in ("resilient_run.launcher.workers.prctl", "resilient_run.launcher.workers", "resilient_run.launcher"):
        del sys.modules[name]
    del sys.modules["resilient_run"].launcher
    return death_with_parent(os.getppid())


def _preload(modules: Sequence[str]) -> None:
    for name in (*modules, "resilient_run.ckpt.checkpointer"):
        # What a worker cannot import must fail there, where the user sees it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _names_optimizer() -> bool:
    """Tell whether the program, if it is a file, has the word in it."""
    program = sys.orig_argv[2]
    if not os.path.isfile(program):
        return False
    with contextlib.suppress(OSError), open(program, "rb") as file:
        return b"optim" in file.read()
    return False


def _refusal() -> str | None:
    """Return why this command must not run with torch imported beforehand in a fork, None when it may."""
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
    return _hidden_module(places)


def _hidden_module(places: list[str]) -> str | None:
    """Say which module that was imported here the worker would find in `places`, the head of its ``sys.path``."""
    for name, module in list(sys.modules.items()):
        loaded = getattr(module, "__spec__", None)
        if "." in name or loaded is None or loaded.origin in {"built-in", "frozen"}:
            continue
        found = PathFinder.find_spec(name, places)
        if found is not None and found.loader is not None and found.origin != loaded.origin:
            return f"{found.origin} takes the place of module {name}, which torch imports"
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
    """Give this fork of the zygote what its own start as a child of the launcher would have given it."""
    for name in request["unset"]:
        del os.environ[name]
    os.environ.update(request["set"])
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    _reopen(sys.__stdin__, 0, "<stdin>")
    _reopen(sys.__stdout__, 1, "<stdout>")
    _reopen(sys.__stderr__, 2, "<stderr>")
    # Python reseeds `random` at a fork; the rest that must differ between processes is up to us.
    sys.modules["torch"].default_generator.seed()
    if "numpy.random.mtrand" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    importlib.invalidate_caches()


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
