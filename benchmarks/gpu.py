"""Everything here that needs a GPU, on one GPU, in ten minutes: what works, and how near to its limit it is.

Parts run one after the other, each in a process of its own, so that one that fails or hangs costs only itself:

- tests: the tests marked `gpu`; those of several ranks let them share the GPU;
- steps: what checkpoints cost the steps of a GPT (`gpu_steps.py`);
- fingerprint: what a capture costs the stream of training, beside reading the state once (`fingerprint_gpu.py`);
- operations, compressors: kernels beside the bandwidth of the GPU's memory (`comm_ops.py`, `compressor_kernels.py`);
- undisturbed, killed: `train_gpt.py` with NCCL and world size 1. Both must end with the same hash of the parameters.

The result of each script is one entry of the JSON. Exit status 1: a part failed, ran too long, or was not begun because
the time was over; the end of its output is in the JSON.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jobs import RESILIENT_RUN
from report import parser, table, write_json

HERE = Path(__file__).resolve().parent
OUTPUT_CHARACTERS = 4000
RUN = (*RESILIENT_RUN[1:], "--standalone", "--nproc-per-node", "1")
TRAIN = (str(HERE.parent / "examples" / "train_gpt.py"), "--steps", "60")
HASH = re.compile(r"^parameters ([0-9a-f]{64})$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process.

    Attributes:
        arguments: Of Python.
        limit_s: How long it may take.
        writes: Whether it knows `--json`.
    """

    arguments: tuple[str, ...]
    limit_s: float
    writes: bool = False


def script(name: str, *options: str, limit_s: float) -> Part:
    return Part(arguments=(str(HERE / name), *options), limit_s=limit_s, writes=True)


PARTS = {
    "steps": script("gpu_steps.py", limit_s=90),
    "fingerprint": script("fingerprint_gpu.py", limit_s=60),
    "undisturbed": Part(arguments=(*RUN, *TRAIN), limit_s=40),
    "killed": Part(arguments=(*RUN, *TRAIN, "--demo-kill", "30"), limit_s=40),
    "operations": script("comm_ops.py", "--sizes", "1000000", "--densities", "0.01", limit_s=60),
    "compressors": script(
        "compressor_kernels.py", "--devices", "cuda", "--sizes-bytes", "4194304", "67108864", limit_s=70
    ),
    "tests": Part(
        arguments=("-P", "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "--rootdir", str(HERE.parent)), limit_s=240
    ),
}


def run(part: Part) -> dict[str, Any]:
    """Return the exit status (None: it ran too long), the seconds, the end of the output, and what was measured."""
    with tempfile.TemporaryDirectory(prefix="resilient-bench-") as folder:
        file = Path(folder) / "result.json"
        options = ("--json", str(file)) if part.writes else ()
        started_s = time.monotonic()
        with subprocess.Popen(
            [sys.executable, *part.arguments, *options],
            cwd=HERE.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output = process.communicate(timeout=part.limit_s)[0]
                status: int | None = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, status = process.communicate()[0], None
        found = {"status": status, "seconds": time.monotonic() - started_s, "output": output[-OUTPUT_CHARACTERS:]}
        if file.exists():
            found["measured"] = json.loads(file.read_text())
        if hashes := HASH.findall(output):
            found["hash"] = hashes[-1]
        return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    arguments.add_argument("--minutes", type=float, default=10.0, help="in all (default: %(default)s)")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu.py measures a GPU, and torch finds none here: nvidia-smi says whether there is one")
    until_s = time.monotonic() + options.minutes * 60
    found: dict[str, dict[str, Any]] = {}
    for name in options.parts:
        part, left_s = PARTS[name], until_s - time.monotonic()
        if left_s <= 0:
            found[name] = {"status": None, "seconds": 0.0, "output": "not begun: the time was over"}
            continue
        found[name] = run(Part(arguments=part.arguments, limit_s=min(part.limit_s, left_s), writes=part.writes))
        print(f"{name}: {found[name]['output']}", flush=True)
    failed = [name for name, each in found.items() if each["status"] != 0]
    hashes = {found[name].get("hash") for name in ("undisturbed", "killed") if name in found}
    if len(hashes) > 1 or None in hashes:
        failed.append(f"the hashes of undisturbed and killed: {', '.join(map(str, hashes))}")
    device = torch.cuda.get_device_name()
    rows = [[name, str(each["status"]), f"{each['seconds']:.0f}"] for name, each in found.items()]
    table(f"On {device}", ("part", "exit status", "seconds"), rows)
    write_json(
        options.json,
        question="What works on a GPU, and how near to its limit is it?",
        parameters={"parts": options.parts, "minutes": options.minutes},
        results={"device": device, "parts": found, "failed": failed},
    )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
