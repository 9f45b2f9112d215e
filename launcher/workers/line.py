"""The line between a launcher and one of its workers: what comes out of `loop` may be kept for the next generation.

It is a socket of sequenced packets, each a JSON object, that the worker gets at its start: the end of `zygote.py`'s
socket, or one that a cold worker inherits. The variable `LINE` names its descriptor and inode, because a script may
have closed it and opened another file.

The worker says ``{"state": state}``: `INSIDE` while its function runs, `OUT` when that has raised (with ``error``, its
text, and ``peers``: it may come from another worker), `READY` when it has let go of all that belongs to the generation,
and `LEFT` when its function has returned. The launcher says ``{"stop": true}`` when the generation is broken,
``{"raise": true}`` if the error is the worker's own, and to one that is ready ``{"set", "unset", "streams"}``, the
difference of its new environment to the one before, with descriptors for its standard streams.
"""

import json
import os
import socket
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

LINE = "RESILIENT_LINE"
"""Environment variable of a worker: descriptor and inode of its end."""

INSIDE, OUT, READY, LEFT = "inside", "out", "ready", "left"

_MAX_PACKET_BYTES = 1 << 17


def name(end: socket.socket) -> str:
    """Return the value of `LINE` for the worker's end."""
    return f"{end.fileno()}:{os.fstat(end.fileno()).st_ino}"


def worker_end(environ: Mapping[str, str]) -> socket.socket | None:
    """Return the worker's end that `environ` names, None where there is none, as in what a worker starts."""
    descriptor, _, inode = environ.get(LINE, "").partition(":")
    if not inode or os.getsid(0) != os.getpid():
        return None
    try:
        found = os.fstat(int(descriptor))
    except (OSError, ValueError):
        return None
    if not stat.S_ISSOCK(found.st_mode) or str(found.st_ino) != inode:
        return None
    os.set_inheritable(int(descriptor), False)
    return socket.socket(fileno=int(descriptor))


def become(message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Take the environment and the standard streams that the launcher gives a worker which it keeps.

    A stream that the script has directed elsewhere stays there.
    """
    for each in message["unset"]:
        os.environ.pop(each, None)
    os.environ.update(message["set"])
    for target, (descriptor, before) in enumerate(zip(descriptors, message["streams"], strict=True)):
        if _file(target) == before:
            os.dup2(descriptor, target)
        os.close(descriptor)


def _file(descriptor: int) -> list[int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return [found.st_dev, found.st_ino]


class Line:
    """The launcher's end of the line to one worker.

    Args:
        end: The socket.
        process: The worker.
        env: The environment that it was started with.
        streams: Its standard streams.

    Attributes:
        state: What the worker has said last, "" before it has said anything.
        out_s: When its function has raised, on the monotonic clock.
        error: What it has raised.
        peers: Whether another worker may be to blame for that.
    """

    def __init__(
        self, end: socket.socket, process: "subprocess.Popen[bytes]", env: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        end.setblocking(False)
        self.end = end
        self.process = process
        self.state = ""
        self.out_s = 0.0
        self.error = ""
        self.peers = False
        self._was(env, streams)

    def _was(self, env: Mapping[str, str], streams: Sequence[int]) -> None:
        self._env, self._streams = dict(env), [_file(stream) for stream in streams]

    def listen(self) -> bool:
        """Take what the worker has said; return False when its end is closed."""
        while True:
            try:
                packet = self.end.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            try:
                said = json.loads(packet)
                self.state = said["state"]
                if self.state == OUT:
                    self.out_s, self.error, self.peers = time.monotonic(), str(said["error"]), bool(said["peers"])
            except (ValueError, LookupError, TypeError):
                return False  # It is closed, or the script writes to it.

    def tell(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Say something; return False if nobody is there to hear it."""
        try:
            socket.send_fds(self.end, [json.dumps(message).encode()], list(descriptors))
        except OSError:
            return False
        return True

    def go_on(self, env: Mapping[str, str], streams: Sequence[int]) -> bool:
        """Let a worker that is ready go on as if it had been started with `env` and `streams`; tell whether it can."""
        message = {
            "set": {each: value for each, value in env.items() if self._env.get(each) != value},
            "unset": sorted(self._env.keys() - env.keys()),
            "streams": self._streams,
        }
        if self.process.poll() is not None or not self.tell(message, streams):
            return False
        self.state = ""
        self._was(env, streams)
        return True
