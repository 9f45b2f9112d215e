"""How logs look, and that nobody can flood them: so many messages of a kind in a while, then only their number."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resilient_run.ckpt.errors import DaemonError

log = logging.getLogger(__name__)

_PER_WINDOW = 20
_WINDOW_S = 10.0
_MAX_KINDS = 1000
_KIND_LENGTH = 100


FORMAT_VARIABLE = "RESILIENT_LOG_FORMAT"
"""Environment variable: "text", or "json" for one object per line."""

INFORMS = {"informs": True}
"""`extra` of a warning that is none: everybody sees it, and programs read that it is information."""


def log_formatter(text_format: str, environ: Mapping[str, str]) -> logging.Formatter:
    """Return what formats the log as the environment asks for, in plain text with `text_format`.

    Raises:
        DaemonError: It asks for no format that there is.
    """
    match environ.get(FORMAT_VARIABLE, "text"):
        case "text":
            return logging.Formatter(text_format)
        case "json":
            return _JsonFormatter()
        case wrong:
            raise DaemonError(f"{FORMAT_VARIABLE} is {wrong!r}: choose text or json")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "unix_s": round(record.created, 3),
            "level": "info" if hasattr(record, "informs") else record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@dataclass(kw_only=True, slots=True, eq=False)
class _Repeats:
    since_s: float
    passed: int = 0
    left_out: int = 0


class RepeatFilter(logging.Filter):
    """Lets 20 messages of a kind pass in 10 s; `report`, called from time to time, says how many more there were.

    Of one kind are messages of one logger and level with the same text before their arguments are filled in. What is
    logged for debugging always passes.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], _Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether `record` is logged."""
        if record.levelno < logging.INFO or record.name == __name__:
            return True
        # asyncio fills its messages in before it logs them: what tells them apart stands in later lines.
        name = record.name, record.levelno, str(record.msg).partition("\n")[0][:_KIND_LENGTH]
        with self._lock:
            kind = self._kinds.get(name)
            if kind is None:
                if len(self._kinds) >= _MAX_KINDS:
                    return False
                kind = self._kinds[name] = _Repeats(since_s=self._clock())
            kind.passed += 1
            if kind.passed <= _PER_WINDOW:
                return True
            kind.left_out += 1
            return False

    def report(self) -> None:
        """Log of each kind whose 10 s are over how many messages were left out, and let it pass again."""
        with self._lock:
            now_s = self._clock()
            over = {name: kind for name, kind in self._kinds.items() if now_s - kind.since_s >= _WINDOW_S}
            for name in over:
                del self._kinds[name]
        for (logger, level, text), kind in over.items():
            if kind.left_out:
                log.log(level, "%s: %d more messages like %r in %.0f s", logger, kind.left_out, text, _WINDOW_S)
