"""What does a checkpoint of every rank cost training, and when is it safe?

Two Gloo ranks train with DDP on this machine's cores; each keeps its own parameters and AdamW state. Rounds of a few
steps alternate: one without a checkpoint, one with a checkpoint after its first step that ends when this is committed.

- stall: what the training thread waits for the checkpoint, in the call and before the next optimizer step.
- extra: how much longer the round with the checkpoint takes, so that background work on the same cores counts.
- committed: from the call until the checkpoint is complete (resilient-run: verified on every host that keeps it).

The limit, measured in the same processes, is a plain memcpy of the state into a warm tmpfs mapping, on all ranks at
once. Contenders: resilient-run on one host, resilient-run on two hosts that hold each other's state, `async_save` of
`torch.distributed.checkpoint` and `torch.save`, both into tmpfs. Goals: stall at most 0.3 memcpy, extra at most 3 (two
hosts: 6), copying with checksums at 80 % of the bandwidth of memcpy.
"""

import argparse
import ctypes
import json
import mmap
import shutil
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
from report import Summary, parser, table, write_json
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from workload import build, emit, tensors, train_step

from resilient_run import Checkpointer
from resilient_run.launcher.etcd_server import EmbeddedEtcd

CONTENDERS = ("resilient-run", "resilient-run, 2 hosts", "async_save", "torch.save")
WARM_UP_ROUNDS = 2
STEPS_PER_ROUND = 4
IDLE_CAPTURES = 5
BATCH = 32


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

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
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
        self._group = dist.new_group(backend="gloo")
        self.stall_s = 0.0

    def save(self, step: int) -> None:
        started_s = time.monotonic()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        # Names of its own for each rank, as in sharded training: otherwise equal tensors would be written once.
        state = {f"rank{dist.get_rank()}": {"model": model, "optimizer": optimizer}}
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


def memcpy_seconds(sources: list[torch.Tensor], directory: Path, repetitions: int = 5) -> list[float]:
    """Return seconds to copy all tensors into a mapped tmpfs file whose pages exist, on all ranks at once."""
    copy = ctypes.CDLL(None).memmove
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    path = directory / f"floor{dist.get_rank()}"
    seconds = []
    with path.open("w+b") as file:
        file.truncate(sum(source.nbytes for source in sources))
        with mmap.mmap(file.fileno(), 0) as mapping:
            view = ctypes.c_char.from_buffer(mapping)
            start = ctypes.addressof(view)
            for _ in range(repetitions + 1):
                dist.barrier()
                target, started_s = start, time.monotonic()
                for source in sources:
                    copy(target, source.data_ptr(), source.nbytes)
                    target += source.nbytes
                seconds.append(time.monotonic() - started_s)
            del view
    path.unlink()
    return seconds[1:]  # the first pass allocates the pages


def train_round(
    model: nn.Module, optimizer: torch.optim.Optimizer, saver: Saver | None, first_step: int
) -> dict[str, float] | None:
    """Train one round and return what it took, with a checkpoint when there is a saver; None when it was skipped."""
    dist.barrier()
    started_s = saved_s = time.monotonic()
    stall_s = saver.stall_s if saver else 0.0
    for step in range(first_step, first_step + STEPS_PER_ROUND):
        train_step(model, optimizer, batch=BATCH)
        if saver and step == first_step:
            saved_s = time.monotonic()
            saver.save(step)
    if saver is None:
        return {"seconds": time.monotonic() - started_s}
    stall_s = saver.stall_s - stall_s
    complete_s = saver.finish()
    if complete_s is None:
        return None
    return {"seconds": time.monotonic() - started_s, "stall_s": stall_s, "committed_s": complete_s - saved_s}


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
    model, optimizer = build(args.mb << 20)
    parallel = DistributedDataParallel(model)
    saver: Saver
    if args.worker == "async_save":
        saver = AsyncSave(model, optimizer, args.directory)
    elif args.worker == "torch.save":
        saver = PlainSave(model, optimizer, args.directory)
    else:
        saver = InMemory(model, optimizer)
    train_step(parallel, optimizer, batch=BATCH)
    state = tensors(model, optimizer)
    memcpy_s = memcpy_seconds(state, args.directory)

    step, rounds, skipped = 1, [], 0
    for count in range(WARM_UP_ROUNDS + args.rounds):
        without = train_round(parallel, optimizer, None, step)
        with_checkpoint = train_round(parallel, optimizer, saver, step + STEPS_PER_ROUND)
        step += 2 * STEPS_PER_ROUND
        if without is None or with_checkpoint is None:
            skipped += 1
        elif count >= WARM_UP_ROUNDS:
            rounds.append({**with_checkpoint, "extra_s": with_checkpoint["seconds"] - without["seconds"]})
    idle_s = idle_captures(saver, step) if isinstance(saver, InMemory) else []
    found = {"rank": dist.get_rank(), "bytes": sum(tensor.nbytes for tensor in state), "skipped": skipped}
    emit(json.dumps({**found, "memcpy_s": memcpy_s, "rounds": rounds, "idle_s": idle_s}))
    del parallel  # a DDP module that outlives its process group can deadlock in torch's destructors
    dist.destroy_process_group()


