"""torch's AveragedModel: an exponential average, evaluated after update_bn() as the documentation of SWA has it."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
train_set = torch.utils.data.TensorDataset(torch.randn(256, 32))

checkpointer = Checkpointer(model=model, optimizer=optimizer, averaged=averaged)
for step in range(checkpointer.restore(), STEPS):
    if step % 4 == 3:
        at("evaluation")
        update_bn(torch.utils.data.DataLoader(train_set, batch_size=32), averaged)
    at("data")
    inputs = torch.randn(64, 32)
    at("forward")
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    at("backward")
    loss.backward()
    at("optimizer")
    optimizer.step()
    averaged.update_parameters(model)
    checkpointer.step(step + 1, loss)
finish(checkpointer)
