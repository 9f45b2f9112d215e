"""Whatever writes to captured memory after `step(n)`, a capture that is committed holds what `step(n)` saw.

Each case is one step of a real `Checkpointer` with a real slot: just before `step(n)` the test keeps a copy of every
leaf, then a writer drawn from a seed changes tensors by a way drawn from the seed at a moment drawn from the seed, and
each slot that is announced complete is compared with the copy, byte by byte. CI runs some hundred cases; 10⁵ of them:

    python tests/test_capture_soundness.py --cases 100000 --seed 1
"""

import argparse
import ctypes
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from solo_daemon import SoloDaemon
from tiers import nightly_but
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from resilient_run.ckpt.checkpointer import Checkpointer
from resilient_run.ckpt.format.manifest import leaf_paths, parse
from resilient_run.ckpt.format.slot import Slot

CASES_PER_MODEL = 40
Bytes = dict[str, tuple[torch.dtype, tuple[int, ...], torch.Tensor]]
"""By path: dtype, shape, and the bytes of a contiguous copy."""


class JudgingDaemon(SoloDaemon):
    """Compares every capture that is announced with what its step saw, before it can be committed or overwritten."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.saw: dict[int, Bytes] = {}
        self.judged: set[int] = set()
        self.wrong: dict[int, list[str]] = {}

    def _completed(self, rank: int, world_size: int, version: tuple[int, int]) -> None:
        for slot in self.slots(rank):
            if slot.state() == "COMPLETE" and slot.header().step == version[1]:
                self._judge(slot, version[1])
            slot.close()
        super()._completed(rank, world_size, version)

    def _judge(self, slot: Slot, step: int) -> None:
        header = slot.verify()
        manifest = parse(slot.manifest(), header.payload_bytes)
        payload = torch.frombuffer(slot.buffer, dtype=torch.uint8)[header.payload_offset : header.used_bytes]
        places = leaf_paths(manifest.tree)
        differing = []
        for path, (dtype, shape, expected) in self.saw[step].items():
            index = places.get(f"objects.{path}")
            if index is None:
                differing.append(f"{path} is missing")
                continue
            spec, offset = manifest.tensors[index], manifest.offsets[index]
            if (spec.dtype, spec.shape) != (str(dtype).removeprefix("torch."), shape):
                differing.append(f"{path} is {spec}")
            elif not torch.equal(payload[offset : offset + spec.nbytes], expected):
                differing.append(path)
        self.judged.add(step)
        if differing:
            self.wrong[step] = differing


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as Accelerate, Lightning and PostLocalSGDOptimizer have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Model(nn.Module):
    """Parameters of random sizes, dtypes and strides, one of them a DTensor, and buffers; it computes nothing."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        sizes = [
            1,
            7,
            1000,
            20_000,
            *chance.choices([3, 5_000, 100_000, 600_000, 1_500_000], [4, 4, 4, 2, 1], k=chance.randint(1, 3)),
        ]
        self.parts = nn.ParameterList(torch.randn(size) for size in chance.sample(sizes, len(sizes)))
        self.parts.append(torch.randn(()))
        self.parts.append(torch.empty(0))
        self.parts.append(torch.randn(60, 300).t())
        self.parts.append(torch.randn(chance.choice([10, 50_000])).bfloat16())
        mesh = dist.init_device_mesh("cpu", (1,))
        self.sharded = nn.Parameter(distribute_tensor(torch.randn(64, chance.choice([2, 3000])), mesh, [Shard(0)]))
        self.register_buffer("average", torch.randn(chance.choice([10, 300_000])))
        self.register_buffer("eighth", torch.randn(5000).to(torch.float8_e4m3fn))

    def grow_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter) * 0.01


def optimizer_of(model: Model, chance: random.Random) -> torch.optim.Optimizer:
    """Return an optimizer of one of the kinds that people use; DTensors have no part in fused kernels."""
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    match chance.randrange(6):
        case 0:
            return torch.optim.Adam(model.parameters(), foreach=False)
        case 1:
            return torch.optim.AdamW(plain, fused=True)
        case 2:
            return Wrapped(torch.optim.AdamW(plain, fused=True, amsgrad=True))
        case 3:
            return Wrapped(torch.optim.Adam(plain, foreach=True))
        case 4:
            return Wrapped(torch.optim.SGD(plain, lr=0.1, momentum=0.9, fused=True))
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is in this process, sharing its memory."""
    with torch.no_grad():
        return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the tensor's storage."""
    return torch.tensor([], dtype=torch.uint8).set_(local(tensor).untyped_storage())


