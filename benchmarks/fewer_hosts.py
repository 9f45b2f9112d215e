"""How long does training stand still when a host is lost for good, and the run goes on with those that are left?

Each host is a launcher with one Gloo rank, all on this machine. From the SIGKILL of everything on the last host, right
after a step was reported, to the moment when every rank of the others has completed its first step, in one rank fewer:

- resilient-run: `--rr-elastic 0`, a `Checkpointer` capture at every step, etcd beside; also with the training in
  `resilient_run.loop`, where the others keep their processes.
- torchrun: its c10d rendezvous on the first host, `torch.distributed.checkpoint.save` after every step into tmpfs,
  `load` at the start.
- peers (`--peer NAME=PYTHON`, see peers/README.md): dlrover, with its flash checkpoint after every step; torchft, one
  replica group per host, whose ranks keep their processes, and the whole model each: nothing is restored;
  nvidia-resiliency-ext's restart in the process, without a launcher, with torchrun's checkpoints.

All have at least one host and at most N, miss a silent host after 3 s where that can be set (dlrover: not), and wait
1 s for more hosts once one is ready.

A run that needs more than a minute to begin on all hosts, or to go on, does not count; it is begun again, and told.

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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host
from report import Summary, parser, table, write_json

from resilient_run.launcher.etcd_server import EmbeddedEtcd

_WORKER = Path(__file__).with_name("recovery_worker.py")
_TORCHFT_WORKER = Path(__file__).parent / "peers" / "torchft_worker.py"
_LIMIT_S = 60.0
_TRIES = 5


Host = Callable[[int], tuple[list[str], dict[str, str]]]
"""What starts a launcher on the host with this number, without the script's options, and what its environment gets."""


def _resilient_run(stack: ExitStack, hosts: int, *options: str) -> Host:
    flags = [f"--rdzv-endpoint={stack.enter_context(EmbeddedEtcd()).endpoint}", "--rdzv-backend=etcd-v3"]
    flags += ["--rdzv-conf=lease_ttl=3", "--rr-elastic=0", "--local-addr=127.0.0.1", "--rr-insecure"]
    command = [*RESILIENT_RUN, *_elastic(hosts), *flags, str(_WORKER), "--keeper", "checkpointer", *options]
    return lambda index: (command, {})


def _torchrun(stack: ExitStack, hosts: int) -> Host:
    flags = [*_elastic(hosts), f"--rdzv-endpoint=localhost:{_free_port()}", "--rdzv-backend=c10d", "--rdzv-conf"]
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,is_host="
    return lambda index: ([*TORCHRUN, *flags, f"{conf}{int(index == 0)}", str(_WORKER), "--keeper", "dcp"], {})


def _dlrover(python: str, stack: ExitStack, hosts: int) -> Host:
    port = _free_port()
    master = [python, "-P", "-m", "dlrover.python.master.main", "--platform", "local", "--node_num", str(hosts)]
    _service(stack, [*master, "--port", str(port), "--job_name", "bench"])
    flags = [*_elastic(hosts), "--rdzv-conf=lastcall_timeout=1,waiting_timeout=1"]
    command = [python, "-P", "-m", "dlrover.trainer.torch.main", *flags, str(_WORKER), "--keeper", "dlrover"]
    shared = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_NUM": str(hosts), "NODE_TYPE": "worker"}
    return lambda index: (command, {**shared, "NODE_RANK": str(index), "NODE_ID": str(index)})


def _torchft(python: str, stack: ExitStack, hosts: int) -> Host:
    port = _free_port()
    lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--min_replicas=1", "--join_timeout_ms=1000"]
    _service(stack, [*lighthouse, "--heartbeat_timeout_ms=3000", "--bind", f"127.0.0.1:{port}"])
    launcher = [python, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    # Its ranks use the launcher's store, which other launchers' have no need of here.
    shared = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    return lambda index: ([*launcher, str(_TORCHFT_WORKER), "--replica", str(index)], shared)


def _inprocess(python: str, stack: ExitStack, hosts: int) -> Host:
    command = [python, str(_WORKER), "--keeper", "nvidia_inprocess", "--loop"]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(hosts)}
    return lambda index: (command, {**shared, "RANK": str(index), "LOCAL_RANK": "0", "GROUP_RANK": str(index)})


def _loop(stack: ExitStack, hosts: int) -> Host:
    return _resilient_run(stack, hosts, "--loop")


