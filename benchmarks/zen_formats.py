"""How small are the formats of Zen by density, and what do its hash and its bitmap each save (Zen, Fig. 3.17, 3.18)?

Bytes, counted, not time. By density: the sums that 16 servers send, of a tensor whose non-zeros lie anywhere, over the
bytes of the dense tensor. A plain bitmap has a bit for each element of the whole tensor from each server; a hash bitmap
only for those of the server. Blocks are those of OmniReduce, 256 elements.

By part: what the busiest of 16 ranks receives for one gradient of `sparse_workload.py`, from schemes that differ in one
thing each, on real connections; dense all-reduce over that. Every sum is compared with the dense one.

    python benchmarks/zen_formats.py --json FILE.json --plot FILE.svg
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch
from baselines.rows import Even
from report import parser, table, write_json
from sparse_workload import WIDTH, WORKLOADS, gradient
from torch import Tensor

from resilient_run.comm.net.rounds import carry_out
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.ops.block import block_encode
from resilient_run.comm.zen.formats import ALL, Format, encode
from resilient_run.comm.zen.partition import Balanced
from resilient_run.comm.zen.routes import push_and_pull
from resilient_run.comm.zen.sparse import compress, expand

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from ranks import run_ranks

SERVERS: Final = 16
DENSITIES: Final = (0.001, 0.005, 0.01, 0.02, 1 / 32, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
PARTS: Final[dict[str, tuple[type[Even | Balanced], int, tuple[Format, ...]]]] = {
    "even ranges, COO": (Even, 1, (Format.COO,)),
    "hash, COO": (Balanced, 1, (Format.COO,)),
    "hash, hash bitmap": (Balanced, 1, ALL),
    "hash, hash bitmap, rows": (Balanced, WIDTH, ALL),
}
"""Label → who sums what, elements under one index, and formats. The first is Sparse PS, the last one Zen."""


def sizes(elements: int, density: float) -> dict[str, float]:
    """Return format → bytes of all servers' messages over those of the dense tensor."""
    random = torch.Generator().manual_seed(0)
    present = torch.rand(elements, generator=random) < density
    dense = torch.randn(elements, generator=random) * present
    whole = compress(dense)
    cut = Balanced(length=elements, servers=SERVERS)
    shares = cut.split(whole)
    blocks = block_encode(dense)
    found = {
        "COO": sum(message.nbytes for message in encode(shares, (Format.COO,))),
        "bitmap": encode([whole], (Format.BITMAP,))[0].nbytes + (SERVERS - 1) * elements // 8,
        "blocks": blocks.indices.nbytes + blocks.values.nbytes,
        "hash bitmap": sum(message.nbytes for message in encode(shares, (Format.BITMAP,))),
    }
    return {name: size / dense.nbytes for name, size in found.items()}


def savings(workload: str, elements: int, gpus: int) -> dict[str, float]:
    """Return part → dense all-reduce's bytes over what the busiest rank receives."""
    own = [gradient(WORKLOADS[workload], rank, elements=elements, gpus=gpus) for rank in range(SERVERS)]
    expected = torch.stack(own).sum(0)
    dense_bytes = 2 * (SERVERS - 1) / SERVERS * expected.nbytes

    def work(
        transport: Transport, *, kind: Callable[..., Even | Balanced], width: int, formats: tuple[Format, ...]
    ) -> tuple[int, Tensor]:
        sparse = compress(own[transport.rank], width)
        cut = kind(length=sparse.length, servers=transport.size)
        summing = push_and_pull(transport.rank, transport.size, sparse, cut, formats=formats)
        total = expand(carry_out(transport, [summing])[0], own[transport.rank])
        return transport.traffic.received_bytes, total

    results = {}
    for part, (kind, width, formats) in PARTS.items():
        if width > 1 and WORKLOADS[workload].exponent is None:
            continue  # Its greatest elements lie anywhere, so all rows would have some.
        found = run_ranks(SERVERS, partial(work, kind=kind, width=width, formats=formats))
        assert all(torch.allclose(total, expected, atol=1e-4) for _, total in found), f"{part} sums wrongly"
        results[part] = dense_bytes / max(received for received, _ in found)
    return results


def plot(path: Path, by_density: dict[float, dict[str, float]], by_part: dict[str, dict[str, float]]) -> None:
    """Write the figure; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "resilient-run"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name in next(iter(by_density.values())):
        left.plot(list(by_density), [found[name] for found in by_density.values()], "o-", markersize=3, label=name)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xscale("log")
    left.set_ylim(0, 2)
    left.set_xlabel("density of the sum")
    left.set_ylabel("bytes over the dense tensor's")
    left.legend(fontsize="small")
    for place, part in enumerate(PARTS):
        positions = [index + (place - 1.5) / 5 for index in range(len(by_part))]
        right.bar(positions, [found.get(part, 0) for found in by_part.values()], 0.2, label=part)
    right.axhline(1, color="black", linewidth=0.8)
    right.set_xticks(range(len(by_part)), list(by_part))
    right.set_ylabel("dense all-reduce's bytes over received")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Count, print and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--elements", type=int, default=2_000_000)
    arguments.add_argument("--gpus", type=int, default=8, help="of a host, whose gradients are summed before")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="write a figure here (png, svg)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    by_density = {density: sizes(options.elements, density) for density in DENSITIES}
    names = list(by_density[DENSITIES[0]])
    table(
        f"Bytes over the dense tensor's, {SERVERS} servers",
        ("density", *names),
        [(f"{density:.3%}", *(f"{found[name]:.3f}" for name in names)) for density, found in by_density.items()],
    )
    by_part = {name: savings(name, options.elements, options.gpus) for name in WORKLOADS}
    table(
        f"Bytes of dense all-reduce over those of the busiest of {SERVERS} ranks",
        ("workload", *PARTS),
        [(name, *(f"{found[part]:.2f}" if part in found else "" for part in PARTS)) for name, found in by_part.items()],
    )
    write_json(
        options.json,
        question=(__doc__ or "").splitlines()[0],
        parameters={"elements": options.elements, "gpus": options.gpus, "servers": SERVERS},
        results={"size_over_dense": {str(key): each for key, each in by_density.items()}, "dense_over": by_part},
    )
    if options.plot is not None:
        plot(options.plot, by_density, by_part)


if __name__ == "__main__":
    main()
