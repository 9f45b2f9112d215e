"""How much longer are the steps of a GPT on a GPU when each of them is to be a checkpoint?

A GPT of `examples/train_gpt.py`'s kind, in bfloat16 with AdamW, trains on one GPU, under `resilient-run`. Rounds of a
few steps take turns: without checkpoints; with `Checkpointer.step` after each step; with `async_save` of
`torch.distributed.checkpoint` into tmpfs after each step, which waits for the save before it, as its documentation
asks. A round begins when nothing is left to do of the one before. Beside the steps: which share of them became a
checkpoint, and how long the calls kept the thread of training.

    python benchmarks/gpu_steps.py --json benchmarks/results/gpu-steps.json
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import RESILIENT_RUN, SHARED_MEMORY, host, job
from report import Summary, parser, table, write_json
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional as F
from workload import emit

from resilient_run import Checkpointer

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

CONTENDERS = ("none", "resilient-run", "async_save")
WARM_UP_ROUNDS = 3
CONTEXT = 1024


class Saver(Protocol):
    """One way to make checkpoints."""

    def save(self, step: int) -> None:
        """Begin the checkpoint of `step`."""

    def finish(self) -> int:
        """Wait until nothing is left to do and return how many checkpoints were completed since the last call."""


class Nothing:
    """No checkpoints."""

    def save(self, step: int) -> None:
        pass

    def finish(self) -> int:
        return 0


class InMemory:
    """resilient-run's `Checkpointer`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._checkpointer = Checkpointer(model=model, optimizer=optimizer)
        self._checkpointer.restore()
        self._captured = 0

    def save(self, step: int) -> None:
        self._checkpointer.step(step)

    def finish(self) -> int:
        self._checkpointer.wait()
        before, self._captured = self._captured, self._checkpointer.stats.captures
        return self._captured - before


class AsyncSave:
    """`async_save`, as its documentation shows it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer, self._directory = model, optimizer, directory
        self._group = dist.new_group(backend="gloo")
        self._begun: Any = None
        self._count = 0

    def save(self, step: int) -> None:
        if self._begun is not None:
            self._begun.result()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        self._begun = dcp.async_save(state, checkpoint_id=self._directory / "dcp", process_group=self._group)
        self._count += 1

    def finish(self) -> int:
        if self._begun is not None:
            self._begun.result()
        count, self._count, self._begun = self._count, 0, None
        return count


def work(directory: Path, contenders: list[str], **sizes: int) -> None:
    """Train, and print what each round took as a JSON line."""
    from train_gpt import GPT

    torch.cuda.set_device(0)
    torch.set_num_threads(1)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = GPT(context=CONTEXT, layers=sizes["layers"], width=sizes["width"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (sizes["batch"], CONTEXT + 1), device="cuda")

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()  # the optimizer's state
    made: dict[str, Callable[[], Saver]] = {
        "none": Nothing,
        "resilient-run": lambda: InMemory(model, optimizer),
        "async_save": lambda: AsyncSave(model, optimizer, directory),
    }
    savers = {name: made[name]() for name in contenders}
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    emit(json.dumps({"bytes": sum(tensor.nbytes for tensor in tensors)}))
    step = 0
    for count in range(WARM_UP_ROUNDS + sizes["rounds"]):
        for name, saver in savers.items():
            torch.cuda.synchronize()
            stall_s, started_s = 0.0, time.perf_counter()
            for _ in range(sizes["steps"]):
                step += 1
                train()
                called_s = time.perf_counter()
                saver.save(step)
                stall_s += time.perf_counter() - called_s
            torch.cuda.synchronize()
            step_s = (time.perf_counter() - started_s) / sizes["steps"]
            kept = saver.finish()
            if count >= WARM_UP_ROUNDS:
                shares = {"call_ms": 1e3 * stall_s / sizes["steps"], "kept": kept / sizes["steps"]}
                emit(json.dumps({"name": name, "step_ms": 1e3 * step_s, **shares}))
    os._exit(0)


def shown(line: str) -> str:
    """Return what a worker printed, which stderr gets at once."""
    print(line, end="", file=sys.stderr, flush=True)
    return line


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--width", type=int, default=768)
    arguments.add_argument("--batch", type=int, default=8, help="windows of 1,024 tokens (default: %(default)s)")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=10, help="of a round (default: %(default)s)")
    arguments.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    arguments.add_argument("--worker", type=Path, metavar="DIRECTORY", help="train, and save there")
    args = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_steps.py measures a GPU, and torch finds none here")
    if "none" not in args.contenders:
        arguments.error("--contenders: the others are compared with none; name it, too")
    sizes = {name: getattr(args, name) for name in ("layers", "width", "batch", "rounds", "steps")}
    if args.worker:
        work(args.worker, args.contenders, **sizes)
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    command = [*RESILIENT_RUN, "--standalone", "--nproc-per-node", "1", __file__, "--worker", str(directory), *flags]
    command += ["--contenders", *args.contenders]
    try:
        with host() as env, job(command, env) as launcher:
            assert launcher.stdout is not None
            first, *lines = [json.loads(line) for line in map(shown, launcher.stdout)]
    finally:
        shutil.rmtree(directory)
    found = {
        name: {
            value: Summary.of(line[value] for line in lines if line["name"] == name)
            for value in ("step_ms", "call_ms", "kept")
        }
        for name in args.contenders
    }
    for values in found.values():
        values["of_none"] = values["step_ms"].median / found["none"]["step_ms"].median
    device = torch.cuda.get_device_name()
    table(
        f"GPT with {first['bytes'] / 2**30:.2f} GiB of state on {device}",
        ("", "step, ms", "x none", "in the call, ms", "share kept"),
        [
            [name, f"{v['step_ms']:.1f}", f"{v['of_none']:.3f}", f"{v['call_ms']:.2f}", f"{v['kept'].median:.2f}"]
            for name, v in found.items()
        ],
    )
    write_json(
        args.json,
        question="How much longer are the steps of a GPT on a GPU when each of them is to be a checkpoint?",
        parameters={**sizes, "contenders": args.contenders},
        results={"device": device, "bytes": first["bytes"], "contenders": found},
    )


if __name__ == "__main__":
    main()