@contextmanager
def launched(contender: str, script: list[str]) -> Iterator[list[Any]]:
    """Yield the launchers of a job of two ranks, on one host or on two."""
    with ExitStack() as stack:
        if contender == "resilient-run, 2 hosts":
            endpoint = stack.enter_context(EmbeddedEtcd()).endpoint
            flags = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", endpoint]
            command = [*RESILIENT_RUN, *flags, "--rdzv-id", "bench", "--local-addr", "127.0.0.1", *script]
            hosts = [stack.enter_context(host(name)) for name in ("a", "b")]
        else:
            launcher = RESILIENT_RUN if contender == "resilient-run" else TORCHRUN
            command = [*launcher, "--standalone", "--nproc-per-node", "2", *script]
            hosts = [stack.enter_context(host())]
        yield [stack.enter_context(job(command, env)) for env in hosts]


def measure(contender: str, *, mb: int, rounds: int) -> dict[str, Any]:
    """Return what one job measured, of both ranks together."""
    directory = Path(tempfile.mkdtemp(prefix="resilient-bench-", dir=SHARED_MEMORY))
    script = [__file__, "--worker", contender, "--mb", str(mb), "--rounds", str(rounds), "--directory", str(directory)]
    try:
        with launched(contender, script) as launchers:
            ranks = [json.loads(line) for launcher in launchers for line in launcher.stdout]
    finally:
        shutil.rmtree(directory)
    memcpy = Summary.of(seconds for rank in ranks for seconds in rank["memcpy_s"])
    values = {
        name: Summary.of(one[name] for rank in ranks for one in rank["rounds"])
        for name in ("stall_s", "extra_s", "committed_s")
    }
    idle_s = [seconds for rank in ranks for seconds in rank["idle_s"]]
    return {
        **values,
        "bytes": ranks[0]["bytes"],
        "skipped": max(rank["skipped"] for rank in ranks),
        "memcpy_s": memcpy,
        "stall_of_memcpy": values["stall_s"].median / memcpy.median,
        "extra_of_memcpy": values["extra_s"].median / memcpy.median,
        "bandwidth_of_memcpy": memcpy.median / Summary.of(idle_s).median if idle_s else None,
    }


def row(contender: str, found: dict[str, Any]) -> list[str]:
    """Return the table's line of one contender."""
    bandwidth = found["bandwidth_of_memcpy"]
    return [
        contender,
        f"{found['memcpy_s']:.3f}",
        f"{found['stall_s']:.3f}",
        f"{found['stall_of_memcpy']:.2f}",
        f"{found['extra_s']:.2f}",
        f"{found['extra_of_memcpy']:.1f}",
        f"{found['committed_s']:.2f}",
        f"{bandwidth:.0%}" if bandwidth else "",
    ]


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--mb", type=int, nargs="+", default=[256, 1024], help="state of each rank, MiB")
    options.add_argument("--rounds", type=int, default=8, help="rounds with a checkpoint, per job")
    options.add_argument("--contender", choices=CONTENDERS, nargs="+", default=CONTENDERS)
    options.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        args.mb = args.mb[0]
        worker(args)
        return

    results = {}
    for mb in args.mb:
        found = {}
        for contender in args.contender:
            # With 1024 MiB each takes some minutes of two cores.
            print(f"measuring {contender} with {mb} MiB", file=sys.stderr, flush=True)
            found[contender] = measure(contender, mb=mb, rounds=args.rounds)
        results[f"{mb} MiB"] = found
        header = ["contender", "memcpy s", "stall s", "/memcpy", "extra s", "/memcpy", "committed s", "bandwidth"]
        title = f"A checkpoint of {mb} MiB on each of two ranks: median (p10..p90)"
        table(title, header, [row(contender, values) for contender, values in found.items()])
    write_json(args.json, question="capture_stall", parameters={"rounds": args.rounds, "batch": BATCH}, results=results)


if __name__ == "__main__":
    main()
