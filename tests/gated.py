"""Jobs that stand still at the step a test names, several on one vault; what they end with is known."""

import os
import shutil
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import gated_trainer
import torch
from cluster import Host, kill, wait_until
from hosts import connect

from resilient_run.ckpt.format import wire

SCRIPT = Path(__file__).parent / "gated_trainer.py"
STEPS = 100
_SKIPPED_S = 1.0


class Gate:
    """The file that says how many steps may be made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open(0)

    def open(self, step: int) -> None:
        """Let every rank train up to `step`."""
        new = self.path.with_suffix(".new")
        new.write_text(str(step))
        new.chmod(0o644)
        new.rename(self.path)
        self.step = step

    @property
    def script(self) -> list[str]:
        """The script and its arguments."""
        return [str(SCRIPT), str(self.path), str(STEPS)]


class Vault:
    """One vault for the hosts of a test, whoever serves it."""

    def __init__(self, name: str) -> None:
        self.path = Path("/dev/shm") / f"{name}-{os.getpid()}"
        self.path.mkdir(mode=0o700)

    @property
    def owner(self) -> int | None:
        """The pid of the daemon that owns the vault, None while none does."""
        lock = self.path / "vault.lock"
        text = lock.read_text().strip() if lock.exists() else ""
        return int(text) if text else None

    def jobs(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return what the daemon says of each job, by run id and host."""
        return jobs_at(self.path / "resilientd.sock")

    def slots(self) -> set[Path]:
        """Return every slot file."""
        return set(self.path.glob("*/*.slot"))

    def close(self) -> None:
        if (pid := self.owner) is not None:
            kill(pid)
        shutil.rmtree(self.path, ignore_errors=True)


def jobs_at(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what the daemon at a socket says of each job, nothing when there is none."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        try:
            connect(sock, path)
            sock.sendall(wire.encode({"id": 1, "op": "status"}))
            answer = wire.recv_message(sock)
        except (OSError, wire.WireError):
            return {}
    return {(job["run_id"], job["host"]): job for job in (answer or {"jobs": []})["jobs"]}


def on_etcd(endpoint: str, run_id: str, *, nnodes: int = 1, nproc: int = 2) -> list[str]:
    """Return the launcher's options."""
    return [
        f"--nnodes={nnodes}",
        f"--nproc-per-node={nproc}",
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        "--rdzv-conf=lease_ttl=3",
        "--local-addr=127.0.0.1",
    ]


def train_to(step: int, gate: Gate, hosts: Sequence[Host], sock: Path) -> None:
    """Let all runs at the daemon of `sock` train, step by step, until each has committed `step` or a later one.

    A step is followed by the next when it is committed, or was not for a while: while a commit is late, or nobody was
    there to commit, captures are skipped.
    """

    def committed(awaited: int) -> bool:
        jobs = jobs_at(sock).values()
        return bool(jobs) and all((job.get("watermark") or {"step": 0})["step"] >= awaited for job in jobs)

    opened_s = time.monotonic()

    def done() -> bool:
        nonlocal opened_s
        if committed(step):
            return True
        late = all(host.reached(gate.step) for host in hosts) and time.monotonic() > opened_s + _SKIPPED_S
        if late or committed(gate.step):
            opened_s = time.monotonic()
            gate.open(gate.step + 1)
        return False

    wait_until(done, timeout_s=180, what=lambda: f"step {step}, at {gate.step}\n" + "".join(h.output for h in hosts))


def trained(steps: int, skipped: Collection[int] = ()) -> tuple[dict[tuple[int, int], float], str]:
    """Return the loss of each rank and step, and the hash of the parameters, of two ranks that nothing happened to.

    Of two ranks the sum does not depend on an order, so one process knows them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, optimizer = gated_trainer.begin()
    losses = {}
    for step in range(1, steps + 1):
        if step in skipped:
            continue
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(2):
            optimizer.zero_grad()
            loss = gated_trainer.loss_of(model, step, rank, 2)
            loss.backward()
            losses[rank, step] = loss.item()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        optimizer.step()
    torch.set_num_threads(threads)
    return losses, gated_trainer.sha256_of(model)


def assert_undisturbed(hosts: Sequence[Host]) -> None:
    """Two ranks trained every step, with the losses and to the parameters of a run that nothing happened to."""
    expected, sha256 = trained(STEPS)
    seen = [(rank, step, loss) for host in hosts for rank, step, loss in host.steps()]
    assert {(rank, step) for rank, step, _ in seen} == expected.keys()
    assert [entry for entry in seen if expected[entry[:2]] != entry[2]] == []
    assert {host.params_sha256() for host in hosts} - {None} == {sha256}
