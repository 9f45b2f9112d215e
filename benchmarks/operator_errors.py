"""How long does an operator wait for the message about an etcd that the launcher cannot use?

From the command to its end, with one host of two, for each fault: nothing listens at the port; no host has the name;
nothing answers at the address, or at each of three; what listens says nothing; TLS with another authority; no TLS where
etcd wants it; a wrong password. Each run must end with exactly one message and exit code 1. The floor is a process that
imports torch's launcher, which reads the command line. Goal: at most 5 s.
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jobs import RESILIENT_RUN, host
from report import Summary, parser, table, write_json

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from certificates import make_certificates
from etcd_process import EtcdProcess, kept_ports

FLOOR = "floor: import of torch's launcher"
GOAL_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What the launcher is told, and what its message has to say."""

    endpoint: str
    message: str
    conf: str = ""
    environ: dict[str, str] = field(default_factory=dict)


@contextmanager
def faults(directory: Path) -> Iterator[dict[str, Fault]]:
    """Yield the faults by name, with the servers that they need."""
    make_certificates(directory)
    tls = (f"--cert-file={directory / 'server.pem'}", f"--key-file={directory / 'server.key'}")
    encrypted = EtcdProcess(directory / "encrypted", *tls, scheme="https")
    guarded = EtcdProcess(directory / "guarded")
    with ExitStack() as stack:
        for etcd in (encrypted, guarded):
            stack.callback(etcd.kill)
            etcd.start()
        guarded.enable_auth("secret")
        silent = stack.enter_context(_silence())
        (port,) = kept_ports(1)
        absent = "cannot reach etcd at"
        yield {
            "wrong port": Fault(endpoint=f"127.0.0.1:{port}", message=absent),
            "no such host": Fault(endpoint="no-such-etcd.invalid:2379", message=absent),
            "silent address": Fault(endpoint=silent[0], message=absent),
            "three silent addresses": Fault(endpoint=",".join(silent), message=absent),
            "another authority": Fault(
                endpoint=encrypted.endpoint, message=absent, conf=f"cacert={directory / 'other.pem'}"
            ),
            "no TLS": Fault(endpoint=encrypted.endpoint, message=absent),
            "wrong password": Fault(
                endpoint=guarded.endpoint,
                message="etcd refused access",
                environ={"RESILIENT_ETCD_USER": "trainer", "RESILIENT_ETCD_PASSWORD": "wrong"},
            ),
        }


@contextmanager
def _silence() -> Iterator[tuple[str, ...]]:
    """Yield three addresses at which nothing is answered: a full backlog, to which the kernel adds no connection."""
    with ExitStack() as stack:
        addresses = []
        for _ in range(3):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
        yield tuple(addresses)


def measure(command: Sequence[str], env: dict[str, str], wanted: str) -> float:
    """Return seconds from the command to its end.

    Raises:
        RuntimeError: It did not end as it must.
    """
    start_s = time.monotonic()
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    took_s = time.monotonic() - start_s
    errors = [line for line in done.stdout.splitlines() if line.startswith("Error: ")]
    if wanted and (done.returncode != 1 or len(errors) != 1 or wanted not in errors[0] or "Traceback" in done.stdout):
        raise RuntimeError(f"ended with {done.returncode}, not with one message {wanted!r}:\n{done.stdout}")
    return took_s


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repetitions", type=int, default=5)
    args = options.parse_args()

    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, faults(Path(name)) as known:
        script = Path(name) / "train.py"
        script.write_text("raise SystemExit('no worker must start')\n")
        launcher = [*RESILIENT_RUN, "--nnodes", "2", "--rdzv-backend", "etcd-v3", "--rdzv-id", "operator-errors"]
        for _ in range(args.repetitions):
            with host() as env:
                floor = [sys.executable, "-P", "-c", "import torch.distributed.run"]
                samples.setdefault(FLOOR, []).append(measure(floor, env, ""))
                for case, fault in known.items():
                    told = ["--rdzv-endpoint", fault.endpoint, *(["--rdzv-conf", fault.conf] if fault.conf else [])]
                    took_s = measure([*launcher, *told, str(script)], {**env, **fault.environ}, fault.message)
                    samples.setdefault(case, []).append(took_s)

    results = {case: Summary.of(values) for case, values in samples.items()}
    rows = [[case, f"{found:.2f}", f"{max(samples[case]):.2f}"] for case, found in results.items()]
    table("Command to its end, seconds: median (p10..p90)", ["fault", "seconds", "slowest"], rows)
    missed = [case for case, values in samples.items() if max(values) > GOAL_S]
    print(f"\ngoal of {GOAL_S:g} s missed by: {', '.join(missed) or 'none'}")
    write_json(args.json, question="operator_errors", parameters={"repetitions": args.repetitions}, results=results)


if __name__ == "__main__":
    main()
