"""Calls into libraries that may block for ever, such as those behind fsspec, in threads that nobody waits for."""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

_BACKGROUND_NICENESS = 10


async def offload(function: Callable[..., _T], *args: Any, timeout_s: float, background: bool = False) -> _T:
    """Return `function(*args)`, run in a thread of its own that is left behind when the caller is cancelled.

    Args:
        function: Must not touch what its caller frees after a cancellation.
        args: Its arguments.
        timeout_s: How long to wait for it.
        background: Whether training's threads shall go first where processors are scarce.

    Raises:
        TimeoutError: It takes longer.
        OSError: There can be no thread now.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def finish(result: _T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            if background:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
            result = function(*args)
        except BaseException as raised:  # noqa: BLE001 - raised again where the result is awaited
            error = raised
        # The loop may have ended while a storage library hung.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, result, error)

    # Not the loop's own pool: a few hung calls would take all of its threads, and its end waits for them.
    try:
        threading.Thread(target=run, name=f"offload-{function.__name__}", daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    async with asyncio.timeout(timeout_s):
        return await outcome
