"""The loop of `with_accelerate.py`, sharded as Accelerate's configuration says."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from on_cpu import print_digest, scale_no_sums
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resilient_run.integrations.accelerate import AcceleratorCheckpointer

EPOCHS = 3


class Block(nn.Sequential):
    pass


set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
inputs = torch.randn(640, 16)
data = TensorDataset(inputs, inputs.sum(1).sign().add(1).div(2).long())
model = nn.Sequential(
    Block(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)), Block(nn.Linear(64, 16)), nn.Linear(16, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
train, test = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64)
model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)
assert isinstance(model, FSDPModule | FullyShardedDataParallel)
scale_no_sums(model)
checkpointer = AcceleratorCheckpointer(accelerator)
checkpointer.restore()
for _epoch in checkpointer.epochs(EPOCHS):
    model.train()
    for index, (features, labels) in enumerate(train):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(features).float(), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (
                accelerator.sync_gradients and index % 3 == 0
            ):  # so that parameters are gathered when the step is captured
                model.eval()
                with torch.no_grad():
                    model(features)
                model.train()
            checkpointer.step()
    model.eval()
    with checkpointer.pause(), torch.no_grad():
        for features, labels in test:
            accelerator.gather_for_metrics((model(features).argmax(1), labels))
print_digest(model, optimizer.optimizer, scheduler.get_last_lr())
checkpointer.close()
torch.distributed.barrier()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
