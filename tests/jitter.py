"""Run pytest while its processes stand still at random moments, as on an overloaded machine: finds races of tests.

    python tests/jitter.py --pause 0.3 -- tests/test_recovery.py -n 2

Every process of the session may be stopped: daemons, launchers, workers, etcd and pytest's own. A pause is far below
every lease and deadline of the project, so a test that fails was lucky before. The one exception: a test that stops a
process by itself may find that it goes on, because nobody can tell whose SIGSTOP it was.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import click

_MARK = "RESILIENT_TEST_JITTER"


def _processes() -> list[int]:
    """Return the processes of this session, found by the environment that they were started with."""
    mark, found = f"{_MARK}={os.getpid()}\0".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RS"
    except OSError:
        return False


def _disturb(ended: threading.Event, chance: random.Random, pause_s: float, rested_s: dict[int, float]) -> None:
    """Stop one process after the other until `ended`; each runs for three times as long as it was stopped."""
    while not ended.is_set():
        found = [pid for pid in _processes() if rested_s.get(pid, 0) < time.monotonic() and _runs(pid)]
        if not found:
            time.sleep(0.02)
            continue
        pid, this_s = chance.choice(found), chance.uniform(0, pause_s)
        rested_s[pid] = time.monotonic() + 4 * this_s
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(this_s)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--pause", "pause_s", type=click.FloatRange(0.001, 1), default=0.3, help="Longest pause, seconds.")
@click.option("--seed", type=int, default=1)
@click.option("--at-once", type=click.IntRange(1, 8), default=2, help="Processes that may stand still together.")
@click.argument("arguments", nargs=-1)
def main(pause_s: float, seed: int, at_once: int, arguments: tuple[str, ...]) -> None:
    """Run pytest with ARGUMENTS and disturb it; ends with its exit code."""
    environment = {**os.environ, _MARK: str(os.getpid())}
    pytest = subprocess.Popen([sys.executable, "-P", "-m", "pytest", *arguments], env=environment)
    ended = threading.Event()
    rested_s: dict[int, float] = {}
    threads = [
        threading.Thread(target=_disturb, args=(ended, random.Random(seed + number), pause_s, rested_s))
        for number in range(at_once)
    ]
    for thread in threads:
        thread.start()
    code = pytest.wait()
    ended.set()
    for thread in threads:
        thread.join()
    sys.exit(code)


if __name__ == "__main__":
    main()
