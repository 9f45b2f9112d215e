"""Real jobs for tests: `resilient-run` launchers as processes, each host with its own daemon and directories."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from launchers import execute_launcher, start_launcher

from resilient_run.ckpt.format import wire

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"
TINY = ("--layers", "2", "--width", "128", "--context", "128", "--batch", "4")
_LONGEST_PAUSE_S = 0.1
_PAUSES = str(EXAMPLE.parent.parent / "benchmarks" / "slow_steps.py")
LIGHT = (str(EXAMPLE), "--seed", "7", "--json", "--layers", "2", "--width", "128", "--context", "16", "--batch", "1")
PACED = (_PAUSES, "0.04", *LIGHT)
"""A run whose steps leave a test time to act between them, and the processors to others: the state of `TINY`."""
ENDLESS = (_PAUSES, "0.1", *LIGHT, "--steps", "100000")


def wait_until(
    condition: Callable[[], Any],
    *,
    timeout_s: float,
    what: str | Callable[[], str],
    host: "Host | None" = None,
    pause_s: float = 0.005,
) -> Any:
    """Poll `condition` until it is truthy and return its value; when late, fail with `what` and what `host` printed.

    A `what` that shows how things stand is a function, which is called only then. Polls take a fifth of the time at
    most: one that asks a daemon or etcd costs both sides.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        begun_s = time.monotonic()
        if value := condition():
            return value
        now_s = time.monotonic()
        if now_s > deadline:
            awaited = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s:.0f} s: {awaited}\n{host.output if host else ''}")
        time.sleep(max(pause_s, min(4 * (now_s - begun_s), _LONGEST_PAUSE_S)))


def kill(pid: int) -> None:
    """SIGKILL a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone, or only waits to be noticed by its parent."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stop(pid: int) -> None:
    """SIGSTOP a process and return once it stands still: until then a later signal may reach it first."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(
        lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, timeout_s=30, what=f"process {pid} to stop"
    )


def _printed_apart(line: str) -> list[str]:
    """Return the JSON objects of `line`, or `line`: unbuffered workers write lines and ends apart, so two mix."""
    parts, decoder = [], json.JSONDecoder()
    at = 0
    while line.startswith("{", at):
        try:
            _, end = decoder.raw_decode(line, at)
        except ValueError:
            return [line]
        parts.append(line[at:end])
        at = end
    return parts if not line[at:].strip() and parts else [line]