def _elastic(hosts: int) -> list[str]:
    return [f"--nnodes=1:{hosts}", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-id=fewer"]


def _service(stack: ExitStack, command: list[str]) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(_end, process)


CONTENDERS: Final[dict[str, Callable[[ExitStack, int], Host]]] = {
    "torchrun": _torchrun,
    "resilient-run": _resilient_run,
    "resilient-run, loop": _loop,
}
PEERS: Final[dict[str, Callable[[str, ExitStack, int], Host]]] = {
    "dlrover": _dlrover,
    "torchft": _torchft,
    "nvidia_inprocess": _inprocess,
}


class _Run:
    """The launchers of one run, and what their workers print."""

    def __init__(self, stack: ExitStack, command: Host, hosts: int, options: list[str]) -> None:
        self._lines: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.launchers: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        stack.callback(lambda: [reader.join() for reader in readers])
        for index in range(hosts):
            words, environ = command(index)
            env = {**stack.enter_context(host(f"host{index}")), **environ}
            process = subprocess.Popen(
                [*words, *options], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
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

    def next(self, until_s: float) -> tuple[int, dict[str, Any]]:
        """Return the next line and the number of its host.

        Raises:
            queue.Empty: There is none by this time of the monotonic clock.
        """
        return self._lines.get(timeout=max(until_s - time.monotonic(), 0.0))


def measure(
    contender: Callable[[ExitStack, int], Host], *, hosts: int, state_mb: int, kill_after: int
) -> dict[str, float]:
    """Return what the loss of one host took and lost."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    options = ["--steps", "1000000", "--state-mb", str(state_mb)]
    try:
        with ExitStack() as stack:
            command = contender(stack, hosts)
            run = _Run(stack, command, hosts, [*options, "--directory", str(directory)])
            completed, until_s = 0, time.monotonic() + _LIMIT_S
            # The run may begin with fewer hosts, and grow; some go on without a host whose launcher has ended.
            while completed < kill_after:
                index, line = run.next(until_s)
                completed += index == hosts - 1 and line["ranks"] == hosts
            killed_s = time.monotonic()
            _kill(run.launchers[-1])
            last, firsts = line["step"], dict[int, dict[str, Any]]()
            while len(firsts) < hosts - 1:
                index, line = run.next(killed_s + _LIMIT_S)
                if line["ranks"] == hosts:
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
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="see peers/README.md")
    args = options.parse_args()
    peers = dict(peer.split("=", 1) for peer in args.peer)
    if others := sorted(peers.keys() - PEERS):
        options.error(f"--peer: {', '.join(others)} is none of {', '.join(PEERS)}")
    contenders = CONTENDERS | {name: partial(PEERS[name], python) for name, python in peers.items()}
    rows, seconds, lost = [], {}, {}
    stuck: dict[str, int] = {}
    for hosts in args.hosts:
        for state_mb in args.state_mb:
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
            for _ in range(args.rounds):
                for name, contender in contenders.items():
                    for trial in range(_TRIES):
                        try:
                            found = measure(contender, hosts=hosts, state_mb=state_mb, kill_after=args.kill_after)
                        except queue.Empty:
                            stuck[name] = stuck.get(name, 0) + 1
                            if trial == _TRIES - 1:
                                raise
                        else:
                            break
                    samples[name].append(found)
            case = f"{hosts} to {hosts - 1}, {state_mb} MiB"
            seconds[case] = {name: Summary.of(each["seconds"] for each in found) for name, found in samples.items()}
            lost[case] = {name: [int(each["steps_lost"]) for each in found] for name, found in samples.items()}
            base = seconds[case]["torchrun"].median
            for name, summary in seconds[case].items():
                rows.append([case, name, f"{summary:.2f}", f"{summary.median / base:.2f}"])
                rows[-1].append(", ".join(map(str, lost[case][name])))
    header = ["ranks, state of each", "launcher", "seconds", "of torchrun", "steps lost"]
    table("Loss of a host to the first step without it: median (p10..p90)", header, rows)
    for name, times in stuck.items():
        print(f"{name}: {times} run(s) did not begin or go on within {_LIMIT_S:.0f} s, and were begun again")
    write_json(
        args.json,
        question="fewer_hosts",
        parameters={name: getattr(args, name) for name in ("hosts", "state_mb", "rounds", "kill_after")},
        results={"seconds": seconds, "steps_lost": lost, "stuck": stuck},
    )


if __name__ == "__main__":
    main()
