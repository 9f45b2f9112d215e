"""One rank of `zen_trained.py` on a host of the laboratory network. Its options are a JSON object; rank 0 prints lines.

All contenders train the same model from the same parameters with the same batches, one after the other in turns.
"""

import hashlib
import json
import os
import sys
import time
from functools import partial
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from baselines import BASELINES
from recording import RecordingTransport, seconds_of_messages
from sparse_workload import WIDTH
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from workload import emit
from zen_trained_models import TRAININGS

from resilient_run.comm.hook import register
from resilient_run.comm.net.scheme import Scheme
from resilient_run.comm.net.transport import Transport
from resilient_run.comm.runtime.bucket import LEAST_ELEMENTS
from resilient_run.comm.schemes import SCHEMES, named
from resilient_run.comm.zen.formats import ALL

ZEN: Final[dict[str, Any]] = {"profile_steps": 1}
SPARSE_TABLES: Final = "all-gather, sparse tables"
OPTIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sparcml, rows": ("sparcml", {"row": WIDTH, "formats": ALL}),
    "zen": ("zen", ZEN),
    "dgc, zen": ("dgc", ZEN),
    **{f"dgc, {name}": ("dgc", {"scheme": name}) for name in ("agsparse", "sparcml", "omnireduce")},
    **{f"strawman, {memory} |G|": ("strawman", {"memory": float(memory)}) for memory in (2, 8)},
}
"""Contender → scheme and options, where the name is not the scheme's."""

options = json.loads(sys.argv[1])


class Contender:
    """A training, step by step.

    Args:
        name: Of what sums gradients: DDP, or a scheme which sums tables and, with DGC, all that is large.
    """

    def __init__(self, name: str) -> None:
        ranks = dist.get_world_size()
        self.training = TRAININGS[options["model"]](ranks, sparse=name == SPARSE_TABLES)
        self._optimizer = self.training.optimizer()
        self._parallel = DistributedDataParallel(self.training.module)
        self.transport: RecordingTransport | None = None
        self.losses: list[Tensor] = []
        if name not in {"all-reduce", SPARSE_TABLES}:
            tables = min(table.numel() for table in self.training.tables.values())
            kind, own = OPTIONS.get(name, (name, {}))
            least_elements = LEAST_ELEMENTS if kind == "dgc" else tables
            register(self._parallel, partial(self._recorded, kind, own), least_elements=least_elements)

    def _recorded(self, kind: str, own: dict[str, Any], ranks: Transport) -> Scheme:
        assert dist.group.WORLD is not None
        self.transport = RecordingTransport.over(dist.group.WORLD)
        return named(kind, self.transport, **own)

    def step(self) -> float:
        """Train a step and return the seconds of the slowest rank."""
        batch = self.training.batch(dist.get_rank())
        dist.barrier()
        began_s = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._parallel(*batch)
        loss.backward()
        self._optimizer.step()
        took_s = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
        self.losses.append(loss.detach())
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        return took_s.item()

    def timed_step(self) -> float:
        """Do the same, and record no messages, which takes time."""
        if self.transport is None:
            return self.step()
        with self.transport.paused():
            return self.step()

    def messages(self) -> dict[str, Any]:
        """Train a step, and return what the scheme received in it, and how long its messages take alone."""
        assert self.transport is not None
        self.transport.forget()
        self.transport.traffic.reset()
        self.step()
        return repeated(self.transport)

    def mean_losses(self) -> list[float]:
        """Return the mean over ranks of the loss of each step."""
        losses = torch.stack(self.losses).double()
        dist.all_reduce(losses)
        found: list[float] = (losses / dist.get_world_size()).tolist()
        return found

    def digest(self) -> str:
        """Return the digest of all parameters."""
        digest = hashlib.sha256()
        for parameter in self.training.module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def repeated(transport: RecordingTransport) -> dict[str, Any]:
    """Return what each rank received in the last step, and how long its messages take alone."""
    own = torch.tensor([transport.traffic.received_bytes])
    with transport.uncounted():
        received = transport.gather_numbers(own)
    return {
        "received_bytes": received.flatten().tolist(),
        "messages_s": seconds_of_messages(transport, repeats=options["rounds"], sample_s=0.2),
    }


def all_reduced(elements: int) -> dict[str, Any]:
    """Return the same of an all-reduce of so many elements."""
    assert dist.group.WORLD is not None
    transport = RecordingTransport.over(dist.group.WORLD)
    transport.all_reduce(torch.zeros(elements))
    return repeated(transport)


def main() -> None:
    """Train in turns, then measure messages."""
    torch.set_num_threads(1)
    SCHEMES.update({name: f"{made.__module__}:{made.__name__}" for name, made in BASELINES.items()})
    dist.init_process_group("gloo")

    def tell(**line: Any) -> None:
        if dist.get_rank() == 0:
            emit(json.dumps(line))

    contenders = {name: Contender(name) for name in options["contenders"]}
    for turn in range(-1, options["rounds"]):
        for name, contender in contenders.items():
            seconds = [contender.timed_step() for _ in range(options["steps"] if turn >= 0 else options["warm_up"])]
            if turn >= 0:
                accuracy = contender.training.accuracy() if dist.get_rank() == 0 else None
                tell(contender=name, seconds=median(seconds), accuracy=accuracy)
    for name, contender in contenders.items():
        tell(contender=name, losses=contender.mean_losses(), parameters=contender.digest())
    # Of all tables, and with DGC of all that is large.
    training = next(iter(contenders.values())).training
    large = [p.numel() for p in training.module.parameters() if p.numel() >= LEAST_ELEMENTS]
    tell(dense="tables", **all_reduced(sum(table.numel() for table in training.tables.values())))
    tell(dense="all", **all_reduced(sum(large)))
    for name, contender in contenders.items():
        if contender.transport is not None:
            tell(contender=name, **contender.messages())
    dist.barrier()
    os._exit(0)  # the hooks' threads and groups end with the process


if __name__ == "__main__":
    main()