class Host:
    """One host of a test cluster: its directories, at most one launcher at a time, and what that printed."""

    prefix: Sequence[str] = ()
    """What stands before the launcher's command to run it on this host."""
    forked = True
    """Whether launchers are forked from a process that has their imports; else they are started as by a user."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.events_path = root / name / "events.jsonl"
        self.events_path.parent.mkdir(parents=True)
        self.run_dir, self.shm_dir = self._directories(root)
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self.launcher: subprocess.Popen[Any] | None = None
        self._readers: list[threading.Thread] = []
        self._workers: list[psutil.Process] = []

    def _directories(self, root: Path) -> tuple[Path, Path]:
        """Make and return this host's run directory and its directory in shared memory."""
        run_dir = root / self.name / "run"
        shm_dir = Path("/dev/shm") / f"{root.name}-{os.getpid()}-{self.name}"
        run_dir.mkdir()
        shm_dir.mkdir(mode=0o700)
        return run_dir, shm_dir

    def environ(self, **more: str) -> dict[str, str]:
        """Return the environment in which launchers start, with `more`."""
        return {
            **os.environ,
            "RESILIENT_HOST_ID": self.name,
            "RESILIENT_RUN_DIR": str(self.run_dir),
            "RESILIENT_SHM_DIR": str(self.shm_dir),
            "RESILIENT_EVENTS": str(self.events_path),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def launch(self, launcher_args: Sequence[str], script_args: Sequence[str], **env: str) -> None:
        """Start `resilient-run` with these arguments."""
        self._end_launcher()
        start = start_launcher if self.forked else execute_launcher
        self.launcher = start([*launcher_args, *script_args], self.environ(**env), self.prefix)
        for stream in (self.launcher.stdout, self.launcher.stderr):
            reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, stream: Any) -> None:
        for line in stream:
            for part in _printed_apart(line):
                try:
                    entry = json.loads(part)
                except ValueError:
                    entry = None
                if isinstance(entry, dict):
                    if "pid" in entry:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            self._workers.append(psutil.Process(entry["pid"]))
                    self.lines.append(entry)
                else:
                    self.text.append(part)  # also what a library prints that only looks like JSON

    @property
    def output(self) -> str:
        """Everything the launcher and its workers printed that is not a JSON line."""
        return "".join(self.text)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Return the launcher's exit code once its output is read to the end."""
        assert self.launcher is not None
        try:
            code = self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"host {self.name} did not finish in {timeout_s:.0f} s:\n{self.output}") from None
        for reader in self._readers:
            reader.join(10.0)
        return code

    def pids(self) -> dict[int, int]:
        """Return rank → pid of the newest workers that announced themselves."""
        return {line["rank"]: line["pid"] for line in list(self.lines) if "pid" in line}

    def starts(self) -> int:
        """Return how many workers have announced themselves so far."""
        return sum("pid" in line for line in list(self.lines))

    def steps(self) -> list[tuple[int, int, float]]:
        """Return (rank, step, loss) of every completed step, in the order printed."""
        return [(line["rank"], line["step"], line["loss"]) for line in list(self.lines) if "loss" in line]

    def reached(self, step: int) -> bool:
        """Tell whether any local rank completed `step` or a later one."""
        return any(done >= step for _, done, _ in self.steps())

    def params_sha256(self) -> str | None:
        """Return the hash of the final parameters, when this host's launcher printed it.

        A rank may have been at its end before, when the others went back, and it with them.
        """
        return next((line["params_sha256"] for line in reversed(list(self.lines)) if "params_sha256" in line), None)

    def recoveries(self) -> list[dict[str, Any]]:
        """Return the recovery events of this host that its launcher wrote."""
        return self.events("recovery")

    def summaries(self) -> list[dict[str, Any]]:
        """Return the events about the recovery of all hosts that this host's launcher wrote."""
        return self.events("recovered")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds that this host's launcher wrote, of all kinds without one."""
        if not self.events_path.exists():
            return []
        events = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [event for event in events if not kinds or event["event"] in kinds]

    def daemon_pid(self) -> int | None:
        """Return the pid of this host's daemon, None when none has its lock."""
        lock = self.run_dir / "resilientd.lock"
        text = lock.read_text().strip() if lock.exists() else ""
        return int(text) if text else None

    def committed_step(self) -> int:
        """Return the newest committed step that this host's daemon knows of, 0 when there is none or no daemon."""
        return max(((job.get("watermark") or {"step": 0})["step"] for job in self._jobs()), default=0)

    def holds(self, step: int) -> bool:
        """Tell whether this host's daemon holds a replica of any rank at `step`."""
        return any(slot["step"] == step for job in self._jobs() for slot in job["slots"])

    def _jobs(self) -> list[dict[str, Any]]:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(10)
                sock.connect(str(self.run_dir / "resilientd.sock"))
                sock.sendall(wire.encode({"id": 1, "op": "status"}))
                answer = wire.recv_message(sock)
        except OSError:
            return []
        return [] if answer is None else list(answer["jobs"])

    def lose(self) -> None:
        """Take the host away: launcher, workers and daemon are killed and its shared memory is wiped."""
        # Not whoever has their numbers by now: some hosts live until all tests of a file have ended.
        if self.launcher is not None:
            self.launcher.kill()
        for worker in list(self._workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        if (pid := self.daemon_pid()) is not None:
            kill(pid)
        shutil.rmtree(self.shm_dir, ignore_errors=True)

    def close(self) -> None:
        """Leave nothing behind."""
        self.lose()
        self._end_launcher()

    def _end_launcher(self) -> None:
        if self.launcher is None:
            return
        if self.launcher.poll() is None:
            self.launcher.kill()
        self.launcher.wait()
        for reader in self._readers:
            reader.join(10.0)
        for stream in (self.launcher.stdout, self.launcher.stderr):
            assert stream is not None
            stream.close()


class Cluster:
    """Hosts of one test below a temporary directory; closes them all at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.name = root.name
        self.hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        """Return the host of that name, made at first use."""
        if name not in self.hosts:
            self.hosts[name] = Host(name, self._root)
        return self.hosts[name]

    def close(self) -> None:
        """Close every host."""
        for host in self.hosts.values():
            host.close()


def assert_same_training(hosts: Sequence[Host], reference: Host) -> None:
    """Every step of every rank was trained, with the same loss each time, and the parameters are bit-identical."""
    expected = {(rank, step): loss for rank, step, loss in reference.steps()}
    seen = {}
    for host in hosts:
        for rank, step, loss in host.steps():
            assert expected[rank, step] == loss, f"rank {rank} step {step}"
            seen[rank, step] = loss
    assert seen.keys() == expected.keys()
    assert {host.params_sha256() for host in hosts} - {None} == {reference.params_sha256()}


def assert_killed_goes_on(root: Path, ranks: int, script: Sequence[str], kill: Sequence[str]) -> None:
    """Run `script` undisturbed and with `kill`, which kills a worker once: both end alike, bit for bit."""
    cluster = Cluster(root)
    try:
        undisturbed, killed = cluster.host("undisturbed"), cluster.host("killed")
        for host, extra in ((undisturbed, ()), (killed, kill)):
            host.launch(["--standalone", "--nproc-per-node", str(ranks)], [*script, *extra])
            assert host.wait() == 0, host.output
        assert recovered(killed) == 1
        assert_same_training([killed], undisturbed)
        assert killed.params_sha256() == undisturbed.params_sha256() is not None
    finally:
        cluster.close()


def recovered(host: Host) -> int:
    """Return how many recoveries of this host got as far as their first step."""
    return sum(event["complete"] for event in host.recoveries())
