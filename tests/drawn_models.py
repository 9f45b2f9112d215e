"""Models, calls and schemes drawn from a seed, and what must hold of their gradients; `test_drawn_models.py` runs it.

    drawn_models.py RANKS FIRST COUNT [SECONDS]

Ranks go through the seeds FIRST, FIRST + 1, … until there were COUNT, or SECONDS are over; what is wrong is printed.
A case trains two copies of a model: by DDP alone, and by a hook.
"""

import copy
import io
import json
import logging
import os
import random
import select
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.distributed_c10d import GroupName, _world
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from resilient_run.comm.compress.compressed import Compressed
from resilient_run.comm.compress.compressors import TopK
from resilient_run.comm.compress.feedback import MomentumCorrection
from resilient_run.comm.errors import CommError
from resilient_run.comm.hook import GradientHook, register
from resilient_run.comm.net import transport
from resilient_run.comm.net.scheme import split_as
from resilient_run.comm.net.two_level import TwoLevel, _HostShares
from resilient_run.comm.runtime.dgc import Dgc
from resilient_run.comm.trial import trial

sys.path.append(str(Path(__file__).parent))  # python -P leaves it out
from every_scheme import LOSSLESS, others

# So that a case of a few steps sees turns of other methods.
trial._FIRST_STEPS, trial._FIRST_WARM_UP, trial._WARM_UP, trial._LEAST_STEPS = 2, 0, 0, 1  # type: ignore[misc]
# How much may come at once is found out again in each case; what is found changes with chance, as it may.
transport._PROBES = 1

WIDTH = 8
TIMEOUT_S = 30
EXACT = (*LOSSLESS, "auto")
PARTS = (
    "linear", "tied", "shared", "complex", "scalar", "empty", "table", "sparse table", "convolution",
    "transposed", "frozen", "two halves", "checkpointed",
)  # fmt: skip
SIZES = (1, 2, 3, 7, 16, 33, 60, 300)
DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "float16")
MISTAKES: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("zenn", {}),
    ("topk", {"density": 0.0}),
    ("topk", {"density": "0.1"}),
    ("randomk", {"density": 1.5}),
    ("randomk", {"k": 3}),
    ("spardl", {"teams": 7}),
    ("spardl", {"gather": "ring"}),
    ("spardl", {"alpha_s": 1e-4}),
    ("spardl", {"density": float("nan")}),
    ("topk-a", {"density": -1}),
    ("powersgd", {"rank": 0}),
    ("powersgd", {"rank": 1.5}),
    ("int8", {"block": 0}),
    ("int8", {"block": True}),
    ("fp8", {"rounding": "up"}),
    ("onebit", {"density": 0.1}),
    ("zen", {"rows": 16}),
    ("zen", {"rows": (0,)}),
    ("zen", {"route": "ring"}),
    ("zen", {"seed": -1}),
    ("zen", {"partition": "even"}),
    ("dgc", {"momentum": 1.0}),
    ("dgc", {"clip_norm": -1.0}),
    ("dgc", {"warm_up_steps": -1}),
    ("dgc", {"pool": 3}),  # of earlier versions
    ("dense", {"density": 0.1}),
    ("auto", {"density": 0.1}),
    ("auto", {"lossy": "yes"}),
    (None, {}),
    ("zen", {"least_elements": "1"}),
    ("zen", {"least_elements": None}),
    ("zen", {"ranks_per_host": 7}),
    ("zen", {"ranks_per_host": 0}),
    ("zen", {"ranks_per_host": "2"}),
)
OTHERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("topk", {"density": 0.5}),
    ("topk", {"least_elements": 7}),
    ("topk", {"ranks_per_host": 2}),
    ("zen", {}),
    ("momentum", {"density": 0.5}),
)
"""What is no mistake, but something else than the other ranks are given."""


