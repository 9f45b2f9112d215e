"""The workers of one job on the hosts of a laboratory network, started as torchrun would start them.

A few cores emulate all hosts. So no worker that wakes up may push one of another host from its core: where a sender
loses it within a send, Gloo's thread beside it spins until the sender goes on, and rounds of short messages cost more
than on hosts with cores of their own. Linux lets a batch job wake up beside others, not before them.
"""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from delayed_hosts import DelayedHosts
from netlab import NetLab

from resilient_run.daemon.trust.secret import make_key

PAYLOAD = 0.956
"""Of the rate of a link, at most: headers take the rest."""
_END_TIMEOUT_S = 60
_PUSHING_NOBODY = ("chrt", "--batch", "0")


def key_in(directory: Path) -> Path:
    """Return the file in `directory` with the run key that all hosts of its runs are given, made at first use."""
    path = directory / "run.key"
    if not path.exists():
        make_key(path)
    return path


def lines_of(
    lab: NetLab | DelayedHosts, command: Sequence[str], *, per_host: int = 1, port: int = 29500
) -> Iterator[str]:
    """Run `command` as every rank of a job and yield the lines of rank 0, as they come.

    Args:
        lab: Its hosts have consecutive ranks each.
        command: Program and arguments; finds the modules of this folder.
        per_host: Ranks on each host.
        port: Where rank 0 listens; another one for each job of a lab.

    Raises:
        RuntimeError: A worker failed.
    """
    workers: list[subprocess.Popen[str]] = []
    try:
        for place, host in enumerate(lab.hosts):
            for local in range(per_host):
                env = {
                    "RANK": str(place * per_host + local),
                    "WORLD_SIZE": str(len(lab.hosts) * per_host),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(per_host),
                    "MASTER_ADDR": lab.hosts[0].address,
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(Path(__file__).parent),
                }
                printed = subprocess.DEVNULL if workers else subprocess.PIPE
                workers.append(host.popen([*_PUSHING_NOBODY, *command], env=env, stdout=printed, text=True))
        assert workers[0].stdout is not None
        yield from workers[0].stdout
        codes = [worker.wait(_END_TIMEOUT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    if any(codes):
        raise RuntimeError(f"{' '.join(command)[:200]} on {len(lab.hosts)} hosts: exit codes {codes}")
