"""What a loop of the zoo adds to its own lines: it is judged and killed here, by nothing that the product computes.

A loop calls `at(kind)` where a part of its step begins, and uses this `Checkpointer` in place of the product's, which
writes down, in a file for each rank, a hash of everything registered at each call of `step(n)`, before the product sees
it, and right after `restore()`. The plan of the job says at which moments the process kills itself: by a timer of the
kernel, which needs no lock of the interpreter.
"""

import ctypes
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

import resilient_run

STEPS = int(os.environ.get("ZOO_STEPS", "20"))
RANK = int(os.environ.get("RANK", "0"))
GENERATION = int(os.environ.get("RESILIENT_GENERATION", "1"))
_DIRECTORY = os.environ.get("ZOO_DIR")
_PACE_S = float(os.environ.get("ZOO_PACE_MS", "0")) / 1e3


class Checkpointer(resilient_run.Checkpointer):
    """The product's, with a witness before each `step(n)` and after `restore()`.

    Args:
        unjudged: Names of objects whose `state_dict()` is another one after loading it, though it stands for the same.
        objects: As for the product.
    """

    def __init__(self, *, unjudged: tuple[str, ...] = (), **objects: Any) -> None:
        super().__init__(**objects)
        self._registered = {name: item for name, item in objects.items() if name not in unjudged}
        _journal.write(start=True)

    def restore(self) -> int:
        at("restore")
        step = super().restore()
        version = self.watermark
        generation = version[0] if version is not None and version[1] == step else None
        _journal.write(restored=step, of=generation, leaves=self._leaves())
        _moments.step = step + 1
        return step

    def step(self, n: int | None = None, loss: Any = None) -> None:
        n = _moments.step if n is None else n
        number = None if loss is None else float(torch.as_tensor(loss).detach().double()).hex()
        _journal.write(saw=n, loss=number, leaves=self._leaves())
        _moments.step = n
        at("step")
        super().step(n)
        _moments.step = n + 1
        _moments.counts = {}

    def _leaves(self) -> dict[str, str]:
        state = {name: _state(item) for name, item in self._registered.items()}
        state |= {name: item for name, item in self.values.items() if name in state}
        state["rng"] = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        return {path: _digest(leaf) for path, leaf in _walk(state, "")}


def at(kind: str) -> None:
    """Say that this part of a step begins here: the process dies now or some microseconds later, if that is planned."""
    _moments.enter(kind)


def finish(checkpointer: resilient_run.Checkpointer) -> NoReturn:
    """End this worker as a script on Gloo should (docs/api.md)."""
    _journal.write(finished=True)
    checkpointer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)


class _Journal:
    """One file per rank, a JSON object per line, each written by one call: what is in it survives SIGKILL."""

    def __init__(self) -> None:
        self._file = -1
        self.reference = False
        self.plan: list[dict[str, Any]] = []
        if _DIRECTORY is None:
            return
        directory = Path(_DIRECTORY)
        self._file = os.open(directory / f"rank{RANK}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        job = json.loads((directory / "job.json").read_text())
        done = {entry["armed"] for path in directory.glob("rank*.jsonl") for entry in read(path) if "armed" in entry}
        self.reference = job["reference"]
        self.plan = [kill for kill in job["kills"] if kill["id"] not in done and kill["victim"] in (RANK, "all")]

    def write(self, **entry: Any) -> None:
        if self._file >= 0:
            line = json.dumps({"generation": GENERATION, "t": time.monotonic(), **entry}, separators=(",", ":"))
            os.write(self._file, f"{line}\n".encode())


class _Moments:
    """Where the loop is, and the next moment at which it dies."""

    def __init__(self) -> None:
        self.step = 0
        self.counts: dict[str, int] = {}
        self._armed = False
        self._paced = 0

    def enter(self, kind: str) -> None:
        occurrence = self.counts.get(kind, 0)
        self.counts[kind] = occurrence + 1
        if _journal.reference:
            _journal.write(at=kind, step=self.step, occurrence=occurrence)
        if _PACE_S and self._paced != self.step:
            self._paced = self.step
            time.sleep(_PACE_S)
        if self._armed:
            return
        for kill in _journal.plan:
            here = (self.step, kind, occurrence) == (kill["step"], kill["kind"], kill["occurrence"])
            missed = kill["step"] < self.step  # its occurrence did not come: as soon as possible
            again = kind == kill["kind"] == "restore" and GENERATION > 1 and kill is _journal.plan[0]
            if here or missed or again:
                self._armed = True
                _journal.write(armed=kill["id"], kind=kind, step=self.step)
                _die_in(kill["delay_us"])
                return


def read(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a journal; the last line may be torn."""
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def _die_in(delay_us: int) -> None:
    """SIGKILL this process, now or by a timer of the kernel."""
    if delay_us == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    # struct sigevent: the value (8 bytes), the signal, and how to notify (SIGEV_SIGNAL is 0); 64 bytes in all.
    event = (ctypes.c_int * 16)(0, 0, int(signal.SIGKILL), 0)
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    seconds, microseconds = divmod(delay_us, 1_000_000)
    times = (ctypes.c_long * 4)(0, 0, seconds, 1000 * microseconds)  # struct itimerspec: the interval, the first time
    if libc.timer_settime(timer, 0, ctypes.byref(times), None):
        raise OSError(ctypes.get_errno(), "timer_settime")


def _state(item: Any) -> Any:
    return item.state_dict() if hasattr(item, "state_dict") else item


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "to_local"):
        with torch.no_grad():
            value = value.to_local()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, _CONTAINERS) for item in value):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}.{index}")
    elif not torch.nn.parameter.is_lazy(value):  # which has no data yet
        yield path, value


_CONTAINERS = (Mapping, list, tuple, torch.Tensor, np.ndarray)


def _digest(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().flatten()
        kind = f"{leaf.dtype} {tuple(leaf.shape)}"
        data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    elif isinstance(leaf, np.ndarray):
        kind, data = f"{leaf.dtype} {leaf.shape}", np.ascontiguousarray(leaf).view(np.uint8) if leaf.size else b""
    else:
        kind, data = f"{type(leaf).__name__}", repr(leaf).encode()
    digest = hashlib.sha256(kind.encode() + b"\0")
    digest.update(data)
    return digest.hexdigest()[:24]


_journal = _Journal()
_moments = _Moments()
random.seed(RANK)
np.random.seed(RANK)
