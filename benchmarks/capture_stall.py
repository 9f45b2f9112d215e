"""What does a checkpoint of every rank cost training, and when is it safe?

Two Gloo ranks train with DDP on this machine's cores; each keeps its own parameters and AdamW state. Rounds of a few
steps alternate: one without a checkpoint, one with a checkpoint after its first step that ends when this is committed.

- stall: what the training thread waits for the checkpoint, in the call and before the next optimizer step.
- extra: how much longer the round with the checkpoint takes, so that background work on the same cores counts.
- committed: from the call until the checkpoint is complete (resilient-run: verified on every host that keeps it).

On two hosts the idle spans of the network are learned first, while one step follows
the other. Their captures are counted by themselves ("first steps"), but for the very first, which waits for its memory.

The limit, measured in the same processes, is a plain memcpy of the state into a warm tmpfs mapping, on all ranks at
once; ratios are to the median of what the jobs of all contenders measured. Contenders: resilient-run on one host,
resilient-run on two hosts that hold each other's state, `async_save` of `torch.distributed.checkpoint` and
`torch.save`, both into tmpfs, and with `--lm PYTHON` (the interpreter of an environment that has it, see
peers/README.md) lm-resiliency, which keeps the state in the memory of both trainers.
Goal: stall at most 0.7 memcpy, and never behind `async_save` or lm-resiliency.

Loops, as people write them: `plain` DDP; `wrapped`, where the fused optimizer is inside another object and only that
is registered; `closure`, where the optimizer runs forward and backward itself; `fsdp2`, sharded over both ranks.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import RESILIENT_RUN, SHARED_MEMORY, TORCHRUN, host, job
from memcpy import memcpy_seconds
from report import Summary, parser, table, write_json
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from workload import build, emit, loss_of, tensors

CONTENDERS = ("resilient-run", "resilient-run, 2 hosts", "async_save", "torch.save", "lm-resiliency")
LOOPS = ("plain", "wrapped", "closure", "fsdp2")
WARM_UP_ROUNDS = 2
FIRST_STEPS = 24  # on two hosts; half of them are usually enough to learn when the network is idle
STEPS_PER_ROUND = 4
IDLE_CAPTURES = 5
BATCH = 32


class Wrapped:
    """An optimizer inside another object, as Accelerate and Lightning have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Loop:
    """One way to train.

    Attributes:
        model: What is registered as the model.
        optimizer: The torch optimizer.
        registered: What is registered as the optimizer.
    """

    def __init__(self, kind: str, state_bytes: int, tensors: int | None = None) -> None:
        self._closure = kind == "closure"
        world_size = dist.get_world_size()
        self.model, self.optimizer = build(state_bytes * (world_size if kind == "fsdp2" else 1), tensors)
        if kind == "fsdp2":
            for layer in (*self.model, self.model):
                if any(True for _ in layer.parameters()):
                    fully_shard(layer)
        if kind in ("fsdp2", "wrapped"):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=kind == "wrapped")
        self.registered: Any = Wrapped(self.optimizer) if kind == "wrapped" else self.optimizer
        self.trained = self.model if kind == "fsdp2" else DistributedDataParallel(self.model)

    def step(self) -> None:
        """One forward, backward and update."""
        if self._closure:
            self.optimizer.step(self._backward)
        else:
            self._backward()
            self.optimizer.step()

    def _backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.trained, batch=BATCH)
        loss.backward()
        return loss


class Saver(Protocol):
    """One way to make checkpoints."""

    stall_s: float
    """Seconds that the training thread has waited so far."""

    def save(self, step: int) -> None:
        """Begin the checkpoint of `step`."""

    def finish(self) -> float | None:
        """Wait until it is complete and return when that was on the monotonic clock; None when it was skipped."""


