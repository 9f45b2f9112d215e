"""The examples, small, as convergence benchmarks train them: one process draws the batches of all ranks."""

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from lstm_lm import LSTM, read_words
from train_gpt import GPT, Windows, read_corpus


class Example(ABC):
    """A model, its text, and the batches of each rank; the same ones for the same seed.

    Args:
        ranks: How many draw batches of their own.
        seed: Of parameters and batches.

    Attributes:
        model: What is trained.
        momentum_rate: Learning rate of SGD with momentum.
    """

    momentum_rate: float
    _context: int
    _batch: int
    _held_out_tokens: int
    _held_out_windows: int

    def __init__(self, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = self._model()
        text = self._text()
        shape = {"batch": self._batch, "context": self._context}
        self._loaders = [
            Windows(text[: -self._held_out_tokens], **shape, seed=1000 * seed + rank) for rank in range(ranks)
        ]
        held_out = Windows(text[-self._held_out_tokens :], batch=self._held_out_windows, context=self._context, seed=0)
        self._held_out = held_out.next_batch()

    def loss(self, rank: int) -> Tensor:
        """Return the loss of the rank's next batch."""
        loader = self._loaders[rank]
        return self._loss(*loader.next_batch(), loader.generator)

    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of all parameters, without momentum."""

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean cross-entropy of the next tokens of text that no rank trains on."""
        inputs, targets = self._held_out
        return float(F.cross_entropy(self._logits(inputs).flatten(0, 1), targets.flatten()))

    @abstractmethod
    def _model(self) -> nn.Module:
        """Return the model, newly initialized."""

    @abstractmethod
    def _text(self) -> Tensor:
        """Return the tokens of the whole corpus."""

    @abstractmethod
    def _logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next tokens, (batch, time, tokens)."""

    @abstractmethod
    def _loss(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        """Return the loss to be minimized."""


class GptExample(Example):
    """`train_gpt.py` with one layer; without dropout, which ranks would have to draw in the order of one process."""

    momentum_rate = 0.1
    _context = 32
    _batch = 4
    _held_out_tokens = 400_000
    _held_out_windows = 512
    model: GPT

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1.0)

    def _model(self) -> GPT:
        return GPT(context=self._context, layers=1, width=64).eval()

    def _text(self) -> Tensor:
        return read_corpus()

    def _logits(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def _loss(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        return F.cross_entropy(self._logits(inputs).flatten(0, 1), targets.flatten())


class LstmExample(Example):
    """`lstm_lm.py` with fewer words: three quarters of its parameters are the two tables."""

    momentum_rate = 0.2
    _context = 20
    _batch = 8
    _held_out_tokens = 80_000
    _held_out_windows = 256
    _words = 2000
    _sampled = 128
    model: LSTM

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.model.parameters(), lr=1.0, initial_accumulator_value=0.1)

    def _model(self) -> LSTM:
        return LSTM(words=self._words, width=64, hidden=64, sparse=False)

    def _text(self) -> Tensor:
        return read_words(self._words)

    def _logits(self, inputs: Tensor) -> Tensor:
        model = self.model
        return model.down(model.lstm(model.embedding(inputs))[0]) @ model.softmax.weight.T

    def _loss(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        return self.model(inputs, targets, self.model.sample(self._sampled, generator))


EXAMPLES: Final[dict[str, type[Example]]] = {"gpt": GptExample, "lstm": LstmExample}
