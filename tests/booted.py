"""A real systemd as process 1 of namespaces of its own, over this machine's files, none of which it can change."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from cluster import wait_until

USER, UID = "ann", 54321
HOME = Path("/home") / USER
_SYSTEMD = Path("/usr/lib/systemd/systemd")
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))

# Nothing of this is seen outside of its mount namespace, and all of it goes with the last process in there. What starts
# with every machine is left out, so that nothing cleans /tmp or sets kernel parameters.
_BOOT = f"""
set -e
mount --make-rprivate /
mount -t tmpfs none "$SCRATCH"
mkdir "$SCRATCH/upper" "$SCRATCH/work" "$SCRATCH/root"
mount -t overlay none -o "lowerdir=/,upperdir=$SCRATCH/upper,workdir=$SCRATCH/work" "$SCRATCH/root"
cd "$SCRATCH/root"
mount -t proc none proc
mount -t sysfs none sys
mount -t cgroup2 none sys/fs/cgroup
mount -t tmpfs none run
mount -t tmpfs -o mode=755 none dev
for device in null zero full random urandom tty; do touch dev/$device; mount --bind /dev/$device dev/$device; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 none dev/pts
mount -t tmpfs -o mode=1777 none dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mkdir -p "./$SHARED"
mount --bind "$SHARED" "./$SHARED"
for place in $READABLE; do
    while test "$place" != /; do chmod go+rx ".$place"; place=$(dirname "$place"); done
done
echo '{USER}:x:{UID}:{UID}::{HOME}:/bin/sh' >> etc/passwd
echo '{USER}:x:{UID}:' >> etc/group
install -d -m 700 -o {UID} -g {UID} ./{HOME}
# There is no network, so nobody is asked for names.
sed -i 's/^hosts:.*/hosts: files/' etc/nsswitch.conf
: > etc/machine-id
rm -rf etc/systemd/system/* usr/lib/systemd/system/*.target.wants
cp -r "$SHARED/units/." etc/systemd/system
echo '[Unit]' > etc/systemd/system/test.target
exec chroot . /usr/bin/env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    {_SYSTEMD} --system --unit=test.target --log-target=console --show-status=no
"""


def unavailable() -> str | None:
    """Return why no systemd can be booted here, None when one can."""
    if os.geteuid() != 0:
        return "only root can boot a systemd"
    if not _SYSTEMD.exists() or shutil.which("nsenter") is None:
        return "needs systemd and nsenter"
    if _cgroup2() is None:
        return "needs a cgroup2 file system that it may write to"
    overlay = "mount -t tmpfs none /mnt && cd /mnt && mkdir u w"
    overlay += " && mount -t overlay none -o lowerdir=/,upperdir=u,workdir=w /mnt"
    tried = subprocess.run(["unshare", "--mount", "--net", "sh", "-c", overlay], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"needs the right to mount an overlay: {tried.stderr.strip()}"


class Booted:
    """The machine; as a context manager it is up inside, and leaves nothing behind.

    Args:
        shared: A directory that is the same in there, and that everybody may write to.
        units: Contents of the files of /etc/systemd/system, by their paths in it.
    """

    def __init__(self, shared: Path, units: Mapping[str, str]) -> None:
        group = _cgroup2()
        assert group is not None
        self.shared = shared
        self._group = group / f"rr-test-{os.getpid()}"
        self._scratch = shared.with_suffix(".root")
        self._outer: subprocess.Popen[bytes] | None = None
        self._first = 0
        shared.chmod(0o777)
        for name, content in units.items():
            path = shared / "units" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    def __enter__(self) -> "Booted":
        self._scratch.mkdir()
        self._group.mkdir()
        command = ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "-"]
        command += ["unshare", "--fork", "--kill-child", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net"]
        paths = {"SCRATCH": str(self._scratch), "SHARED": str(self.shared), "READABLE": " ".join(_sources())}
        try:
            with (self.shared / "systemd.log").open("wb") as log:
                self._outer = subprocess.Popen(
                    [*command, "sh", "-c", _BOOT], env={**os.environ, **paths}, stdout=log, stderr=log
                )
            wait_until(self._is_up, timeout_s=120, what=lambda: f"systemd:\n{self.log}", pause_s=0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._outer is not None:
            self._outer.kill()
            self._outer.wait()
        wait_until(lambda: "populated 0" in (self._group / "cgroup.events").read_text(), timeout_s=60, what="the end")
        for group in sorted(self._group.rglob("*/"), reverse=True):
            group.rmdir()
        self._group.rmdir()
        self._scratch.rmdir()

    @property
    def log(self) -> str:
        """What systemd said on its console."""
        return (self.shared / "systemd.log").read_text(errors="replace")

    def run(self, *command: str, user: bool = False) -> str:
        """Return what `command` printed inside, where it has to succeed, as root or as `USER`."""
        done = subprocess.run(
            self._entered(command, user=user), env=_environ(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start `command` inside as `USER`."""
        return subprocess.Popen(self._entered(command, user=True), env=_environ(), text=True, **options)

    def property_of(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", unit, f"--property={name}", "--value").strip()

    def _entered(self, command: tuple[str, ...], *, user: bool) -> list[str]:
        drop = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs", "--"]
        enter = ["nsenter", f"--target={self._first}", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net"]
        return [*enter, "--root", f"--wdns={self.shared}", *(drop if user else []), *command]

    def _is_up(self) -> bool:
        assert self._outer is not None
        assert self._outer.poll() is None, self.log
        # Until the new root is entered, its directory is not the one in which the question is asked.
        self._first = next((child.pid for child in psutil.Process(self._outer.pid).children()), 0)
        ask = self._entered(("systemctl", "is-system-running"), user=False)
        return subprocess.run(ask, capture_output=True, text=True).stdout.strip() in ("running", "degraded")


def _cgroup2() -> Path | None:
    found = [path for path in _CGROUPS if (path / "cgroup.procs").exists() and os.access(path, os.W_OK)]
    return next((path for path in found if (path / "cgroup.controllers").exists()), None)


def _sources() -> set[str]:
    """Return where the interpreter and what it imports are."""
    return {os.path.realpath(place) for place in (sys.prefix, sys.base_prefix, *sys.path) if os.path.isdir(place)}


def _environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENT_", "XDG_"))}
    return {**kept, "HOME": str(HOME), "USER": USER, "OMP_NUM_THREADS": "1"}
