"""An asyncio event loop in a thread of its own, for synchronous code that needs asynchronous parts."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in a background thread until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run the coroutine in the loop and return its result.

        Raises:
            TimeoutError: It took longer than `timeout_s`, and is cancelled.
            RuntimeError: The loop was stopped, perhaps meanwhile.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise self._stopped() from None
        except BaseException:
            # Also when a signal handler raises: nobody waits for the result any more.
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine in the loop and return its future at once.

        Raises:
            RuntimeError: The loop was stopped.
        """
        with self._lock:
            if self._stopping:
                coroutine.close()
                raise self._stopped()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        with self._lock:
            if not self._stopping:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._stopping = True
        self._thread.join()

    def _stopped(self) -> RuntimeError:
        return RuntimeError(f"thread {self._thread.name} was stopped")

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
