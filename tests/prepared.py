"""The hook of `launchers.py`: an interpreter that stops inside ``import site``, imports torch, and forks others.

With each launcher goes its zygote, forked from it at once. Programs, launchers and workers return from here, and their
interpreter goes on to run `run.py`; the zygote stays, as the one in `resilient_run.launcher.workers.zygote` does.
"""

import ctypes
import gc
import json
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_PACKET_BYTES = 1 << 17
CONTROL_FD = "RESILIENT_TEST_CONTROL_FD"
ZYGOTE_FD = "RESILIENT_TEST_ZYGOTE_FD"
"""Environment variable with the descriptor by which a launcher calls its zygote, ``pid:descriptor``."""

_IN_NETWORK, _WITH_LIMIT = ("ip", "netns", "exec"), "--nofile="
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 4096, 16384, 1 << 19, 2


def hold() -> None:
    """Serve the test until it hangs up; return only in programs, launchers and workers."""
    control = socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
    control.set_inheritable(False)
    hook_dir = os.path.dirname(__file__)
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(hook_dir).removeprefix(os.pathsep)
    sys.path.remove(hook_dir)
    from resilient_run.launcher.workers import nursery, prctl, zygote

    zygote._preload((*zygote._AT_ONCE, *zygote._LATER, "resilient_run.launcher.cli"))
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
    zygote._become_worker({"unset": list(os.environ), "set": request["env"]}, descriptors)
    pid = os.getpid()
    if not request["launches"]:
        control.send(str(pid).encode())
        control.close()
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bind = prctl.death_with_parent(pid)
    if zygote_pid := os.fork():
        theirs.close()
        os.environ[ZYGOTE_FD] = f"{zygote_pid}:{ours.detach()}"
        control.send(str(pid).encode())
        control.close()
        return
    control.close()
    ours.close()
    bind()
    os.setsid()
    packet, descriptors, _, _ = socket.recv_fds(theirs, MAX_PACKET_BYTES, 1)
    if not packet:
        os._exit(0)
    theirs.close()
    request = json.loads(packet)
    _name(request)
    os.environ.clear()
    os.environ.update(request["env"])
    zygote._answer(socket.socket(fileno=descriptors[0]), bind, None, nursery.Nursery([]))


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
        soft, hard = value.removeprefix(_WITH_LIMIT).split(":")
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
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
