"""Lightning's Trainer, with automatic or manual optimisation; a callback of a few lines restores and counts steps."""

import logging
import sys
import warnings

import lightning as L
import torch
from harness import STEPS, Checkpointer, at, finish
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
VARIANT = sys.argv[1]
MANUAL = VARIANT != "automatic"


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not MANUAL
        self.net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def training_step(self, batch, index):
        (inputs,) = batch
        at("forward")
        noisy = inputs + 0.1 * torch.randn_like(inputs)
        loss = (self.net(noisy) - inputs.sum(1, keepdim=True)).square().mean()
        if VARIANT == "closure":
            self.optimizers().step(closure=lambda: self.backward_of(loss))
        elif MANUAL:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            at("backward")
            self.manual_backward(loss)
            at("optimizer")
            optimizer.step()
        return loss

    def backward_of(self, loss):
        self.optimizers().zero_grad()
        at("backward")
        self.manual_backward(loss)
        return loss

    def on_before_backward(self, loss) -> None:
        at("backward")

    def on_before_optimizer_step(self, optimizer) -> None:
        at("optimizer")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Resilient(L.Callback):
    def on_train_start(self, trainer, module) -> None:
        optimizer = module.optimizers() if VARIANT == "manual" else trainer.optimizers[0]
        self.checkpointer = Checkpointer(model=module, optimizer=optimizer)
        self.step = self.checkpointer.restore()
        self.skip = self.step % trainer.num_training_batches

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        self.step += 1
        self.checkpointer.step(self.step, outputs["loss"])
        at("data")
        if self.step >= STEPS:
            trainer.should_stop = True


torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(32 * STEPS, 32)), batch_size=32)
callback = Resilient()
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[callback],
    plugins=[LightningEnvironment()],
)


class From(torch.utils.data.Sampler):
    """The samples in order, from the one that follows what was restored."""

    def __iter__(self):
        yield from range(32 * callback.step, 32 * STEPS)

    def __len__(self) -> int:
        return 32 * STEPS


data = DataLoader(data.dataset, batch_size=32, sampler=From())
trainer.fit(Module(), data)
finish(callback.checkpointer)
