"""How long does training stand still when a host is lost for good, and the run goes on with those that are left?

Each host is a launcher with one Gloo rank, all on this machine. From the SIGKILL of everything on the last host, right
after a step was reported, to the moment when every rank of the others has completed its first step, in one rank fewer:

- resilient-run: `--rr-elastic 0`, a `Checkpointer` capture at every step, etcd beside.
- torchrun: its c10d rendezvous on the first host, `torch.distributed.checkpoint.save` after every step into tmpfs,
  `load` at the start.

Both have `--nnodes 1:N`, miss a silent host after 3 s, and wait 1 s for more hosts once one is ready.

Goal: at most 0.3 of torchrun's time.
"""

import json
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host
from report import Summary, parser, table, write_json

from resilient_run.launcher.etcd_server import EmbeddedEtcd

_WORKER = Path(__file__).with_name("recovery_worker.py")
_LIMIT_S = 120.0


class _Run:
    """The launchers of one run, and what their workers print."""

    def __init__(self, stack: ExitStack, name: str, hosts: int, script: list[str]) -> None:
        self._lines: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.launchers: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        stack.callback(lambda: [reader.join() for reader in readers])
        if name == "resilient-run":
            rendezvous = [f"--rdzv-endpoint={stack.enter_context(EmbeddedEtcd()).endpoint}", "--rdzv-backend=etcd-v3"]
            rendezvous += ["--rdzv-conf=lease_ttl=3", "--rr-elastic=0", "--local-addr=127.0.0.1", "--rr-insecure"]
        else:
            rendezvous = [f"--rdzv-endpoint=localhost:{_free_port()}", "--rdzv-backend=c10d"]
            rendezvous += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,is_host={}"]
        launcher = RESILIENT_RUN if name == "resilient-run" else TORCHRUN
        flags = [f"--nnodes=1:{hosts}", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-id=fewer", *rendezvous]
        for index in range(hosts):
            env = stack.enter_context(host(f"host{index}"))
            own = [flag.format(int(index == 0)) for flag in flags]
            process = subprocess.Popen(
                [*launcher, *own, *script], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            stack.callback(_end, process)
            self.launchers.append(process)
            readers.append(threading.Thread(target=self._read, args=(index, process), daemon=True))
            readers[-1].start()

    def _read(self, index: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.startswith('{"rank"'):
                    self._lines.put((index, json.loads(line)))

    def next(self) -> tuple[int, dict[str, Any]]:
        """Return the next line and the number of its host.

        Raises:
            queue.Empty: There is none for too long.
        """
        return self._lines.get(timeout=_LIMIT_S)


def measure(name: str, *, hosts: int, state_mb: int, kill_after: int) -> dict[str, float]:
    """Return what the loss of one host took and lost."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    keeper = "checkpointer" if name == "resilient-run" else "dcp"
    script = [str(_WORKER), "--keeper", keeper, "--steps", "1000000", "--state-mb", str(state_mb)]
    try:
        with ExitStack() as stack:
            run = _Run(stack, name, hosts, [*script, "--directory", str(directory)])
            steps: dict[int, list[dict[str, Any]]] = {index: [] for index in range(hosts)}
            # The run may begin with fewer hosts, and grow.
            while len(steps[hosts - 1]) < kill_after:
                index, line = run.next()
                steps[index].append(line)
            killed_s = time.monotonic()
            _kill(run.launchers[-1])
            old = {index: lines[-1]["pid"] for index, lines in steps.items()}
            last, firsts = max(lines[-1]["step"] for lines in steps.values()), dict[int, dict[str, Any]]()
            while len(firsts) < hosts - 1:
                index, line = run.next()
                if line["pid"] == old[index]:
                    last = max(last, line["step"])
                elif index < hosts - 1:
                    firsts.setdefault(index, line)
            seconds = max(line["monotonic_s"] for line in firsts.values()) - killed_s
            return {"seconds": seconds, "steps_lost": last - min(line["step"] for line in firsts.values()) + 1}
    finally:
        shutil.rmtree(directory)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _kill(launcher: "subprocess.Popen[str]") -> None:
    """Kill a launcher and all that it started: its daemon, too."""
    with suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def _end(launcher: "subprocess.Popen[str]") -> None:
    _kill(launcher)
    launcher.wait()


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="hosts before the loss")
    options.add_argument("--state-mb", type=int, nargs="+", default=[64], help="state of a rank, MiB")
    options.add_argument("--rounds", type=int, default=5, help="losses for each contender, alternating")
    options.add_argument("--kill-after", type=int, default=15, help="steps of the last host before its loss")
    args = options.parse_args()
    rows, seconds, lost = [], {}, {}
    for hosts in args.hosts:
        for state_mb in args.state_mb:
            samples: dict[str, list[dict[str, float]]] = {"torchrun": [], "resilient-run": []}
            for _ in range(args.rounds):
                for name, found in samples.items():
                    found.append(measure(name, hosts=hosts, state_mb=state_mb, kill_after=args.kill_after))
            case = f"{hosts} to {hosts - 1}, {state_mb} MiB"
            seconds[case] = {name: Summary.of(each["seconds"] for each in found) for name, found in samples.items()}
            lost[case] = {name: [int(each["steps_lost"]) for each in found] for name, found in samples.items()}
            of = seconds[case]["resilient-run"].median / seconds[case]["torchrun"].median
            rows.append([case, *(f"{summary:.2f}" for summary in seconds[case].values()), f"{of:.2f}"])
            rows[-1] += [", ".join(map(str, values)) for values in lost[case].values()]
    header = [
        "ranks, state of each",
        "torchrun, s",
        "resilient-run, s",
        "ratio",
        "steps lost: torchrun",
        "resilient-run",
    ]
    table("Loss of a host to the first step without it: median (p10..p90)", header, rows)
    write_json(
        args.json,
        question="fewer_hosts",
        parameters={name: getattr(args, name) for name in ("hosts", "state_mb", "rounds", "kill_after")},
        results={"seconds": seconds, "steps_lost": lost},
    )


if __name__ == "__main__":
    main()
