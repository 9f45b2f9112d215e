"""Train a word-level LSTM on the source of Python's standard library: two large tables whose gradients are mostly zero.

    python examples/lstm_lm.py
    torchrun --standalone --nproc-per-node 2 examples/lstm_lm.py --scheme zen
    resilient-run --standalone --nproc-per-node 2 examples/lstm_lm.py --scheme zen --sparse

A batch touches the rows of its own words and of a few sampled ones, so an all-reduce of the tables sends mostly zeros.
`--scheme` names what sums the gradients instead (see docs/comm.md); losses are the same for every scheme that loses
nothing.
"""

import argparse
import json
import math
import os
import re
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_gpt import Windows, emit, params_sha256, read_corpus, start

from resilient_run import Checkpointer
from resilient_run.comm.hook import GradientHook, register
from resilient_run.comm.schemes import SCHEMES


class LSTM(nn.Module):
    """Language model over words, numbered by frequency, with a sampled softmax."""

    def __init__(self, *, words: int, width: int, hidden: int, sparse: bool) -> None:
        super().__init__()
        self.words = words
        self.embedding = nn.Embedding(words, width, sparse=sparse)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.down = nn.Linear(hidden, width)
        self.softmax = nn.Embedding(words, width, sparse=sparse)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.softmax.weight, std=0.1)

    def forward(self, inputs: Tensor, targets: Tensor, sampled: Tensor) -> Tensor:
        """Return the mean loss of telling each target (batch, time) from the `sampled` words (1-D)."""
        states = self.down(self.lstm(self.embedding(inputs))[0]).flatten(0, 1)
        targets = targets.flatten()
        true = (states * self.softmax(targets)).sum(1) - self.log_probability(targets)
        others = states @ self.softmax(sampled).T - self.log_probability(sampled)
        others = others.masked_fill(targets[:, None] == sampled, -math.inf)
        logits = torch.cat([true[:, None], others], 1)
        return F.cross_entropy(logits, torch.zeros_like(targets))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Return words drawn log-uniformly, as words occur when they are numbered by frequency."""
        drawn = torch.exp(torch.rand(count, generator=generator) * math.log(self.words + 1)).long() - 1
        return drawn.clamp_(0, self.words - 1)

    def log_probability(self, words: Tensor) -> Tensor:
        """Return the logarithm of the probability that `sample` draws each word."""
        return torch.log(torch.log1p(1 / (words + 1.0)) / math.log(self.words + 1))


def read_words(vocabulary: int) -> Tensor:
    """Return the words of the corpus by their rank in frequency; those that are too rare share the last number."""
    text = read_corpus().numpy().tobytes().decode(errors="replace")
    words = re.findall(r"\w+|[^\w\s]", text)
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return torch.tensor([known.get(word, vocabulary - 1) for word in words])


def parallelize(
    model: LSTM, args: argparse.Namespace, device: torch.device
) -> tuple[DistributedDataParallel, GradientHook | None]:
    """Return `model` under DDP, and the hook that sums its gradients; None leaves it to DDP."""
    parallel = DistributedDataParallel(model)
    hook = None if args.scheme == "ddp" else register(parallel, args.scheme, ranks_per_host=args.ranks_per_host)
    # The buckets of the first backward pass of a process add in another order (see train_gpt.py); what the scheme saw
    # in it is not of this training.
    before = None if hook is None else hook.state_dict()
    word = torch.zeros(1, 1, dtype=torch.long, device=device)
    parallel(word, word, word[0] + 1).backward()
    model.zero_grad()
    if hook is not None and before is not None:
        hook.load_state_dict(before)
    return parallel, hook


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="zen", choices=["ddp", *sorted(SCHEMES)], help="sums gradients; ddp: torch")
    parser.add_argument(
        "--sparse", action="store_true", help="sparse gradients of the tables (nn.Embedding(sparse=True))"
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, help="summed dense before the scheme")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=20, help="words per window")
    parser.add_argument("--words", type=int, default=20_000, help="size of the vocabulary")
    parser.add_argument("--width", type=int, default=128, help="of the tables")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sampled", type=int, default=256, help="words that the softmax compares with")
    parser.add_argument("--json", action="store_true", help="print JSON lines, on every rank")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.json:
        emit(json.dumps({"rank": rank, "pid": os.getpid()}))
    device = start(rank, world_size)

    torch.manual_seed(args.seed)
    model = LSTM(words=args.words, width=args.width, hidden=args.hidden, sparse=args.sparse).to(device)
    parallel, hook = parallelize(model, args, device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    loader = Windows(read_words(args.words), batch=args.batch, context=args.context, seed=args.seed * world_size + rank)

    state: dict[str, Any] = {} if hook is None else {"hook": hook}
    checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader, **state)
    began_s = time.monotonic()
    for step in range(checkpointer.restore() + 1, args.steps + 1):
        inputs, targets = loader.next_batch()
        # Every rank compares with words of its own.
        sampled = model.sample(args.sampled, loader.generator)
        loss = parallel(inputs.to(device), targets.to(device), sampled.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.json:
            emit(json.dumps({"rank": rank, "step": step, "loss": loss.item()}))
        elif rank == 0:
            emit(f"step {step:4d}/{args.steps}  loss {loss.item():.4f}")
        checkpointer.step(step)

    seconds = time.monotonic() - began_s
    digest = params_sha256(model)
    if rank == 0:
        emit(json.dumps({"params_sha256": digest}) if args.json else f"parameters {digest}, {seconds:.1f} s")
    if hook is not None:
        hook.close()
    checkpointer.close()
    dist.destroy_process_group()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