@dataclass(kw_only=True)
class Case:
    """What is drawn; JSON can say it.

    Attributes:
        parts: Kind, type and size of each part of the model.
        turns: Parts that take turns, as by find_unused_parameters: of each step and rank, which of them is used.
        steps: Of each rank; they differ where inputs are uneven.
        passes: Backward passes of each step, all but the last within `no_sync`.
        poison: Step, rank, and what one element of the gradients is there.
        again: A step after which the state goes through a file, into this hook or a new one.
    """

    seed: int
    ranks: int
    scheme: str | None
    options: dict[str, Any]
    per_host: int = 1
    least_elements: int = 1
    parts: list[tuple[str, str, int]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    ddp: dict[str, Any] = field(default_factory=dict)
    zeroing: str = "none"
    autocast: bool = False
    clip: bool = False
    optimizer: str = ""
    poison: tuple[int, int, float] | None = None
    again: tuple[int, str] | None = None
    mistaken: list[int] = field(default_factory=list)


def teams_of(seed: int, ranks: int) -> list[range]:
    """Return which ranks train together: all, or two teams that train models of their own side by side."""
    is_split = ranks > 3 and random.Random(seed).random() < 0.3
    return [range(0, ranks, 2), range(1, ranks, 2)] if is_split else [range(ranks)]


def drawn(seed: int, ranks: int, team: int) -> Case:
    """Return the case of a seed for a team of so many ranks."""
    draw = random.Random(f"{seed} {ranks} {team}")
    if draw.random() < 0.06:
        is_other = ranks > 1 and draw.random() < 0.3
        scheme, options = draw.choice(OTHERS if is_other else MISTAKES)
        mistaken = list(range(ranks))
        if is_other or draw.random() < 0.5:
            mistaken = sorted(draw.sample(mistaken, draw.randint(1, max(1, ranks - 1))))
        return Case(
            seed=seed,
            ranks=ranks,
            scheme=scheme,
            options=options,
            parts=[("linear", "float32", 3)],
            steps=[1] * ranks,
            mistaken=mistaken,
        )
    scheme, options = _scheme(draw, ranks)
    case = Case(seed=seed, ranks=ranks, scheme=scheme, options=options)
    if "teams" not in options:
        case.per_host = draw.choice([2, 2, 4, 1] if ranks == 4 else [1] * 19 + [ranks])
    case.least_elements = draw.choice([1, 1, 1, 5, 40, 300, 1 << 14])
    longest = draw.randint(1, 5)
    case.steps = [longest] * ranks
    kinds = [draw.choice(PARTS) for _ in range(draw.randint(1, 4))]
    if set(kinds) <= {"frozen"}:
        kinds.append("linear")
    case.parts = [
        (kind, "float32" if kind == "sparse table" else draw.choice(DTYPES), draw.choice(SIZES)) for kind in kinds
    ]
    case.ddp = {"bucket_cap_mb": draw.choice([0.0005, 0.002, 0.01, 25])}
    case.ddp["gradient_as_bucket_view"] = draw.random() < 0.4
    mode = draw.choice(["", "", "static_graph", "find_unused_parameters", "find_unused_parameters"])
    if mode:
        case.ddp[mode] = True
    if mode == "find_unused_parameters" and draw.random() < 0.85:
        alike = draw.random() < 0.5
        bits = 1 << len(kinds)
        for _ in range(longest):
            case.turns.append(
                [draw.randrange(1, bits)] * ranks if alike else [draw.randrange(1, bits) for _ in range(ranks)]
            )
    elif mode == "static_graph" and draw.random() < 0.4:
        case.turns = [[draw.randrange(1, 1 << len(kinds))] * ranks] * longest
    if draw.random() < 0.4:
        case.passes = [draw.randint(1, 2) for _ in range(longest)]
    if mode == "static_graph" and case.passes:
        case.passes[0] = 1  # DDP learns the graph in it
    lossless = scheme in EXACT
    case.zeroing = draw.choice(["none", "none", "zeros", *(["never"] if lossless else [])])
    case.autocast = draw.random() < 0.15
    case.clip = draw.random() < 0.3
    case.optimizer = draw.choice(["", "SGD", "AdamW"])
    if draw.random() < 0.12 and case.per_host == 1:
        case.poison = (
            draw.randrange(longest),
            draw.randrange(ranks),
            draw.choice([float("nan"), float("inf"), -float("inf")]),
        )
    elif draw.random() < 0.12 and mode != "static_graph" and not case.turns and "sparse table" not in kinds:
        case.steps = [draw.randint(1, longest) for _ in range(ranks)]
    if draw.random() < 0.4 and len(set(case.steps)) == 1:
        case.again = (
            draw.randrange(longest),
            draw.choice(["same", "thrown away", *([] if mode == "static_graph" else ["new"])]),
        )
    return case


def _scheme(draw: random.Random, ranks: int) -> tuple[str, dict[str, Any]]:
    density = draw.choice([0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 1])
    options: dict[str, list[dict[str, Any]]] = {
        "dense": [{}],
        "auto": [{}, {"lossy": True}, {"lossy": True}],
        "zen": [
            {},
            {"profile_steps": draw.randint(0, 3), "replan_steps": draw.randint(0, 3)},
            {"route": draw.choice(["parallel", "hierarchical", "gather", "dense"])},
            {"route": "parallel", "partition": "hash", "seed": draw.randint(0, 99)},
            {"rows": draw.choice([(), (4,), (3, 8), (16, 64, 256)]), "profile_steps": 1},
        ],
        "spardl": [
            {"density": density},
            {
                "density": density,
                "teams": draw.choice([each for each in range(1, ranks + 1) if ranks % each == 0]),
                "gather": "bruck",
            },
        ],
        "topk-a": [{"density": density}],
        "topk": [{"density": density}],
        "randomk": [{"density": density}],
        "efsignsgd": [{}],
        "onebit": [{}],
        "fp16": [{}],
        "bf16": [{}],
        "int8": [{}, {"block": draw.choice([1, 3, 32, 1000]), "rounding": draw.choice(["nearest", "stochastic"])}],
        "fp8": [{}, {"block": draw.choice([1, 3, 32, 1000]), "rounding": draw.choice(["nearest", "stochastic"])}],
        "powersgd": [{"rank": draw.randint(1, 5)}],
        "dgc": [
            {"density": density},
            {"density": density, "momentum": 0.9},
            {"density": density, "momentum": 0.5, "warm_up_steps": draw.randint(1, 8)},
            {"density": density, "route": draw.choice(["parallel", "gather"])},
        ],
        "dgc+spardl": [{"density": density}],
        "dgc+int8": [{"density": density}],
        "momentum": [{"density": density}],
    }
    options |= {name: [{}] for name in others(options)}
    name = draw.choice(["zen", "zen", *options])
    return name, draw.choice(options[name])


def choice_of(case: Case) -> tuple[Any, dict[str, Any]]:
    """Return the scheme and the options that `register` is given."""
    if case.scheme is not None and case.scheme.startswith("dgc+"):
        inner, density = case.scheme.removeprefix("dgc+"), case.options["density"]
        return lambda ranks: Dgc(ranks, scheme=inner, density=density), {}
    if case.scheme == "momentum":
        memory = lambda ranks: MomentumCorrection(TopK(case.options["density"]), ranks=ranks.size, momentum=0.8)  # noqa: E731
        return lambda ranks: Compressed(ranks, memory(ranks)), {}
    return case.scheme, case.options


class Part(nn.Module):
    """A part of a model: of inputs it makes one number for each."""

    def __init__(self, kind: str, dtype: torch.dtype, size: int) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        if kind in ("linear", "shared", "tied", "checkpointed", "frozen"):
            self.first, self.second = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)
        if kind == "tied":
            self.third = nn.Linear(WIDTH, size)
            self.third.weight = self.first.weight
        if kind == "frozen":
            self.first.weight.requires_grad_(False)
        if kind in ("table", "sparse table"):
            self.table = nn.Embedding(10 * size, WIDTH, sparse=kind == "sparse table")
        if kind == "convolution":
            self.convolution = nn.Conv1d(1, size, 3)
        if kind == "complex":
            wide = torch.complex128 if dtype == torch.float64 else torch.complex64
            self.turn = nn.Parameter(torch.randn(WIDTH, size, dtype=wide))
        if kind == "scalar":
            self.scale = nn.Parameter(torch.randn(()))
        if kind == "empty":
            self.nothing, self.bias = nn.Parameter(torch.randn(0, size)), nn.Parameter(torch.randn(size))
        if kind == "transposed":
            self.matrix = nn.Parameter(torch.randn(1 + size, WIDTH).t())
        if kind == "two halves":
            self.one, self.two = nn.Linear(WIDTH, size).half(), nn.Linear(WIDTH, size).bfloat16()
        elif kind != "complex":
            self.to(dtype)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return checkpoint(self._forward, x, words, use_reentrant=False)
        return self._forward(x, words)

    def _forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if "table" in self.kind:
            return self.table(words % self.table.num_embeddings).mean(1).sum(1).float()
        if self.kind == "convolution":
            return self.convolution(x[:, None]).tanh().sum((1, 2)).float()
        if self.kind == "complex":
            return (x.to(self.turn.dtype) @ self.turn).abs().sum(1).float()
        if self.kind == "scalar":
            return (x * self.scale).sum(1).float()
        if self.kind == "empty":
            return (x.sum(1)[:, None] * self.bias).sum(1).float() + self.nothing.sum().float()
        if self.kind == "transposed":
            return (x @ self.matrix).tanh().sum(1).float()
        if self.kind == "two halves":
            return (self.one(x.half()).float() * self.two(x.bfloat16()).float()).sum(1)
        hidden = self.second(torch.tanh(self.first(x)))
        if self.kind == "shared":
            hidden = self.second(torch.tanh(self.first(hidden)))
        if self.kind == "tied":
            hidden = self.second(torch.tanh(self.third(hidden)))
        return hidden.sum(1).float()


