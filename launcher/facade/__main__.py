"""``python -m resilient_run`` is the ``resilient-run`` command."""

from resilient_run.launcher.cli import main

if __name__ == "__main__":
    main()
