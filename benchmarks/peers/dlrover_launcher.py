"""`dlrover-run` with a local master that is started here: its own way to start one fails under torch 2.13."""

import os
import socket
import subprocess
import sys

from dlrover.trainer.torch.main import main


def run() -> None:
    """Run the command line after this script's name under dlrover."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "dlrover.python.master.main", "--platform", "local", "--node_num", "1"]
    master = subprocess.Popen([*command, "--port", str(port), "--job_name", "bench"], stdout=sys.stderr)
    os.environ["DLROVER_MASTER_ADDR"] = f"127.0.0.1:{port}"
    try:
        main()
    finally:
        master.terminate()
        master.wait()


if __name__ == "__main__":
    run()
