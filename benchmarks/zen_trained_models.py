"""Small models of the kinds that the Zen papers train, with data of their own, for `zen_trained.py`.

Their tables are most of their parameters, and a batch touches 1 to 3 % of the rows (thesis, Table 3.1: 1.06 to 2.8 %).
Ids are drawn log-uniformly (Zipf's law with exponent 1) where they are drawn, and numbered by frequency.
"""

import math
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from lstm_lm import read_words
from train_gpt import Windows

HELD_OUT: Final = 512
"""Examples that no rank trains on."""


class Training(ABC):
    """A model and the batches of all ranks; the same ones for the same number of ranks and the same seed.

    Args:
        ranks: How many draw batches of their own.
        seed: Of parameters and batches.
        sparse: Whether gradients of the tables are sparse tensors.

    Attributes:
        module: Called with a batch it returns the loss.
    """

    module: nn.Module

    def __init__(self, ranks: int, *, seed: int = 0, sparse: bool = False) -> None:
        torch.manual_seed(seed)
        self.module = self._module(sparse)
        self._begin(ranks, seed)

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """Return name → table, all as wide as each other."""
        modules = self.module.named_modules()
        return {f"{name}.weight": each.weight for name, each in modules if isinstance(each, nn.Embedding)}

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of all parameters."""
        return torch.optim.Adagrad(self.module.parameters(), lr=0.1, initial_accumulator_value=0.1)

    @abstractmethod
    def batch(self, rank: int) -> tuple[Tensor, ...]:
        """Return the rank's next batch."""

    @abstractmethod
    def accuracy(self) -> float:
        """Return the share of right answers to examples that no rank trains on."""

    @abstractmethod
    def _module(self, sparse: bool) -> nn.Module:
        """Return the model, newly initialized."""

    @abstractmethod
    def _begin(self, ranks: int, seed: int) -> None:
        """Prepare data."""


def _generators(ranks: int, seed: int) -> list[torch.Generator]:
    """Return one for each rank, and one for what is held out."""
    return [torch.Generator().manual_seed(1000 * seed + rank) for rank in (*range(ranks), 999)]


