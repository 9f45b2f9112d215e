"""A plain loop in the variant that its argument names: kernels, schedules and habits of many scripts."""

import math
import sys

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VARIANT = sys.argv[1]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32))
parameters = list(model.parameters())
forward = model
match VARIANT:
    case "fused":
        optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)
    case "foreach":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True, amsgrad=True)
    case "tensor lr":
        optimizer = torch.optim.Adam(parameters, lr=torch.tensor(1e-3), fused=True)
    case "nadam":
        optimizer = torch.optim.NAdam(parameters, lr=1e-3, foreach=True, decoupled_weight_decay=True)
    case "muon":
        optimizer = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2)
    case "nesterov":
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
    case _:
        optimizer = torch.optim.Adam(parameters, lr=1e-3)
state = {}
if VARIANT == "one cycle":
    state["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1)
if VARIANT == "compiled model":
    forward = torch.compile(model, backend="aot_eager")
if VARIANT == "compiled step":
    optimizer_step = torch.compile(optimizer.step, backend="aot_eager")
if VARIANT == "inductor":
    forward = torch.compile(model)
if VARIANT == "tied":
    model = nn.ModuleDict({"in": nn.Linear(32, 256), "out": nn.Linear(256, 32)})
    model["back"] = nn.Linear(32, 256)
    model["back"].weight = model["in"].weight
    forward = nn.Sequential(model["in"], nn.GELU(), model["out"], model["back"], nn.GELU(), model["out"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)
if VARIANT == "scaler":
    state["scaler"] = scaler
if VARIANT == "curriculum":
    state["batch"] = 8


checkpointer = Checkpointer(model=model, optimizer=optimizer, **state)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    size = checkpointer.values["batch"] if VARIANT == "curriculum" else 64
    parts = 4 if VARIANT == "accumulation" else 1
    for _ in range(parts):
        inputs = torch.randn(size, 32)
        at("forward")
        outputs = checkpoint(forward, inputs, use_reentrant=False) if VARIANT == "checkpointing" else forward(inputs)
        loss = F.mse_loss(outputs, inputs.roll(1, 1)) / parts
        if VARIANT == "scaler":
            loss = loss * 1000  # the first steps overflow and are skipped
        at("backward")
        (scaler.scale(loss) if VARIANT == "scaler" else loss).backward()
    if VARIANT == "clipping":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    if VARIANT == "noise":
        for parameter in parameters:
            parameter.grad += torch.randn_like(parameter) * 0.01
    at("optimizer")
    match VARIANT:
        case "scaler":
            scaler.step(optimizer)
            scaler.update()
        case "compiled step":
            optimizer_step()
        case _:
            optimizer.step()
    optimizer.zero_grad()
    if VARIANT == "clamping":
        with torch.no_grad():
            for parameter in parameters:
                parameter.clamp_(-0.1, 0.1)
    if VARIANT == "one cycle":
        state["scheduler"].step()
    if VARIANT == "curriculum" and step % 5 == 4:
        checkpointer.values["batch"] += math.ceil(size / 4)
    checkpointer.step(step + 1, loss)
finish(checkpointer)
