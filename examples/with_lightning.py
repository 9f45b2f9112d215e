"""Lightning: `resilient-run --standalone --nproc-per-node 2 examples/with_lightning.py`.

A Trainer as people have it: shuffled data, gradient accumulation, a schedule, and a validation in every epoch that
early stopping decides by.
"""

import hashlib
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resilient_run.integrations.lightning import ResilientCallback


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch, index):
        features, labels = batch
        loss = F.cross_entropy(self.net(features), labels)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        features, labels = batch
        self.log("validation_loss", F.cross_entropy(self.net(features), labels), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(0)
    inputs = torch.randn(640, 16)
    data = TensorDataset(inputs, inputs.sum(1).sign().add(1).div(2).long())
    module = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=[ResilientCallback(), EarlyStopping("validation_loss", patience=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
    if trainer.is_global_zero:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
        seen = {name: round(value.item(), 6) for name, value in sorted(trainer.callback_metrics.items())}
        print(seen, f"parameters {hashlib.sha256(parameters).hexdigest()}", sep="\n", flush=True)
    os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
