"""``resilient-run``, also as ``python -m resilient_run``."""

import gc
import sys

import resilient_run


def main() -> None:
    """Run `resilient_run.launcher.cli.main`; nothing that its imports make is garbage to be looked for."""
    if sys.argv[1:] == ["--rr-version"]:
        # torch's parser, which reads it anywhere on the line, comes with torch.
        print(f"resilient-run {resilient_run.__version__}")
        return
    gc.disable()
    from resilient_run.launcher.workers.early import begun

    with begun(sys.argv[1:]):
        from resilient_run.launcher.cli import main as launch

        gc.freeze()
        gc.enable()
        launch()


if __name__ == "__main__":
    main()
