"""One rank of a small training with local steps: prints JSON lines.

    resilient-run … tests/local_trainer.py SCHEME [--steps N] [--every H] [--fragments P] [--delay N] [--at-ends N]
        [--kill-at N] [--cuda]

Every step waits for its commit. `--at-ends N`: up to step N, only the ends of rounds are checkpoints, when all replicas
are equal. `--cuda`: all ranks share one GPU, and talk over NCCL.
"""

import argparse
import hashlib
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

from resilient_run import Checkpointer
from resilient_run.comm.local_steps import LocalSteps


def emit(**line: object) -> None:
    os.write(1, f"{json.dumps(line)}\n".encode())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scheme")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--at-ends", type=int, default=0)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cuda:
        # NCCL refuses two ranks of a host on one GPU: each says that it is a host of its own.
        os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.cuda.set_device(0)
    device = torch.device("cuda" if options.cuda else "cpu")
    dist.init_process_group("nccl" if options.cuda else "gloo")
    rank = dist.get_rank()
    emit(rank=rank, pid=os.getpid())
    torch.manual_seed(rank)  # replicas begin as the first one all the same
    model = nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = LocalSteps(
        model,
        every=options.every,
        fragments=options.fragments,
        delay=options.delay,
        scheme=options.scheme,
        least_elements=100,
    )
    with Checkpointer(model=model, optimizer=optimizer, local=local) as checkpointer:
        for step in range(checkpointer.restore() + 1, options.steps + 1):
            inputs = torch.randn(16, 32).to(device)
            loss = (model(inputs) - inputs.cumsum(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ended = local.step()
            emit(rank=rank, step=step, loss=loss.item(), ended=ended)
            if ended or step > options.at_ends:
                checkpointer.step(step)
                while (checkpointer.watermark or (0, 0))[1] < step:
                    time.sleep(0.001)
            if step == options.kill_at and rank == 1 and os.environ["RESILIENT_GENERATION"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
    local.close()
    state = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(state).hexdigest())
    if rank == 0:
        emit(params_sha256=" ".join(map(str, digests)), replicas=len(set(digests)))
    dist.destroy_process_group()
    os._exit(0)  # a thread of Gloo can abort in Python's own end (docs/api.md)


if __name__ == "__main__":
    main()