class InMemory:
    """resilient-run's `Checkpointer`."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        from resilient_run import Checkpointer  # lm-resiliency's environment has none

        self.checkpointer = Checkpointer(model=model, optimizer=optimizer)
        self.checkpointer.restore()
        self._step = 0
        self._committed_s: float | None = None

    @property
    def stall_s(self) -> float:
        return self.checkpointer.stats.stall_s

    def save(self, step: int) -> None:
        self._step, self._committed_s = step, None
        self.checkpointer.step(step)
        self._given_up = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def finish(self) -> float | None:
        everywhere = torch.tensor(self.checkpointer.wait())
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)  # a step that one rank skipped is never committed
        if not everywhere:
            self._given_up.set()
        self._watcher.join()
        return self._committed_s

    def _watch(self) -> None:
        while not self._given_up.wait(0.001):
            watermark = self.checkpointer.watermark
            if watermark is not None and watermark[1] >= self._step:
                self._committed_s = time.monotonic()
                return


class AsyncSave:
    """`async_save` as its documentation shows it, with a process group of its own."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer, self._directory = model, optimizer, directory
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._group = dist.new_group(backend="gloo")
        self.stall_s = 0.0

    def save(self, step: int) -> None:
        started_s = time.monotonic()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        if not self._is_sharded:
            # Names of its own for each rank: otherwise equal tensors would be written once.
            state = {f"rank{dist.get_rank()}": state}
        future = dcp.async_save(state, checkpoint_id=self._directory / "dcp", process_group=self._group)
        self.stall_s += time.monotonic() - started_s
        assert isinstance(future, Future)
        self._future = future
        self._done_s: list[float] = []
        future.add_done_callback(lambda _: self._done_s.append(time.monotonic()))

    def finish(self) -> float | None:
        self._future.result()
        while not self._done_s:  # callbacks run after waiters are woken
            time.sleep(0.001)
        return self._done_s[0]


class PlainSave:
    """`torch.save`, one file for each rank."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self._model, self._optimizer = model, optimizer
        self._path = directory / f"rank{dist.get_rank()}.pt"
        self.stall_s = 0.0
        self._done_s = 0.0

    def save(self, step: int) -> None:
        started_s = time.monotonic()
        torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, self._path)
        self._done_s = time.monotonic()
        self.stall_s += self._done_s - started_s

    def finish(self) -> float | None:
        return self._done_s


class LmResiliency:
    """lm-resiliency's in-memory checkpoints, each kept on both ranks: its hook, called for the steps that are kept."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        from lm_resiliency import InMemoryCkptConfig, enable_resiliency

        config = InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=str(directory),
            run_id="capture-stall",
            pin_memory=False,
        )
        self.stall_s = 0.0
        self._optimizer = optimizer
        hooks: list[Any] = []
        register = optimizer.register_step_post_hook
        optimizer.register_step_post_hook = lambda hook: (hooks.append(hook), register(lambda *_: None))[1]
        self._handle = enable_resiliency(
            model,
            optimizer,
            interval=1,
            enable_detection=False,
            checkpoint=config,
            device=torch.device("cpu"),
            group=dist.group.WORLD,
        )
        optimizer.register_step_post_hook = register
        (self._hook,) = hooks

    def save(self, step: int) -> None:
        started_s = time.monotonic()
        self._hook(self._optimizer, (), {})
        self._done_s = time.monotonic()
        self.stall_s += self._done_s - started_s

    def finish(self) -> float | None:
        return self._done_s


def train_round(loop: Loop, saver: Saver | None, first_step: int) -> dict[str, float] | None:
    """Train one round and return what it took, with a checkpoint when there is a saver; None when it was skipped."""
    dist.barrier()
    started_s = saved_s = time.monotonic()
    stall_s = saver.stall_s if saver else 0.0
    for step in range(first_step, first_step + STEPS_PER_ROUND):
        loop.step()
        if saver and step == first_step:
            saved_s = time.monotonic()
            saver.save(step)
    if saver is None:
        return {"seconds": time.monotonic() - started_s}
    stall_s = saver.stall_s - stall_s
    complete_s = saver.finish()
    if complete_s is None:
        return None
    return {
        "seconds": time.monotonic() - started_s,
        "stall_s": stall_s,
        "committed_s": complete_s - saved_s,
    }


def first_steps(loop: Loop, memory: InMemory) -> list[float]:
    """Return what the training thread waits for each capture of the first steps but the very first."""
    seconds = []
    stats = memory.checkpointer.stats
    stall_s, skipped = stats.stall_s, stats.skipped
    for step in range(1, FIRST_STEPS + 1):
        memory.checkpointer.step(step)
        loop.step()  # before its optimizer step the capture has ended, or is skipped
        if stats.skipped == skipped:
            seconds.append(stats.stall_s - stall_s)
        stall_s, skipped = stats.stall_s, stats.skipped
    memory.save(FIRST_STEPS + 1)
    memory.finish()
    return seconds[1:]


