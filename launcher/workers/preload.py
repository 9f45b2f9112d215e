"""What a script imports, imported beforehand: zygotes of single ranks, forked from the zygote of all workers.

The first worker of a rank notes in a `Journal` which installed packages it imports, and what the script changed before
that. Once it imports no more, the zygote forks a *rank zygote*, which gets that worker's environment and imports the
same modules in the same order. From then on, workers of the rank are forked from there.

An import depends on what it finds. So a rank zygote watches its own imports, and does without a module that

- starts a thread, opens a file, initialises CUDA or goes to another directory, none of which a fork shares rightly;
- read a variable, `sys.argv` or random numbers that the script had changed before it imported the module;
- keeps a copy of the environment, or sets a variable that differs by worker.

What it read of the variables that differ by worker has to be the same for a worker that is forked from it.
"""

import contextlib
import gc
import importlib
import importlib.util
import mmap
import os
import random
import re
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

PER_WORKER = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES"
    r"|(TORCHELASTIC|RESILIENT)_.*"
)
"""Variables that the agent sets for each worker and that nothing reads while torch is imported."""

_PER_GENERATION = re.compile(r"MASTER_(ADDR|PORT)|TORCHELASTIC_(RESTART_COUNT|ERROR_FILE)|RESILIENT_GENERATION")

_JOURNAL_BYTES = 1 << 15
_OURS = "resilient_run"
_HELPERS = 3
"""Frames above a helper of `_Watch` that are its own."""


class Journal:
    """What a worker imported from installed packages and, before that, changed: lines in memory shared with the zygote.

    Lines are ``import MODULE``, ``set VARIABLE``, ``argv``, ``random``, and at last ``stop``, after which nothing is
    noted, because what a later import finds cannot be told.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _JOURNAL_BYTES)

    def clear(self) -> None:
        """Forget all lines."""
        self._memory[:] = bytes(_JOURNAL_BYTES)

    def lines(self) -> list[str]:
        """Return the lines so far."""
        text = self._memory[: self._memory.find(b"\0")]
        return text[: text.rfind(b"\n") + 1].decode().splitlines()

    def is_complete(self) -> bool:
        """Tell whether nothing more is noted."""
        return self.lines()[-1:] == ["stop"]

    def close(self) -> None:
        """Forget the memory."""
        self._memory.close()

    def keep(self) -> None:
        """Note from now on what this process, a worker that has not begun yet, imports and changes."""
        if not self.is_complete():
            sys.addaudithook(_Watch(self._memory).see)


class _Watch:
    """Sees through an audit hook, which no script notices, what a worker's main thread imports and changes."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.open = True
        self._memory = memory
        self._end = memory.find(b"\0")
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._places = installed_places()
        self._path, self._argv = list(sys.path), list(sys.argv)
        self._random, self._torch = _random_states(), _torch_defaults()

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.open or event not in {"exec", "os.putenv", "os.unsetenv", "os.chdir"}:
            return
        if os.getpid() != self._process or threading.get_ident() != self._thread:
            return
        try:
            self._see(event, args)
        except Exception:  # noqa: BLE001 - the script must not notice; what is not noted is imported by each worker
            self.open = False

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "exec":
            filename = getattr(args[0], "co_filename", "")
            if args[0].co_name != "<module>" or not filename.startswith(self._places):
                return
            if not self._nested() and (name := _executed_module()) is not None:
                self._note_changes()
                self._write(f"import {name}")
        elif not self._nested():
            self._write("stop" if event == "os.chdir" else f"set {os.fsdecode(args[0])}")

    def _nested(self) -> bool:
        """Tell whether an installed module, which a rank zygote will import too, is just being executed."""
        frame: FrameType | None = sys._getframe(_HELPERS)
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(self._places):
                return True
            frame = frame.f_back
        return False

    def _note_changes(self) -> None:
        # The interpreter itself puts the script's directory first.
        distributed, cuda = sys.modules["torch.distributed"], sys.modules["torch"].cuda
        running = distributed.is_initialized() or cuda.is_initialized()
        if self._path not in (sys.path, sys.path[1:]) or _torch_defaults() != self._torch or running:
            self._write("stop")
        if sys.argv != self._argv:
            self._argv = list(sys.argv)
            self._write("argv")
        if _were_drawn(self._random, states := _random_states()):
            self._write("random")
        self._random = states

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode()
        if not self.open or self._end + len(data) >= len(self._memory):
            self.open = False
            return
        self._memory[self._end : self._end + len(data)] = data
        self._end += len(data)
        self.open = line != "stop"


