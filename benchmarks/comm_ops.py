"""How fast are the sparse operations beside torch doing the same, and the partition beside the hierarchical hash?

On the CPU each operation and its torch equivalent run in turns, on one thread each (CPU time), for densities of 0.1 to
20 %; the last line of each density has the partition beside the hash. With a GPU: hash and partition of a tensor as
large as DeepFM's embeddings (214M elements) against the time that moving its bytes takes at the bandwidth of the
memory: dense elements read once, entries written once.

    python benchmarks/comm_ops.py --json benchmarks/results/comm-ops.json
"""

import time
from collections.abc import Callable
from typing import Any

import report
import torch
from hash_kernels import HashMemory, hash_cpu, hash_op
from torch import Tensor

from resilient_run.comm.ops.bitmap import bitmap_encode, bitmap_indices
from resilient_run.comm.ops.block import block_encode
from resilient_run.comm.ops.coo import coo_decode, coo_encode
from resilient_run.comm.ops.scatter import coo_add, scatter_add
from resilient_run.comm.ops.spread import Spread
from resilient_run.comm.ops.topk import sampled_topk, topk
from resilient_run.comm.zen.histogram import partition

Run = Callable[[], Any]
GPU_NUMEL = 214_000_000
GPU_DENSITIES = (0.01, 0.05, 0.2)


def sparse(numel: int, density: float, seed: int, device: str = "cpu") -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    present = torch.rand(numel, generator=random, device=device) < density
    return torch.where(present, torch.randn(numel, generator=random, device=device), 0)


def torch_topk(gradient: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = gradient.abs().topk(k, sorted=False).indices.sort().values
    return found, gradient[found]


def torch_sampled(gradient: Tensor, k: int) -> tuple[Tensor, Tensor]:
    magnitudes = gradient.abs()
    samples = magnitudes[torch.randint(gradient.numel(), (gradient.numel() // 100,))]
    threshold = samples.topk(max(1, k // 100), sorted=True).values[-1]
    found = (magnitudes >= threshold).nonzero().view(-1)
    return found, gradient[found]


def pairs(numel: int, density: float, parts: int) -> dict[str, tuple[Run, Run]]:
    """Return operation → (ours, what it is compared with)."""
    gradient, other, full = sparse(numel, density, 1), sparse(numel, density, 2), torch.randn(numel)
    indices, values = coo_encode(gradient)
    theirs = coo_encode(other)
    wide = indices.long()
    spread = Spread(numel=numel, parts=parts)
    parts_of = partition(indices, values, spread)
    own, length = parts_of.places[: parts_of.counts[0]], spread.size(0)
    bitmap = bitmap_encode(own, length)
    memory = HashMemory.of(spread, density)
    k = int(numel * density)
    sums = [
        torch.sparse_coo_tensor(i[None], v, (numel,), check_invariants=False).coalesce()
        for i, v in ((indices, values), theirs)
    ]

    def torch_coo() -> tuple[Tensor, Tensor]:
        found = gradient.nonzero().view(-1)
        return found, gradient[found]

    return {
        "coo_encode": (lambda: coo_encode(gradient), torch_coo),
        "coo_decode": (
            lambda: coo_decode(indices, values, numel),
            lambda: torch.zeros(numel).index_copy_(0, wide, values),
        ),
        "scatter_add": (lambda: scatter_add(other, indices, values), lambda: other.index_add_(0, wide, values)),
        "coo_add": (lambda: coo_add(indices, values, *theirs), lambda: (sums[0] + sums[1]).coalesce()),
        "bitmap_encode": (lambda: bitmap_encode(own, length), lambda: bitmap_encode.on("reference")(own, length)),
        "bitmap_indices": (
            lambda: bitmap_indices(bitmap, length),
            lambda: bitmap_indices.on("reference")(bitmap, length),
        ),
        "block_encode": (lambda: block_encode(gradient), lambda: block_encode.on("reference")(gradient)),
        "topk": (lambda: topk(full, k), lambda: torch_topk(full, k)),
        "sampled_topk": (lambda: sampled_topk(full, k, seed=1), lambda: torch_sampled(full, k)),
        "partition": (
            lambda: partition(indices, values, spread),
            lambda: partition.on("reference")(indices, values, spread),
        ),
        "partition | hash": (
            lambda: partition(indices, values, spread),
            lambda: hash_cpu(gradient, indices, spread, memory),
        ),
    }


def seconds(run: Run) -> float:
    """Return the time that this thread computed: others of the machine do not count."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def gpu_seconds(run: Run) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def on_cpu(sizes: list[int], densities: list[float], parts: int, repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for numel in sizes:
        rows = []
        for density in densities:
            for name, (ours, theirs) in pairs(numel, density, parts).items():
                ours(), theirs()
                taken = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
                summaries = [report.Summary.of(column) for column in zip(*taken, strict=True)]
                ratio = report.Summary.of(slow / fast for fast, slow in taken)
                milliseconds = [report.Summary.of(1e3 * s for s in column) for column in zip(*taken, strict=True)]
                rows.append([name, f"{density:.1%}", *(f"{each:.2f}" for each in milliseconds), f"{ratio:.1f}"])
                results[f"{numel} {density} {name}"] = {"ours_s": summaries[0], "other_s": summaries[1], "ratio": ratio}
        header = ["operation", "density", "ours, ms", "torch (or hash), ms", "times as fast"]
        report.table(f"{numel:,} elements, one thread, {parts} parts", header, rows)
    return results


def on_gpu(parts: int, repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    rows = []
    copied = torch.empty(GPU_NUMEL, device="cuda")
    copy_s = min(gpu_seconds(copied.clone) for _ in range(10))
    bytes_per_s = 2 * copied.nbytes / copy_s
    spread = Spread(numel=GPU_NUMEL, parts=parts)
    for density in GPU_DENSITIES:
        gradient = sparse(GPU_NUMEL, density, 1, "cuda")
        entries = coo_encode(gradient)
        memory = HashMemory.of(spread, density)
        floor_s = (gradient.nbytes + entries.indices.nbytes + entries.values.nbytes) / bytes_per_s
        runs: dict[str, Run] = {
            "coo_encode": lambda g=gradient: coo_encode(g),
            "partition": lambda e=entries: partition(*e, spread),
            "coo_encode + partition": lambda g=gradient: partition(*coo_encode(g), spread),
            "hierarchical hash": lambda g=gradient, e=entries, m=memory: hash_op(g, e.indices, spread, m),
        }
        for name, run in runs.items():
            gpu_seconds(run)
            taken = report.Summary.of(gpu_seconds(run) for _ in range(repeats))
            rows.append([name, f"{density:.0%}", f"{1e3 * taken.median:.2f}", f"{taken.median / floor_s:.2f}"])
            results[f"{density} {name}"] = {"taken_s": taken, "floor_s": floor_s}
    report.table(f"GPU, {GPU_NUMEL:,} elements", ["operation", "density", "ms", "of the floor"], rows)
    return results


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.2])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    # Kernels use one thread, as they run beside training.
    torch.set_num_threads(1)
    results = {"cpu": on_cpu(args.sizes, args.densities, args.parts, args.repeats)}
    if torch.cuda.is_available():
        results["gpu"] = on_gpu(args.parts, args.repeats)
    question = "How fast are the sparse operations beside torch, and the partition beside the hierarchical hash?"
    parameters = {"parts": args.parts, "repeats": args.repeats, "device": "cuda" if "gpu" in results else "cpu"}
    report.write_json(args.json, question=question, parameters=parameters, results=results)


if __name__ == "__main__":
    main()
