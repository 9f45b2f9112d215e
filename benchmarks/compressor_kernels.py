"""How long does each compressor take, beside moving its bytes through the memory and beside torch doing the same?

The floor of a compression is reading the tensor and writing the message, that of a decompression reading the message
and writing the tensor, at the bandwidth that `copy_` of a tensor of that size reaches in turns with it. That holds for
Random-k, too: it looks at every element, because no inf or nan may be lost. A result is a new tensor, whose memory the
system has to find first: what that takes is in the time of `clone`. On the CPU all is CPU time of one thread, as
kernels run beside training; a GPU is measured where there is one.

    python benchmarks/compressor_kernels.py --json benchmarks/results/compressor-kernels.json
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import report
import torch
from comm_ops import Run, gpu_seconds, seconds, torch_sampled, torch_topk
from torch import Tensor

from resilient_run.comm.compress.compressors import NAMES, named
from resilient_run.comm.net.transport import from_bytes, to_bytes
from resilient_run.comm.ops.bitmap import bitmap_bytes, unpacked
from resilient_run.comm.ops.quantize import BLOCK, DTYPES, quantize, scale_count
from resilient_run.comm.ops.random import random_indices
from resilient_run.comm.ops.signs import signs_encode

SEED = 7
SIZES_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


class Case(NamedTuple):
    """One direction of a compressor: ours, torch doing the same, and the bytes that it cannot avoid to move."""

    ours: Run
    theirs: Run
    moved_bytes: int


def torch_coders(name: str, dense: Tensor, k: int) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    """Return compression of `dense` to a message and decompression of one, in torch's own operations."""
    numel, dtype = dense.numel(), dense.dtype

    def place(message: Tensor) -> Tensor:
        count = message.numel() // (4 + dtype.itemsize)
        indices, values = from_bytes(message, (torch.int32, count), (dtype, count))
        return torch.zeros(numel, dtype=dtype, device=dense.device).index_copy_(0, indices.long(), values)

    def signs(levels: slice) -> Tensor:
        found = signs_encode.on("reference")(dense)
        return to_bytes(found.means[levels], found.bitmap)

    def unpack(message: Tensor, count: int) -> Tensor:
        means, bitmap = from_bytes(message, (torch.float32, count), (torch.uint8, bitmap_bytes(numel)))
        levels = means if count == 2 else torch.cat([means, -means])
        return levels[unpacked(bitmap)[:numel].long()]

    if name in ("topk", "dgc"):
        select = torch_topk if name == "topk" else torch_sampled

        def compress() -> Tensor:
            indices, values = select(dense, k)
            return to_bytes(indices.int(), values)

        return compress, place
    if name == "randomk":
        return (
            lambda: to_bytes(dense[random_indices.on("reference")(dense, numel, k, seed=SEED)]),
            lambda message: torch.zeros(numel, dtype=dtype, device=dense.device).index_copy_(
                0, random_indices.on("reference")(dense, numel, k, seed=SEED).long(), from_bytes(message, (dtype, k))[0]
            ),
        )
    if name in ("efsignsgd", "onebit"):
        levels, count = (slice(2, 3), 1) if name == "efsignsgd" else (slice(2), 2)
        return lambda: signs(levels), lambda message: unpack(message, count)
    if name in ("int8", "fp8"):
        kind: Any = name

        def widen(message: Tensor) -> Tensor:
            scales, codes = from_bytes(message, (torch.float32, scale_count(numel, BLOCK)), (DTYPES[kind], numel))
            return (codes.float() * scales.repeat_interleave(BLOCK)[:numel]).to(dtype)

        def narrow() -> Tensor:
            codes, scales = quantize.on("reference")(dense, kind)
            return to_bytes(scales, codes)

        return narrow, widen
    half = torch.float16 if name == "fp16" else torch.bfloat16
    return lambda: to_bytes(dense.to(half)), lambda message: from_bytes(message, (half, numel))[0].to(dtype)


def cases(name: str, dense: Tensor, density: float) -> dict[str, Case]:
    """Return compression and decompression of a 1-D tensor."""
    compressor = named(name, density=density)
    numel, dtype = dense.numel(), dense.dtype
    k = max(1, round(numel * density))
    message = compressor.compress(dense, seed=SEED)
    compress, decompress = torch_coders(name, dense, k)
    return {
        "compress": Case(
            lambda: compressor.compress(dense, seed=SEED),
            compress,
            dense.nbytes + message.nbytes,
        ),
        "decompress": Case(
            lambda: compressor.decompress(message, numel, dtype, seed=SEED),
            lambda: decompress(message),
            message.nbytes + dense.nbytes,
        ),
    }


def measure(device: str, sizes_bytes: list[int], density: float, repeats: int) -> dict[str, Any]:
    """Time, print and return every compressor at every size."""
    results: dict[str, Any] = {}
    for size_bytes in sizes_bytes:
        dense = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(1)).to(device)
        rows = []
        for name in NAMES:
            for direction, case in cases(name, dense, density).items():
                found = in_turns(case, dense, repeats)
                results[f"{size_bytes} {name} {direction}"] = found
                ours_s: report.Summary = found["ours_s"]
                rows.append(
                    [
                        f"{name} {direction}",
                        " ".join(f"{1e3 * second:.3f}" for second in (ours_s.p10, ours_s.median, ours_s.p90)),
                        *(f"{1e3 * found[each].median:.3f}" for each in ("torch_s", "clone_s")),
                        f"{1e3 * found['floor_s']:.3f}",
                        f"{ours_s.median / found['floor_s']:.1f}",
                        f"{found['torch_over_ours'].median:.1f}",
                    ]
                )
        header = ["operation", "p10, median, p90, ms", "torch", "clone", "floor", "over floor", "torch over ours"]
        report.table(f"{size_bytes >> 10} KiB of float32 on {device}, density {density:g}", header, rows)
    return results


def in_turns(case: Case, dense: Tensor, repeats: int) -> dict[str, Any]:
    """Time ours, torch's, a clone and a copy of `dense` in turns."""
    clock = seconds if dense.device.type == "cpu" else gpu_seconds
    # So many calls together that the grain of the clock does not show.
    calls = max(1, (1 << 20) // dense.nbytes)
    copied = torch.empty_like(dense)
    runs: tuple[Run, ...] = (case.ours, case.theirs, dense.clone, lambda: copied.copy_(dense))
    for run in runs:
        run()
    taken = [[clock(lambda run=run: [run() for _ in range(calls)]) / calls for run in runs] for _ in range(repeats)]
    ours_s, torch_s, clone_s, copy_s = (report.Summary.of(column) for column in zip(*taken, strict=True))
    return {
        "ours_s": ours_s,
        "torch_s": torch_s,
        "clone_s": clone_s,
        "copy_s": copy_s,
        "floor_s": case.moved_bytes / (2 * dense.nbytes) * copy_s.median,
        "torch_over_ours": report.Summary.of(theirs / ours for ours, theirs, _, _ in taken),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--sizes-bytes", type=int, nargs="+", default=list(SIZES_BYTES))
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=9)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    parser.add_argument("--devices", nargs="+", choices=devices, default=devices)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {device: measure(device, args.sizes_bytes, args.density, args.repeats) for device in args.devices}
    question = "How long does each compressor take, beside moving its bytes and beside torch doing the same?"
    parameters = {"density": args.density, "repeats": args.repeats, "devices": args.devices}
    report.write_json(args.json, question=question, parameters=parameters, results=results)


if __name__ == "__main__":
    main()