def _executed_module() -> str | None:
    """Return the name of the module that importlib executes, seen from an audit hook's helper."""
    frame: FrameType | None = sys._getframe(_HELPERS)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "exec_module":
            return str(frame.f_locals["module"].__name__)
        frame = frame.f_back
    return None


def installed_places() -> tuple[str, ...]:
    """Return where installed packages are, and resilient-run itself, as beginnings of paths."""
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    if (site := sys.modules.get("site")) is not None and site.ENABLE_USER_SITE:
        places.add(site.getusersitepackages())
    places.add(os.path.dirname(str(sys.modules[_OURS].__file__)))
    return tuple(os.path.join(path, "") for path in sorted(places | {os.path.realpath(path) for path in places}))


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    return (
        random.getstate(),
        sys.modules["torch"].default_generator.get_state().tolist(),
        None if numpy is None else str(numpy.get_state()),
    )


def _were_drawn(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    # A generator that was not there yet cannot have been seeded.
    return any(first is not None and first != second for first, second in zip(before, after, strict=True))


def _torch_defaults() -> tuple[Any, ...]:
    torch = sys.modules["torch"]
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
    )


class _IteratedName(str):
    """Name of a variable that somebody met on the way through all of them."""


class _IteratedValue(str):
    """Value of a variable that somebody met on the way through all of them: it can be seen whether it is kept."""


class _UnknownVariable(BaseException):
    """An import asked for a variable that says something else to every worker that is forked afterwards."""