def write_data(tensor: torch.Tensor) -> None:
    local(tensor).data.copy_(torch.ones_like(local(tensor)))


def write_numpy(tensor: torch.Tensor) -> None:
    memory(tensor).numpy()[...] ^= 0x55


def write_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(torch.full_like(tensor, 0.5))


def write_foreach(tensor: torch.Tensor) -> None:
    if local(tensor).is_floating_point() and local(tensor).dtype.itemsize > 1:
        torch._foreach_mul_([local(tensor)], -1.0)


def write_memmove(tensor: torch.Tensor) -> None:
    storage = local(tensor).untyped_storage()
    ctypes.memset(storage.data_ptr(), 0x33, storage.nbytes())


def write_one_byte(tensor: torch.Tensor) -> None:
    data = memory(tensor)
    if len(data):
        data[len(data) // 2] += 1


def write_and_revert(tensor: torch.Tensor) -> None:
    data = memory(tensor)
    before = data.clone()
    data.bitwise_not_()
    time.sleep(random.choice([0, 1e-4, 1e-3]))
    data.copy_(before)


def write_slowly(tensor: torch.Tensor) -> None:
    data = memory(tensor)
    for part in data.split(max(len(data) // 20, 1)):
        part += 1
        time.sleep(1e-5)


def put_another(tensor: torch.Tensor) -> None:
    if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
        tensor.data = torch.zeros_like(tensor.data)


WRITES: dict[str, Callable[[torch.Tensor], None]] = {
    "data": write_data,
    "numpy": write_numpy,
    "in place": write_in_place,
    "foreach": write_foreach,
    "memmove": write_memmove,
    "one byte": write_one_byte,
    "reverted": write_and_revert,
    "slowly": write_slowly,
    "put another": put_another,
}
MOMENTS = ("at once", "soon", "while copying", "after the commit of the last", "in a thread", "before the step")


class Case:
    """One model with its checkpointer, driven for some steps."""

    def __init__(self, daemon: JudgingDaemon, chance: random.Random) -> None:
        self.daemon, self.chance = daemon, chance
        self.counts: Counter[str] = Counter()
        self.model = Model(chance)
        self.optimizer = optimizer_of(self.model, chance)
        self.model.grow_gradients()
        self.optimizer.step()
        self.checkpointer = Checkpointer(model=self.model, optimizer=self.optimizer)
        assert self.checkpointer.restore() == 0
        self.done: dict[int, str] = {}

    def tensors(self) -> list[torch.Tensor]:
        # Not the count of steps: with a wrong one the optimizer divides by zero.
        states = [item for state in self.optimizer.state.values() for key, item in state.items() if key != "step"]
        return [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]

    def step(self, n: int) -> None:
        """Make one step as a script would, then let the drawn writers loose."""
        chance, daemon = self.chance, self.daemon
        daemon.frozen = chance.random() < 0.3
        undisturbed = chance.random() < 0.2
        if undisturbed:
            self._settle()
        daemon.saw[n] = snapshot({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        daemon.saw.pop(n - 10, None)
        self.checkpointer.step(n)
        moment, ways, writers = chance.choice(MOMENTS), [], []
        if undisturbed:
            # Nobody writes, and what was captured before is committed: then this capture must be there.
            captured = self.checkpointer.wait(30)
            self.counts["undisturbed and captured" if captured else "undisturbed"] += 1
            moment = "none"
        else:
            for _ in range(chance.choice([1, 1, 1, 5])):
                way = chance.choice(list(WRITES))
                writers.append((WRITES[way], chance.choice(self.tensors())))
                ways.append(way)
        self.done[n] = f"{type(self.optimizer).__name__}, {moment}: {', '.join(ways)}"
        self._write(n, moment, writers)
        if daemon.frozen and (newest := max(daemon._complete.get(0, ()), default=None)):
            daemon.commit(*newest)
            if chance.random() < 0.5:
                # A capture that waited for its slot begins now, long after step() returned.
                time.sleep(chance.choice([0, 1e-4, 1e-3]))
                for write, tensor in writers:
                    write(tensor)
        if chance.random() < 0.8:
            self.model.grow_gradients()
            self.optimizer.step()

    def _settle(self) -> None:
        """Wait until the newest capture is committed, and the checkpointer knows that."""
        capturer = self.checkpointer._capturer
        assert capturer is not None
        self.daemon.frozen = False
        until = time.monotonic() + 30
        while capturer._slots._taken >= capturer._slots.next:
            newest = max(self.daemon._complete.get(0, ()), default=None)
            if newest is not None and newest != self.daemon.watermark:
                self.daemon.commit(*newest)
            time.sleep(1e-3)
            assert time.monotonic() < until, "a capture is never complete"

    def _write(self, n: int, moment: str, writers: list[tuple[Callable[..., None], torch.Tensor]]) -> None:
        def write() -> None:
            for way, tensor in writers:
                way(tensor)

        match moment:
            case "soon":
                time.sleep(self.chance.uniform(0, 2e-3))
                write()
            case "while copying":
                self._wait_for_copying()
                write()
            case "after the commit of the last":
                until = time.monotonic() + 0.005
                while (self.checkpointer.watermark or (0, 0))[1] < n - 1 and time.monotonic() < until:
                    time.sleep(1e-5)
                write()
            case "in a thread":
                thread = threading.Thread(target=write)
                thread.start()
                self.model.grow_gradients()
                thread.join()
            case "before the step":
                self.model.grow_gradients()
                write()
            case _:
                write()

    def _wait_for_copying(self) -> None:
        until = time.monotonic() + 0.002
        slots = self.daemon.slots()
        while time.monotonic() < until and all(slot.state() != "WRITING" for slot in slots):
            pass
        for slot in slots:
            slot.close()


def snapshot(value: Any, path: str = "") -> Bytes:
    """Return a copy of every tensor in `value`, by its dotted path."""
    if isinstance(value, torch.Tensor):
        data = local(value).contiguous()
        flat = data.flatten().view(torch.uint8).clone() if data.numel() else torch.empty(0, dtype=torch.uint8)
        return {path: (data.dtype, tuple(data.shape), flat)}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: Bytes = {}
    for key, item in items:
        found |= snapshot(item, f"{path}.{key}" if path else str(key))
    return found


@contextmanager
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def drive(directory: Path, *, cases: int, seed: str) -> tuple[Counter[str], list[str]]:
    """Drive `cases` cases; return how many came to what, and each capture that was committed wrong, in words."""
    counts: Counter[str] = Counter()
    wrong = []
    for number, first in enumerate(range(0, cases, CASES_PER_MODEL)):
        chance = random.Random(f"{seed}/{number}")
        torch.manual_seed(chance.randrange(2**31))
        here = directory / str(number)
        here.mkdir()
        daemon = JudgingDaemon(here)
        daemon.start()
        try:
            with patch.dict("os.environ", daemon.environ()):
                case = Case(daemon, chance)
            last = min(CASES_PER_MODEL, cases - first)
            for n in range(1, last + 1):
                case.step(n)
            case.checkpointer.wait(30)
            case.checkpointer.close()
        finally:
            daemon.stop()
        counts += case.counts + Counter(cases=last, captured=len(daemon.judged), wrong=len(daemon.wrong))
        counts["discarded"] += case.checkpointer.stats.discarded
        wrong += [
            f"model {number}, step {step} ({case.done[step]}): {leaves[:3]}" for step, leaves in daemon.wrong.items()
        ]
        shutil.rmtree(here)
    return counts, wrong


@pytest.mark.parametrize("seed", nightly_but(["a"], ["a", "b"]))
@pytest.mark.filterwarnings("ignore")
def test_no_writer_gets_into_a_committed_capture(tmp_path: Path, alone: None, seed: str) -> None:
    counts, wrong = drive(tmp_path, cases=160, seed=seed)
    assert not wrong, f"{len(wrong)} of {counts['captured']} captures are not what step(n) saw:\n" + "\n".join(wrong)
    assert counts["undisturbed and captured"] >= 10, counts
    assert counts["undisturbed"] == 0, "captures were given up though nobody wrote"
    assert counts["discarded"] == 0, "what is on the host is read after step()"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was counted here as well")
    options = parser.parse_args()
    started_s = time.monotonic()
    counts: Counter[str] = Counter()
    with one_rank_group():
        while counts["cases"] < options.cases:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                seed = f"{options.seed}/{counts['cases']}"
                more, wrong = drive(Path(directory), cases=min(2000, options.cases - counts["cases"]), seed=seed)
            counts += more
            seconds = round(time.monotonic() - started_s)
            print(f"{seconds} s: {dict(counts)}", *wrong, sep="\n", flush=True)
            if options.json is not None:
                found = {"seed": options.seed, "seconds": seconds, **counts}
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if counts["wrong"] or counts["undisturbed"] or counts["discarded"] else 0


if __name__ == "__main__":
    sys.exit(main())
