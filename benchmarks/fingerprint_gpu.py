"""What does `step()` cost the stream of training where the state is on a GPU?

A state of several tensors, odd sizes among them, is read in four ways, in turns, timed by events of the stream:

- hash: what `step()` puts on the stream of training, the fingerprints of all its bytes (`ckpt/capture/device.py`);
- read: `torch.sum` of each tensor, which reads the state once. The goal is a hash in at most twice that time;
- clone: a copy of the state in the GPU's memory, what a step would cost that only copies;
- staged: a copy to page-locked memory of the host on the stream of training, what `step()` does without the kernel.

Beside them: how long the thread of training is in the call; and the two parts that run behind training, one thread
each: the proof, which hashes what arrived on the host with the same function, and XXH3-64, the slot's checksums. The
fingerprints of both sides are compared before anything is timed.

    python benchmarks/fingerprint_gpu.py --json benchmarks/results/fingerprint-gpu.json
"""

import sys
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import xxhash
from report import Summary, parser, table, write_json
from torch import Tensor

from resilient_run.ckpt.capture.device import CudaDevice, DeviceLeaves
from resilient_run.ckpt.format.slot import CHUNK_BYTES

TENSORS = 64
ODD_BYTES = (0, 1, 2, 3)


def on_stream(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `work` takes on the current stream, and in this thread."""
    torch.cuda.synchronize()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    started_s = time.perf_counter()
    work()
    called_s = time.perf_counter() - started_s
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1e3, called_s


def on_host(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def build(total_bytes: int, device: torch.device) -> dict[int, Tensor]:
    each = total_bytes // TENSORS
    sizes = [each + ODD_BYTES[index % len(ODD_BYTES)] for index in range(TENSORS)]
    return {index: torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for index, size in enumerate(sizes)}


def measure(gib: float, repetitions: int) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    leaves = build(int(gib * 2**30), device)
    ends = list(accumulate(-(-leaf.nbytes // 64) * 64 for leaf in leaves.values()))
    starts = [0, *ends[:-1]]
    places = {index: (start, start + leaves[index].nbytes) for index, start in zip(leaves, starts, strict=True)}
    plan = DeviceLeaves(CudaDevice(device), places)
    payload = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=True)
    chunks = range(-(-len(payload) // CHUNK_BYTES))
    # Floats are what torch sums fastest; what they are does not matter.
    floats = [leaf[: leaf.nbytes // 4 * 4].view(torch.float32) for leaf in leaves.values()]
    clones = [torch.empty_like(leaf) for leaf in leaves.values()]

    def stage() -> None:
        for index, (start, end) in places.items():
            payload[start:end].copy_(leaves[index], non_blocking=True)

    capture = plan.fingerprint(leaves)
    if capture.begin(payload) is not None:
        raise AssertionError("no leaf has moved")
    capture.finish()
    if any(capture.differs(payload, chunk) is not None for chunk in chunks):
        raise SystemExit("the fingerprints of GPU and CPU differ: nothing was measured")
    payload[len(payload) // 2] ^= 1
    if all(capture.differs(payload, chunk) is None for chunk in chunks):
        raise SystemExit("a flipped bit was not found: nothing was measured")
    payload[len(payload) // 2] ^= 1

    ways: dict[str, Callable[[], object]] = {
        "hash": lambda: plan.fingerprint(leaves),
        "read": lambda: [values.sum() for values in floats],
        "clone": lambda: [clone.copy_(leaf) for clone, leaf in zip(clones, leaves.values(), strict=True)],
        "staged": stage,
    }
    behind: dict[str, Callable[[], object]] = {
        "proof": lambda: [capture.differs(payload, chunk) for chunk in chunks],
        "xxh3": lambda: [xxhash.xxh3_64_intdigest(part.numpy()) for part in payload.split(CHUNK_BYTES)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "call", *behind)}
    for repetition in range(repetitions + 2):
        for name, work in ways.items():
            stream_s, called_s = on_stream(work)
            if repetition >= 2:
                seconds[name].append(stream_s)
                if name == "hash":
                    seconds["call"].append(called_s)
    for _ in range(3):
        for name, work in behind.items():
            seconds[name].append(on_host(work))
    return {"device": torch.cuda.get_device_name(device), "bytes": sum(leaf.nbytes for leaf in leaves.values())} | {
        "seconds": {name: Summary.of(values) for name, values in seconds.items()}
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=4.0, help="size of the state (default: %(default)s)")
    arguments.add_argument("--repetitions", type=int, default=30, help="(default: %(default)s)")
    args = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("fingerprint_gpu.py measures a GPU, and torch finds none here")
    found = measure(args.gib, args.repetitions)
    seconds, size = found["seconds"], found["bytes"]
    read_s = seconds["read"].median
    where = {"call": "training's thread", "proof": "behind, 1 thread", "xxh3": "behind, 1 thread"}
    rows = [
        [
            name,
            where.get(name, "training's stream"),
            f"{summary.median * 1e3:.3f}",
            "" if name == "call" else f"{size / summary.median / 1e9:.0f}",
            f"{summary.median / read_s:.2f}",
        ]
        for name, summary in seconds.items()
    ]
    table(
        f"{size / 2**30:.1f} GiB on {found['device']} (goal: hash at most 2.00 x read)",
        ("", "where", "ms", "GB/s", "x read"),
        rows,
    )
    write_json(
        args.json,
        question="What does a fingerprint in step() cost the stream of training on a GPU?",
        parameters={"gib": args.gib, "repetitions": args.repetitions, "tensors": TENSORS},
        results=found,
    )


if __name__ == "__main__":
    main()
