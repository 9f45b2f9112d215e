"""Checks of this host alone: shared memory, limits of processes, directories, versions, GPUs."""

import json
import math
import os
import platform
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from resilient_run.ckpt.errors import CheckpointError, DaemonError

from ..base.ask import ask_daemon
from ..base.process import has_capability
from ..base.record import JobRecord
from ..base.settings import server_pid
from ..slots.memory import SHARE, default_limit_bytes, free_bytes, most_bytes, shown
from ..trust.private import directory_mode
from .examine import Check, Finding, fail, ok, warn
from .plan import RunPlan

_GIB = 1 << 30
_LITTLE = 0.05
_FEW_FILES, _MANY_FILES = 512, 4096
_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
_TORCH_S = 7.0
_TORCH = """
import json, torch
print(json.dumps({"gpus": torch.cuda.device_count(), "cuda": torch.version.cuda or torch.version.hip}))
"""
_BEHIND_A_FILE_SYSTEM = "a file system does not answer: see `mount`, and `dmesg` for what it waits for"


def host_checks(plan: RunPlan) -> list[Check]:
    """Return the checks of this host, whose runs `plan` is one of."""
    return [
        Check(name="versions", look=_versions, when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="shm-size", look=lambda: _shm_size(plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="shm-free", look=lambda: _shm_free(plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="memory", look=lambda: _memory(plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="memlock", look=lambda: _memlock(plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="open-files", look=lambda: _open_files(plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="processes", look=lambda: _processes(plan), when_late="too many processes to count: end some"),
        Check(name="run-dir", look=lambda: _directory("run-dir", plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(name="shm-dir", look=lambda: _directory("shm-dir", plan), when_late=_BEHIND_A_FILE_SYSTEM),
        Check(
            name="gpus",
            look=lambda: _gpus(plan),
            within_s=_TORCH_S + 0.5,
            when_late="the driver does not answer: see `nvidia-smi` and `dmesg`",
        ),
    ]


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    try:
        ours = metadata.version("resilient-run")
        wanted = next(text for text in metadata.requires("resilient-run") or () if re.match(r"torch\W", text))
    except (metadata.PackageNotFoundError, StopIteration):
        yield warn("versions", f"Python {python}, resilient-run from a directory", "install it: pip install .")
        return
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield fail(
            "versions",
            f"Python {python} at {sys.executable} has no torch; resilient-run {ours} needs {wanted}",
            f"pip install '{wanted}', in this environment",
        )
        return
    found = f"Python {python}, torch {torch}, resilient-run {ours}"
    if _fits(torch, wanted):
        yield ok("versions", found)
    else:
        yield warn("versions", f"{found}, which was tested with {wanted}", f"pip install '{wanted}'")


def _fits(version: str, requirement: str) -> bool:
    """Tell whether a version keeps to the bounds (">=", "<") of a requirement."""

    def release(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])

    bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
    return all((release(version) >= release(bound)) == (sign == ">=") for sign, bound in bounds)


def _shm_size(plan: RunPlan) -> Iterator[Finding]:
    place = _existing(plan.settings.shm_dir)
    mounted, kind = _file_system(place)
    size_bytes, wanted_bytes = os.statvfs(place).f_blocks * os.statvfs(place).f_frsize, plan.slots_bytes
    # The daemon gives to slots no more than this share of it, and leaves 1 GiB.
    enlarge_bytes = max((wanted_bytes or 8 * _GIB) / SHARE, (wanted_bytes or 0) + _GIB)
    size = f"{max(1, math.ceil(enlarge_bytes / _GIB))}G"
    enlarge = (
        f"docker run --shm-size={size.lower()}, in Kubernetes an emptyDir with medium Memory at /dev/shm, else "
        f"mount -o remount,size={size} {mounted}"
    )
    found = f"{mounted} ({kind}) has {shown(size_bytes)}"
    if kind != "tmpfs":
        yield warn(
            "shm-size",
            f"{plan.settings.shm_dir} is on {mounted} ({kind}), not in memory: every step would be written to it",
            "leave out RESILIENT_SHM_DIR, or name a directory on a tmpfs",
        )
    elif most_bytes(place) < (1 if wanted_bytes is None else wanted_bytes):
        takes = "" if wanted_bytes is None else f"; slots take {shown(wanted_bytes)} ({plan.formula})"
        yield warn("shm-size", f"{found}, too few for slots{takes}: they are lost when the daemon ends", enlarge)
    else:
        yield ok("shm-size", found)


def _shm_free(plan: RunPlan) -> Iterator[Finding]:
    place = _existing(plan.settings.shm_dir)
    mounted, _ = _file_system(place)
    size_bytes, free = os.statvfs(place).f_blocks * os.statvfs(place).f_frsize, free_bytes(place)
    found = f"{shown(free)} of {shown(size_bytes)} in {mounted} are free"
    remedy = f"`resilientctl gc` removes what dead runs left; look for the rest with `du -ah {mounted} | sort -h`"
    ours = _slots_of(plan)
    if plan.slots_bytes is not None and free + ours < plan.slots_bytes:
        takes = f"slots take {shown(plan.slots_bytes)} ({plan.formula}): they are lost when the daemon ends"
        yield warn("shm-free", f"{found}; {takes}", remedy)
    elif plan.slots_bytes is None and not ours and free < _LITTLE * size_bytes:
        yield fail("shm-free", f"only {found}", remedy)
    else:
        yield ok("shm-free", found)


def _memory(plan: RunPlan) -> Iterator[Finding]:
    memory, budget = psutil.virtual_memory(), _budget(plan)
    found = f"{shown(memory.available)} of {shown(memory.total)} available, slots may take {shown(budget)}"
    wanted, ours = plan.slots_bytes, _slots_of(plan)
    fewer = "fewer replicas (--rr-replicas), fewer ranks on this host, or a host with more memory"
    if wanted is not None and wanted > budget:
        yield fail("memory", f"{found}; they take {shown(wanted)} ({plan.formula})", fewer)
    elif wanted is not None and wanted > memory.available + ours:
        yield fail("memory", f"{found}; they take {shown(wanted)} ({plan.formula})", f"end what uses it, or {fewer}")
    elif memory.available < _LITTLE * memory.total:
        yield warn(
            "memory", f"only {found}", "end what uses it: the kernel kills the next process that asks for memory"
        )
    elif wanted is None:
        yield ok("memory", f"{found}; --state-gb checks that they do")
    else:
        yield ok("memory", f"{found} and take {shown(wanted)} ({plan.formula})")


def _memlock(plan: RunPlan) -> Iterator[Finding]:
    whose, pid = _whose(plan)
    # A daemon raises its limit to the hard one.
    limit, wanted = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)[1], plan.slots_bytes
    if limit == resource.RLIM_INFINITY or has_capability(pid, _CAP_IPC_LOCK):
        yield ok("memlock", f"{whose} may lock all memory")
    elif wanted is not None and wanted <= limit:
        yield ok("memlock", f"{whose} may lock {shown(limit)}, slots take {shown(wanted)}")
    else:
        yield warn(
            "memlock",
            f"{whose} may lock only {shown(limit)}: slots may be swapped out, and a restore waits for the disk",
            "ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in a systemd unit)",
        )


def _open_files(plan: RunPlan) -> Iterator[Finding]:
    whose, pid = _whose(plan)
    # A daemon raises its limit to the hard one.
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    found = f"{whose} may open {'any number of' if hard == resource.RLIM_INFINITY else hard} files"
    remedy = f"ulimit -Hn {1 << 16} as root (docker run --ulimit nofile={1 << 16}, LimitNOFILE= in a systemd unit)"
    if hard == resource.RLIM_INFINITY or hard >= _MANY_FILES:
        yield ok("open-files", found)
    elif hard >= _FEW_FILES:
        yield warn("open-files", f"{found}: less than {_MANY_FILES}, which a flood of connections uses up", remedy)
    else:
        yield fail("open-files", f"{found}; a daemon with its peers, trainers and slots needs {_FEW_FILES}", remedy)


def _processes(plan: RunPlan) -> Iterator[Finding]:
    wanted = 64 + (os.cpu_count() or 1) + 32 * plan.nproc
    rooms = {}
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    privileged = any(has_capability(os.getpid(), each) for each in (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE))
    if soft != resource.RLIM_INFINITY and os.getuid() != 0 and not privileged:
        rooms["ulimit -u"] = soft - _threads_of(os.getuid()), soft
    for directory in _control_groups():
        try:
            most, now = (directory / "pids.max").read_text().strip(), int((directory / "pids.current").read_text())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            rooms["pids.max of the control group (docker run --pids-limit, TasksMax= in a systemd unit)"] = (
                int(most) - now,
                int(most),
            )
    if not rooms:
        yield ok("processes", "no limit")
        return
    which, (room, most_) = min(rooms.items(), key=lambda item: item[1][0])
    found = f"room for {max(room, 0)} more threads and processes, of {most_}"
    if room < wanted:
        yield fail("processes", f"{found}; a run with {plan.nproc} ranks here starts about {wanted}", f"raise {which}")
    else:
        yield ok("processes", found)


def _directory(check: str, plan: RunPlan) -> Iterator[Finding]:
    path = plan.settings.run_dir if check == "run-dir" else plan.settings.shm_dir
    variable = check.upper().replace("-", "_")
    other = f"choose another one with --rr-{check} or RESILIENT_{variable}"
    if not os.path.lexists(path):
        parent = _existing(path)
        if os.access(parent, os.W_OK | os.X_OK):
            yield ok(check, f"{path} is made when it is needed")
        else:
            yield fail(check, f"{path} cannot be made: uid {os.getuid()} may not write to {parent}", other)
        return
    try:
        mode = directory_mode(path)
    except DaemonError as error:
        found, _, remedy = str(error).rpartition("; ")
        yield fail(check, found, remedy)
        return
    if mode & 0o077:
        yield warn(
            check,
            f"{path} has mode {stat.filemode(stat.S_IFDIR | mode)}: others may enter it until a daemon starts there",
            f"chmod 700 {path}",
        )
    else:
        yield ok(check, f"{path} is for uid {os.getuid()} only")


def _gpus(plan: RunPlan) -> Iterator[Finding]:
    devices = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
    if not devices:
        yield ok("gpus", "none: training is on the CPU")
        return
    # Counting makes no context on a GPU, which a run may have all memory of.
    environ = {**plan.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH], env=environ, capture_output=True, text=True, timeout=_TORCH_S
        )
        seen = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        yield warn(
            "gpus",
            f"torch did not count the {len(devices)} GPU(s) within {_TORCH_S:g} s",
            "see whether `nvidia-smi` answers; on a slow disk try again: the first import of torch takes longest",
        )
        return
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield fail("gpus", f"{len(devices)} GPU(s), and torch cannot be imported: {last}", "reinstall torch")
        return
    found = f"{len(devices)} GPU(s), of which torch sees {seen['gpus']}"
    if seen["cuda"] is None:
        yield fail("gpus", f"{found}: it is built for CPUs", "install the torch build for your CUDA (pytorch.org)")
    elif not seen["gpus"]:
        yield fail("gpus", found, "see `nvidia-smi`: is the driver too old for torch? is CUDA_VISIBLE_DEVICES right?")
    elif plan.nproc > seen["gpus"]:
        yield fail("gpus", f"{found}, for {plan.nproc} ranks", "fewer ranks (--nproc-per-node), or more GPUs")
    else:
        yield ok("gpus", f"{found} (CUDA {seen['cuda']})")
    for module, remedy, why in (
        (
            "numba_cuda",
            "pip install 'numba-cuda>=0.20' 'numpy<2.5'",
            "step() waits for the copy of the state to the host",
        ),
        ("pynvml", "pip install 'nvidia-ml-py>=12.535'", "GPU failures are not detected"),
    ):
        if find_spec(module) is None:
            yield warn("gpu-extras", f"{module} is not installed: {why}", remedy)


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _file_system(path: Path) -> tuple[str, str]:
    """Return where the file system of `path` is mounted, and its type."""
    place, found = path.resolve(), ("/", "unknown")
    for mount in psutil.disk_partitions(all=True):
        # Of what is mounted over each other, the last is seen.
        if place.is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= len(found[0]):
            found = mount.mountpoint, mount.fstype
    return found


def _budget(plan: RunPlan) -> int:
    """Return what the daemon here gives to all slots, or one that would be started would give."""
    try:
        return int(ask_daemon(plan.settings.address(), "status", within_s=2.0)["limit_bytes"])
    except (OSError, CheckpointError):
        return default_limit_bytes(_existing(plan.settings.shm_dir))


def _slots_of(plan: RunPlan) -> int:
    """Return what the slots of the run take already, which is taken for the one that is under way here."""
    size_bytes = 0
    for path in plan.settings.shm_dir.glob("*/*.slot"):
        with suppress(FileNotFoundError, DaemonError):
            record = JobRecord.load(path.parent)
            if record.is_open and plan.run_id in (None, record.run_id):
                size_bytes += path.stat().st_size
    return size_bytes


def _whose(plan: RunPlan) -> tuple[str, int]:
    """Return whose limits count, and its pid: the daemon's, or those that one gets which is started from here."""
    pid = server_pid(plan.settings.address())
    with suppress(psutil.Error):
        # Another user's says nothing, neither about itself nor about what we would start.
        if pid is not None and psutil.Process(pid).uids().effective == os.geteuid():
            return f"the daemon (pid {pid})", pid
    return "a process started here", os.getpid()


def _threads_of(uid: int) -> int:
    count = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        if process.info["uids"] is not None and process.info["uids"].real == uid:
            count += process.info["num_threads"] or 1
    return count


def _control_groups() -> list[Path]:
    """Return the directories of this process's control group that may limit processes, and of those above it."""
    directories = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        root = Path("/sys/fs/cgroup") / ("pids" if "pids" in controllers.split(",") else "")
        if not controllers or "pids" in controllers.split(","):
            place = root / group.lstrip("/")
            directories += [each for each in (place, *place.parents) if each.is_relative_to(root) and each != root]
    return directories