def idle_captures(memory: InMemory, first_step: int) -> list[float]:
    """Return seconds that captures take, copying and hashing, while nothing else runs."""
    seconds = []
    for step in range(first_step, first_step + IDLE_CAPTURES):
        dist.barrier()
        before_s = memory.checkpointer.stats.capture_s
        memory.save(step)
        if memory.finish() is not None:
            seconds.append(memory.checkpointer.stats.capture_s - before_s)
    return seconds


def worker(args: argparse.Namespace) -> None:
    """Train rounds with and without checkpoints in turn, and print everything that was measured as one line."""
    dist.init_process_group("gloo")
    loop = Loop(args.loop[0], args.mb << 20, args.tensors)
    saver: Saver
    if args.worker == "async_save":
        saver = AsyncSave(loop.model, loop.optimizer, args.directory)
    elif args.worker == "torch.save":
        saver = PlainSave(loop.model, loop.optimizer, args.directory)
    elif args.worker == "lm-resiliency":
        saver = LmResiliency(loop.model, loop.optimizer, args.directory)
    else:
        saver = InMemory(loop.model, loop.registered)
    loop.step()
    state = tensors(loop.model, loop.optimizer)
    memcpy_s = memcpy_seconds(state, args.directory)

    step, rounds, skipped = FIRST_STEPS + 2, [], 0
    first_s = first_steps(loop, saver) if args.worker == "resilient-run, 2 hosts" else []
    for count in range(WARM_UP_ROUNDS + args.rounds):
        without = train_round(loop, None, step)
        with_checkpoint = train_round(loop, saver, step + STEPS_PER_ROUND)
        step += 2 * STEPS_PER_ROUND
        if without is None or with_checkpoint is None:
            skipped += 1
        elif count >= WARM_UP_ROUNDS:
            rounds.append({**with_checkpoint, "extra_s": with_checkpoint["seconds"] - without["seconds"]})
    idle_s = idle_captures(saver, step) if isinstance(saver, InMemory) else []
    found = {"rank": dist.get_rank(), "bytes": sum(tensor.nbytes for tensor in state), "skipped": skipped}
    emit(json.dumps({**found, "memcpy_s": memcpy_s, "rounds": rounds, "first_s": first_s, "idle_s": idle_s}))
    if isinstance(saver, InMemory):
        saver.checkpointer.close()
    loop.trained = loop.model  # a DDP module that outlives its process group can deadlock in torch's destructors
    dist.destroy_process_group()
    os._exit(0)  # and a thread of Gloo can abort Python's own end


@contextmanager
def launched(contender: str, script: list[str], lm: str | None) -> Iterator[list[Any]]:
    """Yield the launchers of a job of two ranks, on one host or on two."""
    with ExitStack() as stack:
        if contender == "resilient-run, 2 hosts":
            from resilient_run.launcher.etcd_server import EmbeddedEtcd

            endpoint = stack.enter_context(EmbeddedEtcd()).endpoint
            flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint]
            command = [*RESILIENT_RUN, *flags, "--rdzv-id", "bench", "--local-addr", "127.0.0.1", *script]
            hosts = [stack.enter_context(host(name)) for name in ("a", "b")]
        else:
            launcher = RESILIENT_RUN if contender == "resilient-run" else TORCHRUN
            if contender == "lm-resiliency":
                launcher = (str(lm), *launcher[1:])
            command = [*launcher, "--standalone", "--nproc-per-node", "2", *script]
            hosts = [stack.enter_context(host())]
        yield [stack.enter_context(job(command, env)) for env in hosts]


