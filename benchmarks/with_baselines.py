"""Runs a script that then knows the schemes of papers by their names, too: `with_baselines.py SCRIPT [ARGUMENTS]`."""

import runpy
import sys
from pathlib import Path

from baselines import BASELINES

from resilient_run.comm.schemes import SCHEMES

if __name__ == "__main__":
    SCHEMES.update({name: f"{made.__module__}:{made.__name__}" for name, made in BASELINES.items()})
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
