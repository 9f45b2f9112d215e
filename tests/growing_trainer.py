"""A script whose state changes its size: `growing_trainer.py GATE RANK:STEP:MIB…`; it ends once the gate is a file.

No step is made from that on which GATE.held has, if it is a file.
"""

import json
import os
import sys
import time
from math import inf
from pathlib import Path

import torch

from resilient_run import Checkpointer


class Grown:
    """A state of random numbers that only its step and its rank determine."""

    def __init__(self, sizes: dict[int, int], rank: int) -> None:
        self.sizes, self.rank = sizes, rank
        self.make(0)

    def make(self, step: int) -> None:
        mib = self.sizes[max(first for first in self.sizes if first <= step)]
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        self.state = torch.rand(mib << 18, generator=generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state["state"]


def held(gate: Path) -> float:
    """Return the step that is not made for now."""
    try:
        return float(gate.with_suffix(".held").read_text() or "inf")
    except FileNotFoundError:
        return inf


def main() -> None:
    gate, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    rows = [tuple(map(int, text.split(":"))) for text in sys.argv[2:]]
    grown = Grown({step: mib for whose, step, mib in rows if whose == rank}, rank)
    with Checkpointer(grown=grown) as checkpointer:
        begun = checkpointer.restore()
        if begun:
            found = grown.state
            grown.make(begun)
            assert torch.equal(found, grown.state), f"rank {rank} restored another state at step {begun}"
        print(json.dumps({"restored": begun, "rank": rank, "pid": os.getpid(), "time": time.time()}), flush=True)
        for step in range(begun + 1, 100_000):
            while step >= held(gate):
                time.sleep(0.01)
            grown.make(step)
            time.sleep(0.05)
            checkpointer.step(step)
            if gate.exists():
                break


if __name__ == "__main__":
    main()
