"""One rank whose Checkpointer replicates by itself: makes a step for each line on stdin, and says what it did.

With `--stuck` the first chunk that it sends is followed by nothing, for ever; with `--flip` a bit of the first capture
that it sends is flipped on the way; with `--cuda` it trains on a GPU.
"""

import json
import os
import sys
import threading

import torch

from resilient_run import Checkpointer
from resilient_run.ckpt.transport.carriers import Admit, HostCarrier


def stick() -> None:
    send = HostCarrier.send

    def stuck(self: HostCarrier, data: torch.Tensor, admit: Admit) -> None:
        def wait(remaining_bytes: int) -> int:
            if remaining_bytes < len(data):
                say(stuck=True)
                threading.Event().wait()
            return admit(remaining_bytes)

        send(self, data, wait)

    HostCarrier.send = stuck


def flip() -> None:
    send = HostCarrier.send

    def flipped(self: HostCarrier, data: torch.Tensor, admit: Admit) -> None:
        HostCarrier.send = send
        data = data.clone()
        data[-1] ^= 1
        send(self, data, admit)

    HostCarrier.send = flipped


def say(**what: object) -> None:
    os.write(1, f"{json.dumps(what)}\n".encode())


def main() -> None:
    if "--stuck" in sys.argv:
        stick()
    if "--flip" in sys.argv:
        flip()
    device = torch.device("cuda", int(os.environ["RANK"])) if "--cuda" in sys.argv else torch.device("cpu")
    model = torch.nn.Linear(256, 256, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(model=model, optimizer=optimizer) as checkpointer:
        step = checkpointer.restore()
        say(restored=step)
        for _ in sys.stdin:
            model(torch.randn(4, 256, device=device)).square().mean().backward()
            optimizer.step()
            step += 1
            checkpointer.step(step)
            say(step=step, captured=checkpointer.wait())
        stats = checkpointer.exchange_stats
    say(sent=stats.sent, sent_bytes=stats.sent_bytes, received=stats.received, received_bytes=stats.received_bytes)
    os._exit(0)  # Gloo may abort a process whose interpreter ends just after a collective: docs/api.md


if __name__ == "__main__":
    main()
