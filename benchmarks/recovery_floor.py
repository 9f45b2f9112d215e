"""The floor of `recovery_time.py`: what has to happen at least until two new processes have made a step.

This process has torch imported, the model and the optimizer made, and the state of both in a tmpfs file. For each line
on stdin it forks two processes. Each meets the other by a byte through a socket, copies the state from the file over
its own tensors, makes one step, which communicates nothing, and prints the time. Whoever notices a failure first, forms
a process group, runs a script up to its training loop or sums gradients takes longer than this.
"""

import argparse
import ctypes
import mmap
import os
import socket
import sys
import tempfile
import time

import torch
from jobs import SHARED_MEMORY
from recovery_worker import BATCH
from workload import build, emit, tensors, train_step


def main() -> None:
    """Prepare, then serve."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--state-mb", type=int, required=True)
    options.add_argument("--tensors", type=int)
    args = options.parse_args()
    torch.set_num_threads(1)
    model, optimizer = build(args.state_mb << 20, args.tensors)
    train_step(model, optimizer, batch=BATCH)
    state = tensors(model, optimizer)
    copy = ctypes.CDLL(None).memmove
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(sum(tensor.nbytes for tensor in state))
        saved = mmap.mmap(file.fileno(), 0)
        view = ctypes.c_char.from_buffer(saved)
        places = [(ctypes.addressof(view), state[0])]
        for tensor in state[1:]:
            address, before = places[-1]
            places.append((address + before.nbytes, tensor))
        for address, tensor in places:
            copy(address, tensor.data_ptr(), tensor.nbytes)
        emit("ready")
        for _ in sys.stdin:
            pair = socket.socketpair()
            children = []
            for rank in range(2):
                if (pid := os.fork()) == 0:
                    pair[rank].send(b"x")
                    pair[rank].recv(1)
                    for address, tensor in places:
                        copy(tensor.data_ptr(), address, tensor.nbytes)
                    train_step(model, optimizer, batch=BATCH)
                    emit(repr(time.monotonic()))
                    os._exit(0)
                children.append(pid)
            for pid in children:
                os.waitpid(pid, 0)
            for sock in pair:
                sock.close()


if __name__ == "__main__":
    main()
