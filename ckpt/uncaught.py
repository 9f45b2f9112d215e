"""What an uncaught error looks like: a refusal without frames of ours, which the launcher shows last, for all at once.

An error that a full /dev/shm may have caused is followed by how much of it slots take.
"""

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from .errors import CheckpointError, StateError

HELD_BACK: Final = "held_back"
"""In torch's error file of a worker that a refusal ended: whether the worker has not printed it."""

_FINAL: Final = "final"
"""There, too: whether no restart cures it."""

_OURS: Final = os.path.dirname(os.path.realpath(__file__)) + os.sep
_REFUSAL: Final = "resilient_refusal"
_SHARED: Final = Path("/dev/shm")
_FULL: Final = ("No space left on device", "Bus error")
"""What an error says that may come from a full tmpfs: of a write, and of a data loader about a worker."""

_log = logging.getLogger(__name__)
_installed = False


def refusal(error: Exception) -> Exception:
    """Return `error`, of a class of Python's own, as a refusal of ours."""
    setattr(error, _REFUSAL, True)
    return error


def is_final(error: BaseException) -> bool:
    """Tell whether no restart cures `error`."""
    return isinstance(error, StateError) or hasattr(error, _REFUSAL)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, CheckpointError) or hasattr(error, _REFUSAL)


def install() -> None:
    """Show refusals of this process so, and a Ctrl-C without frames of ours; anything else stays as it is."""
    global _installed
    if not _installed:
        _installed = True
        before = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, KeyboardInterrupt) or _is_refusal(error):
                error.__traceback__ = trace = _without_ours(trace)
            # torch's own puts the rank in front. Another hook is the script's choice, and so may be what came before.
            plain = before is sys.__excepthook__ or before.__module__ == "torch.distributed.distributed_c10d"
            alone = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
            if not (_is_refusal(error) and _hand_over(error, hold=plain and alone)):
                before(kind, error, trace)
                if any(text in str(error) for text in _FULL) and _SHARED.exists():
                    _tell_what_slots_take()

        sys.excepthook = show


def _tell_what_slots_take() -> None:
    from .capture.slots import vaults  # the launcher, which has no torch, reads this module too

    found = [path.stat() for vault in vaults for path in vault.glob("*/*.slot") if path.exists()]
    taken = sum(each.st_size for each in found if each.st_dev == _SHARED.stat().st_dev)
    if taken:
        about = os.statvfs(_SHARED)
        _log.error(
            "checkpoints take %.0f of the %.0f MiB of /dev/shm: if it is full, enlarge it (docker run --shm-size=…, "
            "mount -o remount,size=…), or keep them in another tmpfs (RESILIENT_SHM_DIR)",
            taken / (1 << 20),
            about.f_blocks * about.f_frsize / (1 << 20),
        )


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    entries, left = [], None
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for entry in reversed(entries):
        if not os.path.realpath(entry.tb_frame.f_code.co_filename).startswith(_OURS):
            entry.tb_next = left
            left = entry
    return left


def _hand_over(error: BaseException, *, hold: bool) -> bool:
    """Tell the launcher of this worker of `error`, and return whether it shows that, where one may `hold` it back."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)
    if "RESILIENT_SOCKET" not in os.environ or os.getsid(0) != os.getpid() or path == os.devnull:
        return False  # Whatever the launcher does not know of, as what a worker starts.
    # Redirected to a file, stderr is where somebody looks.
    hold = hold and not os.path.exists(os.path.join(os.path.dirname(path), "stderr.log"))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)).rstrip(),
            "timestamp": str(int(time.time())),
        },
    }
    try:
        with open(path, "w") as file:
            json.dump({"message": message, HELD_BACK: hold, _FINAL: is_final(error)}, file)
    except OSError:
        return False
    return hold


def drop_torn(path: str) -> None:
    """Remove an error file that torch cannot read, as of a worker that was killed meanwhile: the launcher would end."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    try:
        ProcessFailure(0, 0, 1, path)
    except Exception:  # noqa: BLE001 - whatever is in it; torch has logged that
        os.unlink(path)


def told(path: str) -> tuple[str, bool]:
    """Return the first line of the refusal that ended the worker whose error file is at `path`, "" without one.

    With it comes whether no restart cures that.
    """
    data = _handed_over(path)
    return ("", False) if data is None else (str(data["message"]["message"]).partition("\n")[0], data[_FINAL])


def is_held_back(path: str) -> bool:
    """Tell whether the error file at `path` has a refusal that only the launcher shows."""
    data = _handed_over(path)
    return data is not None and bool(data[HELD_BACK])


def _handed_over(path: str) -> dict[str, Any] | None:
    """Return what `_hand_over` wrote at `path`, None if that is not from there."""
    try:
        with open(path) as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    match data:
        case {"message": {"message": str()}} if {HELD_BACK, _FINAL} <= data.keys():
            return dict(data)
    return None


def held_back(failures: dict[int, Any]) -> str | None:
    """Return what the ranks in torch's `failures` have not printed, each text once, None if there is nothing."""
    ranks: dict[str, list[str]] = {}
    for rank, failure in sorted(failures.items()):
        if failure.error_file_data.get(HELD_BACK):
            ranks.setdefault(failure.message["extraInfo"]["py_callstack"], []).append(str(rank))
    texts = [f"rank{'' if len(some) == 1 else 's'} {', '.join(some)}: {text}" for text, some in ranks.items()]
    return "\n".join(texts) or None
