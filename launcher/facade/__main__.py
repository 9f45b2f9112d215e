"""``resilient-run``, also as ``python -m resilient_run``."""

import gc
import sys
from types import TracebackType

import resilient_run


def main() -> None:
    """Run `resilient_run.launcher.cli.main`; nothing that its imports make is garbage to be looked for."""
    if sys.argv[1:] == ["--rr-version"]:
        # torch's parser, which reads it anywhere on the line, comes with torch.
        print(f"resilient-run {resilient_run.__version__}")
        return
    gc.disable()
    sys.excepthook = _show
    from resilient_run.launcher.workers.early import begun

    with begun(sys.argv[1:]):
        from resilient_run.launcher.cli import main as launch

        gc.freeze()
        gc.enable()
        launch()


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show a failed worker, a signal or Ctrl-C without the frames of launcher and torch: they say nothing of it."""
    if kind is KeyboardInterrupt or kind.__module__.startswith("torch.distributed.elastic.multiprocessing."):
        error.__traceback__, error.__suppress_context__ = None, True
        trace = None
    sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