class Model(nn.Module):
    """Sums what its parts say."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.parts = nn.ModuleList(Part(kind, getattr(torch, dtype), size) for kind, dtype, size in case.parts)

    def forward(self, x: Tensor, words: Tensor, used: int) -> Tensor:
        said = [part(x, words) for place, part in enumerate(self.parts) if used >> place & 1]
        return torch.stack(said).sum(0)


def flat(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape as real numbers in the order that DDP's buckets have, a copy."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    moved = tensor.permute(order)
    return (torch.view_as_real(moved) if moved.is_complex() else moved).reshape(-1).clone()


def shape_in_bucket(parameter: Tensor) -> torch.Size:
    return torch.view_as_real(parameter).shape if parameter.is_complex() else parameter.shape


class Training:
    """The two copies of the model of a case, and what they come to.

    Attributes:
        came: Of each step, the gradients that DDP made with the hook; `plainly` without.
        given: Of each step, this rank's gradients before the sum.
        used: Of each step, the names of those that its backward passes have reached here.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self.case, self.rank, self.group = case, group.rank(), group
        self.plain, self.ours = (self._parallel(Model(case)) for _ in range(2))
        self.hook = self._registered()
        self.parameters = dict(self._parameters(self.ours))
        self.came: list[dict[str, Tensor | None]] = []
        self.plainly: list[dict[str, Tensor | None]] = []
        self.given: list[dict[str, Tensor]] = []
        self.used: list[set[str]] = []
        self._local: dict[str, Tensor] = {}
        self._reached: set[str] = set()
        self._notes = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, parameter in self._parameters(self.plain)
        ]

    def _parallel(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, process_group=self.group, **self.case.ddp)

    def _note(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._local[name] = flat(parameter, parameter.grad)
            self._reached.add(name)

    def _registered(self) -> GradientHook:
        scheme, options = choice_of(self.case)
        return register(
            self.ours,
            scheme,
            **{"ranks_per_host": self.case.per_host, "least_elements": self.case.least_elements, **options},
        )

    def run(self) -> None:
        """Train."""
        case = self.case
        optimizer: Any = None
        if case.optimizer:
            is_sparse = any(kind == "sparse table" for kind, _, _ in case.parts)
            kind = torch.optim.SGD if is_sparse else getattr(torch.optim, case.optimizer)
            optimizer = kind([each for _, each in self._parameters(self.plain)], lr=1e-3)
        uneven = len(set(case.steps)) > 1
        with Join([self.plain, self.ours]) if uneven else nullcontext():
            for step in range(case.steps[self.rank]):
                self._step(step)
                if case.clip:
                    for model in (self.plain, self.ours):
                        for _, parameter in self._parameters(model):
                            if parameter.grad is not None:
                                parameter.grad.mul_(0.5)
                if optimizer is not None:
                    optimizer.step()
                    if not all(p.isfinite().all() for p in self.plain.module.parameters()):
                        # The step that a loss scaler would have left out.
                        self.plain.module.load_state_dict(self.ours.module.state_dict())
                        optimizer.state.clear()
                    self.ours.module.load_state_dict(self.plain.module.state_dict())
                if case.again is not None and case.again[0] == step:
                    self._again(case.again[1], step)
        self.hook.close()
        for note in self._notes:  # DDP holds the parameters: nobody else would end this, with its groups and threads
            note.remove()

    def _step(self, step: int) -> None:
        case = self.case
        for model in (self.plain, self.ours):
            if case.zeroing != "never":
                model.zero_grad(set_to_none=case.zeroing == "none")
        passes = case.passes[step] if case.passes else 1
        for index in range(passes):
            last = index == passes - 1
            if index == 0:
                self._local = {n: flat(p, p.grad) for n, p in self._parameters(self.plain) if p.grad is not None}
                self._reached = set()
            for model in (self.plain, self.ours):
                with nullcontext() if last else model.no_sync():
                    self._backward(model, step, index)
        self.given.append(self._local)
        self.used.append(self._reached)
        for found, model in ((self.plainly, self.plain), (self.came, self.ours)):
            found.append({n: None if p.grad is None else flat(p, p.grad) for n, p in self._parameters(model)})

    def _backward(self, model: DistributedDataParallel, step: int, index: int, thrown: bool = False) -> None:
        case = self.case
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{case.seed} {step} {index} {self.rank} {thrown}".encode())
        )
        x = torch.randn(3, WIDTH, generator=generator)
        words = torch.randint(0, 1 << 20, (3, 4), generator=generator)
        used = case.turns[step][self.rank] if case.turns else -1
        if case.turns and index:
            used = case.turns[(step + index) % len(case.turns)][self.rank]
        for place, (kind, _, _) in enumerate(case.parts):
            if kind == "sparse table":  # DDP asks for these
                used |= 1 << place
        with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
            loss = model(x, words, used)
        weight = torch.randn(len(x), generator=generator)
        if case.poison is not None and case.poison[:2] == (step, self.rank) and not thrown:
            weight[0] = case.poison[2]
        (loss * weight).sum().backward()

    def _again(self, how: str, step: int) -> None:
        file = io.BytesIO()
        torch.save(self.hook.state_dict(), file)
        if how == "thrown away":
            self.ours.zero_grad(set_to_none=self.case.zeroing == "none")
            self._backward(self.ours, step, 0, thrown=True)
            for (_, mine), (_, plain) in zip(self._parameters(self.ours), self._parameters(self.plain), strict=True):
                mine.grad = None if plain.grad is None else plain.grad.clone()
        if how == "new":
            self.hook.close()
            self.ours = self._parallel(copy.deepcopy(self.ours.module))
            for (_, mine), (_, plain) in zip(self._parameters(self.ours), self._parameters(self.plain), strict=True):
                mine.grad = None if plain.grad is None else plain.grad.clone()
            self.hook = self._registered()
        file.seek(0)
        self.hook.load_state_dict(torch.load(file, weights_only=False))

    def _parameters(self, model: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
        return ((name, each) for name, each in model.module.named_parameters() if each.requires_grad)


TINY = {torch.float32: 1e-30, torch.float64: 1e-30, torch.bfloat16: 1e-30, torch.float16: 1e-6}
"""How far numbers of a type are from each other near 0."""


def apart(mine: Tensor, its: Tensor) -> str:
    off = (mine.double() - its.double()).abs().nan_to_num()
    return f"up to {off.max():.3g} from DDP's, at {int(off.argmax())} of {off.numel()}"


def momentum_of(case: Case) -> float:
    return 0.8 if case.scheme == "momentum" else case.options.get("momentum", 0.0)


def residual(hook: GradientHook, name: str, shape: torch.Size) -> Tensor:
    """Return what this rank remembers of a gradient, flat, with zeros for what only others remember."""
    scheme, state = hook.scheme, hook.state_dict()
    if isinstance(scheme, TwoLevel):
        cut = _HostShares(torch.zeros(shape), scheme.within.size)
        share = cut.share(torch.zeros(cut.parts().numel() // scheme.within.size))
        parts = [torch.zeros(share.numel(), dtype=torch.float64) for _ in range(scheme.within.size)]
        parts[scheme.within.rank] = _remembered(scheme.between, state, name, share.numel())
        return cut.whole(torch.cat(parts)).reshape(-1)
    return _remembered(scheme, state, name, shape.numel())


def _remembered(scheme: Any, state: dict[str, Any], name: str, numel: int) -> Tensor:
    found = torch.zeros(numel, dtype=torch.float64)
    for part, each in state.items():
        if part in ("memory", "own"):
            found += _remembered(None, each, name, numel)
        elif part == "between":
            found += _remembered(scheme.between, each, name, numel)
        elif part == "residuals" and name in each:
            found += each[name].reshape(-1)
        elif part == "kept" and name in each:
            found += each[name][-1]
        elif part == "sums" and name in each["kept"]:
            rank, ranks, block = scheme.transport.rank, scheme.transport.size, scheme._compressor.block
            begin, end = (min(numel, -(-numel // block) * share // ranks * block) for share in (rank, rank + 1))
            found[begin:end] += each["kept"][name][0]
    return found


def is_large(case: Case, name: str, parameter: Tensor) -> bool:
    """Return whether a parameter's gradient goes to the scheme."""
    elements = parameter.numel() * (1 + parameter.is_complex())
    return elements >= case.least_elements or "sparse" in case.parts[int(name.split(".")[1])][0]


def given_of(training: Training, step: int, name: str, like: Tensor) -> Tensor:
    """Return what this rank adds to the average of a gradient in a step."""
    local = training.given[step].get(name) if step < len(training.given) else None
    return (torch.zeros_like(like) if local is None else local / training.case.ranks).double()


def check(training: Training) -> tuple[list[str], list[int]]:
    """Return what does not hold, and a checksum of the sums of each step in which this rank took part."""
    case, hook, wrong = training.case, training.hook, []
    steps, ranks = max(case.steps), case.ranks
    names = list(training.parameters)
    like = {name: flat(each, each) for name, each in training.parameters.items()}
    exact = {
        name for name, each in training.parameters.items() if case.scheme in EXACT or not is_large(case, name, each)
    }
    used = [[step < len(training.used) and name in training.used[step] for name in names] for step in range(steps)]
    given = [torch.stack([given_of(training, step, name, like[name]) for step in range(steps)]) for name in names]
    kept = [
        residual(hook, name, shape_in_bucket(each)) for name, each in training.parameters.items() if name not in exact
    ]
    own = [torch.tensor(used).double(), *(torch.stack([each, each.abs()]) for each in (*given, *kept))]
    together = torch.cat([each.reshape(-1) for each in own])
    dist.all_reduce(together, group=training.group)
    used_anywhere, *summed = split_as(together, [each.shape for each in own])
    remembered = iter(summed[len(names) :])
    checksums = [0] * len(training.came)
    for place, name in enumerate(names):
        real, numel = like[name].dtype, like[name].numel()
        total, size = summed[place]
        momentum = 0.0 if name in exact else momentum_of(case)
        eps = torch.finfo(real).eps
        came_total, wanted, scale = (torch.zeros(numel, dtype=torch.float64) for _ in range(3))
        velocity, speed = torch.zeros_like(wanted), torch.zeros_like(wanted)
        for step, (came, plain) in enumerate(zip(training.came, training.plainly, strict=True)):
            mine, its = came[name], plain[name]
            if (mine is None) != (its is None):
                wrong.append(f"step {step} {name}: is {mine}, by DDP {its}")
                continue
            if mine is None or its is None:
                continue
            if not used_anywhere[step, place] and case.scheme not in EXACT:
                if not torch.equal(mine.nan_to_num(), its.nan_to_num()):
                    wrong.append(f"step {step} {name}: nobody used it, {apart(mine, its)}")
                continue
            checksums[step] = zlib.crc32(mine.nan_to_num().view(torch.uint8).numpy().tobytes(), checksums[step])
            finite = total[step].isfinite()
            if name in exact:
                if not torch.equal(mine.isfinite(), its.isfinite()):
                    wrong.append(f"step {step} {name}: not finite where DDP is, or the other way")
                # What earlier sums were rounded by stays in gradients that nobody zeroes.
                sizes = size[: step + 1] if case.zeroing == "never" else size[step]
                most = 4 * (ranks + step) * eps * sizes.nan_to_num(0, 0, 0).amax() if numel else 0.0
                off = (mine.double() - its.double())[finite].abs()
                if not (off <= most + TINY[real]).all():
                    wrong.append(f"step {step} {name}: {apart(mine, its)}, at most {most}")
                continue
            if bool(mine.isfinite().all()) != bool(finite.all()):
                wrong.append(f"step {step} {name}: an inf or a NaN came from nowhere, or got lost")
            if mine.isfinite().all():
                velocity, speed = momentum * velocity + total[step], momentum * speed + size[step]
                came_total += mine.double()
                wanted += velocity
                scale += speed + mine.double().abs()
        if name in exact:
            continue
        kept_total, kept_size = next(remembered)
        if case.scheme in ("fp16", "bf16"):
            eps = max(eps, torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[case.scheme]).eps)
        most = (
            2 * (steps + ranks) * eps * (scale + kept_size).norm()
            + steps * TINY[torch.float16 if case.scheme == "fp16" else real]
        )
        off = came_total + kept_total - wanted
        if len(training.came) == steps and not off.norm() <= most:
            lost = f"lost {off.norm():.3g} of {wanted.norm():.3g}, at most {most:.3g}"
            wrong.append(f"{name}: {lost}; kept {kept_total.norm():.3g}")
    return wrong, checksums


def tried(case: Case, group: dist.ProcessGroup) -> list[str]:
    """Return what is wrong with a case, on all ranks of `group`."""
    groups, threads = len(_world.pg_names), threading.active_count()
    wrong: list[str] = []
    checksums: list[int] = []
    refused = ""
    try:
        if case.mistaken and group.rank() not in case.mistaken:
            case = replace(case, scheme="topk", options={})
        training = Training(case, group)
    except CommError as error:
        refused = str(error)
        if len(_world.pg_names) != groups or threading.active_count() != threads:
            wrong.append(f"leaked {len(_world.pg_names) - groups} groups, {threading.active_count() - threads} threads")
    said: list[Any] = [None] * case.ranks
    dist.all_gather_object(said, refused, group=group)
    if len(set(said)) > 1:
        wrong.append(f"refused as {said}")
    elif bool(refused) != bool(case.mistaken):
        wrong.append(f"refused: {refused!r}")
    if not any(said):
        training.run()
        found, checksums = check(training)
        wrong += found
    dist.all_gather_object(said, (wrong, checksums), group=group)
    for step, each in enumerate(zip_longest(*(sums for _, sums in said))):
        if len({checksum for checksum in each if checksum is not None}) > 1:
            wrong.append(f"step {step}: ranks differ")
    return [f"rank {place}: {text}" for place, (texts, _) in enumerate(said) for text in texts] + wrong


def be_rank(store: str, rank: int, ranks: int, first: int, count: int, seconds: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    host, port = store.split(":")
    dist.init_process_group(
        "gloo", store=dist.TCPStore(host, int(port)), rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    control = dist.new_group()
    groups = {team: dist.new_group(list(team)) for seed in range(20) for team in teams_of(seed, ranks)}
    ends_s = time.monotonic() + seconds
    for seed in range(first, first + count):
        if rank == 0:
            say(seed=seed)
        teams = teams_of(seed, ranks)
        place = next(place for place, team in enumerate(teams) if rank in team)
        case = drawn(seed, len(teams[place]), place)
        before = set(_world.pg_map)
        try:
            wrong = tried(case, groups[teams[place]])
        except Exception:  # noqa: BLE001 - whatever it is, it is said
            say(at=seed, case=asdict(case), wrong=[f"rank {rank}: {traceback.format_exc()[-1500:]}"])
            os._exit(1)
        for group in set(_world.pg_map) - before:
            dist.destroy_process_group(group)
            _world.pg_names[object()] = GroupName("gone")  # type: ignore[index]  # torch counts them to name the next
        if wrong and rank == teams[place][0]:
            say(at=seed, case=asdict(case), wrong=[each[:300] for each in wrong[:6]])
        if seed % 16 == 0:
            goes_on = torch.tensor(time.monotonic() < ends_s)
            dist.broadcast(goes_on, 0, group=control)
            if not goes_on:
                break
    dist.barrier(group=control)
    if rank == 0:
        say(done=seed + 1)
    time.sleep(TIMEOUT_S)  # until all are killed
    os._exit(0)


def say(**line: Any) -> None:
    os.write(1, f"{json.dumps(line)}\n".encode())


def run(ranks: int, first: int, count: int, seconds: float = inf) -> tuple[int, list[str]]:
    """Return how many seeds there were, and what was wrong; ranks that have stood still, or raised, are replaced."""
    wrong: list[str] = []
    ends_s, last, at = time.monotonic() + seconds, first + count, first
    while at < last and time.monotonic() < ends_s:
        at = _run_once(ranks, at, last - at, ends_s - time.monotonic(), wrong)
    return at - first, wrong


def _run_once(ranks: int, first: int, count: int, seconds: float, wrong: list[str]) -> int:
    """Return the seed that comes next."""
    from launchers import start_python  # which a rank does not find

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    own = [str(each) for each in (ranks, first, count, seconds)]
    script = str(Path(__file__).resolve())
    started = [
        start_python([script, f"127.0.0.1:{store.port}", str(rank), *own], dict(os.environ), stdout=writing)
        for rank in range(ranks)
    ]
    os.close(writing)
    known, at, done, text = len(wrong), first, 0, b""
    try:
        while not done:
            is_late = not select.select([reading], [], [], 4 * TIMEOUT_S)[0]
            read = b"" if is_late else os.read(reading, 1 << 16)
            if not read:
                break
            *lines, text = (text + read).split(b"\n")
            for line in map(json.loads, lines):
                at, done = line.get("seed", at), line.get("done", 0)
                wrong += [f"seed {line['at']}, {line['case']}: {each}" for each in line.get("wrong", ())]
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.close(reading)
    if not done and len(wrong) == known:
        wrong.append(f"seed {at}: the ranks {'stand still' if is_late else 'have ended'}")
    return done or at + 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if ":" in arguments[0]:
        be_rank(arguments[0], *map(int, arguments[1:5]), float(arguments[5]))
    began_s = time.monotonic()
    seeds, found = run(*map(int, arguments[:3]), *map(float, arguments[3:]))
    print(*found, f"{seeds} seeds in {time.monotonic() - began_s:.0f} s, {len(found)} wrong", sep="\n")
