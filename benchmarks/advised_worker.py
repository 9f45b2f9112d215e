"""Runs a training script as if its user had followed `resilient-comm advise`.

    advised_worker.py LINE SCRIPT [ARGS…]

LINE is what advise said to write after DistributedDataParallel(...) is made; it is carried out there.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from resilient_run.comm.hook import register

if __name__ == "__main__":
    line = sys.argv[1]
    del sys.argv[:2]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    construct = DistributedDataParallel.__init__

    def make(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        construct(model, *args, **kwargs)
        exec(line, {"model": model, "register": register})

    DistributedDataParallel.__init__ = make
    runpy.run_path(sys.argv[0], run_name="__main__")
