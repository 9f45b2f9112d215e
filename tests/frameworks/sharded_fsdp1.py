"""A loop with FSDP1, in one of its ways: `sharded_fsdp1.py STRATEGY[,orig][,bf16][,scaler][,early][,again] STEPS`.

"again" calculates the activations of blocks once more in the backward pass (torch's checkpoint wrapper).
It evaluates before every third `step()`, and "early" before `restore()`, so that parameters are gathered there. Each
rank prints a hash of what it has.
"""

import functools
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from resilient_run import Checkpointer

strategy, *ways = sys.argv[1].split(",")
steps = int(sys.argv[2])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.dropout(self.norm(self.linear(inputs)).relu())


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        score = model(torch.ones(4, 9)).float().sum().item()
    model.train()
    return score


dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [Block(9) for _ in range(3)]
blocks[0].linear.requires_grad_(False)
bf16 = torch.bfloat16 if "bf16" in ways else None
wrap = functools.partial(
    FullyShardedDataParallel,
    sharding_strategy=ShardingStrategy[strategy],
    device_mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2)) if "HYBRID" in strategy else None,
    use_orig_params="orig" in ways,
    mixed_precision=MixedPrecision(param_dtype=bf16, buffer_dtype=bf16),
    device_id=torch.device("cpu"),
)
# Without the original parameters a unit is frozen as a whole.
blocks[0].linear = wrap(blocks[0].linear)
model = wrap(nn.Sequential(*map(wrap, blocks), nn.Linear(9, 2)))
if "again" in ways:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
scaler = ShardedGradScaler(device="cpu", enabled="scaler" in ways, growth_interval=3)
losses: list[float] = []
if "early" in ways:
    evaluate()
checkpointer = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, losses=losses)
for step in range(checkpointer.restore(), steps):
    inputs = torch.randn(8, 9)
    loss = nn.functional.cross_entropy(model(inputs).float(), inputs.sum(1).gt(0).long())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 3 == 0:
        losses.append(evaluate())
    checkpointer.step(step + 1)
digest = hashlib.sha256(repr(losses).encode())
with FullyShardedDataParallel.summon_full_params(model, writeback=False):
    # Not their own memory: NumPy would keep FSDP1 from freeing it.
    tensors = [tensor.detach().float().clone() for tensor in [*model.parameters(), *model.buffers()]]
tensors += [value for state in optimizer.state.values() for value in state.values()]
for tensor in tensors:
    digest.update(tensor.numpy().tobytes())
print(f"rank {dist.get_rank()} ends with loss {losses[0]:.6f}, parameters {digest.hexdigest()}", flush=True)
checkpointer.close()
dist.destroy_process_group()
os._exit(0)  # for Gloo: a thread of it can abort in Python's own end (docs/api.md)
