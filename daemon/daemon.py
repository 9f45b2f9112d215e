"""`resilientd`: one per host and user. Read this first.

Launchers and trainers come through a unix socket (`trainers.link`, `service`), peers through TCP (`peers.peers`). Each
run id is a `Job` (`jobs`, `job`): its `Coordinator` talks to etcd, its `Replicator` moves captures, its `JobSlots` in
the `Vault` hold them.
"""

import asyncio
import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resilient_run.ckpt.errors import DaemonError

from .base.logs import RepeatFilter
from .base.settings import Settings
from .base.supervise import Supervisor
from .jobs import Jobs
from .names import Names
from .notify import ServiceManager
from .peers.peers import PeerServer
from .service import DaemonService
from .slots.memory import MemoryBudget
from .slots.slots import in_thread
from .slots.vault import Vault
from .trainers.link import LinkServer
from .trust.private import hold_directory, open_directory

log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
_THREADS_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonOptions:
    """How a daemon behaves.

    Attributes:
        settings: Its directories.
        peer_addr: Address to listen on for peers, None for the one that each job advertises.
        memory_limit_bytes: What all slots may take, None for the default of `MemoryBudget`.
        idle_exit_s: Seconds without connections, jobs and slots after which it ends, 0 for never.
        orphan_ttl_s: Seconds that slots are kept after the launcher that held them open is gone.
    """

    settings: Settings
    peer_addr: str | None
    memory_limit_bytes: int | None
    idle_exit_s: float
    orphan_ttl_s: float


class Daemon:
    """The daemon of one host: a task for each connection and each job, and one that fails takes no other with it.

    Args:
        options: How it behaves.
        repeats: What the log's handlers filter by.
    """

    def __init__(self, options: DaemonOptions, repeats: RepeatFilter) -> None:
        self._options = options
        self._repeats = repeats
        self._supervisor = Supervisor("daemon")
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT, too long idle, or out of reach; slots stay for the next daemon.

        Raises:
            DaemonError: Another daemon serves this run directory or owns the vault, or a directory is not ours alone.
        """
        settings = self._options.settings
        loop, watcher = asyncio.get_running_loop(), asyncio.PidfdChildWatcher()
        loop.set_default_executor(_started_threads())
        # Needs no thread for each child, as the usual one does.
        watcher.attach_loop(loop)
        asyncio.set_child_watcher(watcher)
        with ExitStack() as held:
            run_names = held.enter_context(serving(settings.lock_path))
            vault_names = held.enter_context(serving(settings.vault_lock_path))
            manager = held.enter_context(closing(ServiceManager(os.environ)))
            if manager.is_there:
                settings.service_path.touch(mode=0o600)
            else:
                settings.service_path.unlink(missing_ok=True)
            vault = Vault(settings.shm_dir, MemoryBudget(settings.shm_dir, self._options.memory_limit_bytes))
            jobs = Jobs(vault, self._spawn, disks=[settings.run_dir])
            jobs.scan()
            peers = PeerServer(bind_addr=self._options.peer_addr, find_job=jobs.find, spawn=self._spawn)
            service = DaemonService(jobs, peers, self._supervisor, settings.shm_dir)
            async with asyncio.TaskGroup() as self._group:
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, self._stopping.set)
                sockets = (settings.socket_path, settings.vault_socket_path)
                server = LinkServer(service, self._spawn)
                doors = [server.listen(path) for path in sockets]
                run_names.add(settings.socket_path)
                vault_names.add(settings.vault_socket_path)

                async def lost() -> Path | None:
                    # Whoever came through the vault, as all do that start a daemon, needs no run directory.
                    needed = manager.is_there or settings.socket_path in service.entrances
                    # A directory may be on a storage that does not answer.
                    return await in_thread(vault_names.lost) or (await in_thread(run_names.lost) if needed else None)

                self._keep("adopt", jobs.adopt)
                self._keep("housekeeping", lambda: self._keep_house(jobs, service, lost))
                log.info("resilientd (pid %d) serves %s, slots in %s", os.getpid(), settings.run_dir, settings.shm_dir)
                self._keep("watchdog", manager.watch)
                manager.ready()
                await self._stopping.wait()
                manager.stopping()
                await jobs.persist()
                for door in doors:
                    door.close()
                peers.close()
                for path, names in zip(sockets, (run_names, vault_names), strict=True):
                    if names.is_ours(path):
                        path.unlink(missing_ok=True)
                for task in self._tasks:
                    task.cancel()
            log.info("resilientd (pid %d) ends", os.getpid())

    async def _keep_house(self, jobs: Jobs, service: DaemonService, lost: Callable[[], Awaitable[Path | None]]) -> None:
        """Collect orphans, and end the daemon when nobody has needed it for long enough, or nobody finds it."""
        idle_since_s = time.monotonic()
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._repeats.report()
            if (path := await lost()) is not None:
                log.error(
                    "%s was removed or replaced while this daemon (pid %d) served it. Clients can no longer connect, "
                    "so it ends; launchers or the service manager start the next one. Keep cleaners and logouts off %s "
                    "(docs/operations/daemon.md#removed-while-it-runs)",
                    path,
                    os.getpid(),
                    path.parent,
                )
                # Exit without clean-up: a new daemon may own these paths now.
                os._exit(1)
            await jobs.collect(self._options.orphan_ttl_s)
            if not service.is_idle or not jobs.is_empty:
                idle_since_s = time.monotonic()
            elif 0 < self._options.idle_exit_s < time.monotonic() - idle_since_s:
                log.info("idle for %.0f s", self._options.idle_exit_s)
                self._stopping.set()

    def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._track(self._supervisor.keep(name, work))

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> asyncio.Task[None]:
        return self._track(self._supervisor.once(getattr(work, "__qualname__", "task"), partial(work, *given)))

    def _track(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


@contextmanager
def serving(lock_path: Path) -> Iterator[Names]:
    """Hold a run directory or a vault and its lock, and provide the names by which others find them.

    Raises:
        DaemonError: Another daemon serves it, or it is not ours alone.
    """
    open_directory(lock_path.parent)
    directory = hold_directory(lock_path.parent)
    try:
        with holding(lock_path) as lock:
            yield Names(directory, {lock_path: os.fstat(lock)})
    finally:
        os.close(directory)


@contextmanager
def holding(lock_path: Path) -> Iterator[int]:
    """Provide the lock of a run directory or of a vault, with our pid in it; it ends with this process at the latest.

    Raises:
        DaemonError: Another process holds it.
    """
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DaemonError(
                f"a daemon with pid {owner} already serves {lock_path.parent}: use it, stop it, or choose another "
                f"--run-dir and --shm-dir"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield descriptor
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _started_threads() -> ThreadPoolExecutor:
    """Return the pool of the event loop with all its threads: later the process table may be full.

    Raises:
        DaemonError: It is full now.
    """
    count = min(32, (os.cpu_count() or 1) + 4)
    pool = ThreadPoolExecutor(count, thread_name_prefix="resilientd")
    together = threading.Barrier(count, timeout=_THREADS_S)
    try:
        # One that waits for the others takes none of their work.
        for waiting in [pool.submit(together.wait) for _ in range(count)]:
            waiting.result()
    except RuntimeError as error:
        together.abort()
        raise DaemonError(f"cannot start {count} threads: {error}; raise the limit of processes") from error
    return pool
