"""Accelerate: `resilient-run --standalone --nproc-per-node 2 examples/with_accelerate.py`.

The loop is that of Accelerate's documents, with gradient accumulation, a schedule and an evaluation after each epoch.
"""

import hashlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resilient_run.integrations.accelerate import AcceleratorCheckpointer

EPOCHS = 3
set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
inputs = torch.randn(6400, 16)
data = TensorDataset(inputs, inputs.sum(1).sign().add(1).div(2).long())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=600)
train, test = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64)
model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)

checkpointer = AcceleratorCheckpointer(accelerator)  # what was prepared, and the place in the loaders
checkpointer.restore()
for epoch in checkpointer.epochs(EPOCHS):  # from the interrupted one on
    model.train()
    for features, labels in train:  # and from the batch that follows
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(features), labels))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            checkpointer.step()  # where gradients are only accumulated, it does nothing
    model.eval()
    right = total = 0
    with checkpointer.pause(), torch.no_grad():  # an evaluation may take its time
        for features, labels in test:
            found, wanted = accelerator.gather_for_metrics((model(features).argmax(1), labels))
            right, total = right + int((found == wanted).sum()), total + len(wanted)
    accelerator.print(f"epoch {epoch}: {right} of {total} right, learning rate {scheduler.get_last_lr()[0]:.6f}")

parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
accelerator.print(f"parameters {hashlib.sha256(parameters).hexdigest()}")
checkpointer.close()
accelerator.end_training()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
