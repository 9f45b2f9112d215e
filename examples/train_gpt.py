"""Train a byte-level GPT on the source of Python's standard library, and resume exactly where a failure struck.

    python examples/train_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    resilient-run --standalone --nproc-per-node 2 examples/train_gpt.py --demo-kill 60
    resilient-run --standalone --nproc-per-node 2 examples/train_gpt.py --scheme spardl --demo-kill 60

The script is the same for all of them. Under `resilient-run` its `Checkpointer` keeps the training state in the memory
of the host's daemon; elsewhere it warns once and does nothing. Runs with equal options end with bit-identical
parameters, however often they were interrupted.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from resilient_run import Checkpointer
from resilient_run.comm.hook import GradientHook, register
from resilient_run.comm.schemes import SCHEMES


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then an MLP four times as wide."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        attention = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.dropout(self.attention_out(attention.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """Language model over bytes: tokens (batch, time) of 0..255 to logits (batch, time, 256)."""

    def __init__(self, *, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads=width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])))


def read_corpus(max_bytes: int = 4_000_000) -> Tensor:
    """Return the first `max_bytes` bytes of the standard library's modules, in the order of their paths."""
    paths = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = {*folders} - {"test", "tests", "site-packages", "dist-packages"}
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    corpus = bytearray()
    for path in sorted(paths):
        corpus += path.read_bytes()
        if len(corpus) >= max_bytes:
            break
    return torch.frombuffer(corpus[:max_bytes], dtype=torch.uint8)


class Windows:
    """Endless batches of random windows of the corpus; its generator is all the state it has."""

    def __init__(self, corpus: Tensor, *, batch: int, context: int, seed: int) -> None:
        self.corpus, self.batch, self.context = corpus, batch, context
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (batch, context)."""
        starts = torch.randint(len(self.corpus) - self.context, (self.batch, 1), generator=self.generator)
        windows = self.corpus[starts + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def start(rank: int, world_size: int) -> torch.device:
    """Join the process group, make every sum add up in the same order in every run, return this rank's device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    store = None if "RANK" in os.environ else dist.HashStore()  # plain `python` is a group of one
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size)
    return device


def parallelize(
    model: GPT, device: torch.device, *, fsdp: bool, scheme: str | None
) -> tuple[nn.Module, GradientHook | None]:
    """Return `model` as a data-parallel module, sharded with FSDP2 or replicated with DDP, and what sums gradients."""
    if fsdp:
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model), None
    parallel = DistributedDataParallel(model)
    hook = None if scheme is None else register(parallel, scheme)
    before = None if hook is None else hook.state_dict()
    # DDP lays out its gradient buckets anew after the first backward pass of a process. With more than two ranks that
    # changes the order of the sums, and a restarted run would differ in the last bit: get it over with here.
    parallel(torch.zeros(1, 1, dtype=torch.long, device=device)).sum().backward()
    model.zero_grad()
    if hook is not None and before is not None:
        hook.load_state_dict(before)  # what it remembers of that pass is not of this training
    return parallel, hook


def params_sha256(model: nn.Module) -> str:
    """Return the digest of all parameters in the order of their names. Every rank must call it."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(full.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def emit(line: str) -> None:
    """Write one line to stdout in one call, so that lines of different ranks never interleave."""
    os.write(1, f"{line}\n".encode())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--fsdp", action="store_true", help="shard with FSDP2 instead of replicating with DDP")
    parser.add_argument("--scheme", choices=sorted(SCHEMES), help="sums DDP's gradients (docs/comm.md), not all-reduce")
    parser.add_argument("--json", action="store_true", help="print JSON lines, on every rank")
    parser.add_argument("--demo-kill", type=int, metavar="STEP", help="kill the last rank once, after STEP")
    args = parser.parse_args()
    if args.fsdp and args.scheme:
        parser.error("--scheme is for DDP; leave out --fsdp")
    if args.width < 1 or args.width % 64:
        parser.error(f"--width {args.width} is no multiple of 64: each head has 64")
    return args


def main() -> None:
    args = parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.json:
        emit(json.dumps({"rank": rank, "pid": os.getpid()}))
    device = start(rank, world_size)

    torch.manual_seed(args.seed)
    model = GPT(context=args.context, layers=args.layers, width=args.width).to(device)
    parallel, hook = parallelize(model, device, fsdp=args.fsdp, scheme=args.scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * done / args.steps))
    )
    own_seed = args.seed * world_size + rank  # every rank has its own windows and its own dropout
    loader = Windows(read_corpus(), batch=args.batch, context=args.context, seed=own_seed)
    torch.manual_seed(own_seed)

    state: dict[str, Any] = {} if hook is None else {"hook": hook}
    checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, **state)
    for step in range(checkpointer.restore() + 1, args.steps + 1):
        inputs, targets = loader.next_batch()
        logits = parallel(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

        # Printed before the step can be restored: a step that is repeated is printed twice, but none is missing.
        if args.json:
            emit(json.dumps({"rank": rank, "step": step, "loss": loss.item()}))
        elif rank == 0:
            emit(f"step {step:4d}/{args.steps}  loss {loss.item():.4f}")
        checkpointer.step(step)
        if step == args.demo_kill and rank == world_size - 1 and os.environ.get("RESILIENT_GENERATION", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    digest = params_sha256(model)
    if rank == 0:
        emit(json.dumps({"params_sha256": digest}) if args.json else f"parameters {digest}")
    if hook is not None:
        hook.close()
    checkpointer.close()
    dist.destroy_process_group()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
