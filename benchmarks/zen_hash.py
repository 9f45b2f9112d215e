"""What does the hierarchical hash cost by its memory and its tries, and one hash without them (Zen, Fig. 3.8, 3.16)?

A tensor with non-zeros anywhere, in 16 partitions, on one thread (CPU time). r1 is the memory for parallel hashing over
the non-zeros (the thesis: 2), k the tries before serial memory (the thesis: 3). The thesis measured GPUs, where a
spilled index waits for others; on one thread it does not. The strawman (Algorithm 3.1) has one hash and one try into a
memory with places over |G|, the elements of the tensor: what collides is lost, and finding what is there reads the
whole memory. It is compiled as the others are, and as they do, it allocates its memory in each call. `nonzero()` of a
memory that is there, which the thesis times in Figure 3.8, stands beside it.

    python benchmarks/zen_hash.py --json FILE.json
"""

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from hash_kernels import HashMemory, hash_cpu
from numpy.typing import NDArray
from report import Summary, parser, table, write_json
from torch import Tensor

from resilient_run.comm.ops.coo import coo_encode
from resilient_run.comm.ops.kernels import cpu_kernel
from resilient_run.comm.ops.spread import Spread, murmur_cpu
from resilient_run.comm.zen.histogram import partition

PARTS: Final = 16
DENSITIES: Final = (0.01, 0.05, 0.2)
MEMORIES: Final = (1.0, 2.0, 4.0, 8.0)
TRIES: Final = (1, 2, 3, 4)
STRAWMAN: Final = (0.5, 1.0, 2.0, 4.0, 8.0)


@cpu_kernel
def write(indices: NDArray[np.int32], places: NDArray[np.int32]) -> None:
    """Write index + 1 to the place of each index, over what was there."""
    for i in range(indices.size):
        places[(murmur_cpu(indices[i], 0) * places.size) >> 32] = indices[i] + 1


def filled(indices: Tensor, places: int) -> Tensor:
    """Return the memory of Algorithm 3.1, partition by partition; 0 where nothing is."""
    memory = torch.zeros(places, dtype=torch.int32)
    write(indices.numpy(), memory.numpy())
    return memory


def strawman(dense: Tensor, indices: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices and values that Algorithm 3.1 keeps, and where each of the `PARTS` partitions ends."""
    found = coo_encode(filled(indices, places).view(torch.float32))
    ends = torch.arange(1, PARTS + 1) * places // PARTS
    kept = found.values.view(torch.int32) - 1
    return kept, dense[kept], torch.searchsorted(found.indices, ends)


def thread_s(run: Callable[[], object]) -> float:
    """Return the time that this thread computed."""
    began_s = time.thread_time()
    run()
    return time.thread_time() - began_s


def in_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, Summary]:
    """Return name → seconds; the first turn, which compiles and allocates, does not count."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            seconds = thread_s(run)
            if turn:
                taken[name].append(seconds)
    return {name: Summary.of(each) for name, each in taken.items()}


def measure(elements: int, density: float, repeats: int) -> dict[str, dict[str, Any]]:
    """Return what was hashed, by which memory → seconds, and the share of non-zeros that spilled or was lost."""
    random = torch.Generator().manual_seed(0)
    dense = torch.randn(elements, generator=random) * (torch.rand(elements, generator=random) < density)
    indices, values = coo_encode(dense)
    spread = Spread(numel=elements, parts=PARTS)
    per_part = indices.numel() / PARTS
    memories = {f"r1 {times:g}, k 3": (times, 3) for times in MEMORIES}
    memories |= {f"r1 2, k {tries}": (2.0, tries) for tries in TRIES}
    runs: dict[str, Callable[[], object]] = {"exact partition": lambda: partition(indices, values, spread)}
    share = {"exact partition": 0.0}
    for name, (times, tries) in memories.items():
        slots = max(1, round(times * per_part))
        # Serial memory for all, so that it is never doubled and each call costs the same.
        memory = HashMemory(slots=slots, serial=max(slots // 10, round(per_part)), rounds=tries)
        runs[name] = lambda memory=memory: hash_cpu(dense, indices, spread, memory)
        share[name] = hash_cpu(dense, indices, spread, memory).spilled / indices.numel()
    for times in STRAWMAN:
        name, places = f"strawman, {times:g} |G|", int(times * elements)
        memory_of = filled(indices, places)
        share[name] = 1 - int(memory_of.count_nonzero()) / indices.numel()
        runs[name] = lambda places=places: strawman(dense, indices, places)
        runs[f"nonzero() of {times:g} |G|"] = lambda memory_of=memory_of: memory_of.nonzero()
    found = in_turns(runs, repeats)
    return {name: {"seconds": found[name], "spilled_or_lost": share.get(name)} for name in runs}


def main() -> None:
    """Measure, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--elements", type=int, default=10_000_000)
    arguments.add_argument("--repeats", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    results = {density: measure(options.elements, density, options.repeats) for density in DENSITIES}
    for density, found in results.items():
        table(
            f"{options.elements:,} elements, density {density:.0%}, {PARTS} partitions, one thread",
            ("hash", "ms", "spilled or lost"),
            [
                (
                    name,
                    f"{1e3 * each['seconds'].median:.1f}",
                    "" if each["spilled_or_lost"] is None else f"{each['spilled_or_lost']:.2%}",
                )
                for name, each in found.items()
            ],
        )
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={"elements": options.elements, "parts": PARTS, "repeats": options.repeats},
        results={str(density): each for density, each in results.items()},
    )


if __name__ == "__main__":
    main()
