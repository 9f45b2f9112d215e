"""Small trainings as other people write them, for `strangers.py`: kinds of models that the examples are not.

    python benchmarks/strange_trainings.py NAME [--steps N]

With the variables of torchrun. They know nothing of this package; each is a loop of its own. Data are drawn from a rule
that can be learnt, except scikit-learn's digits and the source of Python's standard library.
"""

import argparse
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Parallelize = Callable[..., DistributedDataParallel]
"""Called as DistributedDataParallel is."""


def recommender(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """DLRM (Naumov et al. 2019): bags of categories with sparse gradients, dense features, two optimizers."""
    tables, rows, width, batch = 4, 20_000, 16, 256

    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables))
            self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
            pairs = (tables + 1) * tables // 2
            self.top = nn.Sequential(
                nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
            )

        def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
            low = self.bottom(dense)
            vectors = torch.stack([low, *(table(bag) for table, bag in zip(self.tables, bags, strict=True))], 1)
            products = vectors @ vectors.mT
            places = torch.tril_indices(tables + 1, tables + 1, -1)
            return self.top(torch.cat([low, products[:, places[0], places[1]]], 1)).squeeze(1)

    model = parallelize(Dlrm())
    sparse = torch.optim.SparseAdam(model.module.tables.parameters(), lr=0.02)
    others = [p for name, p in model.module.named_parameters() if not name.startswith("tables")]
    dense_optimizer = torch.optim.Adam(others, lr=2e-3)
    taste = torch.randn(tables, rows, generator=torch.Generator().manual_seed(5))
    while True:
        # Few categories are frequent, most are rare.
        bags = (rows ** torch.rand(tables, batch, 4, generator=data)).long() - 1
        dense = torch.randn(batch, 13, generator=data)
        score = sum(taste[table, bag].sum(1) for table, bag in enumerate(bags)) + 2 * dense[:, 0]
        loss = F.binary_cross_entropy_with_logits(model(dense, bags), (score > 0).float())
        loss.backward()
        sparse.step()
        dense_optimizer.step()
        model.zero_grad()
        yield loss.detach()


