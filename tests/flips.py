"""Flip a bit of a live tensor again and again: each is found, and training ends as if none had been flipped.

    python tests/flips.py --flips 60 --seed 1 --json flips.json

Two ranks of DDP train the GPT example with `detect.corruption = "rollback"`. A rank and a seed are drawn for each flip;
`resilient-inject` flips a bit of any tensor of the model or the optimizer with them, before the next `step()`. It is
found when a recovery follows whose cause is a corruption of a later step. A job with its flips ends with the parameters
and losses of an undisturbed run.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster import EXAMPLE, TINY, wait_until
from test_corruption import Job, assert_same_end, undisturbed

from resilient_run.launcher.etcd_server import EmbeddedEtcd

STEPS = 600
FLIPS_PER_JOB = 10
SCRIPT = [str(EXAMPLE), "--steps", str(STEPS), "--seed", "7", "--json", *TINY]
CONFIG = """
[detect]
corruption = "rollback"
[root]
# Flips are meant, each at a later step.
stalled_recoveries = 100
crash_loop_failures = 100
quarantine_failures = 100000
"""


def strike(job: Job, chance: random.Random) -> dict[str, Any]:
    """Flip one bit, and return what was found of it."""
    (host,) = job.hosts
    before, rank, seed = len(host.recoveries()), chance.randrange(2), chance.randrange(1 << 32)
    struck = job.flip(rank, "", seed=seed)
    (*_, event) = wait_until(
        lambda: host.recoveries()[before:], timeout_s=60, what=f"what follows a flip of rank {rank}", host=host
    )
    found = re.search(r"corruption: step (\d+): .* differ, .* right, in (.+), which they had in common", event["cause"])
    assert event["kind"] == "corruption", event
    assert found is not None, event
    assert int(found[1]) >= struck, event
    wait_until(lambda: host.committed_step() > event["restored_step"], timeout_s=60, what="a commit", host=host)
    steps_later = int(found[1]) - struck
    return {
        "rank": rank,
        "seed": seed,
        "after_step": struck,
        "found_after_steps": steps_later,
        "in": found[2],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    chance, flips, began_s = random.Random(options.seed), list[dict[str, Any]](), time.monotonic()
    with EmbeddedEtcd() as etcd, tempfile.TemporaryDirectory(prefix="flips-", dir="/tmp") as directory:
        reference = undisturbed(Path(directory, "straight"), SCRIPT, 2)
        for number in range(-(-options.flips // FLIPS_PER_JOB)):
            root = Path(directory, f"flips-{number}")
            root.mkdir()
            job = Job(root, etcd.endpoint)
            try:
                job.launch(SCRIPT, hosts=1, nproc=2, config=CONFIG)
                job.learn()
                for _ in range(min(FLIPS_PER_JOB, options.flips - len(flips))):
                    flips.append(strike(job, chance))
                    print(f"{len(flips)}: {flips[-1]}", flush=True)
                assert job.wait() == [0], job.output
                assert_same_end(job, reference)
            finally:
                job.cluster.close()
    found = {"seed": options.seed, "seconds": round(time.monotonic() - began_s), "found": len(flips), "flips": flips}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
