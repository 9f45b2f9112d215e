"""The boundary between tasks: what one raises unexpectedly is logged once, shown, and the task runs again.

A full table of processes or files, memory that is out, or an error of our own in one task must not end the job that it
works for: every task of a job runs under its job's `Supervisor`. Only what `ends_job` names ends a job, and only when
an essential task raises it. Anything else is tried again for as long as the job lives, and `resilientctl status` shows
it: a job that has ended protects nothing, and commits that stand still are an observation of their own.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from resilient_run.ckpt.errors import DaemonError

from ..etcd.client import EtcdAuthError, EtcdError, EtcdLeaseLost, EtcdUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

_PAUSE_S = (0.1, 5.0)
_STEADY_S = 10.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Task:
    failures: int = 0
    error: str = ""
    unix_s: float = 0.0
    logged: str = ""
    running: bool = True


class Supervisor:
    """The tasks of one job, or of the daemon itself.

    Args:
        owner: Whose tasks they are, for the log.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: dict[str, _Task] = {}

    async def keep(self, name: str, work: Callable[[], Awaitable[None]], *, essential: bool = False) -> None:
        """Await `work()` until it returns; whenever it raises, call it again after a pause that grows to 5 s.

        Args:
            name: Of the task.
            work: Begins anew at each call.
            essential: Whether an error that `ends_job` is raised here as well.
        """
        pause_s = _PAUSE_S[0]
        while True:
            began_s = time.monotonic()
            steady = asyncio.get_running_loop().call_later(_STEADY_S, self._steady, name)
            try:
                await _finish(work)
                self._steady(name)
                return
            except Exception as error:  # the boundary between tasks
                if essential and any(map(ends_job, leaves(error))):
                    raise
                if time.monotonic() - began_s > _STEADY_S:
                    pause_s = _PAUSE_S[0]
                self._failed(name, error, f"it runs again in {pause_s:.1f} s")
            finally:
                steady.cancel()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S[1])

    async def once(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` once, and log its failure: the caller retries it, or does not wait for it."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the boundary between tasks
            self._failed(name, error, "the others go on")
        else:
            self._steady(name)

    def describe(self) -> list[dict[str, Any]]:
        """Return every task that has failed so far, for `resilientctl status`."""
        return [
            {
                "task": name,
                "failures": task.failures,
                "error": task.error,
                "unix_s": round(task.unix_s, 3),
                "running": task.running,
            }
            for name, task in sorted(self._tasks.items())
        ]

    def _failed(self, name: str, error: Exception, outlook: str) -> None:
        task = self._tasks.setdefault(name, _Task())
        first = next(leaves(error))
        task.failures += 1
        task.error, task.unix_s, task.running = f"{type(first).__name__}: {first}", time.time(), False
        if task.logged != task.error:
            task.logged = task.error
            log.error("%s: task %r failed, %s", self._owner, name, outlook, exc_info=error)

    def _steady(self, name: str) -> None:
        task = self._tasks.get(name)
        if task is not None and not task.running:
            task.running, task.logged = True, ""
            log.warning("%s: task %r runs again, it had failed %d time(s)", self._owner, name, task.failures)


async def first(*work: Awaitable[T]) -> T:
    """Return, or raise, what the first of these does, in their order, and end the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _finish(work: Callable[[], Awaitable[None]]) -> None:
    """Await `work()`. Cancellation wins over an exception that `work` raises while it cleans up."""
    task = asyncio.ensure_future(work())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if task.cancelled():
        raise RuntimeError("it was cancelled unexpectedly")
    task.result()


def ends_job(error: BaseException) -> bool:
    """Tell whether a job cannot go on: what answers is no etcd, or a key that everything depends on is damaged.

    Credentials that are refused may be right again: a password is changed on all sides one after the other.
    """
    passing = EtcdUnavailable | EtcdLeaseLost | EtcdAuthError
    return isinstance(error, EtcdError | DaemonError) and not isinstance(error, passing)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what really went wrong inside of exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


def task_lines(tasks: list[dict[str, Any]], now_unix_s: float) -> list[str]:
    """Return what `resilientctl status` prints about the tasks that `describe` returned."""
    return [
        f"  task {task['task']}: failed {task['failures']} time(s), last {max(0.0, now_unix_s - task['unix_s']):.0f} s "
        f"ago: {task['error']}; {'it runs' if task['running'] else 'it is tried again'}"
        for task in tasks
    ]