def _digits(data: torch.Generator, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(found.target)
    while True:
        chosen = torch.randint(len(images), (batch,), generator=data)
        yield images[chosen], targets[chosen]


def vit(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """ViT of transformers on scikit-learn's digits, with a learning rate that warms up and clipping."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
    )
    model = parallelize(ViTForImageClassification(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    for images, targets in _digits(data, 16):
        loss = model(pixel_values=images, labels=targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        yield loss.detach()


def resnet(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """ResNet of transformers on scikit-learn's digits: many small gradients, and buffers of BatchNorm."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 96],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        num_labels=10,
    )
    model = parallelize(ResNetForImageClassification(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for images, targets in _digits(data, 16):
        large = F.interpolate(images, 32)
        loss = F.cross_entropy(model(pixel_values=large).logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def gpt(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """GPT-2 of transformers on bytes of Python's source: tied weights, bfloat16, four micro-batches for each step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = parallelize(GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    micro_batches = 4
    while True:
        total = torch.zeros(())
        for micro_batch in range(micro_batches):
            starts = torch.randint(len(text) - 64, (2,), generator=data)
            tokens = torch.stack([text[start : start + 64] for start in starts]).long()
            model.require_backward_grad_sync = micro_batch == micro_batches - 1  # as Accelerate does it
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / micro_batches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield total


def translator(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """Encoder and decoder (`nn.Transformer`), which learn to add one to each digit of sequences of different length."""
    words, width, longest = 64, 128, 12

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, width, padding_idx=0)
            self.places = nn.Parameter(torch.randn(longest + 1, width) * 0.1)
            self.transformer = nn.Transformer(width, 4, 1, 1, 256, dropout=0.05, batch_first=True)
            self.out = nn.Linear(width, words)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            states = self.transformer(
                self.words(source) + self.places[: source.shape[1]],
                self.words(target) + self.places[: target.shape[1]],
                tgt_mask=mask,
                tgt_is_causal=True,
                src_key_padding_mask=torch.zeros(source.shape).masked_fill(source == 0, float("-inf")),
            )
            return self.out(states)

    model = parallelize(Translator())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    while True:
        lengths = torch.randint(longest // 2, longest + 1, (16, 1), generator=data)
        source = torch.randint(3, words, (16, longest), generator=data)
        source = source.masked_fill(torch.arange(longest) >= lengths, 0)
        wanted = torch.where(source == 0, 0, (source - 2) % (words - 3) + 3)
        shifted = torch.cat([torch.ones(16, 1, dtype=torch.long), wanted[:, :-1]], 1)
        logits = model(source, shifted)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield loss.detach()


def experts(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """Switch layer (Fedus et al. 2021): of eight experts a step uses those that its rows are sent to, often not all."""
    width, count = 64, 8

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(16, width)
            self.router = nn.Linear(16, count)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
            )
            self.after = nn.Linear(width, 1)

        def forward(self, x: Tensor) -> Tensor:
            share, chosen = self.router(x).softmax(1).max(1)
            hidden = self.before(x)
            out = torch.zeros_like(hidden)
            for number in chosen.unique().tolist():
                rows = (chosen == number).nonzero().squeeze(1)
                out = out.index_add(0, rows, self.experts[number](hidden[rows]) * share[rows, None])
            return self.after(out + hidden)

    model = parallelize(Switch(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rule = torch.Generator().manual_seed(5)
    centres, slopes = 2 * torch.randn(count, 16, generator=rule), torch.randn(count, 16, generator=rule)
    while True:
        # A batch comes from few of the regions that have a rule each.
        regions = torch.randint(count, (3,), generator=data)[torch.randint(3, (64,), generator=data)]
        x = centres[regions] + 0.5 * torch.randn(64, 16, generator=data)
        wanted = (slopes[regions] * x).sum(1)
        loss = F.mse_loss(model(x).squeeze(1), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def tagger(parallelize: Parallelize, data: torch.Generator) -> Iterator[Tensor]:
    """LSTM in both directions that tags words by their neighbours: packed sequences, a table with dense gradients."""
    words, tags, batch, longest = 8000, 16, 16, 20

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, 64)
            self.lstm = nn.LSTM(64, 64, bidirectional=True, batch_first=True)
            self.dropout = nn.Dropout(0.1)
            self.tags = nn.Linear(128, tags)

        def forward(self, sentences: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(self.words(sentences), lengths, batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=longest)
            return self.tags(self.dropout(states))

    model = parallelize(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    kind = torch.randint(4, (words,), generator=torch.Generator().manual_seed(5))
    while True:
        sentences = (words ** torch.rand(batch, longest, generator=data)).long() - 1
        lengths = torch.randint(longest // 2, longest + 1, (batch,), generator=data)
        wanted = 4 * kind[sentences] + kind[sentences].roll(1, 1)
        wanted = wanted.masked_fill(torch.arange(longest) >= lengths[:, None], -100)
        wanted[:, 0] = -100
        loss = F.cross_entropy(model(sentences, lengths).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


TRAININGS: dict[str, Callable[[Parallelize, torch.Generator], Iterator[Tensor]]] = {
    each.__name__: each for each in (recommender, vit, resnet, gpt, translator, experts, tagger)
}


SPARSE = ("recommender",)
"""Those with sparse gradients."""


def begin(name: str, parallelize: Parallelize = DistributedDataParallel) -> Iterator[Tensor]:
    """Return a training of that name on all ranks, which yields the loss of each step on this rank."""
    torch.manual_seed(1)
    random.seed(1)
    return TRAININGS[name](parallelize, torch.Generator().manual_seed(100 + dist.get_rank()))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TRAININGS)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for step, loss in zip(range(args.steps), begin(args.name), strict=False):
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end


if __name__ == "__main__":
    main()
