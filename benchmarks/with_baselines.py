"""Runs a script that also knows the schemes and planners of papers: `with_baselines.py SCRIPT [ARGUMENTS]`."""

import runpy
import sys
from pathlib import Path

from baselines import BASELINES, planners

from resilient_run.comm.schemes import SCHEMES

if __name__ == "__main__":
    SCHEMES.update({name: f"{made.__module__}:{made.__name__}" for name, made in BASELINES.items()})
    planners.register()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