def zipf(shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """Return ids of `count`, drawn log-uniformly."""
    drawn = torch.exp(torch.rand(shape, generator=generator, dtype=torch.float64) * math.log(count + 1)).long() - 1
    return drawn.clamp_(0, count - 1)


class DeepFm(nn.Module):
    """Factorization machine and deep network over the same factors (Guo et al. 2017); ids (batch, fields) to clicks."""

    def __init__(self, *, sizes: Tensor, width: int, sparse: bool) -> None:
        super().__init__()
        self.starts = sizes.cumsum(0) - sizes
        # The first column has the weights of first order, the others are factors.
        self.table = nn.Embedding(int(sizes.sum()), width, sparse=sparse)
        nn.init.normal_(self.table.weight, std=0.05)
        self.deep = nn.Sequential(
            nn.Linear(len(sizes) * (width - 1), 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.logits(ids), clicks)

    def logits(self, ids: Tensor) -> Tensor:
        found = self.table(ids + self.starts)
        factors = found[..., 1:]
        second = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return found[..., 0].sum(1) + second + self.deep(factors.flatten(1))[:, 0]


class Recommender(Training):
    """DeepFM, and clicks that follow a hidden factorization machine; a few fields have most of the ids."""

    sizes = (100_000 / 3 / 1.5 ** torch.arange(16)).long()
    width, examples = 16, 256
    module: DeepFm

    def _module(self, sparse: bool) -> nn.Module:
        return DeepFm(sizes=self.sizes, width=self.width, sparse=sparse)

    def _begin(self, ranks: int, seed: int) -> None:
        rule = torch.Generator().manual_seed(5)
        self._taste = 0.7 * torch.randn(int(self.sizes.sum()), 5, generator=rule)
        *self._own, last = _generators(ranks, seed)
        self._held_out = self._drawn(4 * HELD_OUT, last)

    def _drawn(self, examples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = torch.stack([zipf((examples,), size, generator) for size in self.sizes.tolist()], 1)
        taste = self._taste[ids + self.module.starts]
        factors = taste[..., 1:] / 4
        score = taste[..., 0].sum(1) + (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return ids, (torch.rand(examples, generator=generator) < score.sigmoid()).float()

    def batch(self, rank: int) -> tuple[Tensor, ...]:
        return self._drawn(self.examples, self._own[rank])

    @torch.no_grad()
    def accuracy(self) -> float:
        ids, clicks = self._held_out
        return float(((self.module.logits(ids) > 0) == clicks.bool()).float().mean())


class Seq2Seq(nn.Module):
    """Encoder and decoder with attention (Bahdanau et al. 2015), and a sampled softmax over a table of its own."""

    def __init__(self, *, words: int, width: int, hidden: int, sparse: bool) -> None:
        super().__init__()
        self.words = words
        self.source = nn.Embedding(words, width, sparse=sparse)
        self.target = nn.Embedding(words, width, sparse=sparse)
        self.softmax = nn.Embedding(words, width, sparse=sparse)
        for table in (self.source, self.target, self.softmax):
            nn.init.normal_(table.weight, std=0.1)
        self.encoder = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * hidden, hidden)
        self.decoder = nn.GRU(width, hidden, batch_first=True)
        self.down = nn.Linear(2 * hidden, width)

    def states(self, source: Tensor, before: Tensor) -> Tensor:
        """Return what tells the word after each of `before`."""
        memory = self.bridge(self.encoder(self.source(source))[0])
        states = self.decoder(self.target(before), memory.mean(1)[None])[0]
        seen = F.scaled_dot_product_attention(states, memory, memory)
        return self.down(torch.cat([states, seen], 2))

    def forward(self, source: Tensor, before: Tensor, target: Tensor, sampled: Tensor) -> Tensor:
        """Return the mean loss of telling each target (batch, time) from the `sampled` words (1-D)."""
        states, target = self.states(source, before).flatten(0, 1), target.flatten()
        true = (states * self.softmax(target)).sum(1) - self._log_probability(target)
        others = states @ self.softmax(sampled).T - self._log_probability(sampled)
        others = others.masked_fill(target[:, None] == sampled, -math.inf)
        return F.cross_entropy(torch.cat([true[:, None], others], 1), torch.zeros_like(target))

    def _log_probability(self, words: Tensor) -> Tensor:
        return torch.log(torch.log1p(1 / (words + 1.0)) / math.log(self.words + 1))


class Translator(Training):
    """NMT of a language into one with other words, in which neighbours change places."""

    words, width, longest, sentences, sampled = 8000, 64, 10, 32, 256
    module: Seq2Seq

    def _module(self, sparse: bool) -> nn.Module:
        return Seq2Seq(words=self.words, width=self.width, hidden=96, sparse=sparse)

    def _begin(self, ranks: int, seed: int) -> None:
        rule = torch.Generator().manual_seed(5)
        # A word and its translation are about as frequent as each other.
        order = (torch.arange(self.words) + 8 * torch.rand(self.words, generator=rule)).argsort()
        self._dictionary = order.argsort()
        *self._own, last = _generators(ranks, seed)
        self._held_out = self._drawn(HELD_OUT // 4, last)

    def _drawn(self, sentences: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        source = zipf((sentences, self.longest), self.words, generator)
        target = self._dictionary[source].unflatten(1, (-1, 2)).flip(2).flatten(1)
        before = torch.cat([torch.zeros(sentences, 1, dtype=torch.long), target[:, :-1]], 1)
        return source, before, target

    def batch(self, rank: int) -> tuple[Tensor, ...]:
        drawn = self._drawn(self.sentences, self._own[rank])
        return *drawn, zipf((self.sampled,), self.words, self._own[rank])

    @torch.no_grad()
    def accuracy(self) -> float:
        source, before, target = self._held_out
        logits = self.module.states(source, before) @ self.module.softmax.weight.T
        return float((logits.argmax(2) == target).float().mean())


class Encoder(nn.Module):
    """Transformer over words in both directions (Devlin et al. 2019), which tells masked ones that are frequent."""

    def __init__(self, *, words: int, width: int, layers: int, length: int, classes: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, sparse=sparse)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.table.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(words).flatten(0, 1), wanted.flatten(), ignore_index=-100)

    def logits(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.table(words) + self.places))


class Bert(Training):
    """Masked words of the source of Python's standard library: which of the frequent ones each is."""

    words, width, length, windows, classes, masked = 4000, 128, 32, 8, 256, 0.15
    module: Encoder

    def _module(self, sparse: bool) -> nn.Module:
        sizes = {"words": self.words, "width": self.width, "length": self.length, "classes": self.classes}
        return Encoder(**sizes, layers=3, sparse=sparse)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def _begin(self, ranks: int, seed: int) -> None:
        text = read_words(self.words - 1)  # the last number is the mask's
        *self._own, last = _generators(ranks, seed)
        held_out = 80_000
        shape = {"context": self.length, "seed": 0}
        self._loaders = [Windows(text[:-held_out], batch=self.windows, **shape) for _ in range(ranks)]
        for loader, own in zip(self._loaders, self._own, strict=True):
            loader.generator = own
        reader = Windows(text[-held_out:], batch=HELD_OUT // 4, **shape)
        reader.generator = last
        self._held_out = self._masked(reader)

    def _masked(self, loader: Windows) -> tuple[Tensor, Tensor]:
        words, _ = loader.next_batch()
        hidden = torch.rand(words.shape, generator=loader.generator) < self.masked
        wanted = words.clamp(max=self.classes - 1).masked_fill(~hidden, -100)
        return words.masked_fill(hidden, self.words - 1), wanted

    def batch(self, rank: int) -> tuple[Tensor, ...]:
        return self._masked(self._loaders[rank])

    @torch.no_grad()
    def accuracy(self) -> float:
        words, wanted = self._held_out
        hidden = wanted >= 0
        return float((self.module.logits(words).argmax(2)[hidden] == wanted[hidden]).float().mean())


TRAININGS: Final[dict[str, type[Training]]] = {"DeepFM": Recommender, "NMT": Translator, "BERT": Bert}
