"""The hook of `launchers.py`: an interpreter that stops inside ``import site``, imports modules, and forks others.

With each launcher go its zygote and its daemon, forked from it at once. Programs, launchers, daemons and workers return
from here, and their interpreter goes on to run `run.py`; the zygote stays, as the one in
`resilient_run.launcher.workers.zygote` does.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_PACKET_BYTES = 1 << 17
CONTROL_FD = "RESILIENT_TEST_CONTROL_FD"
MODULES = "RESILIENT_TEST_MODULES"
"""Environment variable with what is imported beforehand."""
ZYGOTE_FD = "RESILIENT_TEST_ZYGOTE_FD"
"""Environment variable with the descriptor by which a launcher calls its zygote, ``pid:descriptor``."""
DAEMON_FD = "RESILIENT_TEST_DAEMON_FD"
"""Environment variable with the descriptor by which a launcher calls its daemon, ``pid:descriptor``."""
BEFORE = "RESILIENT_TEST_BEFORE"
"""Environment variable with code that a launcher executes before it begins."""

_IN_NETWORK, _WITH_LIMIT = ("ip", "netns", "exec"), "--nofile="
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 4096, 16384, 1 << 19, 2


def hold() -> None:
    """Serve the test until it hangs up; return only in programs, launchers, daemons and workers."""
    control = socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
    control.set_inheritable(False)
    hook_dir = os.path.dirname(__file__)
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(hook_dir).removeprefix(os.pathsep)
    sys.path.remove(hook_dir)
    from resilient_run.launcher.workers import nursery, prctl, zygote

    gc.disable()
    for name in os.environ.pop(MODULES).split(","):
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    control.send(str(os.getpid()).encode())
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET_BYTES, 3)
        if not packet:
            os._exit(0)
        if zygote._is_orphan():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    request = json.loads(packet)
    _apply(request["prefix"])
    _name(request)
    changes = {"unset": list(os.environ), "set": request["env"]}
    become = zygote._become_worker if "torch" in sys.modules else zygote._take_place
    become(changes, descriptors)
    tempfile.tempdir = None  # TMPDIR may be another one
    try:
        if request["launches"]:
            bind = prctl.death_with_parent(os.getpid())
            if (call := _fork_for(ZYGOTE_FD)) is not None:
                control.close()
                bind()
                os.setsid()
                packet, (descriptor,) = _called(call, 1)
                _name(packet)
                os.environ.clear()
                os.environ.update(packet["env"])
                zygote._answer(socket.socket(fileno=descriptor), bind, None, nursery.Nursery([]))
                return
            if (call := _fork_for(DAEMON_FD)) is not None:
                control.close()
                os.close(int(os.environ[ZYGOTE_FD].partition(":")[2]))
                packet, descriptors = _called(call, 3)
                os.setsid()
                _name(packet)
                zygote._take_place({"unset": list(os.environ), "set": packet["env"]}, descriptors)
                return
        control.send(str(os.getpid()).encode())
    finally:
        control.close()


def _fork_for(variable: str) -> socket.socket | None:
    """Fork a child that a launcher calls by what is in `variable`; return where it hears that, None in the launcher."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        os.environ[variable] = f"{pid}:{ours.detach()}"
        return None
    ours.close()
    return theirs


def _called(call: socket.socket, count: int) -> tuple[dict[str, Any], list[int]]:
    """Return what comes through `call`, with `count` descriptors; end if the launcher hangs up."""
    with call:
        packet, descriptors, _, _ = socket.recv_fds(call, MAX_PACKET_BYTES, count)
    if not packet:
        os._exit(0)
    return json.loads(packet), descriptors


def knows(prefix: Sequence[str]) -> bool:
    """Tell whether a fork can be what this command, put before another one, makes of it."""
    *command, value = prefix or ("",)
    return not prefix or tuple(command) == _IN_NETWORK or value.startswith(_WITH_LIMIT)


def _apply(prefix: list[str]) -> None:
    """Do to this process what the command `prefix` does to what follows it: see ip-netns(8)."""
    if not prefix:
        return
    value = prefix[-1]
    if value.startswith(_WITH_LIMIT):
        soft, _, hard = value.removeprefix(_WITH_LIMIT).partition(":")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard or soft)))
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    with open(f"/run/netns/{value}") as namespace:
        call("setns", namespace.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", value.encode(), b"/sys", b"sysfs", 0, None)
    for file in Path("/etc/netns", value).iterdir():
        call("mount", bytes(file), bytes(Path("/etc", file.name)), b"none", _MS_BIND, None)


def _name(request: dict[str, Any]) -> None:
    """Take over the command and the working directory of `request`."""
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = request.get("command", sys.argv)
    os.chdir(request["cwd"])


if __name__ == "sitecustomize":
    hold()
