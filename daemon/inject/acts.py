"""How each kind of fault is carried out on this host: what it would strike now, and the blow itself."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format.slot import Slot

from ..run.faults import Corruption, Order
from ..run.view import JobView
from ..slots.slots import JobSlots, SlotFile
from ..trainers.sessions import Sessions
from ..trainers.trainer import Trainer
from .victim import Victim


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What of a job can be struck on this host.

    Attributes:
        view: What is known of the job.
        slots: What this host holds of it.
        sessions: Its trainers.
        launcher_pid: Returns the launcher that holds the job open, None while nobody does.
    """

    view: JobView
    slots: JobSlots
    sessions: Sessions
    launcher_pid: Callable[[], int | None]

    def launcher(self) -> Victim:
        """Return the launcher.

        Raises:
            DaemonError: There is none.
        """
        pid = self.launcher_pid()
        if pid is None:
            raise DaemonError(f"no launcher holds the job open on host {self.view.host}")
        return Victim.find(pid)

    def trainer(self, rank: int) -> Trainer:
        """Return the attached trainer of `rank`.

        Raises:
            DaemonError: It is not attached here.
        """
        trainer = self.sessions.find(rank)
        if trainer is None:
            raise DaemonError(
                f"rank {rank} is not attached on host {self.view.host}, which runs ranks {list(self.view.own_ranks)}"
            )
        return trainer

    def process(self, rank: int) -> Victim:
        """Return the process of `rank`, which its launcher started.

        Raises:
            DaemonError: It is not attached here, or is no process of this job.
        """
        launcher, victim = self.launcher(), Victim.find(self.trainer(rank).pid)
        if victim.pid not in {process.pid for process in launcher.descendants()}:
            raise DaemonError(f"pid {victim.pid} says it is rank {rank}, but launcher {launcher.pid} did not start it")
        return victim

    def daemon(self) -> Victim:
        """Return this daemon."""
        return Victim.find(os.getpid())


Blow = Callable[[], None]


def _kill_rank(scene: Scene, order: Order) -> tuple[str, Blow]:
    rank = _rank(order)
    victim = scene.process(rank)
    return f"SIGKILL to rank {rank} (pid {victim.pid})", lambda: _kill(victim)


def _tell_rank(scene: Scene, order: Order) -> tuple[str, Blow]:
    rank = _rank(order)
    trainer = scene.trainer(rank)
    message = {"op": "inject", "kind": order.kind, **order.parameters.to_value()}
    return f"rank {rank} (pid {trainer.pid}) is told to {order.kind}", lambda: trainer.notify(message)


def _corrupt_replica(scene: Scene, order: Order) -> tuple[str, Blow]:
    kept = [rank for rank in scene.view.kept_ranks if rank not in scene.view.own_ranks]
    rank = order.rank if order.rank is not None else next(iter(kept), None)
    file = None if rank is None else scene.slots.newest(rank)
    if rank is None or file is None or file.pair is None or file.busy:
        raise DaemonError(f"host {scene.view.host} has no complete replica of rank {rank}; it holds {kept} for peers")
    parameters: Corruption = order.parameters
    what = f"{parameters.how} in the replica of rank {rank}, generation {file.pair[0]}, step {file.pair[1]}"
    if not parameters.kill:
        return what, lambda: _damage(file, parameters.how)
    victim = scene.process(rank)

    def damage_and_kill() -> None:
        _damage(file, parameters.how)
        _kill(victim)

    return f"{what}, and SIGKILL to that rank (pid {victim.pid})", damage_and_kill


def _kill_launcher(scene: Scene, order: Order) -> tuple[str, Blow]:
    victim = scene.launcher()
    return f"SIGKILL to the launcher (pid {victim.pid})", lambda: _kill(victim)


def _kill_daemon(scene: Scene, order: Order) -> tuple[str, Blow]:
    victim = scene.daemon()
    return f"SIGKILL to the daemon (pid {victim.pid})", lambda: _kill(victim)