def measure(
    contender: str, *, loop: str, mb: int, tensors: int | None, rounds: int, lm: str | None
) -> list[dict[str, Any]]:
    """Return what each rank of one job measured."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    script = [__file__, "--worker", contender, "--loop", loop, "--mb", str(mb), "--rounds", str(rounds)]
    script += ["--directory", str(directory), *([] if tensors is None else ["--tensors", str(tensors)])]
    try:
        with launched(contender, script, lm) as launchers:
            return [json.loads(line) for launcher in launchers for line in launcher.stdout]
    finally:
        shutil.rmtree(directory)


def summarize(measured: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return what the ranks of each contender measured, by the name of its line in the table."""
    memcpy = Summary.of(seconds for ranks in measured.values() for rank in ranks for seconds in rank["memcpy_s"])
    found: dict[str, dict[str, Any]] = {}
    for contender, ranks in measured.items():
        values = {
            name: Summary.of(one[name] for rank in ranks for one in rank["rounds"])
            for name in ("stall_s", "extra_s", "committed_s")
        }
        idle_s = [seconds for rank in ranks for seconds in rank["idle_s"]]
        found[contender] = {
            **values,
            "bytes": ranks[0]["bytes"],
            "skipped": max(rank["skipped"] for rank in ranks),
            "memcpy_s": memcpy,
            "stall_of_memcpy": values["stall_s"].median / memcpy.median,
            "extra_of_memcpy": values["extra_s"].median / memcpy.median,
            "bandwidth_of_memcpy": memcpy.median / Summary.of(idle_s).median if idle_s else None,
        }
        if first_s := [seconds for rank in ranks for seconds in rank["first_s"]]:
            stall = Summary.of(first_s)
            of_memcpy = {"memcpy_s": memcpy, "stall_of_memcpy": stall.median / memcpy.median}
            found[f"{contender}, first steps"] = {"stall_s": stall, **of_memcpy}
    return found


def row(contender: str, found: dict[str, Any]) -> list[str]:
    """Return the table's line of one contender."""
    stall = [f"{found['memcpy_s']:.3f}", f"{found['stall_s']:.3f}", f"{found['stall_of_memcpy']:.2f}"]
    if "extra_s" not in found:
        return [contender, *stall, *[""] * 4]
    bandwidth = found["bandwidth_of_memcpy"]
    return [
        contender,
        *stall,
        f"{found['extra_s']:.2f}",
        f"{found['extra_of_memcpy']:.1f}",
        f"{found['committed_s']:.2f}",
        f"{bandwidth:.0%}" if bandwidth else "",
    ]


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, nargs="+", default=[256, 1024], help="state of each rank, MiB")
    options.add_argument("--tensors", type=int, help="parameters of the model, in place of layers of 12 MiB")
    options.add_argument("--rounds", type=int, default=8, help="rounds with a checkpoint, per job")
    options.add_argument("--contender", choices=CONTENDERS, nargs="+", default=CONTENDERS[:-1])
    options.add_argument("--loop", choices=LOOPS, nargs="+", default=LOOPS[:1])
    options.add_argument("--lm", metavar="PYTHON", help="measure lm-resiliency too, with this interpreter")
    options.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        args.mb = args.mb[0]
        worker(args)
        return

    contenders = [*args.contender, *(["lm-resiliency"] if args.lm else [])]
    if args.lm and subprocess.run([args.lm, "-c", "import lm_resiliency, psutil, torch"]).returncode:
        sys.exit(f"--lm {args.lm}: that environment lacks a package; benchmarks/peers/README.md says how to make it")
    results = {}
    parameters = {"rounds": args.rounds, "batch": BATCH, "tensors": args.tensors}
    for loop, mb in itertools.product(args.loop, args.mb):
        measured = {}
        for contender in contenders:
            # With 1024 MiB each takes some minutes of two cores.
            print(f"measuring {contender} with {mb} MiB, {loop}", file=sys.stderr, flush=True)
            measured[contender] = measure(
                contender, loop=loop, mb=mb, tensors=args.tensors, rounds=args.rounds, lm=args.lm
            )
        results[f"{loop}, {mb} MiB"] = found = summarize(measured)
        header = ["contender", "memcpy s", "stall s", "/memcpy", "extra s", "/memcpy", "committed s", "bandwidth"]
        title = f"A checkpoint of {mb} MiB on each of two ranks, {loop}: median (p10..p90)"
        table(title, header, [row(contender, values) for contender, values in found.items()])
        write_json(args.json, question="capture_stall", parameters=parameters, results=results)


if __name__ == "__main__":
    main()