class _ReadEnvironment:
    """What is read of `os.environ` in a block, by name and on the way through all names.

    Args:
        unknown: Names that may not be read: `_UnknownVariable` is raised.
    """

    def __init__(self, unknown: re.Pattern[str]) -> None:
        self._unknown = unknown
        self.by_name: dict[str, str | None] = {}
        self.iterated = False
        self.refused = ""
        self._met: list[weakref.ref[_IteratedValue]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        record, plain = self, type(os.environ)

        class Recorded(plain):  # type: ignore[valid-type, misc]
            def __getitem__(self, name: str) -> str:
                if type(name) is _IteratedName:
                    value = _IteratedValue(super().__getitem__(str(name)))
                    record._met.append(weakref.ref(value))
                    return value
                if isinstance(name, str) and record._unknown.fullmatch(name):
                    record.refused = name  # a package may catch everything
                    raise _UnknownVariable(name)
                record.by_name[name] = None
                record.by_name[name] = found = super().__getitem__(name)
                return str(found)

            def __iter__(self) -> Iterator[str]:
                record.iterated = True
                return map(_IteratedName, super().__iter__())

        os.environ.__class__ = Recorded
        try:
            yield
        finally:
            os.environ.__class__ = plain

    def kept(self) -> bool:
        """Tell whether somebody still has a value that was met on the way."""
        if any(value() is not None for value in self._met):
            gc.collect()
        return any(value() is not None for value in self._met)


class _ReadArguments(list[str]):
    """`sys.argv`, and whether it was read."""

    was_read = False

    def __getitem__(self, index: Any) -> Any:
        self.was_read = True
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.was_read = True
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        self.was_read = True
        return super().__contains__(item)

    def __len__(self) -> int:
        self.was_read = True
        return super().__len__()


class Importer:
    """The imports of a rank zygote.

    Args:
        refusal: Says why a fork of this process could not run the workers' command, given names of modules.
        knows_rank: The environment is that of a worker; otherwise nothing may go by what differs by worker.
    """

    def __init__(self, refusal: Callable[[Iterable[str]], str | None], *, knows_rank: bool) -> None:
        self._refusal = refusal
        self._knows_rank = knows_rank
        self._unknown = _PER_GENERATION if knows_rank else PER_WORKER
        self._places = installed_places()
        self._changed: set[str] = set()
        self._drawn = self._argued = False
        self.reads: dict[str, str | None] = {}
        self.imported: list[str] = []

    def follow(self, lines: Sequence[str]) -> tuple[str, str] | None:
        """Import what `lines` of a journal say; return the module that must not be and why, None if all may."""
        gc.disable()  # Nothing of what imports make is garbage.
        try:
            with _named_main():
                return self._follow(lines)
        finally:
            gc.enable()

    def _follow(self, lines: Sequence[str]) -> tuple[str, str] | None:
        for line in lines:
            kind, _, name = line.partition(" ")
            if kind == "set":
                self._changed.add(name)
            elif kind == "argv":
                self._argued = True
            elif kind == "random":
                self._drawn = True
            elif kind == "import" and (reason := self._import(name)) is not None:
                return name, reason
        return None

    def _import(self, name: str) -> str | None:
        if name in sys.modules:
            return None
        if not self._is_installed(name):
            return "no installed package has it"
        before, files, directory = set(sys.modules), _open_files(), os.getcwd()
        environ, drawn, argv = dict(os.environ), _random_states(), sys.argv
        read, arguments = _ReadEnvironment(self._unknown), _ReadArguments(argv)
        references = sys.getrefcount(arguments)
        sys.argv = arguments
        try:
            with read.recording():
                importlib.import_module(name)
        except _UnknownVariable as variable:
            return f"it reads {variable}"
        except BaseException as error:  # noqa: BLE001 - a package may raise anything, SystemExit too
            return f"importing it failed: {error!r}"
        finally:
            sys.argv = argv
        self.reads.update((found, value) for found, value in read.by_name.items() if PER_WORKER.fullmatch(found))
        now = dict(os.environ)
        written = [other for other in environ.keys() | now.keys() if environ.get(other) != now.get(other)]
        per_worker = ", ".join(sorted(filter(PER_WORKER.fullmatch, written)))
        changed = ", ".join(sorted(self._changed & read.by_name.keys()))
        reasons = {
            f"it reads {read.refused}": bool(read.refused),
            "it started a thread": threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1,
            "it initialised CUDA": bool(sys.modules["torch"].cuda.is_initialized()),
            "it left a file or a socket open": _open_files() != files,
            "it changed the working directory": os.getcwd() != directory,
            "it keeps sys.argv": sys.getrefcount(arguments) > references,
            f"it sets {per_worker}": bool(per_worker),
            "it keeps a copy of the environment": read.kept(),
            f"it reads {changed}, which the script sets first": bool(changed),
            "it goes through the environment, which the script changes first": read.iterated and bool(self._changed),
            "it goes through the environment, which has no rank yet": read.iterated and not self._knows_rank,
            "it reads sys.argv, which the script changes first": arguments.was_read and self._argued,
            "it draws random numbers, and the script did so first": self._drawn
            and _were_drawn(drawn, _random_states()),
        }
        self.imported.append(name)
        found = next((reason for reason, holds in reasons.items() if holds), None)
        return found or self._refusal(sorted(set(sys.modules) - before))

    def _is_installed(self, name: str) -> bool:
        root = name.partition(".")[0]
        try:
            spec = importlib.util.find_spec(root)
        except (ImportError, ValueError):
            return False
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
        return any(os.path.join(place, "").startswith(self._places) for place in places)


@contextlib.contextmanager
def _named_main() -> Iterator[None]:
    """Let what is imported find a script, by which some packages know that nobody types."""
    main = vars(sys.modules["__main__"])
    if sys.orig_argv[2] != "-m" and "__file__" not in main:
        main["__file__"] = sys.orig_argv[2]
        try:
            yield
        finally:
            del main["__file__"]
    else:
        yield


def _open_files() -> dict[str, str]:
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target != f"/proc/{os.getpid()}/fd":
                found[descriptor] = target
    return found