LOCAL: Mapping[str, Callable[[Scene, Order], tuple[str, Blow]]] = {
    "kill-rank": _kill_rank,
    "hang-rank": _tell_rank,
    "slow-rank": _tell_rank,
    "raise": _tell_rank,
    "flip-bit": _tell_rank,
    "corrupt-replica": _corrupt_replica,
    "kill-launcher": _kill_launcher,
    "kill-daemon": _kill_daemon,
}
"""By kind, what the daemon does itself: what it would strike now, and the blow; DaemonError when it cannot."""


def _stop_rank(scene: Scene, order: Order) -> dict[str, Any]:
    return _stop([scene.process(_rank(order))], order)


def _delay_heartbeats(scene: Scene, order: Order) -> dict[str, Any]:
    finders = {"launcher": [scene.launcher], "daemon": [scene.daemon], "both": [scene.launcher, scene.daemon]}
    return _stop([find() for find in finders[order.parameters.of]], order)


def _lose_host(scene: Scene, order: Order) -> dict[str, Any]:
    launcher, daemon = scene.launcher().to_value(), scene.daemon().to_value()
    return {"do": "lose", "launcher": launcher, "daemon": daemon, "directory": str(scene.slots.directory)}


def _fill_memory(scene: Scene, order: Order) -> dict[str, Any]:
    return {"do": "fill", "directory": str(scene.slots.directory.parent), **order.parameters.to_value()}


DETACHED: Mapping[str, Callable[[Scene, Order], dict[str, Any]]] = {
    "stop-rank": _stop_rank,
    "delay-heartbeats": _delay_heartbeats,
    "lose-host": _lose_host,
    "fill-memory": _fill_memory,
    "fill-disk": lambda scene, order: {"do": "fill", **order.parameters.to_value()},
    "cut-network": lambda scene, order: {"do": "cut", **order.parameters.to_value()},
    "slow-network": lambda scene, order: {"do": "slow", **order.parameters.to_value()},
    "kill-etcd": lambda scene, order: {"do": "kill-etcd", **order.parameters.to_value()},
}
"""By kind, the task of a process of its own (`helper`) now; DaemonError when there is nothing to strike."""


def _stop(victims: list[Victim], order: Order) -> dict[str, Any]:
    processes = [victim.to_value() for victim in victims]
    return {"do": "stop", "victims": processes, "duration_s": order.parameters.duration_s}


def _kill(victim: Victim) -> None:
    victim.signal(signal.SIGKILL)


def _rank(order: Order) -> int:
    assert order.rank is not None, "Order.parse sees to it"
    return order.rank


def _damage(file: SlotFile, how: str) -> None:
    """Damage a complete capture; whoever reads it next must notice.

    A file that is really cut off would kill every process that has it mapped, so a truncated one is one whose second
    half was never written.
    """
    slot = Slot.open(file.slot.path, writable=True)
    try:
        header = slot.header()
        middle = (header.payload_offset + header.used_bytes) // 2
        if how == "bit-flip":
            slot.buffer[middle] ^= 1
        elif how == "truncation":
            slot.buffer[middle : header.used_bytes] = bytes(header.used_bytes - middle)
        else:
            _publish_as_older(slot)
    except SlotError:
        # Its trainer overwrites it at this moment: nothing to damage.
        return
    finally:
        slot.close()


def _publish_as_older(slot: Slot) -> None:
    header = slot.header()
    checksums_end = header.checksums_offset + 8 * header.chunk_count
    slot.publish(
        run_id=header.run_id,
        topology=header.topology,
        rank=header.rank,
        world_size=header.world_size,
        generation=header.generation - 1,
        step=max(0, header.step - 1),
        payload_bytes=header.payload_bytes,
        manifest=slot.manifest(),
        checksums=bytes(slot.buffer[header.checksums_offset : checksums_end]),
    )
